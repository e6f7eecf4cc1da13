"""Reductions over axes, softmax, and running sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.graph.cell_graph import TensorRef
from mindspore_bmpipe.graph.mindir import TensorType


def reduced_axes(site: Site, position: int = 1) -> tuple[int, ...]:
    """The axes an operation reduces, none negative; all of them when it names none."""
    rank = len(site.shape(site.arguments[0]))
    given = site.value(position)
    if isinstance(given, int):
        given = (given,)
    if not given:
        return tuple(range(rank))
    return tuple(sorted(axis % rank for axis in given))


def _with_reduced_axes(site: Site, source: TensorRef, axes: tuple[int, ...]) -> TensorRef:
    """A reduced tensor with an axis of one for every reduced one."""
    shape = site.shape(site.arguments[0])
    return site.shaped(source, tuple(1 if axis in axes else size for axis, size in enumerate(shape)))


def _spread(site: Site, axes: tuple[int, ...]) -> TensorRef:
    """The gradient repeated along the reduced axes."""
    operand = site.arguments[0]
    gradient = site.gradient()
    dtype = site.kind(operand).dtype
    if site.kind(gradient).dtype != dtype:
        gradient = site.like("Cast", (gradient, dtype), gradient, dtype)
    shape = site.shape(operand)
    repeats = tuple(size if axis in axes else 1 for axis, size in enumerate(shape))
    return site.like("Tile", (_with_reduced_axes(site, gradient, axes), repeats), operand)


def total(site: Site) -> Iterator[Contribution]:
    """A sum: nothing is kept."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, _spread(site, reduced_axes(site))


def mean(site: Site) -> Iterator[Contribution]:
    """A mean: nothing is kept."""
    operand = site.arguments[0]
    if site.needs(operand):
        axes = reduced_axes(site)
        count: Any = 1
        for axis in axes:
            count = count * site.shape(operand)[axis]
        division = "Divs" if site.primitive == "MeanExt" else "RealDiv"
        yield operand, site.like(division, (_spread(site, axes), count), operand)


def extremum(site: Site) -> Iterator[Contribution]:
    """The largest or smallest element: keeps operand and result, and shares the gradient among equals."""
    operand = site.arguments[0]
    if not site.needs(operand):
        return
    axes = reduced_axes(site)
    dtype = site.kind(operand).dtype
    gradient = _with_reduced_axes(site, site.gradient(), axes)
    result = _with_reduced_axes(site, site.outputs[0], axes)
    hit = site.like("Cast", (site.like("Equal", (result, operand), operand, "bool"), dtype), operand)
    share = site.like("Div", (gradient, site.like("SumExt", (hit, axes, True, dtype), result)), result)
    yield operand, site.like("Mul", (share, hit), operand)


def extremum_with_index(site: Site) -> Iterator[Contribution]:
    """The largest or smallest element and its place: keeps the place."""
    operand = site.arguments[0]
    if not site.needs(operand):
        return
    values = next(
        number for number, output in enumerate(site.outputs) if site.kind(output).dtype == site.kind(operand).dtype
    )
    axis = site.value(1)
    place, gradient = site.outputs[1 - values], site.gradient(values)
    zeros = site.like("Zeros", (site.shape(operand), site.kind(operand).dtype), operand)
    shape = list(site.shape(operand))
    shape[axis] = 1
    if not site.value(2, False):
        place = site.emit("ExpandDims", (place, axis), TensorType(tuple(shape), site.kind(place).dtype))
        gradient = site.emit("ExpandDims", (gradient, axis), TensorType(tuple(shape), site.kind(gradient).dtype))
    yield operand, site.like("InplaceScatterSrc", (zeros, axis, place, gradient), operand)


def deviation(site: Site) -> Iterator[Contribution]:
    """Standard deviation and mean of axes: keeps the operand and both results."""
    operand = site.arguments[0]
    if not site.needs(operand):
        return
    axes = reduced_axes(site)
    spread, centre = (_with_reduced_axes(site, output, axes) for output in site.outputs[:2])
    gradient = _with_reduced_axes(site, site.gradient(0), axes)
    away = site.like("Mul", (site.like("Sub", (operand, centre), operand), gradient), operand)
    scaled = site.like("Div", (site.like("Div", (away, spread), operand), None), operand)
    shared = site.gradient(1)
    if site.has_gradient(1):
        shared = site.like("Div", (_with_reduced_axes(site, shared, axes), None), centre)
    yield operand, site.like("Add", (scaled, shared), operand)


