"""Galvatron's search with the parallel layout fixed: an even split, and the fewest recomputed layers that fit.

Algorithm: floor(layers / p) layers on every stage, what is left over on the last. On each stage a dynamic program over
layers and memory picks, layer by layer, recomputation or none, so that the stage's time is least and it fits; that is a
knapsack, solved exactly here on bytes (the original counts whole megabytes).

Source: Miao et al., VLDB 16(3), 2022, doi 10.14778/3570690.3570697 (arXiv 2211.13878), and the public code
(PKU-DAIR/Hetu-Galvatron, `galvatron/core/search_engine`, `csrc/dp_core.cpp`). Recompute policy: `full` or nothing, per
layer. Left out: the choice of tensor and data parallelism, which the layer table has already made, and the memory that
the original keeps free for the allocator's cache.
"""

from __future__ import annotations

import itertools

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits
from mindspore_bmpipe.planner.even import end_units
from mindspore_bmpipe.planner.recipes import (
    FULL,
    judged,
    kept_recipe,
    one_chunk_only,
    original_decision,
    recipe_decision,
    required_recipe,
    with_options,
)
from mindspore_bmpipe.planner.splits import Bounds
from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.problem import Problem

NAME = "galvatron_even"


def even_bounds(problem: Problem) -> Bounds:
    """First unit of each stage, and the number of units; the ends ride along."""
    before, after = end_units(problem)
    layers = problem.units - before - after
    sizes = [layers // problem.stages] * (problem.stages - 1)
    sizes.append(layers - sum(sizes))
    sizes[0] += before
    sizes[-1] += after
    return (0, *itertools.accumulate(sizes))


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan above.

    Raises:
        InputError: several chunks per stage, or no unit has an option `full`.
    """
    clock = Clock(limits)
    one_chunk_only(problem, NAME)
    kept, full = kept_recipe(problem), required_recipe(problem, FULL, NAME)
    allowed = [tuple(dict.fromkeys(pair)) for pair in zip(kept, full, strict=True)]
    bounds = even_bounds(problem)
    options = StageOptions(with_options(problem, allowed))
    chosen = [options.choice(stage, low, high) for stage, (low, high) in enumerate(itertools.pairwise(bounds))]
    message = "even split, fewest recomputed layers"
    if any(choice is None for choice in chosen):
        return judged(NAME, problem, recipe_decision(problem, bounds, full), clock, f"{message}, all recomputed")
    decision = original_decision(problem, allowed, options.decision(bounds))
    return judged(NAME, problem, decision, clock, message)
