"""From costs and settings to a plan: the problem is posed, solved, and its answer put back on named units."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspore_bmpipe.config import AUTO, Config
from mindspore_bmpipe.costs.hardware import Hardware, Link, load_hardware
from mindspore_bmpipe.costs.network import EvaluatedCosts, NetworkCosts, UnitCost, evaluate_costs
from mindspore_bmpipe.costs.static_memory import StaticSettings
from mindspore_bmpipe.errors import BmpipeError, InfeasibleError, InputError, NoPlanFoundError
from mindspore_bmpipe.graph.cell_graph import CellGraph
from mindspore_bmpipe.graph.trace_axes import BATCH, SEQUENCE
from mindspore_bmpipe.layer_table import LayerTable
from mindspore_bmpipe.plan import (
    PLAN_FORMAT,
    BubblePlan,
    ChunkPlan,
    Plan,
    SolverReport,
    StagePlan,
    UnitPlan,
)
from mindspore_bmpipe.planner import Solution, SolveLimits, Status
from mindspore_bmpipe.planner.choices import Candidate, settled_configs, solve_best
from mindspore_bmpipe.problem import (
    Decision,
    Option,
    Problem,
    Run,
    check,
    evaluate,
    expand_decision,
    problem_from_config,
    schedule_of,
)

DEFAULT_HARDWARE = "ascend910b"
"""Machine assumed when none is given; a note in the plan says so."""
DEFAULT_MEMORY_SHARE = 0.9
"""Share of device memory a plan may use when no limit is given; the rest is for the runtime and fragmentation."""
TIME_TOLERANCE = 1e-3
"""Relative difference above which a plan's recorded step time no longer fits its source."""


@dataclass(frozen=True)
class UnitName:
    """What a plan file says of a unit beside where it goes."""

    name: str
    """Name of the unit."""
    cells: tuple[str, ...]
    """Paths of its cells; empty for layer tables."""
    recompute_cells: Mapping[str, tuple[str, ...]]
    """Option name -> cells recomputed."""
    parameters: int
    """Trainable weights inside."""
    parameter_elements: int
    """Elements of these weights."""


@dataclass(frozen=True)
class Subject:
    """What is planned: numbers for the planner and names for its answer."""

    source: str
    """Name for people."""
    fingerprint: str
    """Digest of its structure."""
    runs: tuple[Run, ...]
    """Units in order, grouped."""
    units: tuple[UnitName, ...]
    """One entry per unit, in order."""
    stage_constant_bytes: int
    """Bytes every stage needs."""
    shared_saved_bytes: int
    """Bytes every stage keeps once per micro-batch in flight."""
    transfer_ms: float
    """Time of one transfer between stages."""
    config: Config
    """Settings, with everything resolved that the costs were evaluated for."""
    notes: tuple[str, ...]
    """What a reader should know."""
    alternatives: tuple[Subject, ...] = ()
    """The same with other micro-batch sizes and numbers, where the planner may choose."""


def subject_of_layers(table: LayerTable, source: str, config: Config) -> Subject:
    """What a layer table says."""
    document = [
        [
            run.name, run.count, run.forward_ms, run.backward_ms, run.static_bytes,
            [[o.name, o.saved_bytes, o.extra_backward_ms, o.working_set_bytes] for o in run.options],
        ]
        for run in table.runs
    ]  # fmt: skip
    units = tuple(
        UnitName(run.name if run.count == 1 else f"{run.name}[{index}]", (), {}, 0, 0)
        for run in table.runs
        for index in range(run.count)
    )
    return Subject(
        source, _digest(document), table.runs, units, table.stage_constant_bytes, 0, table.transfer_ms, config, ()
    )


