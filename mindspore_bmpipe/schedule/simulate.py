"""Exact times of a schedule: the longest path over its dependency graph, its length for many plans at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.schedule.actions import KINDS, Action
from mindspore_bmpipe.schedule.graph import DependencyGraph, dependency_graph
from mindspore_bmpipe.schedule.periodic import last_ends
from mindspore_bmpipe.schedule.schedule import Schedule
from mindspore_bmpipe.schedule.sweep import FloatArray, end_times, slot_durations, sweep

_MAX_CELLS = 4_000_000
"""Most end times held at once (32 MB); longer batches are swept in pieces."""


@dataclass(frozen=True)
class PathCounts:
    """How often one path through the dependency graph passes each computation.

    The step time is at least `sum(forward * F) + sum(backward * B) + sum(weight * W) + sum(apart * repeated) +
    sum(transfers * transfer)` for all durations, and equal to it for durations whose longest path this is.
    """

    forward: tuple[int, ...]
    """Forwards of each virtual stage."""
    backward: tuple[int, ...]
    """Backwards of each virtual stage."""
    weight: tuple[int, ...]
    """Weight gradients of each virtual stage, whether separate or part of a whole backward."""
    apart: tuple[int, ...]
    """Those of them that are separate, which run again what backwards have recomputed."""
    transfers: tuple[int, ...]
    """Transfers in either direction between each virtual stage and the next, where those are on different stages."""


@dataclass(frozen=True)
class TimedAction:
    """When one action runs."""

    stage: int
    """Stage that runs it."""
    action: Action
    """What runs."""
    start_ms: float
    """Start, from the start of the step."""
    end_ms: float
    """End, from the start of the step."""


def step_times(
    schedule: Schedule,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    transfer_ms: npt.ArrayLike = 0.0,
    weight_ms: npt.ArrayLike | None = None,
    repeated_ms: npt.ArrayLike | None = None,
) -> FloatArray:
    """Step time of each plan: from the first start to the last end over all stages.

    Args:
        schedule: the orders.
        forward_ms: shape (plans, K) or (K,), time of one micro-batch through each virtual stage.
        backward_ms: the same for backward.
        transfer_ms: one transfer between different stages; one number, or of shape (K - 1,) or (plans, K - 1) by the
            virtual stage before it.
        weight_ms: the same for weight gradients, where the schedule splits backwards; `None` for zero.
        repeated_ms: the same for what separate weight gradients run again, and whole backwards do not; `None` for zero.

    Returns:
        Shape (plans,), milliseconds.
    """
    graph = dependency_graph(schedule)
    durations = slot_durations(graph, forward_ms, backward_ms, weight_ms, transfer_ms, repeated_ms)
    plans = durations.shape[1]
    block = max(1, _MAX_CELLS // (graph.size + 1))
    result = np.empty(plans)
    for first in range(0, plans, block):
        result[first : first + block] = last_ends(graph, durations[:, first : first + block])
    return result


def step_with_ends(
    schedule: Schedule,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    transfer_ms: npt.ArrayLike = 0.0,
    weight_ms: npt.ArrayLike | None = None,
    repeated_ms: npt.ArrayLike | None = None,
    before_ms: Sequence[float] = (),
    after_ms: Sequence[float] = (),
) -> float:
    """Step time of one plan (shapes (K,)) whose stages are busy before their first action and after their last.

    Args:
        schedule: the orders.
        forward_ms: time of one micro-batch through each virtual stage.
        backward_ms: the same for backward.
        transfer_ms: one transfer between different stages.
        weight_ms: weight gradients, where the schedule splits backwards; `None` for zero.
        repeated_ms: what separate weight gradients run again; `None` for zero.
        before_ms: per stage, all starting with the step; nothing if empty.
        after_ms: per stage, each starting when its last action has ended; nothing if empty.
    """
    graph = dependency_graph(schedule)
    durations = slot_durations(graph, forward_ms, backward_ms, weight_ms, transfer_ms, repeated_ms)
    stages = schedule.stages
    before, after = (np.array(times or (0.0,) * stages, dtype=np.float64) for times in (before_ms, after_ms))
    # Rows behind those of the actions hold when stages are free; the last one stays the zero of the step's start.
    ends = np.zeros((graph.size + stages + 2, 1))
    predecessor = graph.stage_predecessor.copy()
    for stage, numbers in enumerate(graph.of_stage):
        ends[graph.size + 1 + stage] = before[stage]
        predecessor[numbers[0]] = graph.size + 1 + stage
    sweep(replace(graph, stage_predecessor=predecessor), durations, ends, range(graph.size))
    last = np.array([ends[numbers[-1], 0] for numbers in graph.of_stage])
    return float((last + after).max())


def timeline(
    schedule: Schedule,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    transfer_ms: npt.ArrayLike = 0.0,
    weight_ms: npt.ArrayLike | None = None,
    repeated_ms: npt.ArrayLike | None = None,
) -> tuple[TimedAction, ...]:
    """Start and end of every action of one plan (shapes (K,)), by stage and then in the order the stage runs them."""
    graph, ends, delays = _simulated(schedule, forward_ms, backward_ms, transfer_ms, weight_ms, repeated_ms)
    timed: list[TimedAction] = []
    starts = _starts(graph, ends, delays)
    for stage, (order, numbers) in enumerate(zip(schedule.orders, graph.of_stage, strict=True)):
        timed.extend(map(TimedAction, repeat(stage), order, starts[numbers].tolist(), ends[numbers].tolist()))
    return tuple(timed)


def critical_paths(
    schedule: Schedule,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    transfer_ms: npt.ArrayLike = 0.0,
    weight_ms: npt.ArrayLike | None = None,
    repeated_ms: npt.ArrayLike | None = None,
) -> list[PathCounts]:
    """Counts along two longest paths of each plan, shapes (K,) or (plans, K).

    Where two predecessors end at the same time, the first path stays on the stage and the second follows the data.
    """
    graph = dependency_graph(schedule)
    durations = slot_durations(graph, forward_ms, backward_ms, weight_ms, transfer_ms, repeated_ms)
    block = max(1, _MAX_CELLS // (graph.size + 1))
    found: list[PathCounts] = []
    for first in range(0, durations.shape[1], block):
        part = durations[:, first : first + block]
        ends = np.ascontiguousarray(end_times(graph, part).T)
        transfers = np.ascontiguousarray(part[-graph.virtual_stages :].T)
        for of_plan, sent in zip(ends, transfers, strict=True):
            delays = sent[graph.boundary]
            found.extend(
                _counts(graph, _longest_path(graph, of_plan, delays, prefer_stage)) for prefer_stage in (True, False)
            )
    return found


def _counts(graph: DependencyGraph, path: list[int]) -> PathCounts:
    """Counts along the actions of a path."""
    counts = np.bincount(graph.slot[path], minlength=len(KINDS) * graph.virtual_stages)
    later = np.array(path[1:], dtype=np.int64)
    received = later[graph.stage_predecessor[later] != np.array(path[:-1], dtype=np.int64)]
    crossed = graph.boundary[received]
    transfers = np.bincount(crossed[crossed >= 0], minlength=graph.virtual_stages - 1)
    forward, backward, weight, whole = counts.reshape(len(KINDS), graph.virtual_stages)
    backward, apart, weight = backward + whole, weight, weight + whole
    if any(graph.sends_block):
        transfers = (forward[:-1] + backward[1:]) * np.array(graph.sends_block)
    return PathCounts(*(tuple(part.tolist()) for part in (forward, backward, weight, apart, transfers)))


def critical_actions(
    schedule: Schedule,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    transfer_ms: npt.ArrayLike = 0.0,
    weight_ms: npt.ArrayLike | None = None,
    repeated_ms: npt.ArrayLike | None = None,
) -> tuple[TimedAction, ...]:
    """The actions along a longest path of one plan (shapes (K,)), from the first to the last.

    Each starts when the one before it ends, or one transfer later where that is on another stage; the first starts at 0
    and the last ends with the step.
    """
    graph, ends, delays = _simulated(schedule, forward_ms, backward_ms, transfer_ms, weight_ms, repeated_ms)
    starts = _starts(graph, ends, delays)
    found = []
    for number in _longest_path(graph, ends, delays, prefer_stage=True):
        stage = int(graph.stage.item(number))
        action = schedule.orders[stage][int(np.searchsorted(graph.of_stage[stage], number))]
        found.append(TimedAction(stage, action, starts.item(number), ends.item(number)))
    return tuple(found)


def _simulated(
    schedule: Schedule,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    transfer_ms: npt.ArrayLike,
    weight_ms: npt.ArrayLike | None,
    repeated_ms: npt.ArrayLike | None,
) -> tuple[DependencyGraph, FloatArray, FloatArray]:
    """The dependencies, when each action of one plan ends, and how long what it receives is on its way."""
    graph = dependency_graph(schedule)
    durations = slot_durations(graph, forward_ms, backward_ms, weight_ms, transfer_ms, repeated_ms)
    transfers = durations[-graph.virtual_stages :, 0]
    return graph, end_times(graph, durations)[:, 0], transfers[graph.boundary]


def _starts(graph: DependencyGraph, ends: FloatArray, delays: FloatArray) -> FloatArray:
    """When each action starts: exactly when what it waits for is there, which its end less its duration may miss."""
    starts: FloatArray = np.maximum(ends[graph.stage_predecessor], ends[graph.data_predecessor] + delays)
    return starts


def _longest_path(graph: DependencyGraph, ends: FloatArray, delays: FloatArray, prefer_stage: bool) -> list[int]:
    """Numbers of the actions along a longest path, from the first to the last."""
    # Single entries are read with `item`, which takes a quarter of the time of an index.
    index = int(np.argmax(ends[:-1]))
    path = []
    while index < graph.size:
        path.append(index)
        on_stage, data = graph.stage_predecessor.item(index), graph.data_predecessor.item(index)
        sent = ends.item(data) + delays.item(index)
        stays = ends.item(on_stage) >= sent if prefer_stage else ends.item(on_stage) > sent
        index = on_stage if data == graph.size or (stays and on_stage != graph.size) else data
    return path[::-1]
