"""The numeric waist: what every planner is given, what it decides, and what a decision costs.

Plain integers and floats only. Units are in network order and grouped in runs of equal costs; virtual stages are in
network order too. Memory of stage s is, for every in-flight row of its order,

    stage_constant + sum(static) + sum over chunks c of row[c] * (saved bytes of chunk c) + largest working set
        + (largest sum of a row) * shared saved bytes

and, while weights are updated and nothing is in flight,

    stage_constant + sum(static) + sum(update)

and must not exceed the stage's limit. The first is an upper bound: while a unit runs, what later units of its chunk
keep of the same micro-batch is not there, so a stage needs less where the largest working set is not its last unit's.
All planners keep the bound; `verify` predicts the exact moment. The step time is the longest path of the schedule with
the times of the decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.problem_data import Option, Pin, Problem, Run, schedule_of
from mindspore_bmpipe.schedule import in_flight_rows, splits_backward, step_times
from mindspore_bmpipe.schedule.actions import WEIGHT
from mindspore_bmpipe.split_backward import decision_repeated, repeats_of, split_times
from mindspore_bmpipe.transfers import decision_transfers, least_transfers

__all__ = [
    "Bubble",
    "ChunkEvaluation",
    "Decision",
    "Evaluation",
    "Option",
    "Pin",
    "Placement",
    "Problem",
    "Run",
    "StageEvaluation",
    "StageMemory",
    "Violation",
    "check",
    "evaluate",
    "expand_decision",
    "memory_parts",
    "recompute_ms",
    "schedule_of",
    "simulated_ms",
    "stage_ends",
    "stage_memory",
    "update_peak",
    "virtual_stage_times",
    "virtual_stage_weights",
]


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
    """Mean recomputation time of a stage, m / p * sum(extra), and what separate weight gradients run again."""
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


def virtual_stage_times(problem: Problem, decision: Decision) -> tuple[list[float], list[float]]:
    """Forward and whole backward milliseconds of each virtual stage for one micro-batch, at its stage's speed."""
    forward = [0.0] * problem.virtual_stages
    backward = [0.0] * problem.virtual_stages
    for run, placed in zip(problem.runs, decision.counts, strict=True):
        for virtual, by_option in enumerate(placed):
            units = sum(by_option)
            forward[virtual] += units * run.forward_ms
            backward[virtual] += units * run.backward_ms
            for count, option in zip(by_option, run.options, strict=True):
                backward[virtual] += count * option.extra_backward_ms
    if problem.stage_speeds:
        for virtual, stage in enumerate(schedule_of(problem).stage_of_virtual):
            forward[virtual] /= problem.stage_speeds[stage]
            backward[virtual] /= problem.stage_speeds[stage]
    return forward, backward


def virtual_stage_weights(problem: Problem, decision: Decision) -> list[list[float]] | None:
    """What makes weight gradients of each virtual stage, and what they run again where they are apart: two rows.

    The first is part of the virtual stage's backward, the second comes on top of it. `None` if the schedule never
    splits backwards.
    """
    repeated = decision_repeated(problem, decision.counts)
    if repeated is None:
        return None
    weight = [0.0] * problem.virtual_stages
    stage_of_virtual = schedule_of(problem).stage_of_virtual
    for run, placed in zip(problem.runs, decision.counts, strict=True):
        for virtual, by_option in enumerate(placed):
            weight[virtual] += sum(by_option) * run.split_weight_ms / problem.speeds[stage_of_virtual[virtual]]
    return [weight, repeated]


def simulated_ms(
    problem: Problem,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    weight_ms: npt.ArrayLike | None,
    transfer_ms: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float64]:
    """Step time of plans with these times of their virtual stages, shape (plans, K) or (K,).

    Args:
        problem: gives the schedule and the transfer times.
        forward_ms: forward times.
        backward_ms: whole backward times.
        weight_ms: weight gradients in them and what those run again if they are apart, shape (plans, 2, K) or (2, K);
            `None` if the schedule never splits backwards.
        transfer_ms: transfer times, shape (K - 1,) or (plans, K - 1); by default the least there can be, which makes
            the result a lower bound unless all cuts take the same.
    """
    transfer = least_transfers(problem) if transfer_ms is None else transfer_ms
    return step_times(schedule_of(problem), forward_ms, *split_times(backward_ms, transfer, weight_ms))


def stage_constants(problem: Problem) -> tuple[int, ...]:
    """Bytes of each stage that no decision changes: the stage constant and what is shared by its micro-batches."""
    return tuple(
        problem.stage_constant_bytes + problem.shared_saved_bytes * max(map(sum, rows))
        for rows in in_flight_rows(schedule_of(problem))
    )


def update_peak(problem: Problem, units: Iterable[tuple[int, int]]) -> int:
    """Bytes of a stage while weights are updated.

    Args:
        problem: the problem.
        units: what the stage holds, as (run, number of its units).
    """
    held = sum(number * (problem.runs[run].static_bytes + problem.runs[run].update_bytes) for run, number in units)
    return problem.stage_constant_bytes + held