def subject_of_network(costs: NetworkCosts, config: Config) -> Subject:
    """Evaluate the costs of a network for the settings.

    Raises:
        InputError: settings that the network or this version cannot honour.
    """
    if config.micro_batch_size == AUTO:
        first, *others = (subject_of_network(costs, sized) for sized in _micro_batch_sizes(costs.graph, config))
        return replace(first, alternatives=tuple(others))
    resolved, hardware, notes = resolve_config(costs.graph, config)
    sizes = input_sizes(costs.graph, resolved)
    static = StaticSettings(resolved.data_parallel or 1, resolved.optimizer_shard_level or 0)
    evaluated = evaluate_costs(costs, hardware, sizes, static, stage_link(hardware, resolved))
    runs = _runs(evaluated)
    return Subject(
        source=costs.graph.name,
        fingerprint=network_fingerprint(costs),
        runs=runs,
        units=tuple(_unit_name(costs, unit) for unit in evaluated.units),
        stage_constant_bytes=0,
        shared_saved_bytes=evaluated.shared_saved_bytes,
        transfer_ms=evaluated.transfer_ms,
        config=resolved,
        notes=(*evaluated.notes, *notes),
    )


def network_fingerprint(costs: NetworkCosts) -> str:
    """Digest of units, cells and weights; the same for a live network, its traced file and its exported file."""
    known = costs.graph.parameters
    document = [
        [
            unit.name,
            list(unit.cells),
            sorted([name, list(known[name].type.shape), known[name].type.dtype] for name in unit.parameters),
        ]
        for unit in costs.split.units
    ]
    return _digest(document)


def resolve_config(graph: CellGraph, config: Config) -> tuple[Config, Hardware, list[str]]:
    """Fill in what the settings leave out, refuse what cannot be honoured, and say what was assumed.

    Raises:
        InputError: parallel degrees that this version does not model, or unknown hardware.
    """
    notes = []
    for key in ("tensor_parallel", "expert_parallel", "context_parallel"):
        degree = getattr(config, key)
        if degree is not None and degree > 1:
            raise InputError(
                f"config: {key}: {degree} is not modelled for networks by this version, only for layer tables; leave "
                "it out, or give a layer table with the costs of one device"
            )
    name = config.hardware
    if name is None:
        name = DEFAULT_HARDWARE
        notes.append(f"hardware was not given; {DEFAULT_HARDWARE} is assumed")
    hardware = load_hardware(name)
    limit = config.memory_limit
    if limit is None:
        limit = int(hardware.memory_capacity_bytes * DEFAULT_MEMORY_SHARE)
        notes.append(
            f"memory_limit was not given; {DEFAULT_MEMORY_SHARE:.0%} of the {hardware.memory_capacity_bytes} bytes of "
            f"{hardware.name} are assumed"
        )
    return replace(config, hardware=name, memory_limit=limit), hardware, notes


def input_sizes(graph: CellGraph, config: Config) -> dict[str, int]:
    """Value of every symbol of the graph on one device.

    Inputs are traced at the size of a micro-batch over all data-parallel ranks; ``micro_batch_size`` is that of one.

    Raises:
        InputError: a size that the graph has fixed, or a batch that the ranks cannot share evenly.
    """
    sizes = dict(graph.symbols)
    for key, name in (("micro_batch_size", BATCH), ("sequence_length", SEQUENCE)):
        value = getattr(config, key)
        if value is None:
            continue
        if name not in sizes:
            fixed = _fixed_size(graph, name)
            if fixed != value:
                raise InputError(
                    f"config: {key}: {value}, but {graph.name} has its axis {name} fixed"
                    f"{'' if fixed is None else f' at {fixed}'}; trace it at that size"
                )
            continue
        sizes[name] = int(value)
    ranks = config.data_parallel or 1
    if config.micro_batch_size is None and BATCH in sizes and ranks > 1:
        if sizes[BATCH] % ranks:
            raise InputError(
                f"config: data_parallel: {ranks} does not divide the traced micro-batch of {sizes[BATCH]}; set "
                "micro_batch_size to the samples of one rank"
            )
        sizes[BATCH] //= ranks
    return sizes


