"""Cost model of one unit: work of its operations, and what backward must find in memory, as polynomials.

The unit's own operations are numbered forward first, then backward, views left out. *Storages* are pieces of memory
(a tensor and all its views). Sets of storages are integers used as bit masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspore_bmpipe.costs.collectives import collective_ms
from mindspore_bmpipe.costs.hardware import Hardware
from mindspore_bmpipe.costs.held_weights import SAME_VALUE, SPLIT_PRODUCT
from mindspore_bmpipe.costs.polynomial import Basis
from mindspore_bmpipe.costs.rules.base import Engine
from mindspore_bmpipe.graph.cell_graph import Phase
from mindspore_bmpipe.graph.mindir import TensorType


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


def relative_cell(cell: str, unit_cells: Sequence[str]) -> str:
    """Path of a cell relative to its unit, `0.attention` inside the unit's first cell; empty if it is in none."""
    for number, path in enumerate(unit_cells):
        if cell == path:
            return str(number)
        if not path or cell.startswith(path + "."):
            return f"{number}.{cell[len(path) + 1 :] if path else cell}"
    return ""