def vector_norm(site: Site) -> Iterator[Contribution]:
    """The 2-norm over axes: keeps operand and result."""
    operand = site.arguments[0]
    if not site.needs(operand):
        return
    axes = reduced_axes(site, 2)
    gradient = _with_reduced_axes(site, site.gradient(), axes)
    result = _with_reduced_axes(site, site.outputs[0], axes)
    direction = site.like("Div", (operand, result), operand)
    empty = site.like("Equal", (result, 0), result, "bool")
    safe = site.like("InplaceMaskedFillTensor", (direction, empty, 0), operand)
    yield operand, site.like("Mul", (gradient, safe), operand)


def softmax(site: Site) -> Iterator[Contribution]:
    """Keeps the result."""
    operand = site.arguments[0]
    if site.needs(operand):
        axis = site.value(1, -1)
        axis = axis[0] if isinstance(axis, tuple) else axis
        yield operand, site.like("SoftmaxBackward", (site.gradient(), site.outputs[0], axis), operand)


def log_softmax(site: Site) -> Iterator[Contribution]:
    """Keeps the result."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.like("LogSoftmaxGrad", (site.outputs[0], site.gradient(), site.arguments[1]), operand)


def running_sum(site: Site) -> Iterator[Contribution]:
    """The same sum from the other end: nothing is kept."""
    operand, gradient = site.arguments[0], site.gradient()
    if not site.needs(operand):
        return
    if site.primitive == "CumSum":
        exclusive, backwards = site.value(2, False), site.value(3, False)
        yield operand, site.like("CumSum", (gradient, site.arguments[1], exclusive, not backwards), operand)
        return
    axis = (site.value(1),)
    turned = site.like("ReverseV2", (gradient, axis), operand)
    summed = site.like("CumsumExt", (turned, *site.arguments[1:]), operand)
    yield operand, site.like("ReverseV2", (summed, axis), operand)


def running_product(site: Site) -> Iterator[Contribution]:
    """Keeps the operand and repeats the product."""
    operand = site.arguments[0]
    if site.needs(operand):
        again = site.like("CumProd", site.arguments, operand)
        weighted = site.like("Mul", (again, site.gradient()), operand)
        summed = site.like("CumSum", (weighted, site.arguments[1], False, True), operand)
        yield operand, site.like("RealDiv", (summed, operand), operand)


def product(site: Site) -> Iterator[Contribution]:
    """Keeps the operand: the product of all others is that of those before times that of those behind."""
    operand = site.arguments[0]
    if not site.needs(operand):
        return
    shape, dtype = site.shape(operand), site.kind(operand).dtype
    # Where it names no axis, MindSpore takes the running products along an axis of one.
    axes = reduced_axes(site) if site.value(1) or isinstance(site.value(1), int) else ()
    order = (*axes, *(axis for axis in range(len(shape)) if axis not in axes))
    turned = tuple(shape[axis] for axis in order)
    first = operand if order == tuple(range(len(shape))) else _turned(site, operand, order)
    flat = site.shaped(first, (_count(turned[: len(axes)]), _count(turned[len(axes) :])))
    before, behind = (site.like("CumProd", (flat, 0, True, backwards), flat) for backwards in (False, True))
    others = site.shaped(site.like("Mul", (before, behind), flat), turned)
    back = tuple(order.index(axis) for axis in range(len(shape)))
    if first is not operand:
        others = site.emit("Transpose", (others, back), TensorType(shape, dtype))
    yield operand, site.like("Mul", (others, _spread(site, reduced_axes(site))), operand)


def _turned(site: Site, source: TensorRef, order: tuple[int, ...]) -> TensorRef:
    kind = site.kind(source)
    return site.emit("Transpose", (source, order), TensorType(tuple(kind.shape[axis] for axis in order), kind.dtype))


def _count(shape: tuple[Any, ...]) -> Any:
    count: Any = 1
    for size in shape:
        count = count * size
    return count


RULES: dict[str, Rule] = {
    "ArgMaxWithValue": extremum_with_index,
    "ArgMinWithValue": extremum_with_index,
    "CumProd": running_product,
    "CumSum": running_sum,
    "CumsumExt": running_sum,
    "LinalgVectorNorm": vector_norm,
    "LogSoftmax": log_softmax,
    "LogSoftmaxExt": log_softmax,
    "MaxDim": extremum_with_index,
    "MeanExt": mean,
    "MinDim": extremum_with_index,
    "ReduceMax": extremum,
    "ReduceMean": mean,
    "ReduceMin": extremum,
    "ReduceProd": product,
    "ReduceStd": deviation,
    "ReduceSum": total,
    "Softmax": softmax,
    "SumExt": total,
}
