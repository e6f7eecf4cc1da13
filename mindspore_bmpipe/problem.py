"""The numeric waist: what every planner is given, what it decides, and what a decision costs.

Plain integers and floats only. Units are in network order and grouped in runs of equal costs; virtual stages are in
network order too. Memory of stage s is, for every in-flight row of its order,

    stage_constant + sum(static) + sum over chunks c of row[c] * (saved bytes of chunk c) + largest working set

and must not exceed the stage's limit. The step time is the longest path of the schedule with the times of the decision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspore_bmpipe.config import AUTO, Config, PinSpec, require_supported
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule import Schedule, in_flight_rows, make_schedule, step_times


@dataclass(frozen=True)
class Option:
    """One way to recompute a unit."""

    name: str
    """Name within the run, such as `none` or `full`."""
    saved_bytes: int
    """Activation bytes a unit keeps per micro-batch in flight, at least 0."""
    extra_backward_ms: float
    """Time recomputation adds to the backward of a unit, at least 0."""
    working_set_bytes: int = 0
    """Bytes alive only while a unit's backward runs, at least 0."""


@dataclass(frozen=True)
class Run:
    """Neighbouring units of equal costs."""

    name: str
    """Name for reports; runs that are not neighbours may share one."""
    count: int
    """Units in the run, at least 1."""
    forward_ms: float
    """Forward time of one unit and one micro-batch, at least 0."""
    backward_ms: float
    """Backward time of one unit without recomputation, at least 0."""
    static_bytes: int
    """Parameters, gradients and optimizer state of one unit on one device, at least 0."""
    options: tuple[Option, ...]
    """Ways to recompute a unit, at least one, with distinct names."""
    trainable: bool = True
    """Whether a unit has trainable parameters."""


@dataclass(frozen=True)
class Pin:
    """Units tied to one stage (any of its chunks)."""

    first_unit: int
    """First unit, 0 to units - 1."""
    last_unit: int
    """Last unit, inclusive."""
    stage: int
    """Stage they must be on, 0 to stages - 1."""


@dataclass(frozen=True)
class Problem:
    """One planning problem; validated when made."""

    runs: tuple[Run, ...]
    """Runs in network order, at least one."""
    schedule: str
    """Name of a registered schedule."""
    stages: int
    """Pipeline stages p, at least 1."""
    chunks: int
    """Chunks per stage v, at least 1."""
    micro_batches: int
    """Micro-batches per step m, at least 1."""
    memory_limit_bytes: tuple[int, ...]
    """Bytes a plan may use, one per stage, each above 0."""
    stage_constant_bytes: int = 0
    """Bytes every stage uses whatever is placed on it, at least 0."""
    transfer_ms: float = 0.0
    """Time of one transfer between virtual stages on different stages, at least 0."""
    forbidden_cuts: frozenset[int] = frozenset()
    """Each entry u keeps units u and u + 1 in one virtual stage; 0 to units - 2."""
    pins: tuple[Pin, ...] = ()
    """Units tied to stages."""

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def units(self) -> int:
        """Number of units."""
        return sum(run.count for run in self.runs)

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages, p * v."""
        return self.stages * self.chunks

    @property
    def first_units(self) -> tuple[int, ...]:
        """First unit of each run, and the number of units at the end."""
        firsts = [0]
        for run in self.runs:
            firsts.append(firsts[-1] + run.count)
        return tuple(firsts)

    @property
    def ideal_ms(self) -> float:
        """Time of a step without any bubble or recomputation: m / p * sum of forward and backward."""
        work = sum(run.count * (run.forward_ms + run.backward_ms) for run in self.runs)
        return self.micro_batches / self.stages * work


@dataclass(frozen=True)
class Decision:
    """How many units of each run sit in each virtual stage with each option."""

    counts: tuple[tuple[tuple[int, ...], ...], ...]
    """[run][virtual stage][option], each at least 0."""


@dataclass(frozen=True)
class Placement:
    """Where one unit sits and how it is recomputed."""

    unit: int
    """Unit in network order, from 0."""
    run: int
    """Index of its run."""
    virtual_stage: int
    """Virtual stage in network order."""
    stage: int
    """Stage that runs it."""
    chunk: int
    """Chunk of that stage."""
    option_index: int
    """Index into the options of its run."""


@dataclass(frozen=True)
class Bubble:
    """Time lost as shares of the ideal time; total = preparation + imbalance + recompute + communication."""

    total: float
    """Step time / ideal time - 1."""
    preparation: float
    """(p - 1) / (v * m), the warm-up and cool-down of an even pipeline."""
    imbalance: float
    """What the other parts leave: unequal stages, or a warm-up other than the even one. May be negative."""
    recompute: float
    """Mean recomputation time of a stage, m / p * sum(extra)."""
    communication: float
    """What the step would gain if transfers were free."""


@dataclass(frozen=True)
class ChunkEvaluation:
    """Times of one chunk of a stage."""

    chunk: int
    """Chunk of the stage."""
    forward_ms: float
    """Forward of one micro-batch."""
    backward_ms: float
    """Backward of one micro-batch, recomputation included."""


@dataclass(frozen=True)
class StageEvaluation:
    """Memory and times of one stage."""

    stage: int
    """Stage."""
    static_bytes: int
    """Stage constant plus static bytes of its units."""
    peak_bytes: int
    """Largest memory over the step."""
    limit_bytes: int
    """What it may use."""
    chunks: tuple[ChunkEvaluation, ...]
    """Times of its chunks."""


@dataclass(frozen=True)
class Evaluation:
    """Everything a decision costs; limits are compared in `check`, not here."""

    step_time_ms: float
    """First forward start to last backward end."""
    ideal_ms: float
    """Ideal time, the unit of the bubble."""
    bubble: Bubble
    """Where the time above ideal goes."""
    stages: tuple[StageEvaluation, ...]
    """One entry per stage."""


@dataclass(frozen=True)
class Violation:
    """One constraint a decision breaks."""

    kind: str
    """`shape`, `count`, `order`, `trainable`, `memory`, `pin` or `forbidden_cut`."""
    where: str
    """The run, virtual stage, stage or unit concerned."""
    message: str
    """What is wrong, with numbers."""


def schedule_of(problem: Problem) -> Schedule:
    """The problem's schedule (cached)."""
    return make_schedule(problem.schedule, problem.stages, problem.chunks, problem.micro_batches)


