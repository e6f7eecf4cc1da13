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

import numpy as np

from mindspore_bmpipe.planner.base import Clock, SolveLimits
from mindspore_bmpipe.planner.local_search import PathPool, Times
from mindspore_bmpipe.planner.milp_backend import SolverError, affordable
from mindspore_bmpipe.planner.milp_counts import CountModel
from mindspore_bmpipe.planner.milp_memory import over_limit
from mindspore_bmpipe.problem import (
    Decision,
    Problem,
    simulated_ms,
    virtual_stage_times,
    virtual_stage_weights,
)
from mindspore_bmpipe.transfers import decision_transfers

MAX_ACTIONS = 2000
"""Actions up to which every one gets a variable once options are whole; beyond, only paths bound the step time."""

_ROUNDS = 400
_ROUNDING = 1e-9
_FINEST = 0.8
"""Share of the accepted gap below the best plan at which the last guess lies."""
_STEPS = (0.7, 0.35, 0.15, 0.05)
"""Where a guess lies between bound and best plan; the next one after a guess that was not decided."""
_CALL_SHARE = 0.6
"""Share of the time left that one guess of a proof may take, unless it is the last."""
_NEARBY = 12
"""Disturbed times whose longest paths are added with those of an answer."""
_DISTURBANCE = 0.05
_SHARES_UNTIL, _SHARES_ALWAYS_UNTIL = 0.02, 0.004
"""Gaps below which options become whole where every action gets a start time: the larger if the time left is enough
for that, which then costs less than the guesses that shares would still need. Shares rarely get below the smaller."""
_ENOUGH = 1.5
_PROOF_SHARE = 0.6
"""Share of the time limit that an idle core has left for the proof."""
_START_TIMES_S, _START_TIMES_SQUARED_S = 0.02, 1e-4
"""Seconds of an idle core that a program with start times takes, over their number and over its square; the less."""
_SAME_TIME = 1e-6
"""Relative difference between an answer's time and its simulation below which no path is missing."""


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
            clock: counts the work, and ends it.
            solver: name of the solver; the first that loads if `None`.
        """
        self._solver = solver
        self._problem, self._model, self._pool, self._offer = problem, model, pool, offer
        self._limits, self._clock = limits, clock
        self._best: Decision | None = None
        self._best_ms = float("inf")
        self.bound_ms = 0.0
        """Lower bound on the step time of every plan; infinite if there is none."""
        self._held = 0.0
        """The guess, kept until it is refuted or reached."""
        self._step = 0
        self._sent = len(pool.paths)
        self._whole = True
        self._used_up = False
        """Whether shares of units say no more."""
        self._has_all_paths = False
        self._actions = 2 * problem.virtual_stages * problem.micro_batches
        self._generator = np.random.default_rng(limits.seed)

    @property
    def is_open(self) -> bool:
        """Whether the bound is still too far from the best plan."""
        return self.bound_ms < self._best_ms * (1 - self._limits.accepted_gap)

    def search(self, start_ms: float, bound_ms: float) -> Decision | None:
        """Raise the bound as far as the work goes, and return a better plan if there was one.

        Args:
            start_ms: step time of the best plan, infinite without one.
            bound_ms: what is proved already.
        """
        self._best_ms, self.bound_ms = start_ms, bound_ms
        self._let_vary(start_ms < float("inf"))
        self._run()
        return self._best

    def prove(self) -> None:
        """Go on raising the bound until the wall clock ends it. Better plans only serve as targets."""
        self._step = 0
        self._run()

    def _run(self) -> None:
        try:
            for _ in range(_ROUNDS):
                if not self.is_open or self._clock.ends():
                    break
                # Without any plan the solver is asked for one whatever it takes.
                if self._best_ms < float("inf") and not affordable(self._model.model, self._clock):
                    break
                if not self._round():
                    break
        except SolverError:
            # The plan stands without the solver; only the proof is weaker.
            return

    def _let_vary(self, vary: bool) -> None:
        self._whole = not vary
        self._model.let_options_vary(vary)

    def _guess(self) -> tuple[float, bool]:
        """The step time to refute next, and whether it is the last."""
        accepted = self._limits.accepted_gap * self._best_ms
        if not self.bound_ms < self._held < self._best_ms:
            self._held = self.bound_ms + _STEPS[self._step] * (self._best_ms - self.bound_ms)
        if self._best_ms - self._held < 3 * accepted or self._has_all_paths:
            return self._best_ms - _FINEST * accepted, True
        return self._held, False

    def _can_afford_start_times(self) -> bool:
        if self._actions > MAX_ACTIONS:
            return True
        seconds = min(_START_TIMES_S * self._actions, _START_TIMES_SQUARED_S * self._actions**2)
        return seconds <= self._clock.work_left()

    def _is_time_for_whole(self) -> bool:
        if self._actions > MAX_ACTIONS or self._used_up:
            return self._used_up
        gap = 1 - self.bound_ms / self._best_ms
        # A search must not look at the clock: it knows only what the proof is meant to have.
        left = self._clock.remaining() if self._clock.proving else _PROOF_SHARE * self._limits.time_limit_s
        may_finish = left > _ENOUGH * _START_TIMES_S * self._actions
        return gap < _SHARES_ALWAYS_UNTIL or (gap < _SHARES_UNTIL and may_finish)

    def _round(self) -> bool:
        """Try one guess; whether there is anything left to try."""
        if not self._whole and self._is_time_for_whole():
            if not self._can_afford_start_times():
                return False
            self._make_whole()
        guess, last = float("inf"), True
        if self._best_ms < float("inf"):
            guess, last = self._guess()
            self._model.cut_off(guess, heuristics=self._has_all_paths)
        share = 1.0 if last else _CALL_SHARE
        decision, bound, complete = self._model.solve(self._clock, self._limits.node_limit, share=share)
        before = self.bound_ms
        self.bound_ms = max(before, min(bound * (1 - _ROUNDING), guess))
        if decision is not None:
            self._step = 0
            return self._shares(self._model.times()) if not self._whole else self._units(decision)
        if complete:
            self._step = 0
            if guess == float("inf"):
                self.bound_ms = float("inf")
            return guess < float("inf")
        # Not decided: a guess closer to the bound is refuted sooner.
        self._step += 1
        self._held = 0.0
        return not last and self._step < len(_STEPS)

    def _shares(self, times: tuple[Times, Times, Times | None, Times]) -> bool:
        """Learn from an answer whose options are shares of units."""
        wanted = self._model.step_ms()
        found = None if self._clock.proving else self._offer(tuple(self._model.rounded_split()))
        if found is not None and found[1] < self._best_ms:
            self._best, self._best_ms = found
        real = float(simulated_ms(self._problem, *times)[0])
        if real > wanted * (1 + _SAME_TIME):
            return self._learn(times)
        self._used_up = True
        return True

    def _make_whole(self) -> None:
        self._let_vary(False)
        if self._actions <= MAX_ACTIONS:
            # Start times hold all paths; the rows of single ones would only be in the way.
            self._model = CountModel(self._problem, self._limits, self._solver)
            self._model.add_start_times()
            self._has_all_paths = True

    def _units(self, decision: Decision) -> bool:
        """Learn from an answer with whole units."""
        over = over_limit(self._problem, decision)
        for stage in over:
            self._model.exclude(decision, stage)
        times = (*virtual_stage_times(self._problem, decision), virtual_stage_weights(self._problem, decision))
        transfers = decision_transfers(self._problem, decision.counts)
        real = float(simulated_ms(self._problem, *times, transfers)[0])
        progress = bool(over)
        if not over and real < self._best_ms:
            self._best_ms, progress = real, True
            if not self._clock.proving:
                self._best = decision
        forward, backward = np.array(times[0]), np.array(times[1])
        weight = None if times[2] is None else np.array(times[2])
        return self._learn((forward, backward, weight, transfers)) or progress

    def _learn(self, times: tuple[Times, Times, Times | None, Times]) -> bool:
        """Add the longest paths of these and nearby times; whether there were new ones."""
        forward, backward, weight, transfers = times
        self._pool.separate(forward, backward, weight, transfers)
        for _ in range(_NEARBY):
            noise = 1 + _DISTURBANCE * self._generator.standard_normal((2, len(forward)))
            apart = None if weight is None else weight * noise[1]
            self._pool.separate(forward * noise[0], backward * noise[1], apart, transfers)
        fresh = self._pool.paths[self._sent :]
        for path in () if self._has_all_paths else fresh:
            self._model.add_path(path)
        self._sent = len(self._pool.paths)
        return bool(fresh) and not self._has_all_paths
