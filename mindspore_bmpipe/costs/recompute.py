"""Recomputation of parts of a unit: what it keeps, what runs again, and what that needs while it runs.

MindSpore's semantics: a recomputed cell runs again just before its own backward; what leaves the cell is kept,
everything else made inside it is not. A recomputed primitive keeps no result. Recomputed communication keeps nothing of
what the compiler inserted to exchange shares of tensors. Of what runs again, only operations whose dropped results
backward needs count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspore_bmpipe.costs.polynomial import undominated
from mindspore_bmpipe.costs.unit_model import ModelOperation, UnitModel, indices_of, made_from_nothing, relative_cell
from mindspore_bmpipe.graph.cell_graph import EXCHANGES, SHARES

COMMUNICATION = ":communication"
"""Ends a place that means what the compiler inserted in a cell to exchange shares of tensors between ranks."""

Places = tuple[str, ...]
"""What is recomputed, relative to the unit: cells (``0.attention``), none inside another; primitives
(``0.attention.softmax``); communication of cells (``0.attention.q_proj:communication``)."""


@dataclass(frozen=True)
class RecomputeOption:
    """One way to recompute a unit, as polynomials over the model's monomials."""

    places: Places
    """What is recomputed."""
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
    """Evaluates what to recompute of one unit."""

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
        """Place -> (forward operation, those of its results that are dropped when the place is recomputed)."""
        self.views: dict[str, Places] = {}
        """Primitive -> primitives of views of its results, which MindSpore keeps unless they run again too."""
        self.primitives = tuple(self._add_primitives())
        """Primitives that may be recomputed, in order of first use: none of their results leaves the unit."""
        self.communication = tuple(self._add_communication())
        """Communication that may be recomputed."""
        self._backward_reads = 0
        for operation in self._backward:
            self._backward_reads |= operation.reads

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the unit that run a forward operation, outer ones first."""
        return tuple(sorted(self._inside, key=lambda cell: (cell.count("."), cell)))

    def whole(self) -> Places:
        """All of the unit."""
        return tuple(cell for cell in self.cells if "." not in cell)

    def children(self, cell: str) -> tuple[str, ...]:
        """Cells directly below ``cell`` in the set of those that run something."""
        below = [other for other in self.cells if other.startswith(cell + ".")]
        return tuple(other for other in below if not any(other.startswith(middle + ".") for middle in below))

    def kept(self, places: Iterable[str]) -> tuple[int, tuple[int, ...]]:
        """Storages kept and forward operations repeated when ``places`` are recomputed."""
        recomputed: dict[int, int] = {}
        for place in places:
            for number, dropped in self._dropped[place]:
                recomputed[number] = recomputed.get(number, 0) | dropped
        wanted = self._backward_reads
        made = 0
        repeated: list[int] = []
        for number in sorted(recomputed, reverse=True):
            made |= recomputed[number]
            if recomputed[number] & wanted:
                repeated.append(number)
                wanted |= self._forward[number].reads
        return wanted & ~made & self._model.keepable, tuple(reversed(repeated))

    def repeating_groups(self, places: Places) -> list[tuple[bool, tuple[tuple[int, int], ...]]]:
        """What runs again together: whether it is a recomputed cell, and (forward operation, storages it drops)."""
        return self._groups(places, self.kept(places)[1])

    def _groups(self, places: Places, repeated: Sequence[int]) -> list[tuple[bool, tuple[tuple[int, int], ...]]]:
        """A recomputed cell runs again as a whole; so do primitives that read each other's results."""
        dropped: dict[int, int] = {}
        for place in places:
            for number, storages in self._dropped[place]:
                dropped[number] = dropped.get(number, 0) | storages
        again, groups = set(repeated), []
        for place in places:
            if place in self._inside:
                groups.append((True, [number for number in self.operations_of(place) if number in again]))
                again.difference_update(groups[-1][1])
        groups.extend((False, members) for members in self._joined(sorted(again)))
        return [
            (is_cell, tuple((number, dropped[number]) for number in members)) for is_cell, members in groups if members
        ]

    def operations_of(self, place: str) -> tuple[int, ...]:
        """Forward operations of which a place drops results."""
        return tuple(number for number, _ in self._dropped[place])

    def option(self, places: Places) -> RecomputeOption:
        """Evaluate one choice in full."""
        kept, repeated = self.kept(places)
        own = kept & ~self._model.shared
        forward = self._peaks(self._forward, kept, self._forward_reads_outside())
        backward = self._peaks(self._backward_timeline(places, repeated), 0, kept | self._model.arriving)
        beyond, nothing = self._model.bytes_of(kept), np.zeros((1, self._model.sizes.shape[1]))
        return RecomputeOption(
            places=places,
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

    def _add_primitives(self) -> Iterable[str]:
        """Add what primitives drop: all of their results."""
        from_nothing = made_from_nothing(self._forward)
        found: dict[str, list[int]] = defaultdict(list)
        for number, operation in enumerate(self._forward):
            if operation.held_as and operation.held_as not in self._inside:
                found[operation.held_as].append(number)
        for path, numbers in found.items():
            seen = dict.fromkeys(view for number in numbers for view in self._forward[number].views)
            # MindSpore does not compile these beside recomputed cells ("multiple U Monad"); their own cells will do.
            if any(self._forward[number].reads_weight for number in numbers):
                continue
            # The compiler makes equal masks once for all units, and what recomputed primitives read each other's
            # results runs again together: with the mask, those of all units at the first of their backwards.
            if any(number in from_nothing for number in numbers):
                continue
            if "" not in seen and not any(self._forward[number].writes & self._model.results for number in numbers):
                self._dropped[path] = tuple((number, self._forward[number].writes) for number in numbers)
                self.views[path] = tuple(seen)
                yield path
        for views in self.views.values():
            for view in views:
                self._dropped.setdefault(view, ())

    def _add_communication(self) -> Iterable[str]:
        """Add what communication of cells drops: collectives that exchange shares, and cuts and joins around them."""
        inserted = [
            number
            for number, operation in enumerate(self._forward)
            if operation.cell and not operation.held_as and operation.primitive in EXCHANGES | SHARES
        ]
        for cell in dict.fromkeys(self._forward[number].cell for number in inserted):
            groups = self._joined([number for number in inserted if self._forward[number].cell == cell])
            exchanging = [
                number
                for group in groups
                if any(self._forward[number].primitive in EXCHANGES for number in group)
                for number in group
            ]
            if exchanging:
                place = cell + COMMUNICATION
                self._dropped[place] = tuple(
                    (number, self._forward[number].writes & ~self._model.results) for number in sorted(exchanging)
                )
                yield place

    def _joined(self, numbers: Sequence[int]) -> list[list[int]]:
        """Forward operations in groups, those in one that read each other's results."""
        groups: list[tuple[int, int, list[int]]] = []
        for number in numbers:
            operation = self._forward[number]
            reads, writes, members = operation.reads, operation.writes, [number]
            apart = []
            for group in groups:
                if group[1] & operation.reads or group[0] & operation.writes:
                    reads, writes, members = reads | group[0], writes | group[1], [*group[2], *members]
                else:
                    apart.append(group)
            groups = [*apart, (reads, writes, members)]
        return [sorted(members) for _, _, members in groups]

    def _forward_reads_outside(self) -> int:
        reads = made = 0
        for operation in self._forward:
            reads |= operation.reads & ~made
            made |= operation.writes
        return reads

    def _backward_timeline(self, places: Places, repeated: Sequence[int]) -> list[ModelOperation]:
        """Backward operations; what runs again does so just before the first operation that reads what it dropped."""
        waiting = [
            ([number for number, _ in members], sum({1 << bit for _, bits in members for bit in indices_of(bits)}))
            for _, members in self._groups(places, repeated)
        ]
        timeline: list[ModelOperation] = []

        def run_again(reads: int) -> None:
            for entry in [entry for entry in waiting if entry[1] & reads]:
                if entry in waiting:
                    waiting.remove(entry)
                    for number in entry[0]:
                        run_again(self._forward[number].reads & ~entry[1])
                    timeline.extend(self._forward[number] for number in entry[0])

        for operation in self._backward:
            run_again(operation.reads)
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


def absolute_places(places: Places, unit_cells: Sequence[str]) -> Places:
    """The same in the network; paths given are relative to a unit."""
    paths = []
    for place in places:
        path, colon, kind = place.partition(":")
        number, _, rest = path.partition(".")
        paths.append(".".join(part for part in (unit_cells[int(number)], rest) if part) + colon + kind)
    return tuple(paths)


def relative_places(
    cells: Iterable[str], primitives: Iterable[str], communication: Iterable[str], unit_cells: Sequence[str]
) -> Places:
    """Cells, primitives and cells with recomputed communication, given by their paths in the network, as places."""
    return (
        *(relative_cell(path, unit_cells) or path for path in (*cells, *primitives)),
        *((relative_cell(path, unit_cells) or path) + COMMUNICATION for path in communication),
    )


def _enclosing(cell: str) -> list[str]:
    """A cell and all cells around it inside the unit; operations of no cell of the unit have none."""
    if not cell:
        return []
    parts = cell.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def evaluate_rows(rows: NDArray[np.float64], monomials: NDArray[np.float64]) -> float:
    """Largest value of several polynomials."""
    return float((rows @ monomials).max())
