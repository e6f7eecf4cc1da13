"""One sweep over the levels of a dependency graph: end times of all actions, for many plans at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.graph import DependencyGraph, IntArray

FloatArray = npt.NDArray[np.float64]


def slot_durations(
    graph: DependencyGraph,
    forward_ms: npt.ArrayLike,
    backward_ms: npt.ArrayLike,
    weight_ms: npt.ArrayLike | None,
    transfer_ms: npt.ArrayLike = 0.0,
    repeated_ms: npt.ArrayLike | None = None,
) -> FloatArray:
    """Durations by slot, then transfers by boundary, then 0 for no transfer, shape (kinds * K + K, plans).

    Transfers are one number for all, or of shape (K - 1,) or (plans, K - 1). Where they block they are part of the
    actions that send. What is repeated is part of separate weight gradients (`W`), and of no whole backward (`BW`).
    """
    forward = np.atleast_2d(np.asarray(forward_ms, dtype=np.float64))
    backward = np.atleast_2d(np.asarray(backward_ms, dtype=np.float64))
    weight, repeated = (
        np.zeros_like(forward) if times is None else np.atleast_2d(np.asarray(times, dtype=np.float64))
        for times in (weight_ms, repeated_ms)
    )
    for label, times in (("forward", forward), ("backward", backward), ("weight", weight), ("repeated", repeated)):
        if times.shape != (forward.shape[0], graph.virtual_stages):
            raise InputError(
                f"{label} times have shape {times.shape}, expected (plans, virtual stages) = "
                f"({forward.shape[0]}, {graph.virtual_stages})"
            )
    transfers = np.zeros_like(forward)
    try:
        transfers[:, :-1] = transfer_ms
    except ValueError:
        raise InputError(
            f"transfer times have shape {np.shape(transfer_ms)}, expected one number or (plans, virtual stages - 1) = "
            f"({forward.shape[0]}, {graph.virtual_stages - 1})"
        ) from None
    if any(graph.sends_block):
        # The forward of k and the backward of k + 1 end when their message has crossed; then it is there at once.
        sent = transfers[:, :-1] * np.array(graph.sends_block)
        forward, backward = forward.copy(), backward.copy()
        forward[:, :-1] += sent
        backward[:, 1:] += sent
        transfers[:] = 0.0
    return np.concatenate((forward, backward, weight + repeated, backward + weight, transfers), axis=1).T


def sweep(graph: DependencyGraph, durations: FloatArray, ends: FloatArray, actions: range, offset: int = 0) -> None:
    """Fill in the end times of some whole levels.

    Args:
        graph: the dependencies.
        durations: of actions and transfers, from :func:`slot_durations`.
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
    transfers = durations[-graph.virtual_stages : -1]
    # One time for all transfers is the common case, and its delays are the same for all plans.
    alike = float(transfers.min()) if transfers.size and transfers.min() == transfers.max() else 0.0
    crossed = graph.boundary[part]
    delays = (crossed >= 0)[:, None] * alike
    varied = alike == 0.0 and bool(transfers.any())
    bounds = [start - actions.start for start in graph.level_starts[first : last + 1]]
    shift = actions.start - offset
    for low, high in pairwise(bounds):
        ready = ends[data[low:high]]
        if varied:
            ready += durations[crossed[low:high] - graph.virtual_stages * (crossed[low:high] >= 0)]
        elif alike:
            ready += delays[low:high]
        np.maximum(ready, ends[on_stage[low:high]], out=ready)
        np.add(ready, durations[slots[low:high]], out=ends[low + shift : high + shift])


def _local(predecessor: IntArray, graph: DependencyGraph, offset: int) -> IntArray:
    """Rows of predecessors; the last row for none."""
    return np.where(predecessor == graph.size, -1, predecessor - offset)


def end_times(graph: DependencyGraph, durations: FloatArray) -> FloatArray:
    """End time of every action, shape (A + 1, plans); the extra row is the zero that first actions see."""
    ends = np.zeros((graph.size + 1, durations.shape[1]))
    sweep(graph, durations, ends, range(graph.size))
    return ends
