"""The project's planner: splits and recomputation together, on exact step time, with a proved bound.

Several chunks per stage have a module of their own (`chunked`). With one, the best options of a group of units on a
stage are known exactly, so what is left to decide is where to cut. Steps:

1. Dynamic programs over all groups tell whether any split fits, and give the first splits; quick baselines give others.
2. Local search improves the best of them on exact step time.
3. Elimination tries to prove it: groups that no faster split can contain go, path by path. Often none is left.
   Otherwise it is repeated at guessed step times between bound and plan, which raises the one and improves the other.
4. If a gap remains, the integer program over the remaining groups finds what is better, or proves that nothing is.
5. Among splits of equal step time, one with less recomputation, then a lower peak, is taken.

Networks with too many units for step 1 go to the integer program over counts (`milp`).
"""

from __future__ import annotations

from mindspore_bmpipe.planner import chunked, even, milp
from mindspore_bmpipe.planner.base import (
    Clock,
    Solution,
    SolveLimits,
    with_plan,
)
from mindspore_bmpipe.planner.bisection import bisect
from mindspore_bmpipe.planner.elimination import (
    Survivors,
    cheapest_split,
    eliminate,
    fitting,
    path_bound,
    sharpen,
)
from mindspore_bmpipe.planner.local_search import PathPool, SplitSearch
from mindspore_bmpipe.planner.milp_backend import SolverError
from mindspore_bmpipe.planner.milp_groups import prove
from mindspore_bmpipe.planner.recipe_groups import fitting_split
from mindspore_bmpipe.planner.splits import MAX_GROUPS, Groups, SplitRules, best_split
from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.planner.starts import split_of, starting_plans
from mindspore_bmpipe.problem import Problem

NAME = "bmpipe"

_DESCENT_ROUNDS = 300
_PERTURBATIONS = 40
_TIE_ROUNDS = 10
_MAX_TIES = 2000
"""Groups above which ties are left as the local search broke them."""
_SAME_TIME = 1e-9
_WORK_SHARE = 0.5
"""Share of the time limit of the work of elimination and solver that may change the plan."""


def plan(problem: Problem, limits: SolveLimits, solver: str | None = None) -> Solution:
    """Plan a problem; `solver` names one of python-mip's solvers, the default is the first that loads."""
    if problem.chunks > 1:
        return chunked.plan(NAME, problem, limits, solver)
    clock = Clock(limits, _WORK_SHARE)
    if problem.stages * (problem.units + 1) ** 2 > MAX_GROUPS:
        known = starting_plans(problem, limits)
        return milp.plan_counts(NAME, problem, limits, clock, known[0] if known else None, solver)
    options, rules, pool = StageOptions(problem), SplitRules(problem), PathPool(problem)
    groups = Groups(options, rules)
    closest = fitting_split(NAME, options, groups, clock)
    if isinstance(closest, Solution):
        return closest
    search = SplitSearch(options, rules, pool, clock)
    search.offer([closest])
    stage_times = groups.forward_ms + groups.backward_bound_ms
    for split in (
        best_split(stage_times, additive=False)[1],
        best_split(stage_times**2, additive=True)[1],
        even.even_split(problem, rules),
    ):
        if split is not None:
            search.offer([split])
    # With the best options of their stages, so that the result is never worse than any of them.
    for start in starting_plans(problem, limits):
        search.offer([split_of(start)])
    search.descend(_DESCENT_ROUNDS)
    everything = fitting(groups)
    proof = _Proof(search, pool, limits, clock, solver)
    bound, left = proof.search(everything)
    _break_ties(search, pool, everything, clock)
    assert search.best is not None
    decision, time = options.decision(search.best), search.best_time
    if left is not None and bound < time * (1 - limits.accepted_gap) and milp.begins_proof(clock, limits):
        # What the search meets from here on is not the plan: how far the proof gets depends on the machine.
        bound = max(bound, proof.solve(left))
    proved = bound >= time * (1 - limits.accepted_gap)
    return with_plan(NAME, problem, decision, clock, bound, proved, clock.message(proved))


class _Proof:
    """Lower bounds on every plan's step time; better splits found on the way become the search's best."""

    def __init__(
        self, search: SplitSearch, pool: PathPool, limits: SolveLimits, clock: Clock, solver: str | None
    ) -> None:
        self._search, self._pool, self._limits, self._clock, self._solver = search, pool, limits, clock, solver

    def _target(self) -> float:
        return self._search.best_time * (1 - _SAME_TIME)

    def _accepted(self, proved: float) -> bool:
        return proved >= self._search.best_time * (1 - self._limits.accepted_gap)

    def search(self, everything: Survivors) -> tuple[float, Survivors | None]:
        """The bound that the work allows, and the groups that a better split may contain, unless it is proved."""
        search, pool, limits, clock = self._search, self._pool, self._limits, self._clock
        coarse = eliminate(everything, pool, self._target(), clock)
        if not len(coarse):
            return self._target(), None
        proved = min(bisect(coarse, search, pool, limits, clock), self._target())
        if self._accepted(proved):
            return proved, None
        search.perturb(limits.seed, _PERTURBATIONS)
        coarse = eliminate(coarse, pool, self._target(), clock)
        if clock.ends():
            return min(proved, self._target()), coarse
        proved = max(min(proved, self._target()), self.solve(coarse))
        return proved, None if self._accepted(proved) else coarse

    def solve(self, coarse: Survivors) -> float:
        """The bound of the integer program over groups, as far as the clock allows."""
        search, pool, clock = self._search, self._pool, self._clock
        exact = sharpen(coarse, search.options, clock)
        if exact is None:
            return 0.0
        exact = eliminate(exact, pool, self._target(), clock)
        if not len(exact):
            return self._target()
        try:
            bound = prove(exact, search, pool, self._limits, clock, self._solver)
        except SolverError:
            # The plan stands without the solver; only the proof is weaker.
            bound = path_bound(exact, pool)
        return min(self._target(), bound)


def _break_ties(search: SplitSearch, pool: PathPool, everything: Survivors, clock: Clock) -> None:
    """Offer splits with the least recomputation among groups that a split of the best step time may contain."""
    problem = pool.problem
    equal = everything
    for _ in range(_TIE_ROUNDS):
        equal = eliminate(equal, pool, search.best_time * (1 + _SAME_TIME), clock)
        if len(equal) > _MAX_TIES:
            return
        exact = sharpen(equal, search.options, clock)
        if exact is None:
            return
        equal = exact
        split = cheapest_split(equal, equal.extra_ms, problem.stages, problem.units)
        if split is None:
            return
        search.offer([split])
        times = search.times(split)
        if times is None or not pool.separate(*times):
            return
