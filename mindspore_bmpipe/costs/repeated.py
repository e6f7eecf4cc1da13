"""What the second part of a split backward (`W`, the gradients of weights) runs again of a unit.

`B` hands `W` the gradients of the results of matrix products, and nothing that it has recomputed. So `W` runs again
what was dropped and its products read. A recomputed cell waits for the gradient of its result, so that it does not run
too early, and a recomputed primitive for what the gradients of its result are made from; `W` makes these gradients
again, from the gradients that arrive at the unit on, with whatever was dropped on that way. Where a gradient arrives
from a later unit of the chunk, that unit's gradients are made again in full.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspore_bmpipe.costs.recompute import Places, RecomputeModel
from mindspore_bmpipe.costs.unit_model import UnitModel, indices_of


def repeated_by_weights(
    model: UnitModel, recompute: RecomputeModel, places: Places, hands_on: bool = False
) -> frozenset[int]:
    """Operations of a unit that `W` runs beside those that make gradients of weights.

    Args:
        model: the unit.
        recompute: what may be recomputed of it.
        places: what is.
        hands_on: whether `W` also needs the gradient that the unit hands to the one before it.
    """
    return _Repeated(model, recompute.repeating_groups(places), hands_on).operations


class _Repeated:
    def __init__(
        self, model: UnitModel, groups: Sequence[tuple[bool, tuple[tuple[int, int], ...]]], hands_on: bool
    ) -> None:
        self._model = model
        self._backward = range(model.forward_count, len(model.operations))
        self._made_by = {
            storage: number for number in self._backward for storage in indices_of(model.operations[number].writes)
        }
        self._dropped: dict[int, tuple[int, int]] = {}
        """Storage -> operation that makes it again, and its group."""
        for index, (_, members) in enumerate(groups):
            for number, storages in members:
                for storage in indices_of(storages):
                    self._dropped[storage] = number, index
        self._groups = groups
        own = frozenset(model.weight_gradients)
        made = sum(model.operations[number].writes for number in own)
        self._found: set[int] = set(own)
        for number in own:
            for storage in indices_of(model.operations[number].reads & ~made):
                if storage in self._dropped:
                    self._need(storage)
        if hands_on:
            for storage in indices_of(model.leaving):
                self._need(storage)
        self.operations = frozenset(self._found - own)

    def _need(self, storage: int) -> None:
        number, group = self._dropped.get(storage, (self._made_by.get(storage), None))
        if number is None or number in self._found:
            return
        self._found.add(number)
        reads = self._model.operations[number].reads | (0 if group is None else self._waits_for(group))
        for other in indices_of(reads):
            self._need(other)

    def _gradients(self, number: int) -> int:
        """What an operation of backward reads of backward; gradients that arrive are there."""
        reads = self._model.operations[number].reads
        return sum(1 << storage for storage in indices_of(reads) if storage in self._made_by)

    def _waits_for(self, group: int) -> int:
        """Gradients without which a group does not run again."""
        is_cell, members = self._groups[group]
        operations = self._model.operations
        if is_cell:
            dropped = 0
            for _, storages in members:
                dropped |= storages
            first = next((number for number in self._backward if operations[number].reads & dropped), None)
            return 0 if first is None else self._gradients(first)
        for _, storages in reversed(members):
            for cell, (of_cell, others) in enumerate(self._groups):
                if of_cell and cell != group and any(operations[other].reads & storages for other, _ in others):
                    return self._waits_for(cell)
            readers = [other for other in self._backward if operations[other].reads & storages]
            if readers:
                gradients = 0
                for reader in readers:
                    gradients |= self._gradients(reader)
                return gradients
        return 0
