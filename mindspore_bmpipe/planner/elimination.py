"""Proof by elimination: groups that no split faster than a target can contain (one chunk per stage).

A path through the schedule bounds the step time by a sum of one cost per stage. For such a sum, a forward and a
backward dynamic program give the best split through every single group; groups whose best split is not faster than the
target go. What is left shrinks the ranges that the next path sees, so the passes are repeated until nothing changes.
Where nothing is left, no split is faster than the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.base import Clock
from mindspore_bmpipe.planner.local_search import PathPool
from mindspore_bmpipe.planner.splits import Bounds, Groups
from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.schedule import PathCounts
from mindspore_bmpipe.transfers import transfer_table

_PASSES = 20
_CHOICES_AT_ONCE = 64
_GROUP_S = 2e-7
"""Seconds of an idle core for one group on one path."""


@dataclass(frozen=True, eq=False)
class Survivors:
    """Groups of units on stages, sorted by stage; all arrays have shape (n,)."""

    stage: npt.NDArray[np.intp]
    """Stage of the group."""
    low: npt.NDArray[np.intp]
    """First unit."""
    high: npt.NDArray[np.intp]
    """Unit after the last."""
    forward_ms: npt.NDArray[np.float64]
    """Forward time."""
    backward_ms: npt.NDArray[np.float64]
    """Backward time, or a lower bound on it."""
    extra_ms: npt.NDArray[np.float64]
    """Recomputation in it; 0 while the backward time is only a bound."""
    transfer_ms: npt.NDArray[np.float64]
    """One transfer between its stage and the next; 0 on the last."""

    def __len__(self) -> int:
        return len(self.stage)

    def kept(self, mask: npt.NDArray[np.bool_]) -> Survivors:
        """Those of the mask."""
        return Survivors(
            self.stage[mask],
            self.low[mask],
            self.high[mask],
            self.forward_ms[mask],
            self.backward_ms[mask],
            self.extra_ms[mask],
            self.transfer_ms[mask],
        )


def fitting(groups: Groups) -> Survivors:
    """Every group that the rules allow and that fits in memory, with lower bounds on backward times."""
    stage, low, high = np.nonzero(np.isfinite(groups.backward_bound_ms))
    at = (stage, low, high)
    table = transfer_table(groups.problem)
    transfers = np.zeros(len(stage))
    sends = (stage < len(table)) & (high <= table.shape[1])
    transfers[sends] = table[stage[sends], high[sends] - 1]
    none = np.zeros(len(stage))
    return Survivors(stage, low, high, groups.forward_ms[at], groups.backward_bound_ms[at], none, transfers)


def sharpen(survivors: Survivors, options: StageOptions, clock: Clock) -> Survivors | None:
    """The same groups with exact times, or `None` if the clock ends before."""
    backward, extra = survivors.backward_ms.copy(), np.zeros(len(survivors))
    rows = zip(survivors.stage.tolist(), survivors.low.tolist(), survivors.high.tolist(), strict=True)
    counted = options.work_s
    for index, (stage, low, high) in enumerate(rows):
        if index % _CHOICES_AT_ONCE == 0:
            clock.spend(options.work_s - counted)
            counted = options.work_s
            if clock.ends():
                return None
        choice = options.choice(stage, low, high)
        assert choice is not None
        backward[index], extra[index] = choice.backward_ms, choice.extra_ms
    clock.spend(options.work_s - counted)
    return replace(survivors, backward_ms=backward, extra_ms=extra)


def path_bound(survivors: Survivors, pool: PathPool) -> float:
    """Lower bound on the step time of every split of these groups: the largest least length of a known path."""
    best = 0.0
    for path in pool.paths:
        after = _tables(survivors, path_cost(survivors, path), pool.problem.stages, pool.problem.units)[1]
        best = max(best, float(after[0, 0]))
    return best


def path_cost(survivors: Survivors, path: PathCounts) -> npt.NDArray[np.float64]:
    """What each group adds to a path."""
    forward = np.array(path.forward, dtype=np.float64)[survivors.stage]
    backward = np.array(path.backward, dtype=np.float64)[survivors.stage]
    transfers = np.array((*path.transfers, 0), dtype=np.float64)[survivors.stage]
    return np.asarray(
        forward * survivors.forward_ms + backward * survivors.backward_ms + transfers * survivors.transfer_ms
    )


def _tables(
    survivors: Survivors, cost: npt.NDArray[np.float64], stages: int, units: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Least cost of stages before and from each boundary, both of shape (stages + 1, units + 1)."""
    before = np.full((stages + 1, units + 1), np.inf)
    after = np.full((stages + 1, units + 1), np.inf)
    before[0, 0] = after[stages, units] = 0.0
    starts = np.searchsorted(survivors.stage, np.arange(stages + 1))
    for stage in range(stages):
        part = slice(starts[stage], starts[stage + 1])
        low, high = survivors.low[part], survivors.high[part]
        np.minimum.at(before[stage + 1], high, before[stage, low] + cost[part])
    for stage in reversed(range(stages)):
        part = slice(starts[stage], starts[stage + 1])
        low, high = survivors.low[part], survivors.high[part]
        np.minimum.at(after[stage], low, after[stage + 1, high] + cost[part])
    return before, after


def eliminate(survivors: Survivors, pool: PathPool, target_ms: float, clock: Clock) -> Survivors:
    """The groups that some split with a step time below the target may contain, as far as the known paths tell.

    Any part of the work gives a valid answer; when the clock ends, more groups are left than necessary.
    """
    stages, units = pool.problem.stages, pool.problem.units
    for _ in range(_PASSES):
        size = len(survivors)
        for path in pool.paths:
            if not len(survivors) or clock.ends():
                return survivors
            clock.spend(len(survivors) * _GROUP_S)
            cost = path_cost(survivors, path)
            before, after = _tables(survivors, cost, stages, units)
            through = before[survivors.stage, survivors.low] + cost + after[survivors.stage + 1, survivors.high]
            keep = through < target_ms
            if not keep.all():
                survivors = survivors.kept(keep)
        if len(survivors) == size:
            break
    return survivors


def cheapest_split(survivors: Survivors, cost: npt.NDArray[np.float64], stages: int, units: int) -> Bounds | None:
    """The split of surviving groups with the least sum of costs, or `None` if they make no split."""
    _, after = _tables(survivors, cost, stages, units)
    if not np.isfinite(after[0, 0]):
        return None
    bounds = [0]
    for stage in range(stages):
        mine = np.flatnonzero((survivors.stage == stage) & (survivors.low == bounds[-1]))
        total = cost[mine] + after[stage + 1, survivors.high[mine]]
        bounds.append(int(survivors.high[mine[np.argmin(total)]]))
    return tuple(bounds)
