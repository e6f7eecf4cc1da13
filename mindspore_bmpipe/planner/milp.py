"""Solving the integer program over counts (`milp_counts`): paths and exact memory added as answers violate them."""

from __future__ import annotations

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits, Status, needs_message, with_plan, without_plan
from mindspore_bmpipe.planner.local_search import PathPool, Times
from mindspore_bmpipe.planner.milp_counts import CountModel
from mindspore_bmpipe.planner.milp_memory import over_limit
from mindspore_bmpipe.problem import (
    Decision,
    Problem,
    evaluate,
    stage_memory,
    virtual_stage_times,
    virtual_stage_weights,
)
from mindspore_bmpipe.transfers import decision_transfers

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
    proved = tighten(model, pool, best, clock)
    sent = len(pool.paths)
    known, known_time = best, best_time
    for _ in range(_ROUNDS):
        if clock.ends() and not begins_proof(clock, limits):
            break
        decision, bound, complete = model.solve(clock, limits.node_limit, known, known_time)
        proved = max(proved, bound * (1 - _ROUNDING))
        progress = False
        if decision is not None:
            over = over_limit(problem, decision)
            for stage in over:
                model.exclude(decision, stage)
            time = float("inf") if over else _step_time(pool, decision)
            if time < known_time:
                known, known_time = decision, time
            progress = pool.separate(*_times(problem, decision)) or bool(over)
        if not clock.proving:
            best, best_time = known, known_time
        if proved >= known_time * (1 - limits.accepted_gap):
            break
        if not progress and (complete or not begins_proof(clock, limits)):
            break
        for path in pool.paths[sent:]:
            model.add_path(path)
        sent = len(pool.paths)
    if best is not None:
        optimal = proved >= best_time * (1 - limits.accepted_gap)
        return with_plan(name, problem, best, clock, min(proved, best_time), optimal, clock.message(optimal))
    if proved == float("inf"):
        needed = least_excess(problem, limits, solver)
        return without_plan(name, Status.INFEASIBLE, clock, needs_message(problem, needed), needed)
    return without_plan(name, Status.UNKNOWN, clock, f"no plan that fits was found; {clock.message(False)}")


def begins_proof(clock: Clock, limits: SolveLimits) -> bool:
    """Go from search to proof; whether that was possible and there is time for it."""
    if clock.proving or clock.struck or not limits.prove:
        return False
    clock.begin_proof()
    return not clock.expired()


def _step_time(pool: PathPool, decision: Decision) -> float:
    return evaluate(pool.problem, decision).step_time_ms


def _times(problem: Problem, decision: Decision) -> tuple[list[float], list[float], list[list[float]] | None, Times]:
    """Times of a decision, as :meth:`PathPool.separate` takes them."""
    transfers = decision_transfers(problem, decision.counts)
    return (*virtual_stage_times(problem, decision), virtual_stage_weights(problem, decision), transfers)


def tighten(model: CountModel, pool: PathPool, best: Decision | None, clock: Clock) -> float:
    """Add all known paths and those the relaxation violates; its step time, infinite if it is infeasible."""
    objective = 0.0
    sent = 0
    for _ in range(_RELAXATION_ROUNDS):
        for path in pool.paths[sent:]:
            model.add_path(path)
        sent = len(pool.paths)
        relaxed = model.relax()  # not counted: even a first look needs a bound, and the solver's help to find a plan
        if relaxed is None:
            return float("inf")
        objective = relaxed * (1 - _ROUNDING)
        forward, backward, weight, transfers = model.times()
        pool.separate(forward, backward, weight, transfers)
        if best is not None and weight is None:
            times = _times(pool.problem, best)
            pool.separate((forward + times[0]) / 2, (backward + times[1]) / 2, None, (transfers + times[3]) / 2)
        if len(pool.paths) == sent or clock.expired():
            break
    for path in pool.paths[sent:]:
        model.add_path(path)
    return objective


def least_excess(problem: Problem, limits: SolveLimits, solver: str | None) -> tuple[int, ...] | None:
    """Peaks of the plan whose worst excess over the limits is least; `None` if none was found."""
    model = CountModel(problem, limits, solver, elastic=True)
    decision, _, _ = model.solve(Clock(limits), limits.node_limit)
    if decision is None:
        return None
    return tuple(peak for _, peak in stage_memory(problem, decision))
