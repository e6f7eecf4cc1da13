"""Local search over splits into any number of chunks, on exact step time.

A point is a split and a choice of options for every stage. Neighbours of a split move a block of consecutive cuts by a
unit or two, which carries units from one virtual stage to another; stages whose units change take the choice of
options that is cheapest at the current prices, which say how often the longest paths pass the backward of each virtual
stage. Afterwards every stage's other choices are tried. All neighbours are bounded from below by the known paths in one
product of matrices, and simulated in the order of their bounds until a bound exceeds the best time found.

Where nothing fits yet, bytes over the limits cost time at first, so that the search does not unbalance the stages for
them, and then come before it. The work is counted, not timed, so the search
ends at the same point on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.base import Clock
from mindspore_bmpipe.planner.chunk_options import ChunkOptions, StagePatterns
from mindspore_bmpipe.planner.chunk_rules import ChunkRules, IntArray
from mindspore_bmpipe.planner.local_search import PathPool, moved_blocks
from mindspore_bmpipe.problem import Decision, Problem, simulated_ms
from mindspore_bmpipe.schedule import splits_backward
from mindspore_bmpipe.transfers import split_transfers, transfer_table

FloatArray = npt.NDArray[np.float64]

_BLOCK = 96
"""Neighbours simulated at once."""
_SAME_TIME = 1e-9
_PRICE_PATHS = 24
"""Longest known paths whose backwards make the prices."""
_TRIED_PATTERNS = 48
"""Choices of a stage tried when a split is polished."""
_FAR_MOVES, _NEAR_MOVES = (1, 30), (8, 20)
"""Random moves that lead from a first split, and from the best one, to another start: at least, and fewer than."""
_MOST_PATHS = 250
"""Paths kept from one descent to the next."""
_LIST_WORK, _COMPARISON_WORK, _PRICE_WORK = 30.0, 0.007, 0.5
"""Work of listing the choices of a stage, more for each comparison it took, and of finding the cheapest choice."""
_DESCENTS_PER_CUT = 4
"""Descents for every cut, at most, so that small problems are not searched over and over."""
_CLOSER = 1e-6
"""Share by which `_rank` must fall for a plan of equal time to be better."""
_NEAR = 0.985
"""Paths longer than this share of the step time count in comparing plans of equal time."""


@dataclass(frozen=True, eq=False)
class Point:
    """One plan."""

    bounds: tuple[int, ...]
    """First unit of each virtual stage, and the number of units."""
    chosen: tuple[int, ...]
    """Pattern of each stage."""
    forward: FloatArray
    """Forward of each virtual stage, shape (K,)."""
    backward: FloatArray
    """Whole backward of each virtual stage."""
    weight: FloatArray | None
    """Weight gradients in it and what they run again apart, shape (2, K), if the schedule ever splits it."""
    excess_bytes: int
    """Bytes over the limits, summed over the stages."""
    time_ms: float
    """Step time."""


class ChunkSearch:
    """Improves plans; remembers the best."""

    def __init__(self, problem: Problem, pool: PathPool, rules: ChunkRules, options: ChunkOptions) -> None:
        self.problem = problem
        self._transfers = transfer_table(problem)
        self.pool = pool
        self.rules = rules
        self.options = options
        self.best: Point | None = None
        """Best plan so far; it may exceed limits if none that fits was found."""
        self.work = 0.0
        """Work done so far, in neighbours that are bounded but not simulated."""
        self._slowness = 1 / np.array(problem.speeds)[rules.stage_of_virtual]
        self._splits = splits_backward(pool.schedule)
        self._virtuals = [np.array(row) for row in pool.schedule.virtual_of_chunk]
        self._simulation_work = problem.virtual_stages * problem.micro_batches / 500
        self._penalty = 0.0
        # What a byte over the limit costs at first, in milliseconds: some ten times what recomputing it away does.
        self._byte_price = problem.ideal_ms * problem.stages / sum(problem.memory_limit_bytes)
        self._price = np.ones((2, problem.virtual_stages))
        self._listed: dict[tuple[int, tuple[int, ...]], StagePatterns] = {}
        self._cheapest: dict[tuple[int, tuple[int, ...]], tuple[int, int, FloatArray, FloatArray | None]] = {}

    def patterns(self, stage: int, classes: tuple[int, ...]) -> StagePatterns:
        """Choices of a stage whose chunks hold groups of these classes."""
        key = (stage, classes)
        if key not in self._listed:
            listed = self.options.patterns(stage, tuple(self.rules.segments[index] for index in classes))
            self.work += _LIST_WORK + _COMPARISON_WORK * listed.comparisons
            self._listed[key] = listed
        return self._listed[key]

    def _prices(self, stage: int, listed: StagePatterns) -> FloatArray:
        """What each choice of a stage costs at the current prices."""
        columns = self._virtuals[stage]
        cost = listed.extra_ms @ self._price[0, columns]
        return cost if listed.repeated_ms is None else cost + listed.repeated_ms @ self._price[1, columns]

    def _choice(self, stage: int, classes: tuple[int, ...]) -> tuple[int, int, FloatArray, FloatArray | None]:
        """(excess, pattern, extra and repeated time by chunk) of the cheapest choice at the current prices."""
        key = (stage, classes)
        known = self._cheapest.get(key)
        if known is None:
            self.work += _PRICE_WORK
            listed = self.patterns(stage, classes)
            chosen = int(np.argmin(self._prices(stage, listed)))
            repeated = None if listed.repeated_ms is None else listed.repeated_ms[chosen]
            known = self._cheapest[key] = (listed.excess_bytes, chosen, listed.extra_ms[chosen], repeated)
        return known

    def reprice(self, point: Point) -> None:
        """Set the prices to the backwards of the longest known paths of a plan."""
        lengths = self.pool.lengths(*_batch(point.forward, point.backward, point.weight))[0]
        longest = np.argsort(-lengths, kind="stable")[:_PRICE_PATHS]
        weights = np.maximum(lengths[longest] / lengths[longest[0]] - 0.97, 0.0)
        price = np.stack([weights @ self.pool.backward_counts[longest], weights @ self.pool.apart_counts[longest]])
        price = price / max(float(price[0].mean()), 1e-12) + np.array([[0.05], [0.0]])
        if not np.allclose(price, self._price):
            self._price = price
            self._cheapest.clear()

    def _times(
        self, bounds: IntArray, base: Point | None
    ) -> tuple[FloatArray, FloatArray, FloatArray | None, IntArray, IntArray]:
        """Times and excess of splits; stages with the base's units keep its choice.

        Returns:
            forward and backward, shape (n, K); weight gradients, shape (n, 2, K); excess, shape (n,); pattern of each
            stage, -1 where it keeps the base's, shape (n, p).
        """
        rules, problem = self.rules, self.problem
        classes = rules.classes[bounds[:, :-1], bounds[:, 1:]]
        forward, backward = rules.forward_ms[classes] * self._slowness, rules.backward_ms[classes] * self._slowness
        weight = None
        if self._splits:
            repeated = np.zeros(classes.shape) if base is None or base.weight is None else base.weight[1]
            weight = np.stack(
                (rules.weight_ms[classes] * self._slowness, np.broadcast_to(repeated, classes.shape)), axis=1
            )
        changed = np.full((len(bounds), problem.stages), -1, dtype=np.int64)
        excess = np.zeros(len(bounds), dtype=np.int64)
        if base is not None:
            mine = np.array(base.bounds)
            kept = rules.classes[mine[:-1], mine[1:]]
            backward = backward + (base.backward - rules.backward_ms[kept] * self._slowness)
            differs = classes != kept
        else:
            differs = np.ones(classes.shape, dtype=bool)
        for stage in range(problem.stages):
            columns = self._virtuals[stage]
            held = classes[:, columns]
            if base is not None:
                kept_excess = self.patterns(stage, tuple(kept[columns].tolist())).excess_bytes
                excess += kept_excess
            rows = np.flatnonzero(differs[:, columns].any(axis=1))
            if not rows.size:
                continue
            distinct, inverse = _distinct_rows(held[rows], len(rules.segments))
            choices = [self._choice(stage, tuple(row)) for row in distinct.tolist()]
            over = np.array([choice[0] for choice in choices], dtype=np.int64)
            excess[rows] += over[inverse] - (kept_excess if base is not None else 0)
            times = (rules.backward_ms[distinct] + np.array([choice[2] for choice in choices])) * self._slowness[
                columns
            ]
            backward[rows[:, None], columns] = times[inverse]
            if weight is not None:
                again = np.array([choice[3] for choice in choices]) * self._slowness[columns]
                weight[rows[:, None], 1, columns] = again[inverse]
            changed[rows, stage] = np.array([choice[1] for choice in choices], dtype=np.int64)[inverse]
        return forward, backward, weight, excess, changed

    def _rank(self, forward: FloatArray, backward: FloatArray, weight: FloatArray | None, time_ms: float) -> float:
        """How close the other long paths are to the step time: less leaves more room for the next move."""
        lengths = self.pool.lengths(*_batch(forward, backward, weight))[0]
        near = np.maximum(lengths / time_ms - _NEAR, 0.0)
        return float((near**2).sum())

    def best_of(
        self,
        forward: FloatArray,
        backward: FloatArray,
        weight: FloatArray | None,
        excess: IntArray,
        than: Point | None,
        bounds_of: IntArray,
    ) -> tuple[int, float] | None:
        """The best of some plans and its time, if it beats a plan: by excess, then time, then `_rank`.

        With a penalty, by the sum of time and penalty for the excess instead. `bounds_of` are the splits of the plans,
        shape (n, K + 1).
        """
        self.work += len(forward)
        if self._penalty:
            rows, fine = np.arange(len(forward)), self._penalty * excess
            limit = float("inf") if than is None else than.time_ms + self._penalty * than.excess_bytes
        else:
            least = int(excess.min())
            if than is not None and least > than.excess_bytes:
                return None
            rows, fine = np.flatnonzero(excess == least), np.zeros(len(forward))
            limit = than.time_ms if than is not None and than.excess_bytes == least else float("inf")
        bounds = self.pool.bounds(forward[rows], backward[rows], None if weight is None else weight[rows]) + fine[rows]
        order = np.argsort(bounds, kind="stable")
        rows, bounds = rows[order], bounds[order]
        found: list[tuple[float, int]] = []
        best = limit
        for first in range(0, len(rows), _BLOCK):
            block = rows[first : first + _BLOCK][bounds[first : first + _BLOCK] <= best * (1 + _SAME_TIME)]
            if not block.size:
                break
            self.work += len(block) * self._simulation_work
            part = None if weight is None else weight[block]
            transfers = split_transfers(self._transfers, bounds_of[block])
            totals = simulated_ms(self.problem, forward[block], backward[block], part, transfers) + fine[block]
            best = min(best, float(totals.min()))
            found.extend(zip(totals.tolist(), block.tolist(), strict=True))
        found = [entry for entry in found if entry[0] <= best * (1 + _SAME_TIME)]
        if not found:
            return None
        parts = [None] * len(forward) if weight is None else weight
        ranked = min((self._rank(forward[row], backward[row], parts[row], best), row) for _, row in found[:_BLOCK])
        row = ranked[1]
        if than is not None and best >= limit * (1 - _SAME_TIME):
            rank = self._rank(than.forward, than.backward, than.weight, best)
            if ranked[0] >= rank * (1 - _CLOSER):
                return None
        return row, best - float(fine[row])

    def start(self, bounds: tuple[int, ...]) -> Point:
        """The plan of a split with the cheapest options at the current prices."""
        forward, backward, weight, excess, changed = self._times(np.array([bounds]), None)
        chosen = tuple(changed[0].tolist())
        transfers = split_transfers(self._transfers, bounds)
        time = float(simulated_ms(self.problem, forward, backward, weight, transfers)[0])
        part = None if weight is None else weight[0]
        self.pool.separate(forward[0], backward[0], part)
        return Point(bounds, chosen, forward[0], backward[0], part, int(excess[0]), time)

    def neighbours(self, bounds: tuple[int, ...], steps: tuple[int, ...] = (-1, 1)) -> IntArray:
        """Allowed splits in which one block of consecutive cuts has moved, shape (n, K + 1)."""
        table = moved_blocks(bounds, steps)
        return table[self.rules.allowed(table)]

    def _move(self, point: Point, steps: tuple[int, ...]) -> Point | None:
        """The best neighbour, if better."""
        table = self.neighbours(point.bounds, steps)
        if not len(table):
            return None
        forward, backward, weight, excess, changed = self._times(table, point)
        found = self.best_of(forward, backward, weight, excess, point, table)
        if found is None:
            return None
        row, time = found
        chosen = tuple(
            kept if pattern < 0 else pattern for pattern, kept in zip(changed[row].tolist(), point.chosen, strict=True)
        )
        part = None if weight is None else weight[row]
        self.pool.separate(forward[row], backward[row], part)
        bounds = tuple(table[row].tolist())
        return Point(bounds, chosen, forward[row], backward[row], part, int(excess[row]), time)

    def _polish(self, point: Point) -> Point | None:
        """The best plan with other options on one stage, if better."""
        rules = self.rules
        mine = np.array(point.bounds)
        classes = rules.classes[mine[:-1], mine[1:]]
        backwards, weights, origin = [], [], []
        for stage in range(self.problem.stages):
            columns = self._virtuals[stage]
            held = classes[columns]
            listed = self.patterns(stage, tuple(held.tolist()))
            for number in np.argsort(self._prices(stage, listed), kind="stable")[:_TRIED_PATTERNS].tolist():
                if number != point.chosen[stage]:
                    row = point.backward.copy()
                    row[columns] = (rules.backward_ms[held] + listed.extra_ms[number]) * self._slowness[columns]
                    backwards.append(row)
                    if point.weight is not None and listed.repeated_ms is not None:
                        parts = point.weight.copy()
                        parts[1, columns] = listed.repeated_ms[number] * self._slowness[columns]
                        weights.append(parts)
                    origin.append((stage, number))
        if not origin:
            return None
        backward = np.array(backwards)
        forward = np.broadcast_to(point.forward, backward.shape)
        weight = np.array(weights) if weights else None
        excess = np.full(len(backward), point.excess_bytes, dtype=np.int64)
        bounds = np.broadcast_to(np.array(point.bounds), (len(backward), len(point.bounds)))
        found = self.best_of(forward, backward, weight, excess, point, bounds)
        if found is None:
            return None
        row_index, time = found
        stage, number = origin[row_index]
        chosen = (*point.chosen[:stage], number, *point.chosen[stage + 1 :])
        part = None if weight is None else weight[row_index]
        self.pool.separate(point.forward, backward[row_index], part)
        return replace(point, chosen=chosen, backward=backward[row_index], weight=part, time_ms=time)

    def descend(self, point: Point, clock: Clock, budget: float) -> Point:
        """Move to better plans until there is none, or until this much work was done in all."""
        fined = self._byte_price if point.excess_bytes else 0.0
        for self._penalty in (fined, 0.0) if fined else (0.0,):
            while self.work < budget and not clock.expired():
                self.reprice(point)
                better = self._move(point, (-1, 1)) or self._polish(point)
                if better is None:
                    break
                point = better
        if self.best is None or _key(point) < _key(self.best):
            self.best = point
        return point

    def explore(
        self, starts: list[tuple[int, ...]], clock: Clock, seed: int, budget: float, enough_ms: float = 0.0
    ) -> None:
        """Descend from the given splits, the fastest first, then from random ones near them and near the best.

        Ends when the budget is used.

        Args:
            starts: allowed splits.
            clock: the last resort.
            seed: seed of the random splits.
            budget: work to do in all.
            enough_ms: step time at which to stop.
        """
        generator = np.random.default_rng(seed)
        starts = sorted(dict.fromkeys(starts), key=lambda split: (*_key(self.start(split)), split))
        number = 0
        most = len(starts) + _DESCENTS_PER_CUT * (self.problem.virtual_stages - 1)
        while number < most and self.work < budget and not clock.expired():
            if self.best is not None and self.best.excess_bytes == 0 and self.best.time_ms <= enough_ms:
                return
            if number < len(starts):
                split = starts[number]
            elif number % 2 and self.best is not None:
                split = self._disturbed(self.best.bounds, generator, _NEAR_MOVES)
            else:
                split = self._disturbed(starts[number % len(starts)], generator, _FAR_MOVES)
            if self.best is not None:
                self.pool.keep_longest(self.best.forward, self.best.backward, self.best.weight, _MOST_PATHS)
            self._price = np.ones((2, self.problem.virtual_stages))
            self._cheapest.clear()
            before = self.work
            self.descend(self.start(split), clock, budget)
            number += 1
            if self.work == before:
                return

    def _disturbed(
        self, split: tuple[int, ...], generator: np.random.Generator, moves: tuple[int, int]
    ) -> tuple[int, ...]:
        """A split some random moves away."""
        bounds = np.array(split)
        for _ in range(int(generator.integers(*moves))):
            first, last = sorted(generator.integers(1, max(2, len(bounds) - 1), 2).tolist())
            moved = bounds.copy()
            moved[first : last + 1] += int(generator.choice((-1, 1)))
            if self.rules.allowed(moved[None, :])[0]:
                bounds = moved
        return tuple(bounds.tolist())

    def decision(self, point: Point) -> Decision:
        """The plan as counts."""
        problem = self.problem
        table = [[(0,) * len(run.options) for _ in range(problem.virtual_stages)] for run in problem.runs]
        bounds = np.array(point.bounds)
        classes = self.rules.classes[bounds[:-1], bounds[1:]]
        for stage, chosen in enumerate(point.chosen):
            columns = self._virtuals[stage]
            held = tuple(classes[columns].tolist())
            by_chunk = self.patterns(stage, held).counts(chosen)
            for virtual, index, counts in zip(columns.tolist(), held, by_chunk, strict=True):
                for (run, _), by_option in zip(self.rules.segments[index], counts, strict=True):
                    table[run][virtual] = by_option
        return Decision(tuple(tuple(row) for row in table))


def _distinct_rows(table: IntArray, values: int) -> tuple[IntArray, IntArray]:
    """Distinct rows of numbers below `values`, and which of them each row is."""
    if values ** table.shape[1] >= 2**62:
        distinct, inverse = np.unique(table, axis=0, return_inverse=True)
        return distinct, inverse.reshape(-1)
    codes = table @ (values ** np.arange(table.shape[1]))
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    return table[first], inverse


def _batch(
    forward: FloatArray, backward: FloatArray, weight: FloatArray | None
) -> tuple[FloatArray, FloatArray, FloatArray | None]:
    return forward[None, :], backward[None, :], None if weight is None else weight[None, :]


def _key(point: Point) -> tuple[int, float]:
    return point.excess_bytes, point.time_ms