def virtual_stage_times(problem: Problem, decision: Decision) -> tuple[list[float], list[float]]:
    """Forward and backward milliseconds of each virtual stage for one micro-batch."""
    forward = [0.0] * problem.virtual_stages
    backward = [0.0] * problem.virtual_stages
    for run, placed in zip(problem.runs, decision.counts, strict=True):
        for virtual, by_option in enumerate(placed):
            units = sum(by_option)
            forward[virtual] += units * run.forward_ms
            backward[virtual] += units * run.backward_ms
            for count, option in zip(by_option, run.options, strict=True):
                backward[virtual] += count * option.extra_backward_ms
    return forward, backward


def stage_memory(problem: Problem, decision: Decision) -> tuple[tuple[int, int], ...]:
    """(static bytes, peak bytes) of each stage; exact integers."""
    schedule = schedule_of(problem)
    virtual_of_chunk = schedule.virtual_of_chunk
    result = []
    for stage, rows in enumerate(in_flight_rows(schedule)):
        static = problem.stage_constant_bytes
        working_set = 0
        saved = [0] * problem.chunks
        for chunk, virtual in enumerate(virtual_of_chunk[stage]):
            for run, placed in zip(problem.runs, decision.counts, strict=True):
                static += sum(placed[virtual]) * run.static_bytes
                for count, option in zip(placed[virtual], run.options, strict=True):
                    if count:
                        saved[chunk] += count * option.saved_bytes
                        working_set = max(working_set, option.working_set_bytes)
        in_flight = max(sum(count * size for count, size in zip(row, saved, strict=True)) for row in rows)
        result.append((static, static + in_flight + working_set))
    return tuple(result)


def recompute_ms(problem: Problem, decision: Decision) -> float:
    """Recomputation time of one micro-batch, summed over all units."""
    return math.fsum(
        count * option.extra_backward_ms
        for run, placed in zip(problem.runs, decision.counts, strict=True)
        for by_option in placed
        for count, option in zip(by_option, run.options, strict=True)
    )


