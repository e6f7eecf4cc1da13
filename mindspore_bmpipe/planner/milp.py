"""Solving the integer program over counts (`milp_counts`): paths and exact memory added as answers violate them."""

from __future__ import annotations

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits, Status, needs_message, with_plan, without_plan
from mindspore_bmpipe.planner.local_search import PathPool
from mindspore_bmpipe.planner.milp_counts import CountModel
from mindspore_bmpipe.planner.milp_memory import over_limit
from mindspore_bmpipe.problem import (
    Decision,
    Problem,
    simulated_ms,
    stage_memory,
    virtual_stage_times,
    virtual_stage_weights,
)

_RELAXATION_ROUNDS = 60
_ROUNDS = 200
_ROUNDING = 1e-9


def plan_counts(
    name: str,
    problem: Problem,
    limits: SolveLimits,
    clock: Clock,
    start: Decision | None = None,
    solver: str | None = None,
) -> Solution:
    """Plan a problem with any number of chunks.

    Args:
        name: planner to name in the solution.
        problem: what to plan.
        limits: gap, nodes and seed.
        clock: the planner's clock.
        start: a feasible decision, or `None`.
        solver: name of the solver; the first that loads if `None`.
    """
    pool = PathPool(problem)
    model = CountModel(problem, limits, solver)
    best, best_time = start, float("inf") if start is None else _step_time(pool, start)
    sent = 0
    proved = tighten(model, pool, best, clock)
    sent = len(pool.paths)
    ended = ""
    for _ in range(_ROUNDS):
        decision, bound, complete = model.solve(best, best_time, clock.remaining(), limits.node_limit)
        proved = max(proved, bound * (1 - _ROUNDING))
        progress = False
        if decision is not None:
            over = over_limit(problem, decision)
            for stage in over:
                model.exclude(decision, stage)
                progress = True
            if not over:
                time = _step_time(pool, decision)
                if time < best_time:
                    best, best_time = decision, time
                times = virtual_stage_times(problem, decision)
                progress = pool.separate(*times, virtual_stage_weights(problem, decision))
        if proved >= best_time * (1 - limits.accepted_gap):
            break
        if not complete and clock.expired():
            ended = f"the wall clock ({limits.time_limit_s:g} s) ended the search; another run may give another plan"
            break
        if not progress:
            ended = f"the work limit ({limits.node_limit} nodes) ended the search"
            break
        for path in pool.paths[sent:]:
            model.add_path(path)
        sent = len(pool.paths)
    if best is not None:
        optimal = proved >= best_time * (1 - limits.accepted_gap)
        return with_plan(name, problem, best, clock, min(proved, best_time), optimal, "" if optimal else ended)
    if proved == float("inf"):
        needed = least_excess(problem, limits, clock, solver)
        return without_plan(name, Status.INFEASIBLE, clock, needs_message(problem, needed), needed)
    return without_plan(name, Status.UNKNOWN, clock, ended)


def _step_time(pool: PathPool, decision: Decision) -> float:
    forward, backward = virtual_stage_times(pool.problem, decision)
    return float(simulated_ms(pool.problem, forward, backward, virtual_stage_weights(pool.problem, decision))[0])


def tighten(model: CountModel, pool: PathPool, best: Decision | None, clock: Clock) -> float:
    """Add all known paths and those the relaxation violates; its step time, infinite if it is infeasible."""
    objective = 0.0
    sent = 0
    for _ in range(_RELAXATION_ROUNDS):
        for path in pool.paths[sent:]:
            model.add_path(path)
        sent = len(pool.paths)
        relaxed = model.relax()
        if relaxed is None:
            return float("inf")
        objective = relaxed * (1 - _ROUNDING)
        forward, backward, weight = model.times()
        pool.separate(forward, backward, weight)
        if best is not None and weight is None:
            times = virtual_stage_times(pool.problem, best)
            pool.separate((forward + times[0]) / 2, (backward + times[1]) / 2)
        if len(pool.paths) == sent or clock.expired():
            break
    for path in pool.paths[sent:]:
        model.add_path(path)
    return objective


def least_excess(problem: Problem, limits: SolveLimits, clock: Clock, solver: str | None) -> tuple[int, ...] | None:
    """Peaks of the plan whose worst excess over the limits is least; `None` if no limits would help or time ran out."""
    model = CountModel(problem, limits, solver, elastic=True)
    decision, _, _ = model.solve(None, 0.0, max(clock.remaining(), 1.0), limits.node_limit)
    if decision is None:
        return None
    return tuple(peak for _, peak in stage_memory(problem, decision))
