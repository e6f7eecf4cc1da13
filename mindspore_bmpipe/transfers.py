"""Times of transfers between virtual stages: of each cut, of decisions and splits, and the least there can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.costs.hardware import Link
from mindspore_bmpipe.problem_data import Problem, schedule_of

FloatArray = npt.NDArray[np.float64]


def transfer_table(problem: Problem) -> FloatArray:
    """Time of one transfer between virtual stages k and k + 1 cut after unit u, shape (K - 1, units - 1)."""
    if problem.cut_transfers_ms:
        return np.array(problem.cut_transfers_ms, dtype=np.float64)
    return np.full((problem.virtual_stages - 1, problem.units - 1), float(problem.transfer_ms))


def with_cuts(problem: Problem, cut_bytes: Sequence[int], links: Sequence[Link]) -> Problem:
    """The problem with the times of transfers by what is sent and where the stages are.

    Args:
        problem: as posed for one time for all.
        cut_bytes: bytes that one rank sends for each cut after a unit; empty to leave the problem as it is.
        links: slowest link from each stage to the next one, and from the last to the first.
    """
    if not cut_bytes or problem.virtual_stages < 2:
        return problem
    rows = []
    for one, other in pairwise(schedule_of(problem).stage_of_virtual):
        # Neighbours share one link in both directions; interleaved stages also send from the last to the first.
        link = links[min(one, other) if abs(one - other) == 1 else max(one, other)]
        rows.append(tuple(0.0 if one == other else link.transfer_ms(size) for size in cut_bytes))
    return replace(problem, cut_transfers_ms=tuple(rows))


def least_transfers(problem: Problem) -> FloatArray:
    """The least time that any decision can have between virtual stages k and k + 1, shape (K - 1,).

    Step times with these are lower bounds. Every virtual stage holds a unit, so that few cuts at the ends are left out.
    """
    table, size = transfer_table(problem), problem.virtual_stages
    return np.array([table[k, k : problem.units - size + k + 1].min() for k in range(size - 1)])


def split_transfers(table: FloatArray, bounds: npt.ArrayLike) -> FloatArray:
    """Times between the virtual stages of splits.

    Args:
        table: of :func:`transfer_table`.
        bounds: first unit of each virtual stage, then the number of units; shape (n, K + 1) or (K + 1,).

    Returns:
        Shape (n, K - 1) or (K - 1,).
    """
    cuts = np.clip(np.asarray(bounds)[..., 1:-1] - 1, 0, table.shape[1] - 1)
    found: FloatArray = table[np.arange(len(table)), cuts]
    return found


def decision_transfers(problem: Problem, counts: Sequence[Sequence[Sequence[int]]]) -> FloatArray:
    """Times between the virtual stages of a decision, given by its counts; shape (K - 1,).

    A decision that leaves virtual stages empty, which no planner makes, gets those of the nearest cut.
    """
    units = np.array([[sum(by_option) for by_option in placed] for placed in counts]).sum(axis=0)
    return split_transfers(transfer_table(problem), np.concatenate(([0], np.cumsum(units))))