def evaluate(problem: Problem, decision: Decision) -> Evaluation:
    """What a decision costs. It need not be feasible, but its counts must have the problem's shape.

    Raises:
        InputError: the counts have another shape, or place other numbers of units than the runs have.
    """
    broken = [*_shape_violations(problem, decision)]
    if not broken:
        broken.extend(_count_violations(problem, decision))
    if broken:
        raise InputError(f"decision: {'; '.join(violation.message for violation in broken)}")
    schedule = schedule_of(problem)
    forward, backward = virtual_stage_times(problem, decision)
    step_time = float(step_times(schedule, forward, backward, problem.transfer_ms)[0])
    free = float(step_times(schedule, forward, backward)[0]) if problem.transfer_ms else step_time
    ideal = problem.ideal_ms
    total = step_time / ideal - 1
    preparation = (problem.stages - 1) / (problem.chunks * problem.micro_batches)
    recompute = problem.micro_batches / problem.stages * recompute_ms(problem, decision) / ideal
    communication = (step_time - free) / ideal
    imbalance = total - preparation - recompute - communication
    stages = tuple(
        StageEvaluation(
            stage=stage,
            static_bytes=static,
            peak_bytes=peak,
            limit_bytes=problem.memory_limit_bytes[stage],
            chunks=tuple(
                ChunkEvaluation(chunk, forward[virtual], backward[virtual])
                for chunk, virtual in enumerate(schedule.virtual_of_chunk[stage])
            ),
        )
        for stage, (static, peak) in enumerate(stage_memory(problem, decision))
    )
    return Evaluation(step_time, ideal, Bubble(total, preparation, imbalance, recompute, communication), stages)


def expand_decision(problem: Problem, decision: Decision) -> tuple[Placement, ...]:
    """Where every unit sits, in unit order; inside a virtual stage the options of a run are handed out in option order."""
    schedule = schedule_of(problem)
    chunk_of_virtual = schedule.chunk_of_virtual
    placements: list[Placement] = []
    for index, placed in enumerate(decision.counts):
        for virtual, by_option in enumerate(placed):
            for option, count in enumerate(by_option):
                for _ in range(count):
                    stage, chunk = schedule.stage_of_virtual[virtual], chunk_of_virtual[virtual]
                    placements.append(Placement(len(placements), index, virtual, stage, chunk, option))
    return tuple(placements)


def check(problem: Problem, decision: Decision) -> tuple[Violation, ...]:
    """Every constraint the decision breaks; empty if it is feasible.

    Counts of a wrong shape are reported alone, since nothing else can be computed from them.
    """
    shape = tuple(_shape_violations(problem, decision))
    if shape:
        return shape
    violations = [*_count_violations(problem, decision), *_order_violations(problem, decision)]
    for virtual in range(problem.virtual_stages):
        if not any(
            run.trainable and sum(placed[virtual]) for run, placed in zip(problem.runs, decision.counts, strict=True)
        ):
            message = f"virtual stage {virtual} has no unit with trainable parameters"
            violations.append(Violation("trainable", f"virtual stage {virtual}", message))
    for stage, (_, peak) in enumerate(stage_memory(problem, decision)):
        limit = problem.memory_limit_bytes[stage]
        if peak > limit:
            message = f"stage {stage} needs {peak} bytes, {peak - limit} more than its limit of {limit}"
            violations.append(Violation("memory", f"stage {stage}", message))
    placements = expand_decision(problem, decision)
    if len(placements) == problem.units:
        violations.extend(_placement_violations(problem, placements))
    return tuple(violations)


def _shape_violations(problem: Problem, decision: Decision) -> Iterator[Violation]:
    if len(decision.counts) != len(problem.runs):
        yield Violation("shape", "counts", f"counts have {len(decision.counts)} runs, the problem {len(problem.runs)}")
        return
    for index, (run, placed) in enumerate(zip(problem.runs, decision.counts, strict=True)):
        where = f"run {index} ({run.name})"
        if len(placed) != problem.virtual_stages:
            message = f"{where}: counts for {len(placed)} virtual stages, the problem has {problem.virtual_stages}"
            yield Violation("shape", where, message)
        elif any(len(by_option) != len(run.options) for by_option in placed):
            yield Violation("shape", where, f"{where}: counts do not have {len(run.options)} options everywhere")


def _count_violations(problem: Problem, decision: Decision) -> Iterator[Violation]:
    for index, (run, placed) in enumerate(zip(problem.runs, decision.counts, strict=True)):
        where = f"run {index} ({run.name})"
        if any(count < 0 for by_option in placed for count in by_option):
            yield Violation("count", where, f"{where}: a count is negative")
        total = sum(map(sum, placed))
        if total != run.count:
            yield Violation("count", where, f"{where}: {total} units are placed, the run has {run.count}")


