"""Plans to start from: those of the quick baselines, and those the caller knows."""

from __future__ import annotations

import itertools

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner import even, galvatron_even, megatron_manual, merak
from mindspore_bmpipe.planner.base import SolveLimits
from mindspore_bmpipe.planner.splits import Bounds
from mindspore_bmpipe.problem import Decision, Problem, check, evaluate

_QUICK = (even, megatron_manual, merak, galvatron_even)
"""Baselines that take well under a second on a hundred units."""


def starting_plans(problem: Problem, limits: SolveLimits) -> list[Decision]:
    """Feasible plans, the fastest first; a first look with little effort asks the even planner only."""
    found = [decision for decision in limits.starts if not check(problem, decision)]
    for baseline in _QUICK if limits.effort >= 1 else (even,):
        try:
            decision = baseline.plan(problem, limits).decision
        except InputError:
            # It does not know this kind of problem.
            continue
        if decision is not None:
            found.append(decision)
    return sorted(found, key=lambda decision: evaluate(problem, decision).step_time_ms)


def split_of(decision: Decision) -> Bounds:
    """First unit of each virtual stage, and the number of units."""
    sizes = [sum(map(sum, placed)) for placed in zip(*decision.counts, strict=True)]
    return tuple(itertools.accumulate(sizes, initial=0))
