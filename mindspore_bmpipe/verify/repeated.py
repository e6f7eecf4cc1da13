"""Which forward operations of a traced network a plan has run again in the backward."""

from __future__ import annotations

from collections.abc import Iterator

from mindspore_bmpipe.costs.graph_index import GraphIndex
from mindspore_bmpipe.costs.rules import VIEWS
from mindspore_bmpipe.graph.cell_graph import Phase, is_inserted_exchange, primitive_path, read_tensors
from mindspore_bmpipe.plan import UnitPlan


def repeated_operations(index: GraphIndex, unit: int, planned: UnitPlan) -> frozenset[int]:
    """Forward operations that run again: those whose results backward, or another that runs again, has to find.

    What leaves a recomputed cell is kept, tensor by tensor: an operation whose result leaves runs again all the same
    if backward reads another of its results (the mask of a dropout, the mean of a layer norm). A recomputed primitive
    keeps nothing, and neither does recomputed communication.
    """
    operations = index.graph.operations
    cells, primitives = planned.recompute_cells, planned.recompute_primitives
    around: dict[int, str] = {}
    alone: set[int] = set()
    for number, operation in enumerate(operations):
        if operation.phase is not Phase.FORWARD or index.unit_of[number] != unit:
            continue
        outer = next((cell for cell in upwards(operation.cell) if cell in cells), None)
        if outer is not None:
            around[number] = outer
        if primitive_path(operation) in primitives or (
            operation.cell in planned.recompute_communication and is_inserted_exchange(operation)
        ):
            alone.add(number)
    leaving: set[int] = set()
    wanted: set[int] = set()
    for number, operation in enumerate(operations):
        storages = {index.storage[tensor] for tensor in read_tensors(operation)}
        if operation.phase is Phase.BACKWARD:
            wanted |= storages
        elif operation.primitive not in VIEWS:
            for storage in storages:
                maker = index.made_by(storage)
                if maker in around and maker not in alone and around.get(number) != around[maker]:
                    leaving.add(storage)
    again: set[int] = set()
    for number in sorted({*around, *alone}, reverse=True):
        operation = operations[number]
        if operation.primitive in VIEWS:
            continue
        if any(index.storage[output] in wanted - leaving for output in operation.outputs):
            again.add(number)
            wanted |= {index.storage[tensor] for tensor in read_tensors(operation)}
    return frozenset(again)


def upwards(cell: str) -> Iterator[str]:
    """The cell, and all around it up to the network."""
    while cell:
        yield cell
        cell = cell.rpartition(".")[0]
    yield ""
