"""Cost model of one unit: work of its operations, and what backward must find in memory, as polynomials.

The unit's own operations are numbered forward first, then backward, views left out. *Storages* are pieces of memory
(a tensor and all its views). Sets of storages are integers used as bit masks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspore_bmpipe.costs.collectives import collective_ms
from mindspore_bmpipe.costs.graph_index import GraphIndex
from mindspore_bmpipe.costs.hardware import Hardware
from mindspore_bmpipe.costs.held_weights import SAME_VALUE, SPLIT_PRODUCT
from mindspore_bmpipe.costs.polynomial import Basis
from mindspore_bmpipe.costs.rules import VIEWS, work_of
from mindspore_bmpipe.costs.rules.base import Engine, OperationView, Work, argument_values, size_bytes
from mindspore_bmpipe.graph.cell_graph import Operation, Phase, primitive_path, read_tensors
from mindspore_bmpipe.graph.mindir import TensorType
from mindspore_bmpipe.graph.units import Unit


@dataclass(frozen=True)
class ModelOperation:
    """One operation of a unit, with costs."""

    primitive: str
    """Primitive type."""
    phase: Phase
    """Forward or backward."""
    cell: str
    """Cell it belongs to, relative to the unit: ``0`` for the unit's first cell, ``0.attention`` for one inside."""
    engine: Engine
    """Where its arithmetic runs."""
    dtype: str
    """Element type its arithmetic is done in."""
    reads: int
    """Storages read, as a bit mask."""
    writes: int
    """Storages made, as a bit mask."""
    ranks: tuple[int, ...] = ()
    """Ranks it exchanges data with, itself included; empty for all but collectives."""
    rounds: int = 0
    """Messages that it sends one after the other in one ring."""
    held_as: str = ""
    """Path of the primitive that a cell holds for it, relative to the unit (``0.attention.softmax``); empty for
    functional forms and for what the compiler adds."""
    reads_weight: bool = False
    """Whether one of its operands is a weight."""
    views: tuple[str, ...] = ()
    """The same of forward views of its results; empty text for a view that no cell holds a primitive for."""


