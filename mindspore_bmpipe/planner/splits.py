"""Ways to cut a network into one group of units per stage, and the dynamic programs over them (one chunk per stage)."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.problem import Problem

Bounds = tuple[int, ...]
"""First unit of each stage, and the number of units at the end."""


MAX_GROUPS = 8_000_000
"""Entries of a (stages, units + 1, units + 1) table up to which groups are listed."""


class SplitRules:
    """What pins, forbidden cuts and trainable units allow, whatever the memory."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        units, stages = problem.units, problem.stages
        trainable = [run.trainable for run in problem.runs for _ in range(run.count)]
        self._trainable_before = np.concatenate(([0], np.cumsum(trainable)))
        self._may_cut = np.ones(units + 1, dtype=bool)
        for cut in problem.forbidden_cuts:
            self._may_cut[cut + 1] = False
        self._first_stage = np.zeros(units, dtype=np.int64)
        self._last_stage = np.full(units, stages - 1, dtype=np.int64)
        for pin in problem.pins:
            pinned = slice(pin.first_unit, pin.last_unit + 1)
            self._first_stage[pinned] = np.maximum(self._first_stage[pinned], pin.stage)
            self._last_stage[pinned] = np.minimum(self._last_stage[pinned], pin.stage)
        # Stages never decrease along the network, so a pin bounds every unit after and before it as well.
        self._first_stage = np.maximum.accumulate(self._first_stage)
        self._last_stage = np.minimum.accumulate(self._last_stage[::-1])[::-1]

    def stages_of(self, low: int, high: int) -> range:
        """Stages that may hold exactly the units [low, high); empty if none."""
        if not (self._may_cut[low] and self._may_cut[high]) or (
            self._trainable_before[high] == self._trainable_before[low]
        ):
            return range(0)
        return range(int(self._first_stage[high - 1]), int(self._last_stage[low]) + 1)

    def stages_from(self, low: int) -> npt.NDArray[np.bool_]:
        """Whether [low, high) may be on each stage, for every high from low + 1 on, shape (highs, stages).

        Stages that would leave too few units for the others are left out too.
        """
        units, stages = self.problem.units, self.problem.stages
        high = np.arange(low + 1, units + 1)[:, None]
        stage = np.arange(stages)[None, :]
        return np.asarray(
            self._may_cut[low]
            & self._may_cut[high]
            & (self._trainable_before[high] > self._trainable_before[low])
            & (self._first_stage[high - 1] <= stage)
            & (stage <= self._last_stage[low])
            & (stage <= low)
            & ((stage > 0) == (low > 0))
            & (stages - 1 - stage <= units - high)
            & ((stage < stages - 1) == (high < units))
        )

    def allows(self, bounds: Bounds) -> bool:
        """Whether a split keeps every rule."""
        return all(stage in self.stages_of(low, high) for stage, (low, high) in enumerate(itertools.pairwise(bounds)))


class Groups:
    """Every group [low, high) on every stage it may be on, as arrays over (stage, low, high)."""

    def __init__(self, options: StageOptions, rules: SplitRules) -> None:
        problem = options.problem
        self.problem = problem
        units, stages = problem.units, problem.stages
        shape = (stages, units + 1, units + 1)
        self.forward_ms = np.full(shape, np.inf)
        """Forward time; infinite where the group is forbidden."""
        self.backward_bound_ms = np.full(shape, np.inf)
        """Lower bound on the backward time; infinite where the group is forbidden or does not fit."""
        self.excess_bytes = np.full(shape, np.inf)
        """Least peak minus limit; infinite where the group is forbidden."""
        for low in range(units):
            allowed = rules.stages_from(low)
            forward = options.forward_from(low)
            excess = options.least_bytes_from(low) - options.limits[None, :]
            bound = options.backward_bound_from(low)
            self.forward_ms[:, low, low + 1 :] = np.where(allowed, forward, np.inf).T
            self.excess_bytes[:, low, low + 1 :] = np.where(allowed, excess, np.inf).T
            self.backward_bound_ms[:, low, low + 1 :] = np.where(allowed & (excess <= 0), bound, np.inf).T


def best_split(costs: npt.NDArray[np.float64], additive: bool) -> tuple[float, Bounds | None]:
    """The split of least total cost, or of least largest cost if not additive.

    Args:
        costs: shape (stages, units + 1, units + 1), cost of group [low, high) on a stage, infinite if not allowed.
        additive: whether costs add up.

    Returns:
        The least cost and the split, or infinity and `None` if no split is allowed.
    """
    stages, size, _ = costs.shape
    reached = np.full(size, np.inf)
    reached[0] = 0.0 if additive else -np.inf
    origins = []
    for stage in range(stages):
        known = reached[:, None]
        total = known + costs[stage] if additive else np.where(np.isinf(known) & (known > 0), np.inf, costs[stage])
        if not additive:
            total = np.maximum(total, known)
        origin = np.argmin(total, axis=0)
        origins.append(origin)
        reached = total[origin, np.arange(size)]
    if np.isposinf(reached[-1]):
        return float("inf"), None
    bounds = [size - 1]
    for origin in reversed(origins):
        bounds.append(int(origin[bounds[-1]]))
    return float(reached[-1]), tuple(reversed(bounds))
