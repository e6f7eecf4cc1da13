"""Least recomputation within a budget of saved bytes: relaxation, greedy choice, and the exact dynamic program."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.dominance import undominated_options
from mindspore_bmpipe.problem import Option, Problem

_SAME_TIME = 1e-12
"""Relative difference below which two recomputation times count as equal (rounding of sums)."""

Segments = tuple[tuple[int, int], ...]
"""(run, units of it), for the runs of a group in network order."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """Choices of options that no other choice beats in both saved bytes and recomputation."""

    saved: npt.NDArray[np.int64]
    """Saved bytes per micro-batch, increasing, shape (n,)."""
    extra: npt.NDArray[np.float64]
    """Recomputation milliseconds, decreasing, shape (n,)."""
    counts: npt.NDArray[np.int32]
    """Units with each option, shape (n, options)."""
    repeated: npt.NDArray[np.float64] | None = None
    """What separate weight gradients run again, shape (n,), if it counts too; recomputation then need not decrease."""


def pareto(saved: npt.NDArray[np.int64], extra: npt.NDArray[np.float64], counts: npt.NDArray[np.int32]) -> Frontier:
    """The choices that are not beaten."""
    order = np.lexsort((extra, saved))
    sorted_extra = extra[order]
    best_before = np.concatenate(([np.inf], np.minimum.accumulate(sorted_extra)[:-1]))
    kept = order[sorted_extra < best_before - _SAME_TIME * (1 + np.abs(sorted_extra))]
    return Frontier(saved[kept], extra[kept], counts[kept])


class RunFrontiers:
    """Frontiers of equal units, grown one unit at a time and kept."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ladders: dict[tuple[int, tuple[int, ...]], list[Frontier]] = {}
        self.steps = 0
        """Runs combined with others so far by `cheapest_choice`."""
        self.pairs = 0
        """Pairs of choices looked at in doing so: with `steps`, what it cost."""

    def of(self, run_index: int, units: int, allowed: tuple[int, ...]) -> Frontier:
        """Frontier of some units of a run with the allowed options."""
        ladder = self._ladders.setdefault((run_index, allowed), [])
        if len(ladder) > units:
            return ladder[units]
        options = self._problem.runs[run_index].options
        if not ladder:
            ladder.append(Frontier(np.zeros(1, np.int64), np.zeros(1), np.zeros((1, len(options)), np.int32)))
        steps = np.zeros((len(allowed), len(options)), dtype=np.int32)
        steps[range(len(allowed)), list(allowed)] = 1
        saved = np.array([option.saved_bytes for option in options], dtype=np.int64)
        extra = np.array([option.extra_backward_ms for option in options])
        while len(ladder) <= units:
            counts = (ladder[-1].counts[:, None, :] + steps[None, :, :]).reshape(-1, len(options))
            ladder.append(pareto(counts.astype(np.int64) @ saved, counts @ extra, counts))
        return ladder[units]


def _hull(options: tuple[Option, ...], allowed: list[int]) -> list[Option]:
    """Convex hull of (saved, extra) from the least extra time to the fewest saved bytes."""
    by_extra = sorted(
        (options[index] for index in allowed), key=lambda option: (option.extra_backward_ms, option.saved_bytes)
    )
    hull: list[Option] = []
    for option in by_extra:
        if hull and option.saved_bytes >= hull[-1].saved_bytes:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(from_option: Option, to_option: Option) -> float:
    """Extra milliseconds per byte bought back."""
    return (to_option.extra_backward_ms - from_option.extra_backward_ms) / (
        from_option.saved_bytes - to_option.saved_bytes
    )


