"""Local search over splits (one chunk per stage) on exact step time.

A point is a split; its options are chosen exactly by `stage_options`, so its forward and backward times follow.
Neighbours move any block of consecutive cuts by a few units at once: a single cut moves units between two stages, a
longer block passes units along a chain of stages. Many neighbours are simulated in one sweep; those that a known path
already proves to be worse than the best are never simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.base import Clock
from mindspore_bmpipe.planner.chunk_rules import ChunkRules
from mindspore_bmpipe.planner.splits import Bounds, SplitRules
from mindspore_bmpipe.planner.stage_options import StageOptions
from mindspore_bmpipe.problem import Problem, schedule_of
from mindspore_bmpipe.schedule import PathCounts, Schedule, critical_paths, splits_backward, step_times
from mindspore_bmpipe.split_backward import split_times
from mindspore_bmpipe.transfers import least_transfers, split_transfers, transfer_table

_STEPS = (-2, -1, 1, 2)
_PERTURBED_CUTS = 3
_BLOCK = 64
"""Splits simulated at once."""
_STAGE_S, _ACTION_S = 3e-8, 8e-8
"""Seconds of an idle core for one stage of a split whose times are known, and for one action of a simulation."""
_SAME_TIME = 1e-9
"""Relative difference below which two step times count as equal."""


Times = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@lru_cache(maxsize=8)
def _typical_paths(schedule: Schedule, transfers: tuple[float, ...]) -> tuple[PathCounts, ...]:
    """Longest paths when one stage is slightly slower than the others: the corner cases of an even pipeline."""
    size = schedule.virtual_stages
    times = np.ones((size + 1, size))
    times[np.arange(1, size + 1), np.arange(size)] = 1.05
    split = splits_backward(schedule)
    found = critical_paths(schedule, times, times if split else 2 * times, transfers, times if split else None)
    return tuple(dict.fromkeys(found))


class PathPool:
    """Paths through the schedule's graph: each is a lower bound on step time that is linear in the times."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.schedule = schedule_of(problem)
        self.paths: list[PathCounts] = []
        self._least = least_transfers(problem)
        self._known: set[PathCounts] = set()
        self._forward: npt.NDArray[np.float64] = np.zeros((0, problem.virtual_stages))
        self._backward: npt.NDArray[np.float64] = np.zeros((0, problem.virtual_stages))
        self._weight: npt.NDArray[np.float64] = np.zeros((0, 2 * problem.virtual_stages))
        self._constant: npt.NDArray[np.float64] = np.zeros(0)
        for path in _typical_paths(self.schedule, tuple(self._least.tolist())):
            self.add(path)

    def add(self, path: PathCounts) -> bool:
        """Add a path; whether it was unknown."""
        if path in self._known:
            return False
        self._known.add(path)
        self.paths.append(path)
        self._forward = np.vstack((self._forward, path.forward))
        self._backward = np.vstack((self._backward, path.backward))
        # A weight gradient is part of the backward that is counted with it, unless the path passes only one of them.
        self._weight = np.vstack((self._weight, (*np.subtract(path.weight, path.backward), *path.apart)))
        self._constant = np.append(self._constant, np.dot(path.transfers, self._least))
        return True

    def keep_longest(self, forward: Times, backward: Times, weight: Times | None, size: int) -> None:
        """Forget all but the paths that are longest for one plan, so that a long search stays quick."""
        if len(self.paths) <= size:
            return
        lengths = self.lengths(forward[None, :], backward[None, :], None if weight is None else weight[None, :])[0]
        rows = np.sort(np.argsort(-lengths, kind="stable")[:size])
        self.paths = [self.paths[row] for row in rows.tolist()]
        self._known = set(self.paths)
        self._forward, self._backward = self._forward[rows], self._backward[rows]
        self._weight, self._constant = self._weight[rows], self._constant[rows]

    def separate(
        self,
        forward: npt.ArrayLike,
        backward: npt.ArrayLike,
        weight: npt.ArrayLike | None = None,
        transfers: npt.ArrayLike | None = None,
    ) -> bool:
        """Add the longest paths of plans' times, shapes (K,) or (plans, K); whether any was new.

        Weight gradients and what they run again have the shape (2, K) or (plans, 2, K), as `simulated_ms` takes them.
        Without transfer times of the plans, the least there can be are taken.
        """
        sent = self._least if transfers is None else transfers
        added = False
        for path in critical_paths(self.schedule, forward, *split_times(backward, sent, weight)):
            added = self.add(path) or added
        return added

    def bounds(self, forward: Times, backward: Times, weight: Times | None = None) -> Times:
        """Largest known path of each plan, shapes (plans, K) to (plans,), with the least transfers there can be.

        Weight gradients are of the shape (plans, 2, K).
        """
        return np.asarray(self.lengths(forward, backward, weight).max(axis=1))

    def lengths(self, forward: Times, backward: Times, weight: Times | None = None) -> Times:
        """Length of every known path of each plan, shapes (plans, K) to (plans, paths); weights as in `bounds`."""
        total = forward @ self._forward.T + backward @ self._backward.T + self._constant
        if weight is not None:
            total = total + weight.reshape(len(weight), -1) @ self._weight.T
        return np.asarray(total)

    @property
    def backward_counts(self) -> npt.NDArray[np.float64]:
        """Backwards of each virtual stage on each known path, shape (paths, K)."""
        return self._backward

    @property
    def apart_counts(self) -> npt.NDArray[np.float64]:
        """The same of separate weight gradients."""
        return self._weight[:, self.problem.virtual_stages :]


