"""Merak: a uniform split, recomputation falling linearly in room from the first stage to the last.

Algorithm: units are dealt out by number, floor(units / p) each, the remainder one each to stages 1, 2, ... (its
`uniform_floor`; its default `uniform` rounds up and overruns the network unless stages divide the units). The first
stage recomputes a share r of its units; stage s (from 1) a share

    r_s = 1 - (1 - r) (p - 1) / (p - s) for s < p,  0 for the last stage,  0 where this is negative

because p - s + 1 micro-batches are in flight there. A stage of n units keeps its first ones and recomputes the last
floor(n r_s). The user sets r by hand; here the smallest r that fits is taken.

Source: Lai et al., IEEE TPDS 34(5), 2023, doi 10.1109/TPDS.2023.3247001, and the public code (HPDL-Group/Merak,
`Merak/core/pipeline/module.py`, `module_utils.py`). Recompute policy: the option `full`; units without it keep theirs.
Not modelled: Merak's own schedule that shifts recomputation off the critical path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from math import floor

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits
from mindspore_bmpipe.planner.recipes import (
    FULL,
    judged,
    kept_recipe,
    one_chunk_only,
    required_recipe,
    runs_of_units,
    split_decision,
)
from mindspore_bmpipe.planner.splits import Bounds
from mindspore_bmpipe.problem import Decision, Problem, stage_memory

NAME = "merak"


def uniform_bounds(units: int, stages: int) -> Bounds:
    """First unit of each stage, and the number of units."""
    size, rest = divmod(units, stages)
    sizes = [size + (1 <= stage <= rest) for stage in range(stages)]
    return (0, *itertools.accumulate(sizes))


def stage_ratios(first: Fraction, stages: int) -> list[Fraction]:
    """Recomputed share of each stage for the share of the first."""
    ratios = [1 - (1 - first) * Fraction(stages - 1, stages - number) for number in range(1, stages)]
    return [max(Fraction(0), ratio) for ratio in ratios] + [Fraction(0)]


def first_ratios(bounds: Bounds) -> list[Fraction]:
    """Every share of the first stage at which some stage recomputes one unit more, from 0 to 1."""
    stages = len(bounds) - 1
    found = {Fraction(0), Fraction(1)}
    for stage, (low, high) in enumerate(itertools.pairwise(bounds[:-1])):
        for count in range(1, high - low + 1):
            ratio = 1 - (1 - Fraction(count, high - low)) * Fraction(stages - 1 - stage, stages - 1)
            found.add(ratio)
    return sorted(found)


def decisions(problem: Problem) -> Iterator[tuple[Fraction, Decision]]:
    """The plan of every share that differs, the smallest share first.

    Raises:
        InputError: no unit has an option `full`.
    """
    bounds = uniform_bounds(problem.units, problem.stages)
    full, kept = required_recipe(problem, FULL, NAME), kept_recipe(problem)
    unit_runs = runs_of_units(problem)
    for first in first_ratios(bounds) if problem.stages > 1 else [Fraction(0)]:
        options = [kept[run] for run in unit_runs]
        for ratio, (low, high) in zip(stage_ratios(first, problem.stages), itertools.pairwise(bounds), strict=True):
            for unit in range(high - floor((high - low) * ratio), high):
                options[unit] = full[unit_runs[unit]]
        yield first, split_decision(problem, bounds, options)


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan above.

    Raises:
        InputError: several chunks per stage, or no unit has an option `full`.
    """
    clock = Clock(limits)
    one_chunk_only(problem, NAME)
    closest: tuple[int, Fraction, Decision] | None = None
    for ratio, decision in decisions(problem):
        peaks = [peak for _, peak in stage_memory(problem, decision)]
        excess = max(peak - limit for peak, limit in zip(peaks, problem.memory_limit_bytes, strict=True))
        if closest is None or excess < closest[0]:
            closest = (excess, ratio, decision)
        if excess <= 0:
            closest = (excess, ratio, decision)
            break
    assert closest is not None
    message = f"uniform split, first stage recomputes {float(closest[1]):.0%}"
    return judged(NAME, problem, closest[2], clock, message)