class CapTable:
    """What the options up to one working-set size offer, for all runs."""

    def __init__(self, problem: Problem, cap: int, reserved: int) -> None:
        runs = problem.runs
        self.reserved = reserved
        """Bytes kept free for the working set."""
        self.allowed = tuple(
            tuple(index for index in undominated_options(run.options) if run.options[index].working_set_bytes <= cap)
            for run in runs
        )
        """Options of each run that may be used."""
        hulls = [_hull(run.options, list(allowed)) for run, allowed in zip(runs, self.allowed, strict=True)]
        self.without_option = np.array([not hull for hull in hulls])
        """Runs that have no option within the cap, shape (runs,)."""
        self.base_saved = np.array([hull[0].saved_bytes if hull else 0 for hull in hulls], dtype=np.int64)
        self.base_extra = np.array([hull[0].extra_backward_ms if hull else 0.0 for hull in hulls])
        self.least_saved = np.array([hull[-1].saved_bytes if hull else 0 for hull in hulls], dtype=np.int64)
        steps = sorted(
            (_slope(before, after), index, number, before.saved_bytes - after.saved_bytes)
            for index, hull in enumerate(hulls)
            for number, (before, after) in enumerate(itertools.pairwise(hull))
        )
        self.step_run = np.array([step[1] for step in steps], dtype=np.intp)
        """Run of each purchase, cheapest byte first, shape (purchases,)."""
        self.step_bytes = np.array([step[3] for step in steps], dtype=np.int64)
        """Bytes one unit gives back."""
        self.step_slope = np.array([step[0] for step in steps])
        """Extra milliseconds per byte."""

    def extra_bound(self, units: npt.NDArray[np.int64], budget: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Least extra time by the relaxation, infinite where not even that fits.

        Args:
            units: shape (groups, runs), units of each run.
            budget: shape (groups, n), saved bytes allowed.
        """
        missing = units @ self.base_saved
        deficit = np.maximum(missing[:, None] - budget, 0)
        amount = units[:, self.step_run] * self.step_bytes
        bought = np.concatenate((np.zeros((len(units), 1), dtype=np.int64), np.cumsum(amount, axis=1)), axis=1)
        cost = np.concatenate((np.zeros((len(units), 1)), np.cumsum(amount * self.step_slope, axis=1)), axis=1)
        slopes = np.append(self.step_slope, 0.0)
        result = np.full(budget.shape, np.inf)
        rows = np.arange(len(units))
        impossible = (units[:, self.without_option] > 0).any(axis=1)
        for column in range(budget.shape[1]):
            wanted = deficit[:, column]
            full = np.maximum((bought < wanted[:, None]).sum(axis=1) - 1, 0)
            value = cost[rows, full] + (wanted - bought[rows, full]) * slopes[full]
            fits = (wanted <= bought[:, -1]) & ~impossible
            result[:, column] = np.where(fits, value, np.inf)
        return result + (units @ self.base_extra)[:, None]


def relaxed_extra(table: CapTable, segments: Segments, budget: int) -> float:
    """Least extra time of a group by the relaxation, infinite if no choice is within the budget."""
    order = np.array([index for index, _ in segments])
    relaxation = _Suffix(table, segments)
    if table.without_option[order].any() or relaxation.least_saved > budget:
        return float("inf")
    return float(relaxation.bound(np.array([budget]))[0])


def cheapest_choice(
    table: CapTable, frontiers: RunFrontiers, segments: Segments, budget: int, below: float
) -> tuple[float, int, tuple[tuple[int, ...], ...]] | None:
    """The choice with the least extra time, then the fewest saved bytes, whose saved bytes are within the budget.

    Args:
        table: options that may be used.
        frontiers: frontiers of single runs.
        segments: the group of units.
        budget: saved bytes allowed.
        below: choices with this extra time or more are of no interest.

    Returns:
        (extra milliseconds, saved bytes, counts of each run), or `None` if no choice fits or is below.
    """
    order = np.array([index for index, _ in segments])
    amounts = np.array([units for _, units in segments], dtype=np.int64)
    if table.without_option[order].any() or int(amounts @ table.least_saved[order]) > budget:
        return None
    if len(segments) == 1:
        frontier = frontiers.of(segments[0][0], segments[0][1], table.allowed[segments[0][0]])
        at = int(np.searchsorted(frontier.saved, budget, side="right")) - 1
        return float(frontier.extra[at]), int(frontier.saved[at]), (tuple(frontier.counts[at].tolist()),)
    frontiers.steps += 1
    whole = _Suffix(table, segments)
    slack = 1 + _SAME_TIME
    upper = min(below, whole.greedy(budget)) * slack + _SAME_TIME
    if whole.bound(np.array([budget]))[0] > upper:
        return None
    suffixes = [_Suffix(table, segments[position:]) for position in range(len(segments) + 1)]
    state = Frontier(np.zeros(1, np.int64), np.zeros(1), np.zeros((1, 0), np.int32))
    for position, (index, units) in enumerate(segments):
        right = frontiers.of(index, units, table.allowed[index])
        saved = (state.saved[:, None] + right.saved[None, :]).reshape(-1)
        extra = (state.extra[:, None] + right.extra[None, :]).reshape(-1)
        frontiers.steps += 1
        frontiers.pairs += len(saved)
        keep = np.flatnonzero(saved + suffixes[position + 1].least_saved <= budget)
        keep = keep[extra[keep] + suffixes[position + 1].bound(budget - saved[keep]) <= upper]
        if not keep.size:
            return None
        left_rows, right_rows = np.divmod(keep, len(right.saved))
        counts = np.concatenate((state.counts[left_rows], right.counts[right_rows]), axis=1)
        state = pareto(saved[keep], extra[keep], counts)
    flat = state.counts[-1].tolist()
    counts_by_run = []
    for index, _ in segments:
        width = len(frontiers.of(index, 0, table.allowed[index]).counts[0])
        counts_by_run.append(tuple(flat[:width]))
        flat = flat[width:]
    return float(state.extra[-1]), int(state.saved[-1]), tuple(counts_by_run)


class _Suffix:
    """The relaxation of the last runs of a group, as a function of the budget left for them."""

    def __init__(self, table: CapTable, segments: Segments) -> None:
        runs = np.array([index for index, _ in segments], dtype=np.intp)
        amounts = np.array([units for _, units in segments], dtype=np.int64)
        self.least_saved = int(amounts @ table.least_saved[runs])
        self._base_saved = int(amounts @ table.base_saved[runs])
        self._base_extra = float(amounts @ table.base_extra[runs])
        units_of_run = np.zeros(len(table.allowed), dtype=np.int64)
        units_of_run[runs] = amounts
        mine = np.flatnonzero(units_of_run[table.step_run])
        self._units = units_of_run[table.step_run[mine]]
        self._bytes, self._slope = table.step_bytes[mine], table.step_slope[mine]
        self._bought = np.concatenate(([0], np.cumsum(self._units * self._bytes)))
        self._cost = np.concatenate(([0.0], np.cumsum(self._units * self._bytes * self._slope)))

    def bound(self, budget: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Least extra time for each budget, all of which must be at least the least saved bytes."""
        deficit = np.maximum(self._base_saved - budget, 0)
        return np.asarray(self._base_extra + np.interp(deficit, self._bought, self._cost)) * (1 - _SAME_TIME)

    def greedy(self, budget: int) -> float:
        """Extra time of the choice that buys whole units, cheapest byte first."""
        deficit = max(self._base_saved - budget, 0)
        full = max(int((self._bought < deficit).sum()) - 1, 0)
        rest = deficit - int(self._bought[full])
        extra = self._base_extra + float(self._cost[full])
        if rest > 0:
            extra += -(-rest // int(self._bytes[full])) * int(self._bytes[full]) * float(self._slope[full])
        return extra
