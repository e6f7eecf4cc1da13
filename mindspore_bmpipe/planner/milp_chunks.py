"""Proving a plan with several chunks per stage by the integer program over counts (`milp_counts`).

The program is asked for a plan at most as long as a guess between the proved bound and the best plan. If there is
none, the guess is the new bound; coarse guesses are refuted quickly, and the paths they needed help the finer ones.

At first units per virtual stage are whole numbers, but shares of a unit may take different options: times depend on
options so little that this costs a few tenths of a percent of the bound, and saves most of the branching. An answer
whose simulation is longer than the program thought adds the longest paths around it, and the guess is tried again.
Its split is offered to the local search. Once such an answer is right about its time, options become whole too.
Few actions then get a start time each (all paths at once).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mindspore_bmpipe.planner.base import Clock, SolveLimits
from mindspore_bmpipe.planner.local_search import PathPool, Times
from mindspore_bmpipe.planner.milp_backend import SolverError
from mindspore_bmpipe.planner.milp_counts import CountModel
from mindspore_bmpipe.planner.milp_memory import over_limit
from mindspore_bmpipe.problem import (
    Decision,
    Problem,
    simulated_ms,
    virtual_stage_times,
    virtual_stage_weights,
)

MAX_ACTIONS = 2000
"""Actions up to which every one gets a variable once options are whole; beyond, only paths bound the step time."""

_ROUNDS = 400
_ROUNDING = 1e-9
_FINEST = 0.8
"""Share of the accepted gap below the best plan at which the last guess lies."""
_STEP = 0.7
"""Where a guess lies between bound and best plan."""
_NEARBY = 12
"""Disturbed times whose longest paths are added with those of an answer."""
_DISTURBANCE = 0.05
_SHARES_UNTIL = 0.004
"""Gap below which options become whole at once where every action gets a start time: shares rarely go further."""
_SAME_TIME = 1e-6
"""Relative difference between an answer's time and its simulation below which no path is missing."""


@dataclass(frozen=True)
class Proof:
    """How a proof ended."""

    decision: Decision | None
    """A better plan, or `None`."""
    bound_ms: float
    """Lower bound on the step time of every plan; infinite if there is none."""
    timed_out: bool
    """Whether the wall clock ended it."""


Offer = Callable[[tuple[int, ...]], tuple[Decision, float] | None]
"""Plans a split with exact options: the best plan known then and its step time, if better than before."""


