"""Builds the cost model of a unit from the graph, and tells which units have the same one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from mindspore_bmpipe.costs.graph_index import GraphIndex
from mindspore_bmpipe.costs.held_weights import SAME_VALUE
from mindspore_bmpipe.costs.polynomial import Basis
from mindspore_bmpipe.costs.rules import VIEWS, work_of
from mindspore_bmpipe.costs.rules.base import OperationView, Work, argument_values, size_bytes
from mindspore_bmpipe.costs.unit_model import ModelOperation, UnitModel, made_from_nothing, relative_cell
from mindspore_bmpipe.graph.cell_graph import Operation, Phase, primitive_path, read_tensors
from mindspore_bmpipe.graph.units import Unit


def unit_signature(index: GraphIndex, unit: Unit) -> Hashable:
    """Equal for units whose models are equal: same operations on same types, wired the same way."""
    local: dict[int, int] = {}
    tensors = index.graph.tensors
    number = index.unit_of[(unit.forward or unit.backward)[0]]
    rows: list[Hashable] = []
    for position in (*unit.forward, *unit.backward):
        if position in index.gradient_sums:
            continue
        operation = index.graph.operations[position]
        reads = tuple(
            (local.setdefault(index.storage[t], len(local)), tensors[t].type, index.is_static(index.storage[t]))
            for t in read_tensors(operation)
        )
        outputs = tuple(
            (local.setdefault(index.storage[t], len(local)), tensors[t].type, _is_read_outside(index, t, number))
            for t in operation.outputs
        )
        rows.append(
            (operation.primitive, operation.phase, relative_cell(operation.cell, unit.cells), reads, outputs,
             _attribute_key(operation))
        )  # fmt: skip
    shared = frozenset(place for storage, place in local.items() if _is_shared(index, storage))
    held = frozenset(place for storage, place in local.items() if storage in _held(index, number))
    return (tuple(rows), shared, held)


def build_unit_model(index: GraphIndex, unit: Unit, symbols: Sequence[str], assume_elementwise: bool) -> UnitModel:
    """Build the model of one unit.

    Args:
        index: tables of the graph the unit belongs to.
        unit: the unit.
        symbols: names of the graph's symbols.
        assume_elementwise: price primitives without a rule as element-wise.
    """
    return _Builder(index, unit, symbols, assume_elementwise).build()


class _Builder:
    def __init__(self, index: GraphIndex, unit: Unit, symbols: Sequence[str], assume_elementwise: bool) -> None:
        self._index = index
        self._unit = unit
        self._assume_elementwise = assume_elementwise
        self._number = index.unit_of[(unit.forward or unit.backward)[0]]
        self._basis = Basis(sorted(symbols))
        self._views = self._forward_views()
        self._local: dict[int, int] = {}
        self._sizes: list[tuple[tuple[int, float], ...]] = []

    def build(self) -> UnitModel:
        graph = self._index.graph
        operations: list[ModelOperation] = []
        flops: list[tuple[tuple[int, float], ...]] = []
        moved: list[tuple[tuple[int, float], ...]] = []
        sent: list[tuple[tuple[int, float], ...]] = []
        forward_count = 0
        for position in (*self._unit.forward, *self._unit.backward):
            operation = graph.operations[position]
            if operation.primitive in VIEWS or position in self._index.gradient_sums:
                continue
            work = work_of(self._view(operation), self._assume_elementwise)
            operations.append(self._operation(operation, work))
            sent.append(self._basis.terms(work.traffic.sent_bytes if work.traffic else 0))
            flops.append(self._basis.terms(work.flops))
            moved.append(self._basis.terms(work.read_bytes + work.written_bytes))
            forward_count += operation.phase is Phase.FORWARD
        masks = self._masks()
        masks["shared"] |= _merged(operations[:forward_count], operations[forward_count:])
        return UnitModel(
            basis=self._basis,
            operations=tuple(operations),
            forward_count=forward_count,
            flops=self._basis.matrix(flops),
            bytes_moved=self._basis.matrix(moved),
            sent_bytes=self._basis.matrix(sent),
            sizes=self._basis.matrix(self._sizes),
            storage_names=tuple(self._name(storage) for storage in self._local),
            storage_types=tuple(graph.tensors[storage].type for storage in self._local),
            **masks,
        )

    def _operation(self, operation: Operation, work: Work) -> ModelOperation:
        tensors = self._index.graph.tensors
        kinds = [tensors[t].type.dtype for t in (*operation.outputs, *read_tensors(operation))]
        return ModelOperation(
            primitive=operation.primitive,
            phase=operation.phase,
            cell=relative_cell(operation.cell, self._unit.cells),
            engine=work.engine,
            dtype=kinds[0] if kinds else "float32",
            reads=self._mask(read_tensors(operation)),
            writes=self._mask(operation.outputs),
            ranks=work.traffic.ranks if work.traffic else (),
            rounds=work.traffic.rounds if work.traffic else 0,
            held_as=self._held_as(operation),
            reads_weight=any(tensors[t].parameter is not None for t in read_tensors(operation)),
            views=tuple(dict.fromkeys(view for made in operation.outputs for view in self._views.get(made, ()))),
        )

    def _held_as(self, operation: Operation) -> str:
        held = primitive_path(operation)
        return relative_cell(held, self._unit.cells) if held else ""

    def _forward_views(self) -> dict[int, list[str]]:
        """Storage -> primitives of its forward views."""
        found: dict[int, list[str]] = defaultdict(list)
        for position in self._unit.forward:
            operation = self._index.graph.operations[position]
            if operation.primitive in VIEWS:
                for made in operation.outputs:
                    found[self._index.storage[made]].append(self._held_as(operation))
        return dict(found)

    def _view(self, operation: Operation) -> OperationView:
        tensors = self._index.graph.tensors
        reads = read_tensors(operation)
        kinds = {t: tensors[t].type for t in reads}
        return OperationView(
            primitive=operation.primitive,
            arguments=tuple(argument_values(argument, kinds) for argument in operation.arguments),
            inputs=tuple(kinds[t] for t in reads),
            outputs=tuple(tensors[t].type for t in operation.outputs),
            attributes=operation.attributes,
        )

    def _mask(self, tensors: Sequence[int]) -> int:
        mask = 0
        for tensor in tensors:
            storage = self._index.storage[tensor]
            if self._index.is_static(storage):
                continue
            if storage not in self._local:
                self._local[storage] = len(self._local)
                self._sizes.append(self._basis.terms(size_bytes(self._index.graph.tensors[storage].type)))
            mask |= 1 << self._local[storage]
        return mask

    def _masks(self) -> dict[str, int]:
        keepable = shared = arriving = results = leaving = discarded = held = 0
        behind_late_gradients = _held(self._index, self._number)
        for storage, place in self._local.items():
            bit = 1 << place
            if storage in behind_late_gradients:
                held |= bit
            producer = self._index.made_by(storage)
            own = producer is not None and self._index.unit_of[producer] == self._number
            is_forward = producer is None or self._index.graph.operations[producer].phase is Phase.FORWARD
            readers = self._index.backward_readers.get(storage, frozenset())
            if is_forward:
                keepable |= bit
                if _is_shared(self._index, storage):
                    shared |= bit
                if own and self._leaves_forward(storage):
                    results |= bit
            elif not own:
                arriving |= bit
            elif readers - {self._number}:
                leaving |= bit
            elif not readers:
                discarded |= bit
        return {
            "keepable": keepable,
            "shared": shared,
            "arriving": arriving,
            "results": results,
            "leaving": leaving,
            "discarded": discarded,
            "held": held,
        }

    def _leaves_forward(self, storage: int) -> bool:
        """Whether a forward result is read by another unit's forward, or by nothing at all (the loss)."""
        forward = self._index.forward_readers.get(storage, frozenset())
        anywhere = forward | self._index.backward_readers.get(storage, frozenset())
        return bool(forward - {self._number}) or not anywhere

    def _name(self, storage: int) -> str:
        producer = self._index.made_by(storage)
        if producer is None:
            return "network input"
        operation = self._index.graph.operations[producer]
        return f"{operation.primitive} of {operation.cell or 'the network'}"


