"""The project's planner for several chunks per stage.

1. The relaxation of the integer program over counts, with paths added as they are violated, gives a first bound and,
   rounded, a first split; even splits and the plans of quick baselines are others.
2. Local search descends from these and from random splits (`chunk_search`).
3. The integer program, told to look only for plans better than the best one, either finds one or proves that there is
   none. Few actions: with a start time per action (all paths at once). Many: with paths added as answers violate them.

Steps 1 and 2, and step 3 as far as the work limit goes, make the plan: they count their work, so the plan is the same
on every machine. Then step 3 goes on until the time limit, and only its bound counts.
"""

from __future__ import annotations

import numpy as np

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits, Status, needs_message, with_plan, without_plan
from mindspore_bmpipe.planner.chunk_options import ChunkOptions
from mindspore_bmpipe.planner.chunk_rules import ChunkRules
from mindspore_bmpipe.planner.chunk_search import ChunkSearch
from mindspore_bmpipe.planner.local_search import PathPool
from mindspore_bmpipe.planner.milp import begins_proof, least_excess, tighten
from mindspore_bmpipe.planner.milp_backend import SolverError
from mindspore_bmpipe.planner.milp_chunks import Prover
from mindspore_bmpipe.planner.milp_counts import CountModel
from mindspore_bmpipe.planner.starts import split_of, starting_plans
from mindspore_bmpipe.problem import (
    Decision,
    Problem,
    evaluate,
    recompute_ms,
    stage_memory,
    virtual_stage_times,
    virtual_stage_weights,
)

_SEARCH_WORK = 2_000_000
"""Work of the local search (`ChunkSearch.work`), some twenty seconds of an idle core, if the time limit is
`_FULL_SEARCH_S` or more."""
_FULL_SEARCH_S = 100.0
_OFFER_WORK = 10_000
"""Work on each split of the integer program."""
_SHARED_PATHS = 250
"""Paths of the local search that the integer program starts with."""
_WORK_SHARE = 0.45
"""Share of the time limit, as seconds of an idle core, that the solver's work on the plan itself may take."""


def plan(name: str, problem: Problem, limits: SolveLimits, solver: str | None) -> Solution:
    """Plan a problem with any number of chunks."""
    clock = Clock(limits, _WORK_SHARE)
    rules = ChunkRules(problem)
    nearest = rules.any_split()
    if nearest is None:
        return without_plan(name, Status.INFEASIBLE, clock, needs_message(problem, None))
    pool = PathPool(problem)
    search = ChunkSearch(problem, PathPool(problem), rules, ChunkOptions(problem))
    bound, rounded, sent = 0.0, None, 0
    try:
        model = CountModel(problem, limits, solver)
        bound = tighten(model, pool, None, clock)
        if bound == float("inf"):
            return _infeasible(name, search, nearest, limits, clock, solver)
        sent = len(pool.paths)
        rounded = _rounded_split(model, rules)
    except SolverError:
        model = None
    known = starting_plans(problem, limits)
    baseline = known[0] if known else None
    starts = [split for split in (rounded, nearest, *map(split_of, known)) if split]
    work = _SEARCH_WORK * limits.effort * min(1.0, limits.time_limit_s / _FULL_SEARCH_S)
    search.explore(starts, clock, limits.seed, work, bound * (1 + limits.accepted_gap / 2))
    best = _better(problem, baseline, search)
    if model is not None:
        _share_paths(search, pool, problem, best)
        for path in pool.paths[sent:]:
            model.add_path(path)
        time = float("inf") if best is None else evaluate(problem, best).step_time_ms
        prover = Prover(problem, model, pool, lambda split: _offer(search, split, clock), limits, clock, solver)
        best = prover.search(time, bound) or best
        if prover.is_open and begins_proof(clock, limits):
            prover.prove()
        bound = max(bound, prover.bound_ms)
    if best is None:
        if bound == float("inf"):
            return _infeasible(name, search, nearest, limits, clock, solver)
        return without_plan(name, Status.UNKNOWN, clock, f"no plan that fits was found; {clock.message(False)}")
    time = evaluate(problem, best).step_time_ms
    proved = bound >= time * (1 - limits.accepted_gap)
    return with_plan(name, problem, best, clock, min(bound, time), proved, clock.message(proved))


def _infeasible(
    name: str, search: ChunkSearch, split: tuple[int, ...], limits: SolveLimits, clock: Clock, solver: str | None
) -> Solution:
    """The answer that nothing fits, with what would; the split stands in where the solver does not tell."""
    problem = search.problem
    needed = least_excess(problem, limits, solver)
    if needed is None:
        needed = tuple(peak for _, peak in stage_memory(problem, search.decision(search.start(split))))
    return without_plan(name, Status.INFEASIBLE, clock, needs_message(problem, needed), needed)


def _share_paths(search: ChunkSearch, pool: PathPool, problem: Problem, best: Decision | None) -> None:
    """Give the proof the paths that the search found to be long for good plans."""
    if search.best is not None:
        search.pool.keep_longest(search.best.forward, search.best.backward, search.best.weight, _SHARED_PATHS)
        for path in search.pool.paths:
            pool.add(path)
    if best is not None:
        pool.separate(*virtual_stage_times(problem, best), virtual_stage_weights(problem, best))


def _offer(search: ChunkSearch, split: tuple[int, ...], clock: Clock) -> tuple[Decision, float] | None:
    """Descend from a split of the integer program; the plan, if it is the best so far."""
    before = search.best
    if not search.rules.allowed(np.array([split]))[0]:
        return None
    search.descend(search.start(split), clock, search.work + _OFFER_WORK)
    best = search.best
    if best is None or best is before or best.excess_bytes > 0:
        return None
    return search.decision(best), best.time_ms


def _rounded_split(model: CountModel, rules: ChunkRules) -> tuple[int, ...] | None:
    """The split nearest to the relaxation's, if the rules allow it."""
    until = np.cumsum(model.relaxed_units())
    size = len(until)
    bounds = [0]
    for virtual, wanted in enumerate(until.tolist()):
        least, most = bounds[-1] + 1, rules.problem.units - (size - 1 - virtual)
        bounds.append(min(max(round(wanted), least), most))
    bounds[-1] = rules.problem.units
    return tuple(bounds) if rules.allowed(np.array([bounds]))[0] else None


def _better(problem: Problem, baseline: Decision | None, search: ChunkSearch) -> Decision | None:
    """The better plan by time, recomputation, then peak, of those that fit."""
    found = [] if baseline is None else [baseline]
    if search.best is not None and search.best.excess_bytes == 0:
        found.append(search.decision(search.best))
    if not found:
        return None

    def key(decision: Decision) -> tuple[float, float, int]:
        peak = max(peak for _, peak in stage_memory(problem, decision))
        return evaluate(problem, decision).step_time_ms, recompute_ms(problem, decision), peak

    return min(found, key=key)