def _micro_batch_sizes(graph: CellGraph, config: Config) -> list[Config]:
    """Every way to cut the samples of a step, micro_batches times the size without `auto`, into micro-batches."""
    default = replace(config, micro_batch_size=None)
    if config.micro_batches is None or BATCH not in graph.symbols:
        return [default]
    samples = config.micro_batches * input_sizes(graph, default)[BATCH]
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    return [replace(config, micro_batch_size=size, micro_batches=samples // size) for size in sizes]


def pose(subject: Subject) -> Problem:
    """The problem a planner is given."""
    return problem_from_config(
        subject.runs, subject.config, subject.stage_constant_bytes, subject.transfer_ms, subject.shared_saved_bytes
    )


def solve_subject(subject: Subject, planner: str = "bmpipe") -> tuple[Problem, Solution]:
    """Pose and solve."""
    limits = SolveLimits()
    if subject.config.time_limit is not None:
        limits = replace(limits, time_limit_s=subject.config.time_limit)
    if subject.config.seed is not None:
        limits = replace(limits, seed=subject.config.seed)
    return solve_best(_candidates(subject), planner, limits)


def _candidates(subject: Subject) -> list[Candidate]:
    """Every problem that the settings leave the choice of."""
    found, refused = [], None
    for sized in (subject, *subject.alternatives):
        try:
            configs = settled_configs(sized.config, len(sized.units))
            for config in configs:
                problem = pose(replace(sized, config=config))
                label = f"{problem.schedule} with {problem.chunks} chunk(s)"
                if subject.alternatives:
                    label += f" and {problem.micro_batches} micro-batches of {config.micro_batch_size}"
                found.append(Candidate(label, problem))
        except InputError as error:
            refused = error
    if refused is not None and not found:
        raise refused
    return found


def _settled(subject: Subject, micro_batches: int, schedule: str, chunks: int) -> Subject:
    """The subject with what the planner chose in place of `auto`."""
    for sized in (subject, *subject.alternatives):
        if sized.config.micro_batches == micro_batches or not subject.alternatives:
            config = sized.config
            if AUTO in (config.schedule, config.chunks):
                config = replace(config, schedule=schedule, chunks=chunks)
            return replace(sized, config=config, alternatives=())
    raise InputError(f"micro_batches: {micro_batches} of the plan is no way to cut the samples of a step")


def make_plan(subject: Subject, planner: str = "bmpipe") -> Plan:
    """Plan the subject.

    Raises:
        InfeasibleError: no plan fits; the message says what would.
        NoPlanFoundError: the time limit ended first.
    """
    problem, solution = solve_subject(subject, planner)
    if solution.decision is None:
        raise no_plan_error(solution)
    return plan_of(subject, problem, solution)


def no_plan_error(solution: Solution) -> BmpipeError:
    """The error that says why there is no plan."""
    if solution.status is Status.INFEASIBLE:
        return InfeasibleError(f"no plan is feasible: {solution.message}")
    return NoPlanFoundError(
        f"no plan was found in {solution.solve_seconds:.1f} s, and none was ruled out: {solution.message}; "
        "raise time_limit"
    )


def plan_of(subject: Subject, problem: Problem, solution: Solution) -> Plan:
    """Put the answer back on the subject's units."""
    assert solution.decision is not None and solution.step_time_ms is not None
    subject = _settled(subject, problem.micro_batches, problem.schedule, problem.chunks)
    evaluation = evaluate(problem, solution.decision)
    placements = expand_decision(problem, solution.decision)
    chunk_units: dict[tuple[int, int], dict[str, dict[str, int]]] = {}
    units = []
    for place, name in zip(placements, subject.units, strict=True):
        run = problem.runs[place.run]
        option = run.options[place.option_index].name
        by_option = chunk_units.setdefault((place.stage, place.chunk), {}).setdefault(run.name, {})
        by_option[option] = by_option.get(option, 0) + 1
        units.append(
            UnitPlan(
                name=name.name,
                run=run.name,
                cells=name.cells,
                stage=place.stage,
                chunk=place.chunk,
                option=option,
                recompute_cells=name.recompute_cells.get(option, ()),
                recompute_primitives=(),
                parameters=name.parameters,
                parameter_elements=name.parameter_elements,
            )
        )
    stages = tuple(
        StagePlan(
            stage=stage.stage,
            peak_bytes=stage.peak_bytes,
            static_bytes=stage.static_bytes,
            limit_bytes=stage.limit_bytes,
            chunks=tuple(
                ChunkPlan(chunk.chunk, chunk_units.get((stage.stage, chunk.chunk), {}), chunk.forward_ms,
                          chunk.backward_ms)
                for chunk in stage.chunks
            ),
        )
        for stage in evaluation.stages
    )  # fmt: skip
    bubble = evaluation.bubble
    bound = solution.bound_ms if solution.bound_ms is not None else 0.0
    gap = solution.gap if solution.gap is not None else 1.0
    return Plan(
        format=PLAN_FORMAT,
        fingerprint=subject.fingerprint,
        source=subject.source,
        settings=_settings(subject.config, problem),
        solver=SolverReport(
            planner=solution.planner,
            status=solution.status.value,
            step_time_ms=solution.step_time_ms,
            bound_ms=bound,
            gap=gap,
            solve_seconds=solution.solve_seconds,
            message=solution.message,
        ),
        bubble=BubblePlan(bubble.total, bubble.preparation, bubble.imbalance, bubble.recompute, bubble.communication),
        stages=stages,
        units=tuple(units),
        notes=subject.notes,
    )


def check_plan(plan: Plan, subject: Subject) -> list[str]:
    """Everything that is wrong with a plan for this subject and its settings; empty if nothing is.

    Raises:
        InputError: the plan was made for another network, so nothing in it can be compared.
    """
    if plan.fingerprint != subject.fingerprint:
        raise InputError(
            f"the plan was made for another network ({plan.source}, {plan.fingerprint[:12]}) than {subject.source} "
            f"({subject.fingerprint[:12]}): units, cells or weights differ; plan this network"
        )
    chosen = plan.settings
    subject = _settled(subject, chosen["micro_batches"], chosen["schedule"], chosen["chunks"])
    problem = pose(subject)
    wrong: list[str] = []
    if len(plan.stages) != problem.stages:
        wrong.append(f"the plan has {len(plan.stages)} stages, the settings {problem.stages}")
    decision = _decision(plan, problem, wrong)
    if wrong or decision is None:
        return wrong
    wrong.extend(violation.message for violation in check(problem, decision))
    evaluation = evaluate(problem, decision)
    recorded = plan.solver.step_time_ms
    if abs(evaluation.step_time_ms - recorded) > TIME_TOLERANCE * evaluation.step_time_ms:
        wrong.append(
            f"the plan records a step of {recorded:.3f} ms, these costs and settings give {evaluation.step_time_ms:.3f}"
        )
    return wrong


def _decision(plan: Plan, problem: Problem, wrong: list[str]) -> Decision | None:
    counts = [[[0] * len(run.options) for _ in range(problem.virtual_stages)] for run in problem.runs]
    unit_runs = [index for index, run in enumerate(problem.runs) for _ in range(run.count)]
    virtual_of_chunk = schedule_of(problem).virtual_of_chunk
    before = -1
    for unit, index in zip(plan.units, unit_runs, strict=True):
        run = problem.runs[index]
        names = [option.name for option in run.options]
        if unit.option not in names:
            wrong.append(f"{unit.name}: option {unit.option} is not one of {', '.join(names)} under these settings")
            continue
        if unit.stage >= problem.stages or unit.chunk >= problem.chunks:
            wrong.append(f"{unit.name}: stage {unit.stage}, chunk {unit.chunk} does not exist under these settings")
            continue
        virtual = virtual_of_chunk[unit.stage][unit.chunk]
        if virtual < before:
            wrong.append(f"{unit.name} is on virtual stage {virtual}, the unit before it on {before}: order is broken")
        before = virtual
        counts[index][virtual][names.index(unit.option)] += 1
    if wrong:
        return None
    return Decision(tuple(tuple(tuple(row) for row in placed) for placed in counts))


def _runs(evaluated: EvaluatedCosts) -> tuple[Run, ...]:
    """Group neighbouring units of equal costs; names are those of the list they stand in."""
    groups: list[list[UnitCost]] = []
    for unit in evaluated.units:
        if groups and groups[-1][0].kind == unit.kind:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    names = [_run_name(group) for group in groups]
    runs = []
    for group, name in zip(groups, names, strict=True):
        first = group[0]
        if names.count(name) > 1:
            name = f"{name}[{group[0].unit.name.rpartition('.')[2]}-{group[-1].unit.name.rpartition('.')[2]}]"
        runs.append(
            Run(
                name=name,
                count=len(group),
                forward_ms=first.forward_ms,
                backward_ms=first.backward_ms,
                static_bytes=first.static_bytes,
                options=tuple(
                    Option(o.name, o.saved_bytes, o.extra_backward_ms, o.working_set_bytes) for o in first.options
                ),
                trainable=first.trainable,
            )
        )
    return tuple(runs)


def _run_name(group: Sequence[UnitCost]) -> str:
    name = group[0].unit.name
    parent, _, last = name.rpartition(".")
    return parent if parent and last.isdigit() else name


def _unit_name(costs: NetworkCosts, unit: UnitCost) -> UnitName:
    inside = {
        name
        for cell in costs.graph.cells
        for name in cell.parameters
        if any(cell.path == path or not path for path in unit.unit.cells)
    }
    trainable = [costs.graph.parameters[name] for name in inside if costs.graph.parameters[name].trainable]
    elements = 0
    for weight in trainable:
        count = 1
        for length in weight.type.shape:
            count *= length
        elements += count
    return UnitName(
        name=unit.unit.name,
        cells=unit.unit.cells,
        recompute_cells={option.name: option.cells for option in unit.options},
        parameters=len(trainable),
        parameter_elements=elements,
    )


def stage_link(hardware: Hardware, config: Config) -> Link:
    """Stages talk inside a node only when all of them fit in one."""
    devices = (config.stages or 1) * (config.data_parallel or 1)
    return hardware.intra_node if devices <= hardware.devices_per_node else hardware.inter_node


def _fixed_size(graph: CellGraph, name: str) -> int | None:
    """Size of an axis that is not a symbol, read off the first input that has it."""
    axis = 0 if name == BATCH else 1
    for tensor in graph.inputs:
        shape = graph.tensors[tensor].type.shape
        if len(shape) > axis and isinstance(shape[axis], int):
            return int(shape[axis])
    return None


def _settings(config: Config, problem: Problem) -> dict[str, Any]:
    settings = {
        key: value
        for key, value in vars(config).items()
        if value is not None and key not in ("pins", "memory_limit", "recompute_options", "stage_speeds")
    }
    settings.update(
        stages=problem.stages,
        chunks=problem.chunks,
        micro_batches=problem.micro_batches,
        schedule=problem.schedule,
        memory_limit=list(problem.memory_limit_bytes),
    )
    if config.recompute_options is not None:
        settings["recompute_options"] = list(config.recompute_options)
    if config.stage_speeds is not None:
        settings["stage_speeds"] = list(config.stage_speeds)
    if config.pins is not None:
        settings["pins"] = [{"units": pin.units, "stage": pin.stage} for pin in config.pins]
    return dict(sorted(settings.items()))


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
