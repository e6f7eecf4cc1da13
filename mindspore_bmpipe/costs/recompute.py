"""Recompute options of a unit: which of its cells to recompute, what that keeps, costs and needs while it runs.

MindSpore's semantics: a recomputed cell runs again just before its own backward; what leaves the cell is kept,
everything else made inside it is not; of what runs again, only operations whose dropped results backward needs count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspore_bmpipe.costs.polynomial import undominated
from mindspore_bmpipe.costs.unit_model import ModelOperation, UnitModel, indices_of

MOST_PER_CELL = 32
"""Combinations kept for each cell while combinations of its sub-cells are formed; more did not change any frontier of
the example networks."""

Cells = tuple[str, ...]
"""Recomputed cells, relative to the unit (``0.attention``), none inside another."""

Measure = Callable[[Cells], tuple[float, float]]
"""Kept bytes and extra milliseconds of a set of cells."""


@dataclass(frozen=True)
class RecomputeOption:
    """One way to recompute a unit, as polynomials over the model's monomials."""

    cells: Cells
    """Cells recomputed."""
    saved: NDArray[np.float64]
    """Bytes kept per micro-batch in flight."""
    kept: int
    """The storages kept, as a bit mask."""
    repeated: tuple[int, ...]
    """Forward operations that run again."""
    forward_set: NDArray[np.float64]
    """Bytes needed beyond the kept ones while its forward runs: the largest of these rows, shape (rows, monomials)."""
    backward_set: NDArray[np.float64]
    """The same while its backward runs."""

    @property
    def working_set(self) -> NDArray[np.float64]:
        """The same while either runs."""
        return undominated(np.vstack([self.forward_set, self.backward_set]))