@dataclass(frozen=True)
class StageMemory:
    """What the memory of one stage is made of; all bytes of one device."""

    static_bytes: int
    """Stage constant plus static bytes of its units."""
    shared_bytes: int
    """Kept for all micro-batches together, all step long."""
    saved_bytes: tuple[int, ...]
    """Kept by each chunk for one micro-batch, from its forward until its backward has ended."""
    working_set_bytes: int
    """Largest working set of its units, alive while a backward runs."""
    update_bytes: int
    """Alive while weights are updated, when nothing else but static bytes is."""


def memory_parts(problem: Problem, decision: Decision) -> tuple[StageMemory, ...]:
    """What each stage holds; exact integers."""
    result = []
    for virtuals, constant in zip(schedule_of(problem).virtual_of_chunk, stage_constants(problem), strict=True):
        static = problem.stage_constant_bytes
        shared = constant - static
        working_set = update = 0
        saved = [0] * problem.chunks
        for chunk, virtual in enumerate(virtuals):
            for run, placed in zip(problem.runs, decision.counts, strict=True):
                static += sum(placed[virtual]) * run.static_bytes
                update += sum(placed[virtual]) * run.update_bytes
                for count, option in zip(placed[virtual], run.options, strict=True):
                    if count:
                        saved[chunk] += count * option.saved_bytes
                        working_set = max(working_set, option.working_set_bytes)
        result.append(StageMemory(static, shared, tuple(saved), working_set, update))
    return tuple(result)


def stage_memory(problem: Problem, decision: Decision) -> tuple[tuple[int, int], ...]:
    """(static bytes, peak bytes) of each stage; exact integers."""
    result = []
    for rows, parts in zip(in_flight_rows(schedule_of(problem)), memory_parts(problem, decision), strict=True):
        in_flight = max(sum(count * size for count, size in zip(row, parts.saved_bytes, strict=True)) for row in rows)
        running = parts.shared_bytes + in_flight + parts.working_set_bytes
        result.append((parts.static_bytes, parts.static_bytes + max(running, parts.update_bytes)))
    return tuple(result)


def stage_ends(problem: Problem, decision: Decision) -> tuple[tuple[float, float], ...]:
    """Milliseconds of each stage before its first forward and after its last backward that the step time leaves out."""
    held = [[sum(map(sum, (placed[virtual] for virtual in virtuals))) for placed in decision.counts]
            for virtuals in schedule_of(problem).virtual_of_chunk]  # fmt: skip
    return tuple(
        (
            math.fsum(count * run.gather_ms for count, run in zip(counts, problem.runs, strict=True)),
            math.fsum(count * run.reduce_ms for count, run in zip(counts, problem.runs, strict=True)),
        )
        for counts in held
    )


def recompute_ms(problem: Problem, decision: Decision) -> float:
    """Recomputation time of one micro-batch, summed over all units."""
    return math.fsum(
        count * option.extra_backward_ms
        for run, placed in zip(problem.runs, decision.counts, strict=True)
        for by_option in placed
        for count, option in zip(by_option, run.options, strict=True)
    )


def _repeated_ms(problem: Problem, repeated: Sequence[float]) -> float:
    """What all separate weight gradients of a step run again, at speed 1, from what one of each virtual stage does."""
    schedule = schedule_of(problem)
    return math.fsum(
        repeated[schedule.virtual_of_chunk[stage][action.chunk]] * problem.speeds[stage]
        for stage, order in enumerate(schedule.orders)
        for action in order
        if action.kind == WEIGHT
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
    weight = virtual_stage_weights(problem, decision)
    transfers = decision_transfers(problem, decision.counts)
    step_time = float(simulated_ms(problem, forward, backward, weight, transfers)[0])
    free = float(simulated_ms(problem, forward, backward, weight, 0.0)[0]) if transfers.any() else step_time
    ideal = problem.ideal_ms
    total = step_time / ideal - 1
    preparation = (problem.stages - 1) / (problem.chunks * problem.micro_batches)
    recompute = problem.micro_batches / sum(problem.speeds) * recompute_ms(problem, decision) / ideal
    if weight is not None:
        recompute += _repeated_ms(problem, weight[1]) / sum(problem.speeds) / ideal
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
    """Where every unit sits, in unit order.

    Inside a virtual stage, options of a run are dealt out in option order, or so that least runs again where the
    schedule splits backwards.
    """
    schedule = schedule_of(problem)
    chunk_of_virtual = schedule.chunk_of_virtual
    splits = splits_backward(schedule)
    placements: list[Placement] = []
    for index, (run, placed) in enumerate(zip(problem.runs, decision.counts, strict=True)):
        dealing = repeats_of(run).dealing() if splits else range(len(run.options))
        for virtual, by_option in enumerate(placed):
            for option in dealing:
                for _ in range(by_option[option]):
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
