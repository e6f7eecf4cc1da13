"""DAPPLE's planner for a straight pipeline: the split with the least latency of a step.

Algorithm: latency = warm-up + steady + ending. With all stages' forward in the warm-up, all backward in the ending and
the slowest stage in between, for stage times t and m micro-batches,

    latency = sum over stages of t + (m - 1) max over stages of t

which is never below the 1F1B step time without transfers. The least value is found exactly: for every limit on the
slowest stage that can still be better, the split of least sum within it.

Source: Fan et al., PPoPP 2021, doi 10.1145/3437801.3441593, arXiv 2007.01045; the planner itself is not public. The
paper counts warm-up and ending up to a pivot stage only and finds the pivot by comparing steady phases; for stages as
even as a planner makes them that is the slowest one. Left out, because devices and replicas are fixed here: placement,
replication, and the all-reduce in the ending phase. Recompute policy: the paper applies recomputation to the whole
model; added here: one recipe for all units, the one with the least latency among those that fit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits
from mindspore_bmpipe.planner.recipe_groups import best_recipe_split, require_listable
from mindspore_bmpipe.planner.splits import Bounds, best_split
from mindspore_bmpipe.problem import Problem

NAME = "dapple"


def least_latency(stage_ms: npt.NDArray[np.float64], micro_batches: int) -> tuple[float, Bounds | None]:
    """Least latency of a split of groups, shape (stages, units + 1, units + 1), and the split.

    Returns:
        Infinity and `None` if no split is allowed.
    """
    slowest, split = best_split(stage_ms, additive=False)
    if split is None:
        return float("inf"), None
    least_sum, _ = best_split(stage_ms, additive=True)
    limits = np.unique(stage_ms[np.isfinite(stage_ms) & (stage_ms >= slowest)])
    best, best_bounds = float("inf"), split
    for limit in limits.tolist():
        if least_sum + (micro_batches - 1) * limit >= best:
            break
        total, bounds = best_split(np.where(stage_ms <= limit, stage_ms, np.inf), additive=True)
        if bounds is not None and total + (micro_batches - 1) * limit < best:
            best, best_bounds = total + (micro_batches - 1) * limit, bounds
    return best, best_bounds


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan above.

    Raises:
        InputError: several chunks per stage, or too many groups.
    """
    require_listable(problem, NAME)
    return best_recipe_split(
        NAME,
        problem,
        Clock(limits),
        lambda groups: least_latency(groups.stage_ms, problem.micro_batches),
        "least latency, one recipe for all units",
    )
