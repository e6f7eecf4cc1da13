"""Orders along an axis: gradients go back to the places that elements came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.graph.cell_graph import TensorRef
from mindspore_bmpipe.graph.mindir import TensorType


def largest_few(site: Site) -> Iterator[Contribution]:
    """The k largest elements: keeps their places."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, _spread(site, operand, site.outputs[1], site.gradient())


def sort(site: Site) -> Iterator[Contribution]:
    """All elements in order: keeps the operand, of which backward takes the largest again, all of them."""
    operand, gradient = site.arguments[0], site.gradient()
    if not site.needs(operand):
        return
    last = len(site.shape(operand)) - 1
    axis = site.attributes.get("axis", -1) % (last + 1)
    descending = bool(site.attributes.get("descending", False))
    order = list(range(last + 1))
    order[axis], order[last] = order[last], order[axis]

    def turned(source: TensorRef) -> TensorRef:
        kind = site.kind(source)
        if axis == last:
            return source
        shape = tuple(kind.shape[place] for place in order)
        return site.emit("Transpose", (source, tuple(order)), TensorType(shape, kind.dtype))

    def signed(source: TensorRef) -> TensorRef:
        return source if descending else site.like("Neg", (source,), source)

    from_last = signed(turned(operand))
    kind = site.kind(from_last)
    _, places = site.emit_many("TopK", (from_last, kind.shape[-1]), (kind, TensorType(kind.shape, "int32")))
    spread = _spread(site, from_last, places, signed(turned(gradient)))
    yield operand, turned(signed(spread))


def _spread(site: Site, model: TensorRef, places: TensorRef, gradient: TensorRef) -> TensorRef:
    """Elements of a gradient at their places along the last axis of zeros that are shaped like ``model``."""
    shape, taken = site.shape(model), site.shape(places)
    rows: Any = 1
    for size in shape[:-1]:
        rows = rows * size
    kind = TensorType((rows, taken[-1]), site.kind(places).dtype)
    offset = site.emit("Add", (site.shaped(places, kind.shape), None), kind)
    count = rows * taken[-1]
    points = site.shaped(offset, (count, 1))
    elements = rows * shape[-1]
    flat = TensorType((elements,), site.kind(gradient).dtype)
    spread = site.emit("ScatterNd", (points, site.shaped(gradient, (count,)), (elements,)), flat)
    return site.shaped(spread, shape)


def ordered(site: Site) -> Iterator[Contribution]:
    """All elements or the first few in order, by the extended kernels: keeps their places."""
    operand, axis = site.arguments[0], site.value(2 if site.primitive == "TopkExt" else 1, -1)
    if site.needs(operand):
        zeros = site.like("Zeros", (site.shape(operand), site.kind(operand).dtype), operand)
        yield operand, site.like("InplaceScatterSrc", (zeros, axis, site.outputs[1], site.gradient()), operand)


RULES: dict[str, Rule] = {
    "Sort": sort,
    "SortExt": ordered,
    "TopK": largest_few,
    "TopkExt": ordered,
}
