"""Ways to cut a network into one group of units per stage, and the dynamic programs over them (one chunk per stage)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.problem import Problem

Bounds = tuple[int, ...]
"""First unit of each stage, and the number of units at the end."""


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

    def allows(self, bounds: Bounds) -> bool:
        """Whether a split keeps every rule."""
        return all(
            stage in self.stages_of(low, high) for stage, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False))
        )


class Groups:
    """Every group [low, high) on every stage it may be on, as arrays over (stage, low, high)."""

    def __init__(self, options: StageOptions, rules: SplitRules) -> None:
        problem = options.problem
        units, stages = problem.units, problem.stages
        limits = np.array(problem.memory_limit_bytes, dtype=np.int64)
        shape = (stages, units + 1, units + 1)
        self.forward_ms = np.full(shape, np.inf)
        """Forward time; infinite where the rules forbid the group."""
        self.backward_ms = np.full(shape, np.inf)
        """Backward time with the least recomputation that fits; infinite where nothing fits."""
        self.excess_bytes = np.full(shape, np.inf)
        """Least peak minus limit; infinite where the rules forbid the group."""
        for low in range(units):
            for high in range(low + 1, units + 1):
                allowed = rules.stages_of(low, high)
                # Each stage before and after needs a unit of its own.
                first = max(allowed.start, stages - 1 - (units - high))
                last = min(allowed.stop - 1, low, stages - 1 if high == units else stages - 2)
                if low:
                    first = max(first, 1)
                if not allowed or first > last:
                    continue
                choice = options.choice(low, high)
                here = slice(first, last + 1)
                self.forward_ms[here, low, high] = choice.forward_ms
                self.backward_ms[here, low, high] = choice.backward_ms[here]
                self.excess_bytes[here, low, high] = choice.least_bytes[here] - limits[here]


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