class SplitSearch:
    """Improves splits; remembers what it has seen."""

    def __init__(self, options: StageOptions, rules: SplitRules, pool: PathPool, clock: Clock) -> None:
        """Prepare a search.

        Args:
            options: best options of groups of units.
            rules: what splits may be.
            pool: known paths; those of good splits are added.
            clock: counts the work, and ends it.
        """
        self.problem = options.problem
        self.options = options
        self.rules = rules
        self.pool = pool
        self._allowed = ChunkRules(self.problem).allowed
        self._clock = clock
        self._transfers = transfer_table(self.problem)
        self._simulation_s = _ACTION_S * 2 * self.problem.virtual_stages * self.problem.micro_batches
        self.best: Bounds | None = None
        """Best split so far."""
        self.best_time = float("inf")
        """Its step time; no split seen is faster by more than rounding."""
        self._best_tie: tuple[float, int] = (float("inf"), 0)

    def times(self, bounds: Bounds) -> tuple[Times, Times, None, Times] | None:
        """Forward, backward, no separate weight gradient and transfer times of a split; `None` if a stage does not fit.

        As :meth:`PathPool.separate` takes them.
        """
        forward, backward = self.options.times(np.array([bounds]))
        if not np.isfinite(backward).all():
            return None
        return forward[0], backward[0], None, split_transfers(self._transfers, bounds)

    def _tie_break(self, bounds: Bounds) -> tuple[float, int]:
        extra, peak = 0.0, 0
        for stage, (low, high) in enumerate(itertools.pairwise(bounds)):
            choice = self.options.choice(stage, low, high)
            assert choice is not None
            extra, peak = extra + choice.extra_ms, max(peak, choice.peak_bytes)
        return extra, peak

    def offer(self, candidates: Sequence[Bounds] | IntArray) -> Bounds | None:
        """Evaluate splits that keep the rules; the best of those that beat the best so far, which it then is."""
        table = np.asarray(candidates, dtype=np.int64)
        if not len(table):
            return None
        chosen = self.options.work_s
        forward, backward = self.options.times(table)
        self._clock.spend(self.options.work_s - chosen + table.size * _STAGE_S)
        fits = np.flatnonzero(np.isfinite(backward).all(axis=1))
        # The known paths are exact for most neighbours, so few are left to simulate: those that look best first.
        bounds = self.pool.bounds(forward[fits], backward[fits])
        order = fits[np.argsort(bounds, kind="stable")]
        simulated: dict[int, float] = {}
        learned: set[int] = set()
        limit = self.best_time
        for first in range(0, len(order), _BLOCK):
            rows = order[first : first + _BLOCK]
            rows = rows[self.pool.bounds(forward[rows], backward[rows]) <= limit * (1 + _SAME_TIME)]
            if not rows.size:
                continue
            self._clock.spend(len(rows) * self._simulation_s)
            transfers = split_transfers(self._transfers, table[rows])
            totals = step_times(self.pool.schedule, forward[rows], backward[rows], transfers)
            simulated.update(zip(rows.tolist(), totals.tolist(), strict=True))
            # What makes the best of them slow makes others slow that look as good.
            at = int(np.argmin(totals))
            limit = min(limit, float(totals[at]))
            self.pool.separate(forward[rows[at]], backward[rows[at]], None, transfers[at])
            learned.add(int(rows[at]))
        improved = None
        for row, total in sorted(simulated.items()):
            if self._improve(tuple(table[row].tolist()), total):
                improved = row
        if improved is None:
            return None
        if improved not in learned:
            transfers = split_transfers(self._transfers, table[improved])
            self.pool.separate(forward[improved], backward[improved], None, transfers)
        return tuple(table[improved].tolist())

    def _improve(self, bounds: Bounds, time: float) -> bool:
        """Take the split if it is better by time, or equal in time and better by recomputation, then by peak."""
        if time > self.best_time * (1 + _SAME_TIME):
            return False
        tie = self._tie_break(bounds)
        if time >= self.best_time * (1 - _SAME_TIME):
            extra, best_extra = tie[0], self._best_tie[0]
            same = abs(extra - best_extra) <= _SAME_TIME * (extra + best_extra)
            if tie[1] >= self._best_tie[1] if same else extra > best_extra:
                return False
        # Of equal times the least is kept, so that a chain of ties cannot drift upwards.
        self.best, self.best_time, self._best_tie = bounds, min(time, self.best_time), tie
        return True

    def neighbours(self, bounds: Bounds) -> IntArray:
        """Allowed splits one move away, shape (n, len(bounds))."""
        table = moved_blocks(bounds, _STEPS)
        return table[self._allowed(table)]

    def descend(self, rounds: int) -> None:
        """Move from the best split to its best neighbour until none is better or rounds or work are used up."""
        for _ in range(rounds):
            if self.best is None or self._clock.ends() or self.offer(self.neighbours(self.best)) is None:
                return

    def perturb(self, seed: int, tries: int) -> None:
        """Look again at the neighbours of randomly disturbed copies of the best split."""
        generator = np.random.default_rng(seed)
        for _ in range(tries):
            if self.best is None or len(self.best) < 3 or self._clock.ends():
                return
            cuts = list(self.best[1:-1])
            for _ in range(_PERTURBED_CUTS):
                cuts[int(generator.integers(len(cuts)))] += int(generator.choice(_STEPS))
            split = (0, *cuts, self.best[-1])
            if not _increasing(split) or not self.rules.allows(split):
                continue
            if self.offer(np.concatenate(([split], self.neighbours(split)))):
                self.descend(tries)


def moved_blocks(bounds: Bounds, steps: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Copies of a split with one block of consecutive cuts moved, shape (n, len(bounds)); not all are splits."""
    cuts = len(bounds) - 2
    if cuts < 1:
        return np.empty((0, len(bounds)), dtype=np.int64)
    first, last = np.triu_indices(cuts)
    position = np.arange(cuts)
    block = (position >= first[:, None]) & (position <= last[:, None])
    table = np.empty((len(steps) * len(first), len(bounds)), dtype=np.int64)
    table[:, 0], table[:, -1] = bounds[0], bounds[-1]
    inner = np.array(bounds[1:-1])
    # Block by block, all steps of each: ties go to the first.
    table[:, 1:-1] = (inner + np.array(steps)[None, :, None] * block[:, None, :]).reshape(-1, cuts)
    return table


def _increasing(split: Bounds) -> bool:
    return all(low < high for low, high in itertools.pairwise(split))
