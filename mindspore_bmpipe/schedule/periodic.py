"""Long schedules repeat: where a dependency graph does, and bounds on its end that meet long before it is simulated.

A long schedule repeats the same block of actions: between `first` and `end`, action i + P does the same as action i,
and waits for the actions P after those that i waits for. No action from `first` on waits for one more than `reach`
before it. So the end times of the `reach` actions before a cut between two blocks, the state x_k at cut k, decide
everything after it, and x_(k+1) = A(x_k) with one and the same A for every block; the last end is g(x_K), K being the
number of blocks. A and g consist of maxima and of additions of durations. Hence they are

    homogeneous   A(x + s) = A(x) + s     for every number s, and
    monotone      x <= y  =>  A(x) <= A(y)     entry by entry.

Upper bound. Let s be the largest entry of x_k - x_(k-c). Then x_k <= x_(k-c) + s, and from x_(i) <= x_(i-c) + s follows
x_(i+1) = A(x_i) <= A(x_(i-c) + s) = x_(i+1-c) + s. By induction the state grows by at most s in every c blocks:

    x_(i+nc) <= x_i + n s     for all i >= k - c,   so the last end is at most g(x_(K-nc) + n s).

Lower bound. Let S be some entries of the state, and z_i the states that follow from those of x_(k-c) in S alone, all
others being minus infinity; z_i <= x_i, because A is monotone. Let r be the smallest entry of z_k - x_(k-c) in S. Then
the entries in S alone give those same entries at least r more c blocks later, so by the same induction

    x_(i+nc) >= z_i + n r     for all i >= k - c,   so the last end is at least g(z_(K-nc) + n r).

Both are proved whatever c and S are. They meet where the entries that grow fastest carry each other and carry the end:
c is the length with the smallest s / c, S the entries that grow by s. The plain periodic regime, x_k = x_(k-c) + s in
every entry, is the case that S is everything. A stage that works ahead of the slowest one leaves that regime for as
long as its queue fills, often longer than the step; the bounds do not wait for it.

A last end is accepted when the bounds agree within `TOLERANCE` of it, so that is its error, beside the rounding that a
full simulation has too. Where they do not, the simulation just goes on to the end.

That fixed lengths c exist at all is the cyclicity theorem of max-plus algebra (Baccelli, Cohen, Olsder, Quadrat,
Synchronization and Linearity, 1992, chapter 3); here it is never assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.schedule.graph import DependencyGraph, IntArray
from mindspore_bmpipe.schedule.sweep import FloatArray, end_times, sweep

TOLERANCE = 1e-11
"""Largest distance of the two bounds, as a share of the upper one, at which they count as equal."""

_ROUNDING = 1e-12
"""Difference of two end times, as a share of the larger one, that may be rounding; it decides only what is tried."""

FEWEST_BLOCKS = 6
"""With fewer blocks there is nothing to gain."""

_FEWEST_SIMULATED = 4
"""Blocks before bounds are made, at least."""

_STRETCH = 4096
"""Actions whose end times are held at once, beside those that later ones wait for."""

_SHORTEST_SEARCH = 8
"""Lengths c up to this, and up to the number of stages, are tried."""


@dataclass(frozen=True)
class Period:
    """The part of a dependency graph that repeats; all positions are numbers of actions."""

    actions: int
    """Actions P of one block, over all stages."""
    micro_batches: int
    """Micro-batches by which the computations of a block are further on than those of the block before."""
    blocks: int
    """Number of blocks, at least `FEWEST_BLOCKS`."""
    first: int
    """Cut before the first block, at least `reach`; the cut before block k is `first + k * actions`."""
    end: int
    """Cut after the last block."""
    reach: int
    """No action from `first` on waits for one more than this before it."""

    def cut(self, block: int) -> int:
        """First action of a block, 0 to `blocks`."""
        return self.first + block * self.actions


@lru_cache(maxsize=32)
def find_period(graph: DependencyGraph) -> Period | None:
    """The longest repetition, around the middle of the graph, of one micro-batch or of a group of as many as stages.

    `None` where there is none of at least `FEWEST_BLOCKS` blocks. Every condition of the proof above is checked on the
    graph itself, so nothing depends on the kind of the schedule.
    """
    shifts = {parts * group for parts in (1, graph.sequence_parts) for group in (1, _stages(graph))}
    found = [period for shift in sorted(shifts) if (period := _repetition(graph, shift)) is not None]
    return max(found, key=lambda period: period.blocks * period.actions, default=None)


def _repetition(graph: DependencyGraph, shift: int) -> Period | None:
    """The repetition in which each computation comes back after `shift` micro-batches."""
    middle = graph.size // 2
    same = np.flatnonzero(graph.slot == graph.slot[middle])
    place = int(np.searchsorted(same, middle))
    if place + shift >= len(same):
        return None
    actions = int(same[place + shift] - same[place])
    on_stage, data = _distance(graph.stage_predecessor), _distance(graph.data_predecessor)
    is_cut = np.zeros(graph.size + 1, dtype=bool)
    is_cut[list(graph.level_starts)] = True
    repeats = np.ones(graph.size - actions, dtype=bool)
    for array in (graph.slot, graph.boundary, on_stage, data, is_cut[:-1]):
        repeats &= array[actions:] == array[:-actions]
    # The first action of a stage waits for nothing on it; where that is inside, the block is not the same everywhere.
    repeats &= on_stage[:-actions] > 0
    if middle >= len(repeats) or not repeats[middle]:
        return None
    broken = np.flatnonzero(~repeats)
    after = int(np.searchsorted(broken, middle))
    low = int(broken[after - 1]) + 1 if after else 0
    end = (int(broken[after]) if after < len(broken) else len(repeats)) + actions
    while end > middle and not (is_cut[end] and is_cut[end - actions]):
        end -= 1
    reach = int(max(on_stage[low:].max(), data[low:].max()))
    blocks = (end - max(low, reach)) // actions
    last_of_stage = np.ones(graph.size, dtype=bool)
    last_of_stage[graph.stage_predecessor[graph.stage_predecessor < graph.size]] = False
    if blocks < FEWEST_BLOCKS or int(np.flatnonzero(last_of_stage)[0]) < end - reach:
        return None
    return Period(actions, shift, blocks, end - blocks * actions, end, reach)


def _stages(graph: DependencyGraph) -> int:
    return int(graph.stage.max()) + 1


def _distance(predecessor: IntArray) -> IntArray:
    """How far before each action its predecessor is; 0 without one."""
    size = len(predecessor)
    return np.where(predecessor == size, 0, np.arange(size) - predecessor)


def last_ends(graph: DependencyGraph, durations: FloatArray) -> FloatArray:
    """Largest end time of each plan.

    Args:
        graph: the dependencies.
        durations: of actions and transfers, from `slot_durations`, none negative.

    Returns:
        Shape (plans,); within `TOLERANCE` of the full simulation. A plan's value does not depend on the others.
    """
    period = find_period(graph)
    if period is None:
        return end_times(graph, durations).max(axis=0)
    # Bounds cost about a cool-down, so they wait that long; and they need a whole circuit of waiting, which holds up to
    # as many micro-batches as there are stages.
    circuit = -(-_stages(graph) // period.micro_batches) + 1
    block = max(_FEWEST_SIMULATED, (graph.size - period.end) // period.actions, circuit)
    if block > period.blocks // 2:
        return _last_end(graph, period, durations, 0, np.zeros((0, durations.shape[1])))
    cut = period.cut(block)
    ends = np.zeros((cut + 1, durations.shape[1]))
    sweep(graph, durations, ends, range(cut))
    lower, result = _bounds(graph, period, durations, ends, block)
    left = result - lower > TOLERANCE * result
    if left.any():
        state = ends[cut - period.reach : cut, left]
        result[left] = _last_end(graph, period, durations[:, left], cut, state)
    return result


def _last_end(graph: DependencyGraph, period: Period, durations: FloatArray, cut: int, state: FloatArray) -> FloatArray:
    """Last end of each plan from the state at a cut, or from nothing at cut 0; shape (plans,).

    Only as many end times are kept as later actions wait for, so that they stay in the processor's cache.
    """
    starts = np.array(graph.level_starts)
    while cut < graph.size:
        # `find_period` has made sure that every stage ends within reach of the repetition's end.
        reached = starts[starts <= cut + max(_STRETCH, period.first - cut)][-1]
        stop = graph.size if reached > period.end - period.reach else int(reached)
        ends = np.zeros((len(state) + stop - cut + 1, durations.shape[1]))
        ends[: len(state)] = state
        sweep(graph, durations, ends, range(cut, stop), cut - len(state))
        cut, state = stop, ends[-1 - period.reach : -1]
    largest: FloatArray = ends.max(axis=0)
    return largest


def _bounds(
    graph: DependencyGraph, period: Period, durations: FloatArray, ends: FloatArray, block: int
) -> tuple[FloatArray, FloatArray]:
    """Lower and upper bound of the last end of each plan, from the end times before a cut; shapes (plans,)."""
    plans = ends.shape[1]
    lower, upper = np.empty(plans), np.empty(plans)
    cycles = _cycles(graph, period, ends, block)
    for cycle in np.unique(cycles).tolist():
        members = np.flatnonzero(cycles == cycle)
        times = durations[:, members]
        repetitions = -(-(period.blocks - block) // cycle)
        base = period.blocks - repetitions * cycle
        before, now = _state(period, ends, block - cycle, members), _state(period, ends, block, members)
        growth = now - before
        most = growth.max(axis=0)
        carrying = growth >= most - _ROUNDING * now.max(axis=0)
        least, carried = _carried(graph, period, times, before, carrying, (block - cycle, base, block))
        states = np.concatenate(
            (carried + repetitions * least, _state(period, ends, base, members) + repetitions * most), 1
        )
        twice = np.concatenate((times, times), axis=1)
        lower[members], upper[members] = np.split(_last_end(graph, period, twice, period.end, states), 2)
    return lower, upper


def _cycles(graph: DependencyGraph, period: Period, ends: FloatArray, block: int) -> IntArray:
    """The length of each plan, in blocks, over which its state grows least per block; shape (plans,)."""
    longest = min(block, max(_SHORTEST_SEARCH, _stages(graph)))
    lengths = np.arange(1, longest + 1)
    cut = period.cut(block)
    rows = np.arange(cut - period.reach, cut)
    growth = ends[rows] - ends[rows - period.actions * lengths[:, None]]
    rates = growth.max(axis=1) / lengths[:, None]
    # Among equal ones the shortest, which np.argmax finds as the first.
    return 1 + np.argmax(rates <= rates.min(axis=0) * (1 + _ROUNDING), axis=0)


def _carried(
    graph: DependencyGraph,
    period: Period,
    durations: FloatArray,
    before: FloatArray,
    carrying: npt.NDArray[np.bool_],
    blocks: tuple[int, int, int],
) -> tuple[FloatArray, FloatArray]:
    """What some entries of the state at a first cut give on their own.

    Args:
        graph: the dependencies.
        period: its repetition.
        durations: of actions and transfers.
        before: state at the first cut, shape (reach, plans).
        carrying: which entries count, the same shape.
        blocks: the first cut, one in between, and the last.

    Returns:
        The smallest growth of those entries until the last cut, shape (plans,), and the whole state at the cut in
        between, shape (reach, plans).
    """
    first, between, last = (period.cut(block) for block in blocks)
    offset = first - period.reach
    ends = np.zeros((last - offset + 1, before.shape[1]))
    ends[: period.reach] = np.where(carrying, before, -np.inf)
    # Nor does the start of the step carry anything.
    ends[-1] = -np.inf
    sweep(graph, durations, ends, range(first, last), offset)
    at_end = ends[last - offset - period.reach : last - offset]
    least = np.where(carrying, at_end - before, np.inf).min(axis=0)
    return least, ends[between - offset - period.reach : between - offset]


def _state(period: Period, ends: FloatArray, block: int, plans: IntArray | slice = slice(None)) -> FloatArray:
    """State of some plans at a cut, shape (reach, plans)."""
    cut = period.cut(block)
    return ends[cut - period.reach : cut, plans]
