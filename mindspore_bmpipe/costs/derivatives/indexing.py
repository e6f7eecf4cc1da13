"""Operations that pick elements by tensors of places: those are kept."""

from __future__ import annotations

from collections.abc import Iterator

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.graph.cell_graph import TensorRef
from mindspore_bmpipe.graph.mindir import TensorType


def gather(site: Site) -> Iterator[Contribution]:
    """Rows of a table along one axis: gradients of equal rows are summed."""
    table, places = site.arguments[:2]
    if not site.needs(table):
        return
    kind = site.kind(table)
    axis = site.value(2, 0) % len(kind.shape)
    gradient = site.gradient()
    if axis == 0:
        yield table, site.like("UnsortedSegmentSum", (gradient, places, kind.shape[0]), table)
        return
    # The kernel sums along the first axes only.
    shape, rank = site.shape(gradient), len(site.shape(places))
    others = (*range(axis), *range(axis + rank, len(shape)))
    order = (*range(axis, axis + rank), *others)
    turned = site.emit("Transpose", (gradient, order), TensorType(tuple(shape[i] for i in order), kind.dtype))
    summed = TensorType((kind.shape[axis], *(shape[i] for i in others)), kind.dtype)
    rows = site.emit("UnsortedSegmentSum", (turned, places, kind.shape[axis]), summed)
    back = (*range(1, axis + 1), 0, *range(axis + 1, len(kind.shape)))
    yield table, site.like("Transpose", (rows, back), table)


def gather_elements(site: Site) -> Iterator[Contribution]:
    """One element per place along an axis: the kernel reads the operand, for its shape."""
    operand, axis, places = site.arguments[:3]
    if site.needs(operand):
        yield operand, site.like("GatherDGradV2", (operand, axis, places, site.gradient()), operand)


def gather_points(site: Site) -> Iterator[Contribution]:
    """Slices at points of several axes."""
    operand, places = site.arguments[:2]
    if site.needs(operand):
        yield operand, site.like("ScatterNd", (places, site.gradient(), site.shape(operand)), operand)


def embedding(site: Site) -> Iterator[Contribution]:
    """Rows of a table by token."""
    places, table = site.arguments[:2]
    if site.needs(table):
        arguments = (site.gradient(), places, site.shape(table)[0], site.value(2), site.value(5, False))
        yield table, site.like("EmbeddingDenseBackward", arguments, table)


def index_select(site: Site) -> Iterator[Contribution]:
    """Slices along one axis."""
    operand, axis, places = site.arguments[:3]
    if site.needs(operand):
        zeros = site.like("Zeros", (site.shape(operand), site.kind(operand).dtype), operand)
        yield operand, site.like("InplaceIndexAddExt", (zeros, axis, places, site.gradient(), 1), operand)


def index(site: Site) -> Iterator[Contribution]:
    """Elements at places of several axes."""
    operand, places = site.arguments[:2]
    if site.needs(operand):
        zeros = site.like("Zeros", (site.shape(operand), site.kind(operand).dtype), operand)
        yield operand, site.like("InplaceIndexPut", (zeros, places, site.gradient(), True), operand)


def scatter_add(site: Site) -> Iterator[Contribution]:
    """A tensor with updates added at places."""
    operand, places, updates = site.arguments[:3]
    if site.needs(updates):
        yield updates, site.like("GatherNdExt", (site.gradient(), places), updates)
    if site.needs(operand):
        yield operand, site.gradient()


def scatter_update(site: Site) -> Iterator[Contribution]:
    """A tensor with updates in place of what it had: those elements get no gradient."""
    operand, places, updates = site.arguments[:3]
    if site.needs(updates):
        yield updates, site.like("GatherNd", (site.gradient(), places), updates)
    if site.needs(operand):
        gradient = site.gradient()
        if site.primitive == "TensorScatterUpdate":
            zeros = site.constant(site.kind(updates))
            gradient = site.like("TensorScatterUpdate", (gradient, places, zeros), operand)
        yield operand, gradient


def send_to_experts(site: Site) -> Iterator[Contribution]:
    """Rows repeated and sorted by expert: keeps the order."""
    operand, chosen = site.arguments[:2]
    if site.needs(operand):
        shape = site.shape(chosen)
        copies = shape[1] if len(shape) > 1 else 1
        arguments = (site.gradient(), site.outputs[1], copies, *site.arguments[3:])
        yield operand, site.like("MoeTokenPermuteGrad", arguments, operand)


def return_from_experts(site: Site) -> Iterator[Contribution]:
    """Weighted sum of a token's rows: keeps the rows, their order and the weights."""
    rows, order, weights, *further = site.arguments
    weighted = isinstance(weights, TensorRef)
    kinds = [site.kind(rows), site.kind(weights) if weighted else TensorType((0,), site.kind(rows).dtype)]
    found = site.emit_many("MoeTokenUnpermuteGrad", (rows, site.gradient(), order, weights, *further), kinds)
    for operand, gradient in zip((rows, weights), found, strict=True):
        if site.needs(operand):
            yield operand, gradient


RULES: dict[str, Rule] = {
    "Embedding": embedding,
    "Gather": gather,
    "GatherD": gather_elements,
    "GatherNd": gather_points,
    "Index": index,
    "IndexSelect": index_select,
    "InnerMoeTokenUnpermute": return_from_experts,
    "MoeTokenPermute": send_to_experts,
    "ScatterNdUpdate": scatter_update,
    "TensorScatterAdd": scatter_add,
    "TensorScatterUpdate": scatter_update,
}
