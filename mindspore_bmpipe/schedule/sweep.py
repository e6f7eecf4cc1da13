"""One sweep over the levels of a dependency graph: end times of all actions, for many plans at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.graph import DependencyGraph, IntArray

FloatArray = npt.NDArray[np.float64]


def slot_durations(
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


def sweep(
    graph: DependencyGraph, durations: FloatArray, transfer_ms: float, ends: FloatArray, actions: range, offset: int = 0
) -> None:
    """Fill in the end times of some whole levels.

    Args:
        graph: the dependencies.
        durations: by slot, shape (kinds * K, plans).
        transfer_ms: one transfer.
        ends: end times from action `offset` on, shape (rows, plans); the last row is the zero that first actions see.
        actions: which actions, from the start of a level to the end of one.
        offset: action of the first row of `ends`.
    """
    first, last = np.searchsorted(graph.level_starts, (actions.start, actions.stop)).tolist()
    part = slice(actions.start, actions.stop)
    on_stage, data = (
        _local(graph.stage_predecessor[part], graph, offset),
        _local(graph.data_predecessor[part], graph, offset),
    )
    slots = graph.slot[part]
    delays = graph.transfers[part, None] * transfer_ms
    bounds = [start - actions.start for start in graph.level_starts[first : last + 1]]
    shift = actions.start - offset
    for low, high in pairwise(bounds):
        ready = ends[data[low:high]]
        if transfer_ms:
            ready += delays[low:high]
        np.maximum(ready, ends[on_stage[low:high]], out=ready)
        np.add(ready, durations[slots[low:high]], out=ends[low + shift : high + shift])


def _local(predecessor: IntArray, graph: DependencyGraph, offset: int) -> IntArray:
    """Rows of predecessors; the last row for none."""
    return np.where(predecessor == graph.size, -1, predecessor - offset)


def end_times(graph: DependencyGraph, durations: FloatArray, transfer_ms: float) -> FloatArray:
    """End time of every action, shape (A + 1, plans); the extra row is the zero that first actions see."""
    ends = np.zeros((graph.size + 1, durations.shape[1]))
    sweep(graph, durations, transfer_ms, ends, range(graph.size))
    return ends