def _is_read_outside(index: GraphIndex, tensor: int, unit: int) -> bool:
    storage = index.storage[tensor]
    readers = index.forward_readers.get(storage, frozenset()) | index.backward_readers.get(storage, frozenset())
    return bool(readers - {unit}) or not readers


def _is_shared(index: GraphIndex, storage: int) -> bool:
    """Whether a storage is an input of the network that several units read.

    What a unit makes is not: another stage receives it once for every cell that reads it, and keeps each copy.
    """
    if index.made_by(storage) is not None or index.is_static(storage):
        return False
    return len(index.forward_readers.get(storage, frozenset())) > 1


def _merged(forward: Sequence[ModelOperation], backward: Sequence[ModelOperation]) -> int:
    """Storages that depend on nothing and are kept only for what runs again, such as a mask of scores.

    The compiler makes equal ones once for all units. Those that backward itself reads count for each unit.
    """
    found = 0
    for number in made_from_nothing(forward):
        found |= forward[number].writes
    for operation in backward:
        found &= ~operation.reads
    return found


def _held(index: GraphIndex, unit: int) -> frozenset[int]:
    """Storages read by the operations of a unit that make the gradient of a weight which an earlier unit reads too."""
    operations, tensors = index.graph.operations, index.graph.tensors
    found: set[int] = set()
    for position in index.gradient_sums:
        makers = [tensors[tensor].producer for tensor in read_tensors(operations[position])]
        own = [maker for maker in makers if maker is not None and index.unit_of[maker] == unit]
        if not any(maker is not None and index.unit_of[maker] < unit for maker in makers):
            continue
        while own:
            reads = read_tensors(operations[own[0]])
            if operations[own.pop(0)].primitive in SAME_VALUE:
                own.extend(maker for tensor in reads if (maker := tensors[tensor].producer) is not None)
            else:
                found.update(index.storage[tensor] for tensor in reads if not index.is_static(index.storage[tensor]))
    return frozenset(found)


def _attribute_key(operation: Operation) -> Hashable:
    def freeze(value: Any) -> Hashable:
        if isinstance(value, tuple):
            return tuple(freeze(item) for item in value)
        return value if isinstance(value, (bool, int, float, str, type(None))) else None

    return tuple((name, freeze(value)) for name, value in operation.attributes.items())
