"""Proving a plan with several chunks per stage by the integer program over counts (`milp_counts`).

The program is asked for a plan at most as long as a guess between the proved bound and the best plan. If there is
none, the guess is the new bound; coarse guesses are refuted quickly, and the paths they needed help the finer ones.
What it finds is simulated exactly: a better plan is kept, and a plan whose step time or memory the program misjudged,
because paths were missing or by tolerance, is cut off and the guess is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspore_bmpipe.planner.base import Clock, SolveLimits
from mindspore_bmpipe.planner.local_search import PathPool
from mindspore_bmpipe.planner.milp import over_limit
from mindspore_bmpipe.planner.milp_backend import SolverError
from mindspore_bmpipe.planner.milp_counts import CountModel
from mindspore_bmpipe.problem import Decision, Problem, virtual_stage_times
from mindspore_bmpipe.schedule import step_times

MAX_ACTIONS = 2000
"""Actions up to which every one gets a variable for the last guesses; beyond, only paths bound the step time."""

_ROUNDS = 200
_ROUNDING = 1e-9
_FINEST = 0.8
"""Share of the accepted gap below the best plan at which the last guess lies."""
_STEP = 0.5
"""Where a guess lies between bound and best plan."""


@dataclass(frozen=True)
class Proof:
    """How a proof ended."""

    decision: Decision | None
    """A better plan, or `None`."""
    bound_ms: float
    """Lower bound on the step time of every plan; infinite if there is none."""
    timed_out: bool
    """Whether the wall clock ended it."""


def prove(
    problem: Problem,
    model: CountModel,
    pool: PathPool,
    start_ms: float,
    bound_ms: float,
    limits: SolveLimits,
    clock: Clock,
) -> Proof:
    """Raise the bound towards the best plan until the gap is accepted, or find better plans.

    Args:
        problem: what is planned.
        model: its integer program, with the paths of the pool.
        pool: known paths.
        start_ms: step time of the best plan, infinite without one.
        bound_ms: what is proved already.
        limits: gap and nodes.
        clock: the last resort.
    """
    best, best_ms, proved = None, start_ms, bound_ms
    excluded, sent = 0, len(pool.paths)
    for _ in range(_ROUNDS):
        if proved >= best_ms * (1 - limits.accepted_gap):
            return Proof(best, proved, False)
        if clock.expired():
            return Proof(best, proved, True)
        guess = float("inf")
        if best_ms < float("inf"):
            guess = min(proved + _STEP * (best_ms - proved), best_ms * (1 - _FINEST * limits.accepted_gap))
            if best_ms - guess < 3 * limits.accepted_gap * best_ms:
                guess = best_ms * (1 - _FINEST * limits.accepted_gap)
            model.cut_off(guess)
        try:
            decision, bound, complete = model.solve(None, 0.0, clock.remaining(), limits.node_limit)
        except SolverError:
            return Proof(best, proved, False)
        proved = max(proved, min(bound * (1 - _ROUNDING), guess))
        if DEBUG: print("   guess",guess,"found",decision is not None,"bound",proved,complete,len(pool.paths),round(clock.elapsed(),1),flush=True)
        if decision is None:
            if complete:
                continue
            return Proof(best, proved, clock.expired())
        over = over_limit(problem, decision)
        for stage in over:
            model.exclude(decision, stage, excluded)
            excluded += 1
        times = virtual_stage_times(problem, decision)
        progress = bool(over)
        if not over:
            total = float(step_times(pool.schedule, *times, problem.transfer_ms)[0])
            if total < best_ms:
                best, best_ms, progress = decision, total, True
        progress = pool.separate(*times) or progress
        if not progress:
            return Proof(best, proved, clock.expired())
        for path in pool.paths[sent:]:
            model.add_path(path)
        sent = len(pool.paths)
    return Proof(best, proved, False)
DEBUG=False