def _order_violations(problem: Problem, decision: Decision) -> Iterator[Violation]:
    latest, latest_run = -1, -1
    for index, placed in enumerate(decision.counts):
        used = [virtual for virtual, by_option in enumerate(placed) if any(by_option)]
        if used and used[0] < latest:
            where = f"run {index} ({problem.runs[index].name})"
            message = (
                f"{where} has units in virtual stage {used[0]}, before units of "
                f"run {latest_run} ({problem.runs[latest_run].name}) in virtual stage {latest}"
            )
            yield Violation("order", where, message)
        if used and used[-1] > latest:
            latest, latest_run = used[-1], index


def _placement_violations(problem: Problem, placements: tuple[Placement, ...]) -> Iterator[Violation]:
    for pin in problem.pins:
        wrong = [place.unit for place in placements[pin.first_unit : pin.last_unit + 1] if place.stage != pin.stage]
        if wrong:
            where = f"units {pin.first_unit}-{pin.last_unit}"
            message = f"{where} are pinned to stage {pin.stage}, but unit {wrong[0]} is on {placements[wrong[0]].stage}"
            yield Violation("pin", where, message)
    for cut in sorted(problem.forbidden_cuts):
        before, after = placements[cut].virtual_stage, placements[cut + 1].virtual_stage
        if before != after:
            message = f"units {cut} and {cut + 1} must share a virtual stage, but are in {before} and {after}"
            yield Violation("forbidden_cut", f"units {cut}-{cut + 1}", message)


def _validate(problem: Problem) -> None:
    if not problem.runs:
        raise InputError("runs: there are none; give at least one run of units")
    for index, run in enumerate(problem.runs):
        _validate_run(f"runs[{index}] ({run.name})", run)
    _require_integer("stages", problem.stages, 1)
    _require_integer("chunks", problem.chunks, 1)
    _require_integer("micro_batches", problem.micro_batches, 1)
    _require_integer("stage_constant_bytes", problem.stage_constant_bytes, 0)
    _require_time("transfer_ms", problem.transfer_ms)
    if problem.virtual_stages > problem.units:
        raise InputError(
            f"stages: {problem.stages} stages of {problem.chunks} chunk(s) need at least {problem.virtual_stages} units, "
            f"the network has {problem.units}; lower stages or chunks, or split the network into more units"
        )
    schedule_of(problem)
    if len(problem.memory_limit_bytes) != problem.stages:
        raise InputError(
            f"memory_limit_bytes: {len(problem.memory_limit_bytes)} limits for {problem.stages} stages; give one per stage"
        )
    for stage, limit in enumerate(problem.memory_limit_bytes):
        _require_integer(f"memory_limit_bytes[{stage}]", limit, 1)
    if problem.ideal_ms <= 0:
        raise InputError("runs: all forward and backward times are 0; give the times of the units")
    for cut in problem.forbidden_cuts:
        if isinstance(cut, bool) or not isinstance(cut, int) or not 0 <= cut < problem.units - 1:
            raise InputError(f"forbidden_cuts: {cut!r} is no cut; give the unit before it, 0 to {problem.units - 2}")
    for index, pin in enumerate(problem.pins):
        if not 0 <= pin.first_unit <= pin.last_unit < problem.units:
            raise InputError(
                f"pins[{index}]: units {pin.first_unit}-{pin.last_unit} do not exist; give a range within "
                f"0-{problem.units - 1}"
            )
        if not 0 <= pin.stage < problem.stages:
            raise InputError(f"pins[{index}]: there is no stage {pin.stage}; give 0 to {problem.stages - 1}")


def _validate_run(where: str, run: Run) -> None:
    _require_integer(f"{where}.count", run.count, 1)
    _require_time(f"{where}.forward_ms", run.forward_ms)
    _require_time(f"{where}.backward_ms", run.backward_ms)
    _require_integer(f"{where}.static_bytes", run.static_bytes, 0)
    if not run.options:
        raise InputError(f"{where}.options: there are none; give at least the option of recomputing nothing")
    names = [option.name for option in run.options]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"{where}.options: {', '.join(repeated)} appears more than once; names must be distinct")
    for option in run.options:
        place = f"{where}.options ({option.name})"
        _require_integer(f"{place}.saved_bytes", option.saved_bytes, 0)
        _require_time(f"{place}.extra_backward_ms", option.extra_backward_ms)
        _require_integer(f"{place}.working_set_bytes", option.working_set_bytes, 0)