class RecomputeModel:
    """Evaluates sets of recomputed cells of one unit."""

    def __init__(self, model: UnitModel) -> None:
        self._model = model
        self._forward = model.operations[: model.forward_count]
        self._backward = model.operations[model.forward_count :]
        self._inside: dict[str, list[int]] = defaultdict(list)
        for number, operation in enumerate(self._forward):
            for cell in _enclosing(operation.cell):
                self._inside[cell].append(number)
        self._readers: dict[int, list[int]] = defaultdict(list)
        for number, operation in enumerate(self._forward):
            for storage in indices_of(operation.reads):
                self._readers[storage].append(number)
        self._dropped = {cell: tuple(self._interior(cell)) for cell in self._inside}
        """Cell -> (forward operation, those of its results that the cell drops when it is recomputed)."""
        self._backward_reads = 0
        for operation in self._backward:
            self._backward_reads |= operation.reads

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the unit that run a forward operation, outer ones first."""
        return tuple(sorted(self._inside, key=lambda cell: (cell.count("."), cell)))

    def whole(self) -> Cells:
        """All of the unit."""
        return tuple(cell for cell in self.cells if "." not in cell)

    def children(self, cell: str) -> tuple[str, ...]:
        """Cells directly below ``cell`` in the set of those that run something."""
        below = [other for other in self.cells if other.startswith(cell + ".")]
        return tuple(other for other in below if not any(other.startswith(middle + ".") for middle in below))

    def kept(self, cells: Iterable[str]) -> tuple[int, tuple[int, ...]]:
        """Storages kept and forward operations repeated when ``cells`` are recomputed."""
        recomputed = sorted(entry for cell in cells for entry in self._dropped[cell])
        wanted = self._backward_reads
        made = 0
        repeated: list[int] = []
        for number, dropped in reversed(recomputed):
            made |= dropped
            if dropped & wanted:
                repeated.append(number)
                wanted |= self._forward[number].reads
        return wanted & ~made & self._model.keepable, tuple(reversed(repeated))

    def option(self, cells: Cells) -> RecomputeOption:
        """Evaluate one set of cells in full."""
        kept, repeated = self.kept(cells)
        own = kept & ~self._model.shared
        forward = self._peaks(self._forward, kept, self._forward_reads_outside())
        backward = self._peaks(self._backward_timeline(cells, repeated), 0, kept | self._model.arriving)
        beyond, nothing = self._model.bytes_of(kept), np.zeros((1, self._model.sizes.shape[1]))
        return RecomputeOption(
            cells=cells,
            saved=self._model.bytes_of(own),
            kept=kept,
            repeated=repeated,
            forward_set=undominated(np.vstack([forward - beyond, nothing])),
            backward_set=undominated(np.vstack([backward - beyond, nothing])),
        )

    def _interior(self, cell: str) -> Iterable[tuple[int, int]]:
        """Forward operations of a cell with their results that stay inside it; what leaves a cell is kept.

        The compiler decides for each result: a layer norm whose normalised result leaves the cell runs again for its
        mean and variance.
        """
        inside = set(self._inside[cell])
        for number in self._inside[cell]:
            dropped = 0
            for storage in indices_of(self._forward[number].writes & ~self._model.results):
                if all(reader in inside for reader in self._readers[storage]):
                    dropped |= 1 << storage
            if dropped:
                yield number, dropped

    def _forward_reads_outside(self) -> int:
        reads = made = 0
        for operation in self._forward:
            reads |= operation.reads & ~made
            made |= operation.writes
        return reads

    def _backward_timeline(self, cells: Cells, repeated: Sequence[int]) -> list[ModelOperation]:
        """Backward operations, each recomputed cell running again just before the first that reads what it dropped."""
        again = set(repeated)
        groups: dict[str, list[int]] = {}
        makes: dict[str, int] = {}
        for cell in cells:
            groups[cell] = [number for number, _ in self._dropped[cell] if number in again]
            makes[cell] = 0
            for number, dropped in self._dropped[cell]:
                if number in again:
                    makes[cell] |= dropped
        timeline: list[ModelOperation] = []
        waiting = [cell for cell in cells if groups[cell]]
        for operation in self._backward:
            for cell in [cell for cell in waiting if makes[cell] & operation.reads]:
                timeline.extend(self._forward[number] for number in groups[cell])
                waiting.remove(cell)
            timeline.append(operation)
        return timeline

    def _peaks(self, timeline: Sequence[ModelOperation], stays: int, present: int) -> NDArray[np.float64]:
        """Live bytes during every step of ``timeline``.

        Args:
            timeline: operations in order.
            stays: storages that are not freed after their last use.
            present: storages that are there from the start.
        """
        model = self._model
        keep = stays | model.leaving | model.results
        last: dict[int, int] = {}
        for step, operation in enumerate(timeline):
            for storage in indices_of(operation.reads | operation.writes):
                last[storage] = step
        change = np.zeros((len(timeline) + 1, model.sizes.shape[1]))
        for storage in indices_of(present):
            change[0] += model.sizes[storage]
        born = present
        for step, operation in enumerate(timeline):
            for storage in indices_of(operation.writes & ~born):
                change[step] += model.sizes[storage]
            born |= operation.writes
        for storage, step in last.items():
            if not keep >> storage & 1:
                change[step + 1] -= model.sizes[storage]
        live = np.cumsum(change, axis=0)[:-1]
        return live if len(live) else np.zeros((1, model.sizes.shape[1]))


def frontier(
    model: RecomputeModel, operation_ms: NDArray[np.float64], monomials: NDArray[np.float64], unit: UnitModel, most: int
) -> list[RecomputeOption]:
    """Options worth offering to the planner at given sizes and times, least recomputation first.

    Nothing (``none``) and everything (``full``) are always among them. The others are not dominated in kept bytes and
    extra time by any combination of cells that was formed; where there are more than ``most``, those go first whose
    loss takes least from the area below the frontier.
    """
    sizes = unit.sizes @ monomials
    measured: dict[Cells, tuple[float, float]] = {}

    def measure(cells: Cells) -> tuple[float, float]:
        found = measured.get(cells)
        if found is None:
            kept, repeated = model.kept(cells)
            saved = float(sizes[indices_of(kept & ~unit.shared)].sum())
            found = measured[cells] = (saved, float(operation_ms[list(repeated)].sum()))
        return found

    def combine(cell: str) -> list[Cells]:
        below: list[Cells] = [()]
        for child in model.children(cell):
            choices = combine(child)
            below = _pareto([(*some, *more) for some in below for more in choices], measure)
        return _pareto([*below, (cell,)], measure)

    combinations: list[Cells] = [()]
    for cell in model.whole():
        choices = combine(cell)
        combinations = _pareto([(*some, *more) for some in combinations for more in choices], measure)
    whole = model.whole()
    chosen = sorted({(), *combinations} - {whole}, key=lambda cells: (measure(cells)[1], cells))
    chosen = _thinned(chosen, measure, max(most - 1, 1))
    if whole and measure(whole) != measure(()):
        chosen.append(whole)
    return [model.option(cells) for cells in chosen]


def _pareto(candidates: Iterable[Cells], measure: Measure) -> list[Cells]:
    """Combinations that no other beats in both kept bytes and extra time; fewer cells first among equals."""
    ordered = sorted(set(candidates), key=lambda cells: (*measure(cells), len(cells), cells))
    best: list[Cells] = []
    least = float("inf")
    for cells in ordered:
        extra = measure(cells)[1]
        if extra < least:
            best.append(cells)
            least = extra
    return _thinned(best, measure, MOST_PER_CELL)


def _thinned(candidates: Sequence[Cells], measure: Measure, most: int) -> list[Cells]:
    """At most ``most`` of the candidates, the ends always kept."""
    left = sorted(candidates, key=lambda cells: measure(cells)[1])
    while len(left) > max(most, 2):
        points = [measure(cells) for cells in left]

        def loss(place: int, points: Sequence[tuple[float, float]] = points) -> float:
            before, here, after = points[place - 1], points[place], points[place + 1]
            return (before[0] - here[0]) * (after[1] - here[1])

        worst = min(range(1, len(left) - 1), key=lambda place: (loss(place), place))
        del left[worst]
    return left


def option_name(cells: Cells, whole: Cells) -> str:
    """Name of an option: ``none``, ``full``, or its cells without the unit's own path."""
    if not cells:
        return "none"
    if cells == whole:
        return "full"
    return "+".join(cell.split(".", 1)[1] if "." in cell else cell for cell in cells)


def absolute_cells(cells: Cells, unit_cells: Sequence[str]) -> tuple[str, ...]:
    """Paths in the network of cells given relative to a unit."""
    paths = []
    for cell in cells:
        number, _, rest = cell.partition(".")
        base = unit_cells[int(number)]
        paths.append(".".join(part for part in (base, rest) if part))
    return tuple(paths)


def _enclosing(cell: str) -> list[str]:
    """A cell and all cells around it inside the unit; operations of no cell of the unit have none."""
    if not cell:
        return []
    parts = cell.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def evaluate_rows(rows: NDArray[np.float64], monomials: NDArray[np.float64]) -> float:
    """Largest value of several polynomials."""
    return float((rows @ monomials).max())
