"""What the cost of one unit needs to know of the whole graph: memory behind tensors, and who reads it where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mindspore_bmpipe.costs.rules import VIEWS
from mindspore_bmpipe.graph.cell_graph import CellGraph, Phase, read_tensors
from mindspore_bmpipe.graph.units import Unit

_SUMS = frozenset({"AddN", "Add"})


@dataclass(frozen=True)
class GraphIndex:
    """Lookup tables over one graph and its units."""

    graph: CellGraph
    """The graph."""
    storage: tuple[int, ...]
    """For every tensor, the tensor whose memory it uses: itself, or what a chain of views started from."""
    unit_of: tuple[int, ...]
    """For every operation, its unit."""
    forward_readers: dict[int, frozenset[int]]
    """Storage -> units whose forward operations read it."""
    backward_readers: dict[int, frozenset[int]]
    """Storage -> units whose backward operations read it."""
    gradient_sums: frozenset[int]
    """Operations that add up the gradients which several units have for one weight. A pipeline runs none of them: every
    unit's gradient is added to the buffer of its own stage."""

    def is_static(self, storage: int) -> bool:
        """Whether a storage is a weight or a constant, which is there whatever micro-batch runs."""
        tensor = self.graph.tensors[storage]
        return tensor.parameter is not None or tensor.is_constant

    def made_by(self, storage: int) -> int | None:
        """The operation that makes a storage; ``None`` for inputs, weights and constants."""
        return self.graph.tensors[storage].producer


def index_graph(graph: CellGraph, units: Sequence[Unit]) -> GraphIndex:
    """Build the lookup tables."""
    storage = list(range(len(graph.tensors)))
    unit_of = [0] * len(graph.operations)
    for number, unit in enumerate(units):
        for index in (*unit.forward, *unit.backward):
            unit_of[index] = number
    forward: dict[int, set[int]] = defaultdict(set)
    backward: dict[int, set[int]] = defaultdict(set)
    sums = _gradient_sums(graph, unit_of)
    for index, operation in enumerate(graph.operations):
        if index in sums:
            continue
        reads = read_tensors(operation)
        if operation.primitive in VIEWS and reads and operation.outputs:
            storage[operation.outputs[0]] = storage[reads[0]]
            continue
        readers = forward if operation.phase is Phase.FORWARD else backward
        for tensor in reads:
            readers[storage[tensor]].add(unit_of[index])
    return GraphIndex(
        graph,
        tuple(storage),
        tuple(unit_of),
        {key: frozenset(value) for key, value in forward.items()},
        {key: frozenset(value) for key, value in backward.items()},
        sums,
    )


def _gradient_sums(graph: CellGraph, unit_of: Sequence[int]) -> frozenset[int]:
    """Sums over the backward of several units that nothing reads: only gradients of weights are not read any more."""
    read = {tensor for operation in graph.operations for tensor in read_tensors(operation)}
    found = set()
    for index, operation in enumerate(graph.operations):
        if operation.phase is Phase.BACKWARD and operation.primitive in _SUMS and read.isdisjoint(operation.outputs):
            makers = [graph.tensors[tensor].producer for tensor in read_tensors(operation)]
            if len({None if maker is None else unit_of[maker] for maker in makers}) > 1:
                found.add(index)
    return frozenset(found)
