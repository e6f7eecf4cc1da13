"""From costs and settings to a plan: the problem is posed, solved, and its answer put back on named units."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mindspore_bmpipe.compiler_rules import with_compiler_rules
from mindspore_bmpipe.config import AUTO, Config
from mindspore_bmpipe.errors import BmpipeError, InfeasibleError, InputError, NoPlanFoundError
from mindspore_bmpipe.plan import (
    PLAN_FORMAT,
    BubblePlan,
    ChunkPlan,
    Plan,
    SolverReport,
    StageLoad,
    StagePlan,
    UnitPlan,
)
from mindspore_bmpipe.planner import Solution, SolveLimits, Status
from mindspore_bmpipe.planner.choices import Candidate, settled_configs, solve_best
from mindspore_bmpipe.problem import (
    Decision,
    Problem,
    check,
    evaluate,
    expand_decision,
    memory_parts,
    schedule_of,
    stage_ends,
    virtual_stage_weights,
)
from mindspore_bmpipe.problem_config import problem_from_config
from mindspore_bmpipe.subjects import Subject
from mindspore_bmpipe.transfers import decision_transfers, with_cuts

TIME_TOLERANCE = 1e-3
"""Relative difference above which a plan's recorded step time no longer fits its source."""


def pose(subject: Subject) -> Problem:
    """The problem a planner is given.

    Raises:
        InputError: settings are missing, or MindSpore refuses every plan with these settings.
    """
    problem = problem_from_config(
        subject.runs, subject.config, subject.stage_constant_bytes, subject.transfer_ms, subject.shared_saved_bytes
    )
    return with_compiler_rules(with_cuts(problem, subject.cut_bytes, subject.stage_links), subject)


def solve_subject(
    subject: Subject, planner: str = "bmpipe", starts: tuple[Decision, ...] = ()
) -> tuple[Problem, Solution]:
    """Pose and solve; `starts` are plans known from elsewhere, see `SolveLimits`."""
    limits = SolveLimits(starts=starts)
    if subject.config.time_limit is not None:
        limits = replace(limits, time_limit_s=subject.config.time_limit)
    if subject.config.seed is not None:
        limits = replace(limits, seed=subject.config.seed)
    problem, solution = solve_best(_candidates(subject), planner, limits)
    margin = subject.config.memory_margin
    if margin and solution.status is Status.INFEASIBLE:
        message = f"{solution.message}; memory_margin leaves {margin:.1%} more than the bytes named free"
        solution = replace(solution, message=message)
    return problem, solution


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
                recompute_primitives=name.recompute_primitives.get(option, ()),
                parameters=name.parameters,
                parameter_elements=name.parameter_elements,
                recompute_communication=name.recompute_communication.get(option, ()),
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
            stopped_by=solution.stopped_by.value,
        ),
        bubble=BubblePlan(bubble.total, bubble.preparation, bubble.imbalance, bubble.recompute, bubble.communication),
        stages=stages,
        units=tuple(units),
        transfer_ms=tuple(decision_transfers(problem, solution.decision.counts).tolist()),
        loads=_loads(problem, solution.decision),
        notes=subject.notes,
    )


def _loads(problem: Problem, decision: Decision) -> tuple[StageLoad, ...]:
    weights, repeated = virtual_stage_weights(problem, decision) or (None, None)
    ends = stage_ends(problem, decision)
    return tuple(
        StageLoad(
            weight_ms=tuple(0.0 if weights is None else weights[virtual] for virtual in virtuals),
            saved_bytes=parts.saved_bytes,
            shared_bytes=parts.shared_bytes,
            working_set_bytes=parts.working_set_bytes,
            update_bytes=parts.update_bytes,
            gather_ms=gather,
            reduce_ms=reduce,
            repeated_ms=() if repeated is None else tuple(repeated[virtual] for virtual in virtuals),
        )
        for virtuals, parts, (gather, reduce) in zip(
            schedule_of(problem).virtual_of_chunk, memory_parts(problem, decision), ends, strict=True
        )
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


def _settings(config: Config, problem: Problem) -> dict[str, Any]:
    settings = {
        key: value
        for key, value in vars(config).items()
        if value is not None and key not in ("pins", "memory_limit", "recompute_options", "stage_speeds", "overlap")
    }
    # As given: what `memory_margin` leaves of it are the limits of the stages.
    limit = config.memory_limit
    settings.update(
        stages=problem.stages,
        chunks=problem.chunks,
        micro_batches=problem.micro_batches,
        schedule=problem.schedule,
        memory_limit=list(limit) if isinstance(limit, tuple) else [limit] * problem.stages,
    )
    if config.recompute_options is not None:
        settings["recompute_options"] = list(config.recompute_options)
    if config.overlap is not None:
        settings["overlap"] = list(config.overlap)
    if config.stage_speeds is not None:
        settings["stage_speeds"] = list(config.stage_speeds)
    if config.pins is not None:
        settings["pins"] = [{"units": pin.units, "stage": pin.stage} for pin in config.pins]
    return dict(sorted(settings.items()))