def _require_integer(where: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InputError(f"{where}: {value!r} is not allowed; give an integer of at least {minimum}")


def _require_time(where: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InputError(f"{where}: {value!r} is not allowed; give a finite number of milliseconds, at least 0")


_UNIT_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_RUN_RANGE = re.compile(r"(.+)\[(\d+)(?:-(\d+))?\]")


def resolve_pin(runs: Sequence[Run], pin: PinSpec, where: str = "pins") -> Pin:
    """Global unit indices of a pin written as indices, as a run's name, or as part of a run (`body[0-3]`, from 0 there).

    Raises:
        InputError: no such run or units, or a name that several runs share.
    """
    first_of_run = 0
    named: dict[str, list[tuple[int, int]]] = {}
    for run in runs:
        named.setdefault(run.name, []).append((first_of_run, run.count))
        first_of_run += run.count
    if pin.units in named:
        name, low, high = pin.units, 0, None
    elif match := _UNIT_RANGE.fullmatch(pin.units):
        first = int(match.group(1))
        return Pin(first, int(match.group(2) or first), pin.stage)
    elif match := _RUN_RANGE.fullmatch(pin.units):
        name, low = match.group(1), int(match.group(2))
        high = int(match.group(3) or low)
    else:
        name, low, high = pin.units, 0, None
    if name not in named:
        raise InputError(f"{where}: {pin.units!r} is no unit range and no run; the runs are {', '.join(named)}")
    if len(named[name]) > 1:
        raise InputError(f"{where}: several runs are named {name}; pin by unit index instead")
    start, count = named[name][0]
    last = count - 1 if high is None else high
    if not low <= last < count:
        raise InputError(f"{where}: {pin.units!r} is outside run {name}, whose units are 0-{count - 1}")
    return Pin(start + low, start + last, pin.stage)


def problem_from_config(
    runs: Sequence[Run],
    config: Config,
    stage_constant_bytes: int = 0,
    transfer_ms: float = 0.0,
    forbidden_cuts: frozenset[int] = frozenset(),
) -> Problem:
    """The planning problem of evaluated costs and a CONFIG. `chunks` defaults to 1, `schedule` to 1f1b.

    `recompute_options` keeps the named options of each run; a run that has none of them keeps all of its own, so that
    embeddings and heads with a single option need not be named.

    Raises:
        InputError: a needed key is missing, or this version cannot plan what is asked.
    """
    require_supported(config)
    stages, micro_batches, limit = config.stages, config.micro_batches, config.memory_limit
    missing = [key for key in ("stages", "micro_batches", "memory_limit") if getattr(config, key) is None]
    if stages is None or micro_batches is None or limit is None:
        raise InputError(f"config: {', '.join(missing)} is missing; a plan needs it")
    assert config.chunks != AUTO and config.schedule != AUTO
    kept = tuple(runs)
    if config.recompute_options is not None:
        kept = _with_options(kept, config.recompute_options)
    return Problem(
        runs=kept,
        schedule=config.schedule or "1f1b",
        stages=stages,
        chunks=int(config.chunks or 1),
        micro_batches=micro_batches,
        memory_limit_bytes=(limit,) * stages if isinstance(limit, int) else limit,
        stage_constant_bytes=stage_constant_bytes,
        transfer_ms=transfer_ms,
        forbidden_cuts=forbidden_cuts,
        pins=tuple(resolve_pin(kept, pin, f"pins[{index}]") for index, pin in enumerate(config.pins or ())),
    )


def _with_options(runs: tuple[Run, ...], names: tuple[str, ...]) -> tuple[Run, ...]:
    known = {option.name for run in runs for option in run.options}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(
            f"recompute_options: no unit has an option {', '.join(unknown)}; the options are {', '.join(sorted(known))}"
        )
    result = []
    for run in runs:
        options = tuple(option for option in run.options if option.name in names) or run.options
        result.append(Run(run.name, run.count, run.forward_ms, run.backward_ms, run.static_bytes, options, run.trainable))
    return tuple(result)
