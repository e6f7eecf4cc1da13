"""Exact times of a schedule: a longest path over its dependency graph, for many plans in one sweep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.actions import KINDS, Action
from mindspore_bmpipe.schedule.graph import DependencyGraph, dependency_graph
from mindspore_bmpipe.schedule.schedule import Schedule

FloatArray = npt.NDArray[np.float64]

_MAX_CELLS = 4_000_000
"""Most end times held at once (32 MB); longer batches are swept in pieces."""


@dataclass(frozen=True)
class PathCounts:
    """How often one path through the dependency graph passes each computation.

    The step time is at least `sum(forward * F) + sum(backward * B) + sum(weight * W) + transfers * transfer_ms` for all
    durations, and equal to it for durations whose longest path this is.
    """

    forward: tuple[int, ...]
    """Forwards of each virtual stage."""
    backward: tuple[int, ...]
    """Backwards of each virtual stage."""
    weight: tuple[int, ...]
    """Weight gradients of each virtual stage."""
    transfers: int
    """Transfers between stages."""


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


def _durations(
    graph: DependencyGraph, forward_ms: npt.ArrayLike, backward_ms: npt.ArrayLike, weight_ms: npt.ArrayLike | None
) -> FloatArray:
    """Durations by slot, shape (kinds * K, plans)."""
    forward = np.atleast_2d(np.asarray(forward_ms, dtype=np.float64))
    backward = np.atleast_2d(np.asarray(backward_ms, dtype=np.float64))
    weight = np.zeros_like(forward) if weight_ms is None else np.atleast_2d(np.asarray(weight_ms, dtype=np.float64))
    for label, times in (("forward", forward), ("backward", backward), ("weight", weight)):
        if times.shape != (forward.shape[0], graph.virtual_stages):
            raise InputError(
                f"{label} times have shape {times.shape}, expected (plans, virtual stages) = "
                f"({forward.shape[0]}, {graph.virtual_stages})"
            )
    return np.concatenate((forward, backward, weight, backward + weight), axis=1).T


def _end_times(graph: DependencyGraph, durations: FloatArray, transfer_ms: float) -> FloatArray:
    """End time of every action, shape (A + 1, plans); the extra row is the zero that first actions see."""
    ends = np.zeros((graph.size + 1, durations.shape[1]))
    delays = graph.transfers[:, None] * transfer_ms
    for low, high in zip(graph.level_starts, graph.level_starts[1:], strict=False):
        ready = ends[graph.data_predecessor[low:high]]
        if transfer_ms:
            ready += delays[low:high]
        np.maximum(ready, ends[graph.stage_predecessor[low:high]], out=ready)
        np.add(ready, durations[graph.slot[low:high]], out=ends[low:high])
    return ends


def step_times(
    schedule: Schedule,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    transfer_ms: float = 0.0,
    weight_ms: npt.ArrayLike | None = None,
) -> FloatArray:
    """Step time of each plan: from the first start to the last end over all stages.

    Args:
        schedule: the orders.
        forward_ms: shape (plans, K) or (K,), time of one micro-batch through each virtual stage.
        backward_ms: the same for backward.
        transfer_ms: one transfer between different stages.
        weight_ms: the same for separate weight gradients; `None` for zero.

    Returns:
        Shape (plans,), milliseconds.
    """
    graph = dependency_graph(schedule)
    durations = _durations(graph, forward_ms, backward_ms, weight_ms)
    plans = durations.shape[1]
    block = max(1, _MAX_CELLS // (graph.size + 1))
    result = np.empty(plans)
    for first in range(0, plans, block):
        ends = _end_times(graph, durations[:, first : first + block], transfer_ms)
        result[first : first + block] = ends.max(axis=0)
    return result


def timeline(
    schedule: Schedule,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    transfer_ms: float = 0.0,
    weight_ms: npt.ArrayLike | None = None,
) -> tuple[TimedAction, ...]:
    """Start and end of every action of one plan (shapes (K,)), by stage and then in the order the stage runs them."""
    graph = dependency_graph(schedule)
    durations = _durations(graph, forward_ms, backward_ms, weight_ms)
    ends = _end_times(graph, durations, transfer_ms)[:, 0]
    timed = []
    for stage, order in enumerate(schedule.orders):
        for action in order:
            index = graph.number[stage, action]
            end = float(ends[index])
            timed.append(TimedAction(stage, action, end - float(durations[graph.slot[index], 0]), end))
    return tuple(timed)


def critical_path(
    schedule: Schedule,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    transfer_ms: float = 0.0,
    weight_ms: npt.ArrayLike | None = None,
    prefer_stage: bool = True,
) -> PathCounts:
    """Counts along a longest path of one plan (shapes (K,)).

    Where two predecessors end at the same time, the path stays on the stage if `prefer_stage`, else it follows the
    data: the two answers are different, equally long paths.
    """
    graph = dependency_graph(schedule)
    durations = _durations(graph, forward_ms, backward_ms, weight_ms)
    ends = _end_times(graph, durations, transfer_ms)[:, 0]
    counts = np.zeros(len(KINDS) * graph.virtual_stages, dtype=np.int64)
    transfers = 0
    index = int(np.argmax(ends[:-1]))
    while index < graph.size:
        counts[graph.slot[index]] += 1
        on_stage, data = int(graph.stage_predecessor[index]), int(graph.data_predecessor[index])
        sent = float(ends[data]) + float(graph.transfers[index]) * transfer_ms
        stays = ends[on_stage] >= sent if prefer_stage else ends[on_stage] > sent
        if data == graph.size or (stays and on_stage != graph.size):
            index = on_stage
        else:
            transfers += int(graph.transfers[index])
            index = data
    forward, backward, weight, whole = counts.reshape(len(KINDS), graph.virtual_stages)
    backward, weight = backward + whole, weight + whole
    return PathCounts(tuple(forward.tolist()), tuple(backward.tolist()), tuple(weight.tolist()), transfers)