class Prover:
    """Raises the bound towards the best plan until the gap is accepted, and finds better plans on the way."""

    def __init__(
        self,
        problem: Problem,
        model: CountModel,
        pool: PathPool,
        offer: Offer,
        limits: SolveLimits,
        clock: Clock,
        solver: str | None = None,
    ) -> None:
        """Prepare a proof.

        Args:
            problem: what is planned.
            model: its integer program, with the paths of the pool.
            pool: known paths.
            offer: what to do with splits that look good.
            limits: gap and nodes.
            clock: the last resort.
            solver: name of the solver; the first that loads if `None`.
        """
        self._solver = solver
        self._problem, self._model, self._pool, self._offer = problem, model, pool, offer
        self._limits, self._clock = limits, clock
        self._best: Decision | None = None
        self._best_ms = float("inf")
        self._proved = 0.0
        self._held = 0.0
        """The guess, kept until it is refuted or reached."""
        self._sent = len(pool.paths)
        self._whole = True
        self._has_all_paths = False
        self._is_small = 2 * problem.virtual_stages * problem.micro_batches <= MAX_ACTIONS
        self._generator = np.random.default_rng(limits.seed)

    def run(self, start_ms: float, bound_ms: float) -> Proof:
        """Prove.

        Args:
            start_ms: step time of the best plan, infinite without one.
            bound_ms: what is proved already.
        """
        self._best_ms, self._proved = start_ms, bound_ms
        self._let_vary(start_ms < float("inf"))
        try:
            for _ in range(max(1, int(_ROUNDS * self._limits.effort))):
                if self._proved >= self._best_ms * (1 - self._limits.accepted_gap) or self._clock.expired():
                    break
                if not self._round():
                    break
        except SolverError:
            # The plan stands without the solver; only the proof is weaker.
            return Proof(self._best, self._proved, False)
        accepted = self._proved >= self._best_ms * (1 - self._limits.accepted_gap)
        return Proof(self._best, self._proved, self._clock.expired() and not accepted)

    def _let_vary(self, vary: bool) -> None:
        self._whole = not vary
        self._model.let_options_vary(vary)

    def _guess(self) -> float:
        finest = self._best_ms * (1 - _FINEST * self._limits.accepted_gap)
        if not self._proved < self._held < self._best_ms:
            self._held = self._proved + _STEP * (self._best_ms - self._proved)
        return finest if self._best_ms - self._held < 3 * self._limits.accepted_gap * self._best_ms else self._held

    def _round(self) -> bool:
        """Try one guess; whether there is anything left to try."""
        limits, model = self._limits, self._model
        if self._is_small and not self._whole and self._proved > self._best_ms * (1 - _SHARES_UNTIL):
            self._make_whole()
        guess = float("inf")
        if self._best_ms < float("inf"):
            guess = self._guess()
            model.cut_off(guess, heuristics=self._has_all_paths)
        decision, bound, complete = model.solve(
            None, 0.0, self._clock.remaining(), max(1, int(limits.node_limit * limits.effort))
        )
        self._proved = max(self._proved, min(bound * (1 - _ROUNDING), guess))
        if decision is None:
            if complete and guess == float("inf"):
                self._proved = float("inf")
            return complete and guess < float("inf")
        return self._shares(model.times()) if not self._whole else self._units(decision, complete)

    def _shares(self, times: tuple[Times, Times, Times | None]) -> bool:
        """Learn from an answer whose options are shares of units."""
        wanted = self._model.step_ms()
        found = self._offer(tuple(self._model.rounded_split()))
        if found is not None and found[1] < self._best_ms:
            self._best, self._best_ms = found
        real = float(simulated_ms(self._problem, *times)[0])
        if real <= wanted * (1 + _SAME_TIME):
            self._make_whole()
            return True
        return self._learn(times)

    def _make_whole(self) -> None:
        self._let_vary(False)
        if self._is_small:
            # Start times hold all paths; the rows of single ones would only be in the way.
            self._model = CountModel(self._problem, self._limits, self._solver)
            self._model.add_start_times()
            self._has_all_paths = True

    def _units(self, decision: Decision, complete: bool) -> bool:
        """Learn from an answer with whole units."""
        over = over_limit(self._problem, decision)
        for stage in over:
            self._model.exclude(decision, stage)
        times = (*virtual_stage_times(self._problem, decision), virtual_stage_weights(self._problem, decision))
        real = float(simulated_ms(self._problem, *times)[0])
        progress = bool(over)
        if not over and real < self._best_ms and (complete or not self._clock.expired()):
            self._best, self._best_ms, progress = decision, real, True
        forward, backward = np.array(times[0]), np.array(times[1])
        weight = None if times[2] is None else np.array(times[2])
        return self._learn((forward, backward, weight)) or progress

    def _learn(self, times: tuple[Times, Times, Times | None]) -> bool:
        """Add the longest paths of these and nearby times; whether there were new ones."""
        forward, backward, weight = times
        self._pool.separate(forward, backward, weight)
        for _ in range(_NEARBY):
            noise = 1 + _DISTURBANCE * self._generator.standard_normal((2, len(forward)))
            apart = None if weight is None else weight * noise[1]
            self._pool.separate(forward * noise[0], backward * noise[1], apart)
        fresh = self._pool.paths[self._sent :]
        for path in () if self._has_all_paths else fresh:
            self._model.add_path(path)
        self._sent = len(self._pool.paths)
        return bool(fresh) and not self._has_all_paths
