"""What the cost of one unit needs to know of the whole graph: memory behind tensors, and who reads it where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mindspore_bmpipe.costs.rules import VIEWS
from mindspore_bmpipe.graph.cell_graph import CellGraph, Phase, read_tensors
from mindspore_bmpipe.graph.units import Unit


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
    for index, operation in enumerate(graph.operations):
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
    )
