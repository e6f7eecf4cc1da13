"""What may be in each virtual stage, for any number of chunks: groups of units as table look-ups.

Units [low, high) form a group. Groups with the same numbers of units of the same runs are of one class: they take the
same time and have the same choices of options.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.knapsack import Segments
from mindspore_bmpipe.problem import Problem, schedule_of

IntArray = npt.NDArray[np.int64]

_SEED = 20250
"""Seed of the random weights that tell groups apart by one sum each."""


class ChunkRules:
    """Groups of a problem: classes, times and what pins, forbidden cuts and trainable units allow."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        schedule = schedule_of(problem)
        self.stage_of_virtual = np.array(schedule.stage_of_virtual)
        units = problem.units
        run_of_unit = np.array([index for index, run in enumerate(problem.runs) for _ in range(run.count)])
        self._before = np.zeros((units + 1, len(problem.runs)), dtype=np.int64)
        np.cumsum(np.eye(len(problem.runs), dtype=np.int64)[run_of_unit], axis=0, out=self._before[1:])
        self._make_classes()
        trainable = np.array([run.trainable for run in problem.runs])[run_of_unit]
        self._trainable_before = np.concatenate(([0], np.cumsum(trainable)))
        self._may_cut = np.ones(units + 1, dtype=bool)
        for cut in problem.forbidden_cuts:
            self._may_cut[cut + 1] = False
        wrong = np.zeros((problem.stages, units), dtype=np.int64)
        for pin in problem.pins:
            wrong[:, pin.first_unit : pin.last_unit + 1] += 1
            wrong[pin.stage, pin.first_unit : pin.last_unit + 1] -= 1
        self._wrong_before = np.concatenate((np.zeros((problem.stages, 1), np.int64), np.cumsum(wrong, axis=1)), axis=1)

    def _make_classes(self) -> None:
        problem = self.problem
        size = problem.units + 1
        with np.errstate(over="ignore"):
            weights = np.random.default_rng(_SEED).integers(0, 2**64, len(problem.runs), dtype=np.uint64)
            hashed = (self._before.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
            codes = hashed[None, :] - hashed[:, None]
        low, high = np.triu_indices(size, 1)
        _, first, inverse = np.unique(codes[low, high], return_index=True, return_inverse=True)
        self.classes = np.full((size, size), -1, dtype=np.int64)
        """Class of group [low, high)."""
        self.classes[low, high] = inverse
        members = self._before[high[first]] - self._before[low[first]]
        self.forward_ms = members @ np.array([run.forward_ms for run in problem.runs])
        """Forward time of each class."""
        self.backward_ms = members @ np.array([run.backward_ms for run in problem.runs])
        """Backward time of each class without recomputation."""
        self.weight_ms = members @ np.array([run.split_weight_ms for run in problem.runs])
        """Weight gradients in it, where the schedule runs them apart."""
        self.segments: list[Segments] = [
            tuple((index, int(row[index])) for index in np.flatnonzero(row).tolist()) for row in members
        ]
        """(run, units) of each class."""

    def allowed(self, bounds: IntArray) -> npt.NDArray[np.bool_]:
        """Which splits, shape (n, K + 1) of first units and the number of units, keep every rule."""
        low, high = bounds[:, :-1], bounds[:, 1:]
        good = (low < high).all(axis=1) & (bounds[:, 0] == 0) & (bounds[:, -1] == self.problem.units)
        inside = np.clip(bounds, 0, self.problem.units)
        low, high = inside[:, :-1], inside[:, 1:]
        good &= self._may_cut[inside].all(axis=1)
        good &= (self._trainable_before[high] > self._trainable_before[low]).all(axis=1)
        stage = self.stage_of_virtual[None, :]
        good &= (self._wrong_before[stage, high] == self._wrong_before[stage, low]).all(axis=1)
        return np.asarray(good)

    def any_split(self) -> tuple[int, ...] | None:
        """The allowed split nearest to even in forward and backward time; `None` if there is none."""
        work = np.where(self.classes >= 0, (self.forward_ms + self.backward_ms)[self.classes], 0.0)
        count = len(self.stage_of_virtual)
        return self.nearest_split(work, np.full(count, work[0, -1] / count))

    def nearest_split(self, sizes: npt.NDArray[np.float64], goals: npt.NDArray[np.float64]) -> tuple[int, ...] | None:
        """The allowed split with the least sum of squared differences from goals, by dynamic programming.

        Args:
            sizes: shape (units + 1, units + 1), size of group [low, high).
            goals: shape (K,), wanted size of each virtual stage.

        Returns:
            The split, or `None` if none is allowed.
        """
        count, units = len(self.stage_of_virtual), self.problem.units
        trainable = self._trainable_before[None, :] > self._trainable_before[:, None]
        open_ = self._may_cut[:, None] & self._may_cut[None, :] & trainable & (self.classes >= 0)
        reached = np.full(units + 1, np.inf)
        reached[0] = 0.0
        origins = []
        for virtual in range(count):
            bad = self._wrong_before[self.stage_of_virtual[virtual]]
            total = np.where(open_ & (bad[None, :] == bad[:, None]), (sizes - goals[virtual]) ** 2, np.inf)
            total += reached[:, None]
            origin = np.argmin(total, axis=0)
            origins.append(origin)
            reached = total[origin, np.arange(units + 1)]
        if np.isinf(reached[-1]):
            return None
        bounds = [units]
        for origin in reversed(origins):
            bounds.append(int(origin[bounds[-1]]))
        return tuple(reversed(bounds))
