"""The project's planner: splits and recomputation together, on exact step time, with a proved bound.

With one chunk per stage, the best options of a group of units on a stage are known exactly, so what is left to decide is
where to cut. Steps:

1. Dynamic programs over all groups tell whether any split fits, and give the first splits; the even plan is another.
2. Local search improves the best of them on exact step time.
3. Elimination tries to prove it: groups that no faster split can contain are removed, path by path. Usually none is left.
4. Otherwise the integer program over the remaining groups finds what is better, or proves that nothing is.
5. Among splits of equal step time, one with less recomputation, then a lower peak, is taken.

Networks with too many units for step 1 go to the integer program over counts (`milp`).
"""

from __future__ import annotations

import numpy as np

from mindspore_bmpipe.planner import even, milp
from mindspore_bmpipe.planner.base import (
    Clock,
    Solution,
    SolveLimits,
    Status,
    needs_message,
    with_plan,
    without_plan,
)
from mindspore_bmpipe.planner.elimination import Survivors, cheapest_split, eliminate, fitting
from mindspore_bmpipe.planner.local_search import PathPool, SplitSearch
from mindspore_bmpipe.planner.milp_groups import prove
from mindspore_bmpipe.planner.splits import Groups, SplitRules, best_split
from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.problem import Problem

NAME = "bmpipe"

MAX_GROUPS = 8_000_000
"""Entries of a (stages, units + 1, units + 1) table up to which groups are listed."""

_DESCENT_ROUNDS = 300
_PERTURBATIONS = 40
_TIE_ROUNDS = 10
_SAME_TIME = 1e-9


def plan(problem: Problem, limits: SolveLimits, solver: str | None = None) -> Solution:
    """Plan a problem; `solver` names one of python-mip's solvers, the default is the first that loads."""
    clock = Clock(limits)
    if problem.chunks > 1 or problem.stages * (problem.units + 1) ** 2 > MAX_GROUPS:
        start = None if problem.chunks > 1 else even.plan(problem, limits).decision
        return milp.plan_counts(NAME, problem, limits, clock, start, solver)
    options, rules, pool = StageOptions(problem), SplitRules(problem), PathPool(problem)
    groups = Groups(options, rules)
    excess, closest = best_split(groups.excess_bytes, additive=False)
    if closest is None:
        return without_plan(NAME, Status.INFEASIBLE, clock, needs_message(problem, None))
    if excess > 0:
        needed = tuple(
            int(options.choice(low, high).least_bytes[stage])
            for stage, (low, high) in enumerate(zip(closest, closest[1:], strict=False))
        )
        return without_plan(NAME, Status.INFEASIBLE, clock, needs_message(problem, needed), needed)
    search = SplitSearch(options, rules, pool)
    search.offer([closest])
    stage_times = groups.forward_ms + groups.backward_ms
    for split in (
        best_split(stage_times, additive=False)[1],
        best_split(stage_times**2, additive=True)[1],
        even.even_split(problem, rules),
    ):
        if split is not None:
            search.offer([split])
    _offer_even_plan(search, problem, limits)
    search.descend(clock, _DESCENT_ROUNDS)
    everything = fitting(groups)
    survivors = eliminate(everything, pool, search.best_time * (1 - _SAME_TIME))
    timed_out = False
    if len(survivors):
        search.perturb(clock, limits.seed, _PERTURBATIONS)
        bound, timed_out = prove(survivors, search, pool, limits, clock, solver)
    else:
        bound = search.best_time * (1 - _SAME_TIME)
    _break_ties(search, pool, everything)
    assert search.best is not None
    proved = bound >= search.best_time * (1 - limits.relative_gap)
    if proved:
        message = ""
    elif timed_out:
        message = f"the wall clock ({limits.time_limit_s:g} s) ended the proof; another run may give another plan"
    else:
        message = f"the work limit ({limits.node_limit} nodes) ended the proof"
    return with_plan(NAME, problem, options.decision(search.best), clock, bound, proved, message)


def _offer_even_plan(search: SplitSearch, problem: Problem, limits: SolveLimits) -> None:
    """The split of the even planner's own plan, so that the result is never worse than it."""
    decision = even.plan(problem, limits).decision
    if decision is None:
        return
    sizes = [
        sum(sum(placed[stage]) for placed in decision.counts) for stage in range(problem.stages)
    ]
    search.offer([(0, *np.cumsum(sizes).tolist())])


def _break_ties(search: SplitSearch, pool: PathPool, everything: Survivors) -> None:
    """Offer splits with the least recomputation among groups that a split of the best step time may contain."""
    problem = pool.problem
    equal = everything
    for _ in range(_TIE_ROUNDS):
        equal = eliminate(equal, pool, search.best_time * (1 + _SAME_TIME))
        plain = np.array(
            [
                search.options.choice(low, high).extra_ms[stage]
                for stage, low, high in zip(equal.stage.tolist(), equal.low.tolist(), equal.high.tolist(), strict=True)
            ]
        )
        split = cheapest_split(equal, plain, problem.stages, problem.units)
        if split is None:
            return
        search.offer([split])
        times = search.times(split)
        if times is None or not pool.separate(*times):
            return
