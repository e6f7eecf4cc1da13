"""The times a plan file records: of its computations, and of what data-parallel ranks exchange around them."""

from __future__ import annotations

from typing import Any

from mindspore_bmpipe.config import OVERLAP_TRANSFERS, OVERLAPS
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.schedule import Schedule, make_schedule, splits_backward, step_with_ends

PlanTimes = tuple[list[float], list[float], tuple[float, ...], list[float] | None, list[float] | None]
"""Times of virtual stages as schedules take them: forward, backward, transfer, weight gradients, repeated by those."""


def plan_schedule(plan: Plan) -> Schedule:
    """The schedule of a plan.

    Raises:
        InputError: the plan lacks it, or has other stages or chunks.
    """
    numbers = [plan.settings.get(key) for key in ("stages", "chunks", "micro_batches")]
    kind = plan.settings.get("schedule")
    if not isinstance(kind, str) or not all(isinstance(number, int) for number in numbers):
        raise InputError("plan: its settings do not give schedule, stages, chunks and micro_batches; plan again")
    schedule = make_schedule(
        kind, *numbers, sends_block=OVERLAP_TRANSFERS not in plan.settings.get("overlap", OVERLAPS)
    )
    if len(plan.stages) != schedule.stages or any(
        not len(stage.chunks) == len(load.saved_bytes) == len(load.weight_ms) == schedule.chunks
        or len(load.repeated_ms) not in (0, schedule.chunks)
        for stage, load in zip(plan.stages, plan.loads, strict=True)
    ):
        raise InputError(f"plan: it does not have {schedule.stages} stages of {schedule.chunks} chunks; plan again")
    return schedule


def plan_times(plan: Plan, schedule: Schedule) -> PlanTimes:
    """Times of the virtual stages of a plan."""
    forward, backward, weight, repeated = ([0.0] * schedule.virtual_stages for _ in range(4))
    for virtuals, stage, load in zip(schedule.virtual_of_chunk, plan.stages, plan.loads, strict=True):
        parts = zip(virtuals, stage.chunks, load.weight_ms, load.repeated_ms or (0.0,) * schedule.chunks, strict=True)
        for virtual, chunk, part, again in parts:
            forward[virtual] = chunk.forward_ms
            weight[virtual], repeated[virtual] = part, again
            backward[virtual] = max(chunk.backward_ms - part, 0.0)
    if not splits_backward(schedule):
        return forward, backward, plan.transfer_ms, None, None
    return forward, backward, plan.transfer_ms, weight, repeated


def has_exchange(plan: Plan) -> bool:
    """Whether data-parallel ranks exchange anything before the first forwards or after the last backwards."""
    return any(load.gather_ms or load.reduce_ms for load in plan.loads)


def step_with_exchange(plan: Plan) -> float:
    """Time of a step with what data-parallel ranks exchange once in it.

    A stage begins when its weights are gathered, and is done when its gradients are summed; where a stage has to wait
    anyway, that costs nothing.

    Raises:
        InputError: as :func:`plan_schedule`.
    """
    if not has_exchange(plan):
        return plan.solver.step_time_ms
    schedule = plan_schedule(plan)
    before, after = [load.gather_ms for load in plan.loads], [load.reduce_ms for load in plan.loads]
    return step_with_ends(schedule, *plan_times(plan, schedule), before, after)


def exchange_summary(plan: Plan) -> dict[str, Any]:
    """The same for ``--json``."""
    return {
        "gather_ms": [load.gather_ms for load in plan.loads],
        "reduce_ms": [load.reduce_ms for load in plan.loads],
        "step_time_ms": step_with_exchange(plan),
    }


def exchange_text(plan: Plan) -> list[str]:
    """The same for people; nothing where nothing is exchanged."""
    if not has_exchange(plan):
        return []
    gathers, sums = [load.gather_ms for load in plan.loads], [load.reduce_ms for load in plan.loads]
    return [
        f"weights gathered before the pipeline: {max(gathers):.2f} ms at most, on stage {_place(gathers)}; gradients "
        f"summed over ranks after it: {max(sums):.2f} ms at most, on stage {_place(sums)}",
        f"step with both {step_with_exchange(plan):.2f} ms; plans are made for the step time without them",
    ]


def _place(times: list[float]) -> int:
    return times.index(max(times))
