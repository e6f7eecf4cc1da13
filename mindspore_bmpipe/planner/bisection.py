"""Closing the gap from both sides by elimination at guessed step times (one chunk per stage).

For a guess between the proved bound and the best plan, elimination either removes every group, which proves the
guess as a bound, or leaves groups of which none is too slow on its own. The cheapest splits of those are then good
plans: with all stages below a common limit, the step time is close to what the total time of the stages gives.
"""

from __future__ import annotations

from mindspore_bmpipe.planner.base import Clock, SolveLimits
from mindspore_bmpipe.planner.elimination import Survivors, cheapest_split, eliminate, path_bound, path_cost, sharpen
from mindspore_bmpipe.planner.local_search import PathPool, SplitSearch

_GUESSES = 24
_CANDIDATES = 12
_DESCENT_ROUNDS = 10
_DESCENT_SHARE = 1.01
"""A candidate at most this much slower than the best plan is worth a look at its neighbours."""


def bisect(everything: Survivors, search: SplitSearch, pool: PathPool, limits: SolveLimits, clock: Clock) -> float:
    """Lower bound on the step time of every split of the given groups; improves the search's best split on the way.

    Args:
        everything: all groups that a faster split than the best may contain; times may be lower bounds.
        search: holds the best split so far.
        pool: known paths; those of the candidates are added.
        limits: the gap at which to stop.
        clock: counts the work, and ends it.
    """
    low = min(path_bound(everything, pool), search.best_time)
    ceiling = search.best_time
    for _ in range(_GUESSES):
        ceiling = min(ceiling, search.best_time)
        if ceiling - low <= limits.accepted_gap / 4 * search.best_time:
            break
        if clock.ends():
            break
        guess = (low + ceiling) / 2
        decided = _decide(everything, guess, search, pool, clock)
        if decided is None:
            break
        if decided:
            low = guess
        else:
            ceiling = guess
    return low


def _decide(everything: Survivors, guess: float, search: SplitSearch, pool: PathPool, clock: Clock) -> bool | None:
    """Whether no split is faster than the guess; `False` if one is or may be, `None` if it was not decided."""
    stages, units = pool.problem.stages, pool.problem.units
    survivors = eliminate(everything, pool, guess, clock)
    exact = sharpen(survivors, search.options, clock)
    if exact is None:
        return None
    survivors = exact
    weights = survivors.forward_ms + survivors.backward_ms
    for attempt in range(_CANDIDATES):
        before = len(survivors)
        survivors = eliminate(survivors, pool, guess, clock)
        if not len(survivors):
            return True
        if attempt == 0 or len(survivors) < before:
            weights = survivors.forward_ms + survivors.backward_ms
        split = cheapest_split(survivors, weights, stages, units)
        if split is None:
            return True
        times = search.times(split)
        assert times is not None
        length = float(pool.bounds(times[0][None, :], times[1][None, :])[0])
        known = len(pool.paths)
        pool.separate(*times)
        fresh = pool.paths[known:]
        search.offer([split])
        if length <= search.best_time * _DESCENT_SHARE and search.offer(search.neighbours(split)):
            search.descend(_DESCENT_ROUNDS)
        if search.best_time < guess or not fresh:
            return False
        # The next candidate avoids the path that made this one slow.
        weights = weights + path_cost(survivors, fresh[-1]) / pool.problem.micro_batches
    return False
