"""Weights that a unit's own cells hold, and what the compiler can do with their gradients."""

from __future__ import annotations

from mindspore_bmpipe.costs.rules import VIEWS
from mindspore_bmpipe.graph.cell_graph import CellGraph, read_tensors
from mindspore_bmpipe.graph.units import Unit

SPLIT_PRODUCT = "MatMul"
"""The operation whose weight gradients the compiler puts off where it splits backwards; `BatchMatMul` is none."""
SAME_VALUE = frozenset({"Cast", *VIEWS})
"""Operations that give the same values in another type or shape."""


def held_weights(graph: CellGraph, unit: Unit) -> tuple[str, ...]:
    """Names of the weights that a unit's own cells hold; those it is given in a call are not among them."""
    return tuple(dict.fromkeys(name for cell in graph.cells if cell.path in unit.cells for name in cell.parameters))


def product_weights(graph: CellGraph, unit: Unit) -> frozenset[str]:
    """Names of trainable weights of the unit that are factors of matrix products."""
    held = {name for name in held_weights(graph, unit) if graph.parameters[name].trainable}
    products = (graph.operations[number] for number in unit.forward)
    return frozenset(
        name
        for product in products
        if product.primitive == SPLIT_PRODUCT
        for tensor in read_tensors(product)
        if (name := weight_behind(graph, tensor)) in held and name is not None
    )


def weight_behind(graph: CellGraph, tensor: int) -> str | None:
    """The weight that a tensor is, perhaps in another type or shape; `None` if it is none."""
    while True:
        name, producer = graph.tensors[tensor].parameter, graph.tensors[tensor].producer
        if name is not None or producer is None or graph.operations[producer].primitive not in SAME_VALUE:
            return name
        tensor = next(iter(read_tensors(graph.operations[producer])))
