"""What each stage of a simulated step waits for, and the memory it holds from moment to moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, WEIGHT, WHOLE
from mindspore_bmpipe.schedule.schedule import Schedule, releasing_kinds
from mindspore_bmpipe.schedule.simulate import TimedAction


@dataclass(frozen=True)
class StageIdle:
    """Where the time of one stage goes; the parts add up to the step time."""

    stage: int
    """Stage."""
    busy_ms: float
    """Sum of its actions."""
    warm_up_ms: float
    """Idle until its first backward starts, without communication."""
    waiting_ms: float
    """Idle between its first backward and its last forward, without communication."""
    cool_down_ms: float
    """Idle after its last forward until the step ends, without communication."""
    communication_ms: float
    """Idle while the message that its next action waits for is on its way."""

    @property
    def idle_ms(self) -> float:
        """All that is not busy."""
        return self.warm_up_ms + self.waiting_ms + self.cool_down_ms + self.communication_ms


@dataclass(frozen=True)
class MemoryPoint:
    """Memory of one stage from a moment until the next point."""

    time_ms: float
    """The moment, from the start of the step."""
    bytes: int
    """What the stage holds from then on."""


def stage_idle(
    schedule: Schedule, timed: Sequence[TimedAction], transfer_ms: npt.ArrayLike = 0.0
) -> tuple[StageIdle, ...]:
    """Idle time of each stage by kind.

    A gap before an action is communication for as long as the message the action waits for is on its way and the stage
    has nothing else to do; the rest of it waits for computation elsewhere.

    Args:
        schedule: the orders.
        timed: what `timeline` gives for them.
        transfer_ms: the transfer times it was given, one number or of shape (K - 1,).
    """
    transfers = np.broadcast_to(np.asarray(transfer_ms, dtype=np.float64), (schedule.virtual_stages - 1,)).tolist()
    step = max(entry.end_ms for entry in timed)
    virtual_of_chunk, stage_of_virtual = schedule.virtual_of_chunk, schedule.stage_of_virtual
    result = []
    position = 0
    for stage, order in enumerate(schedule.orders):
        entries = timed[position : position + len(order)]
        position += len(order)
        first_backward = next(index for index, action in enumerate(order) if action.kind in (BACKWARD, WHOLE))
        last_forward = max(index for index, action in enumerate(order) if action.kind == FORWARD)
        idle = [0.0, 0.0, 0.0]
        communication = free = 0.0
        for index, entry in enumerate(entries):
            gap = entry.start_ms - free
            virtual = virtual_of_chunk[stage][entry.action.chunk]
            source = virtual + (-1 if entry.action.kind == FORWARD else 1)
            received = (
                entry.action.kind != WEIGHT
                and 0 <= source < schedule.virtual_stages
                and stage_of_virtual[source] != stage
            )
            # An action that starts after a gap starts when its message arrives, one transfer after it was sent.
            on_its_way = min(gap, transfers[min(source, virtual)]) if received else 0.0
            communication += on_its_way
            idle[0 if index <= first_backward else 1 if index <= last_forward else 2] += gap - on_its_way
            free = entry.end_ms
        idle[2] += step - free
        busy = sum(entry.end_ms - entry.start_ms for entry in entries)
        result.append(StageIdle(stage, busy, idle[0], idle[1], idle[2], communication))
    return tuple(result)


def memory_curve(
    schedule: Schedule,
    timed: Sequence[TimedAction],
    stage: int,
    held_bytes: int,
    saved_bytes: Sequence[int],
    working_set_bytes: int = 0,
) -> tuple[MemoryPoint, ...]:
    """Memory of a stage over the step, as steps: each point holds until the next.

    A micro-batch's saved bytes appear when its forward starts and go when its backward has ended (its weight gradient,
    where that is separate); the working set is there while a backward or a weight gradient runs.

    Args:
        schedule: the orders.
        timed: what `timeline` gives for them.
        stage: which stage.
        held_bytes: held all step long.
        saved_bytes: of each chunk for one micro-batch.
        working_set_bytes: alive while a backward runs.
    """
    release = releasing_kinds(schedule)
    changes: dict[float, int] = {0.0: 0}
    for entry in timed:
        if entry.stage != stage:
            continue
        saved = saved_bytes[entry.action.chunk]
        at_start = saved if entry.action.kind == FORWARD else working_set_bytes
        at_end = 0 if entry.action.kind == FORWARD else -working_set_bytes
        if entry.action.kind in release:
            at_end -= saved
        changes[entry.start_ms] = changes.get(entry.start_ms, 0) + at_start
        changes[entry.end_ms] = changes.get(entry.end_ms, 0) + at_end
    points: list[MemoryPoint] = []
    current = held_bytes
    for time_ms in sorted(changes):
        current += changes[time_ms]
        if not points or points[-1].bytes != current:
            points.append(MemoryPoint(time_ms, current))
    return tuple(points)