@dataclass(frozen=True)
class UnitModel:
    """Everything the costs of a unit follow from; equal units share one model."""

    basis: Basis
    """Monomials of all polynomials below."""
    operations: tuple[ModelOperation, ...]
    """Forward operations in order, then backward operations in order."""
    forward_count: int
    """How many of them are forward."""
    flops: NDArray[np.float64]
    """Flops of every operation, shape (operations, monomials)."""
    bytes_moved: NDArray[np.float64]
    """Bytes read and written by every operation, shape (operations, monomials)."""
    sent_bytes: NDArray[np.float64]
    """Bytes that every operation sends to other ranks of one ring, shape (operations, monomials)."""
    sizes: NDArray[np.float64]
    """Bytes of every storage, shape (storages, monomials)."""
    storage_names: tuple[str, ...]
    """What each storage is, for people: primitive and cell."""
    storage_types: tuple[TensorType, ...]
    """Shape and element type of each storage; dimensions are numbers or expressions."""
    keepable: int
    """Storages that forward leaves for backward: results of forward operations and inputs of the unit."""
    shared: int
    """What a stage keeps once, not once per unit: inputs of the network that several units read, and what is made from
    nothing for operations that run again."""
    arriving: int
    """Gradients that other units' backward leaves for this one."""
    results: int
    """Results of forward operations that later units read, and the network's own result."""
    leaving: int
    """Results of backward that other units read."""
    discarded: int
    """Results of backward that nothing reads: gradients of weights, added to their buffers at once."""
    held: int
    """What gradients of earlier units' weights are made from. The compiler makes these gradients last, so this stays to
    the end of the backward of all units before, if the weight is on another stage."""

    def operation_ms(self, hardware: Hardware, sizes: Mapping[str, int]) -> NDArray[np.float64]:
        """Time of every operation, shape (operations,).

        The largest of arithmetic, memory and link time, plus the launch (roofline model). Nothing runs beside a
        collective.
        """
        values = self.basis.values(sizes)
        flops, moved = self.flops @ values, self.bytes_moved @ values
        rates = np.array(
            [
                hardware.rate(operation.engine.value, operation.dtype) if operation.engine is not Engine.NONE else 1.0
                for operation in self.operations
            ]
        )
        busy = np.maximum(flops / rates, moved / hardware.bytes_per_ms)
        busy = np.maximum(busy, self.link_ms(hardware, sizes))
        return np.where(busy > 0, busy + hardware.launch_ms, 0.0)

    def link_ms(self, hardware: Hardware, sizes: Mapping[str, int]) -> NDArray[np.float64]:
        """Time that every operation exchanges data with other ranks (alpha-beta model), shape (operations,)."""
        volumes = self.volume_bytes @ self.basis.values(sizes)
        times = np.zeros(len(self.operations))
        for number, operation in enumerate(self.operations):
            if operation.rounds:
                times[number] = collective_ms(hardware, operation.primitive, operation.ranks, float(volumes[number]))
        return times

    @property
    def volume_bytes(self) -> NDArray[np.float64]:
        """Bytes of the whole tensor that every collective handles, shape (operations, monomials)."""
        # In a ring every message is one nth of it.
        shares = np.array([len(item.ranks) / item.rounds if item.rounds else 0.0 for item in self.operations])
        return self.sent_bytes * shares[:, None]

    @property
    def is_collective(self) -> NDArray[np.bool_]:
        """Which operations exchange data with other ranks, shape (operations,)."""
        return np.array([operation.rounds > 0 for operation in self.operations], dtype=bool)

    @property
    def forward_flops(self) -> NDArray[np.float64]:
        """Polynomial of all forward flops."""
        return self.flops[: self.forward_count].sum(axis=0)

    @property
    def backward_flops(self) -> NDArray[np.float64]:
        """Polynomial of all backward flops."""
        return self.flops[self.forward_count :].sum(axis=0)

    @property
    def weight_gradients(self) -> tuple[int, ...]:
        """Operations that make the gradients of weights used in a `MatMul`, and bring them to their final type.

        Just these MindSpore's compiler runs apart where a schedule splits the backward.
        """
        backward = range(self.forward_count, len(self.operations))
        products = (number for number in backward if self.operations[number].primitive == SPLIT_PRODUCT)
        return tuple(sorted({number for product in products for number in self._to_a_weight(product)}))

    def _to_a_weight(self, product: int) -> list[int]:
        """A product of backward and what passes its result on, if that is the gradient of a weight; else nothing."""
        chain = [product]
        while not self.operations[chain[-1]].writes & self.discarded:
            made = self.operations[chain[-1]].writes
            readers = [number for number, operation in enumerate(self.operations) if operation.reads & made]
            if len(readers) != 1 or self.operations[readers[0]].primitive not in SAME_VALUE:
                return []
            chain.extend(readers)
        return chain

    def bytes_of(self, storages: int) -> NDArray[np.float64]:
        """Polynomial of the bytes of a set of storages."""
        return self.sizes[indices_of(storages)].sum(axis=0)


def indices_of(mask: int) -> list[int]:
    """Positions of the set bits."""
    return [position for position in range(mask.bit_length()) if mask >> position & 1]


def made_from_nothing(operations: Sequence[ModelOperation]) -> frozenset[int]:
    """Operations that depend on nothing but constants, as those that make a causal mask; weights aside."""
    made = 0
    found = []
    for number, operation in enumerate(operations):
        if not operation.reads & ~made and not operation.reads_weight:
            found.append(number)
            made |= operation.writes
    return frozenset(found)


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


def relative_cell(cell: str, unit_cells: Sequence[str]) -> str:
    """Path of a cell relative to its unit, `0.attention` inside the unit's first cell; empty if it is in none."""
    for number, path in enumerate(unit_cells):
        if cell == path:
            return str(number)
        if not path or cell.startswith(path + "."):
            return f"{number}.{cell[len(path) + 1 :] if path else cell}"
    return ""


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
