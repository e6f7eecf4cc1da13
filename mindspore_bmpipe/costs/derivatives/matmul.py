"""Matrix products: each operand is kept for the gradient of the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import TensorRef
from mindspore_bmpipe.graph.mindir import TensorType


def product(site: Site) -> Iterator[Contribution]:
    """Products whose operands may be given transposed: (..., m, k) times (..., k, n)."""
    first, second = site.arguments[:2]
    first_turned, second_turned = _turned(site, "transpose_a", 2), _turned(site, "transpose_b", 3)
    gradient = site.gradient()
    if site.needs(second):
        operands = (
            (gradient, first, True, first_turned) if second_turned else (first, gradient, not first_turned, False)
        )
        yield second, _batched(site, operands, second)
    if site.needs(first):
        operands = (
            (second, gradient, second_turned, True) if first_turned else (gradient, second, False, not second_turned)
        )
        yield first, _batched(site, operands, first)


def _turned(site: Site, name: str, position: int) -> bool:
    return bool(site.attributes[name] if name in site.attributes else site.value(position, False))


def _batched(site: Site, operands: tuple[Any, ...], target: TensorRef) -> TensorRef:
    """A product with the batch axes of the result, summed over those that ``target`` does not have."""
    kind = site.kind(target)
    batch = site.shape(site.outputs[0])[:-2]
    whole = site.emit(site.primitive, operands, TensorType((*batch, *kind.shape[-2:]), kind.dtype))
    return site.reduced(whole, target)


def product_of_any_rank(site: Site) -> Iterator[Contribution]:
    """Products that take vectors, matrices and batches, and broadcast batches."""
    first, second = site.arguments[:2]
    wide_first, wide_second, gradient = _matrices(site)
    if site.needs(second):
        found = _second_gradient(site, wide_first, wide_second, gradient)
        yield second, site.shaped(found, site.shape(second))
    if site.needs(first):
        found = _first_gradient(site, wide_first, wide_second, gradient)
        yield first, site.shaped(found, site.shape(first))


def _matrices(site: Site) -> tuple[TensorRef, TensorRef, TensorRef]:
    """Operands and gradient with an axis of one in place of every missing one."""
    first, second = site.arguments[:2]
    gradient = site.gradient()
    if len(site.shape(second)) == 1:
        second = _expanded(site, second, -1)
        gradient = _expanded(site, gradient, -1)
    if len(site.shape(first)) == 1:
        first = _expanded(site, first, 0)
        gradient = _expanded(site, gradient, -2)
    return first, second, gradient


def _expanded(site: Site, source: TensorRef, axis: int) -> TensorRef:
    kind = site.kind(source)
    shape = list(kind.shape)
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 1)
    return site.emit("ExpandDims", (source, axis), TensorType(tuple(shape), kind.dtype))


def _transposed(site: Site, source: TensorRef) -> TensorRef:
    kind = site.kind(source)
    axes = list(range(len(kind.shape)))
    axes[-1], axes[-2] = axes[-2], axes[-1]
    return site.emit("Transpose", (source, tuple(axes)), TensorType(tuple(kind.shape[i] for i in axes), kind.dtype))


def _rows(site: Site, source: TensorRef) -> TensorRef:
    """A batch of matrices as one matrix of all their rows."""
    shape = site.shape(source)
    rows: Any = 1
    for size in shape[:-1]:
        rows = rows * size
    return site.shaped(source, (rows, shape[-1]))


def _first_gradient(site: Site, first: TensorRef, second: TensorRef, gradient: TensorRef) -> TensorRef:
    dtype = site.kind(first).dtype
    if len(site.shape(first)) == 2 and len(site.shape(second)) > 2:
        # One matrix times many: the sum over the batch becomes part of the product.
        rank = len(site.shape(gradient))
        axes = (rank - 2, *range(rank - 2), rank - 1)
        shape = site.shape(gradient)
        turned = site.emit("Transpose", (gradient, axes), TensorType(tuple(shape[i] for i in axes), dtype))
        flat: Any = 1
        for size in (*shape[:-2], shape[-1]):
            flat = flat * size
        operands = (site.shaped(turned, (shape[-2], flat)), _rows(site, _transposed(site, second)))
        return site.emit(site.primitive, operands, TensorType(site.shape(first), dtype))
    shape = (*site.shape(gradient)[:-2], *site.shape(first)[-2:])
    whole = site.emit(site.primitive, (gradient, _transposed(site, second)), TensorType(shape, dtype))
    return site.reduced(whole, first)


def _second_gradient(site: Site, first: TensorRef, second: TensorRef, gradient: TensorRef) -> TensorRef:
    dtype = site.kind(second).dtype
    if len(site.shape(second)) == 2 and len(site.shape(first)) > 2:
        operands = (_transposed(site, _rows(site, first)), _rows(site, gradient))
        return site.emit(site.primitive, operands, TensorType(site.shape(second), dtype))
    shape = (*site.shape(gradient)[:-2], *site.shape(second)[-2:])
    whole = site.emit(site.primitive, (_transposed(site, first), gradient), TensorType(shape, dtype))
    return site.reduced(whole, second)


def dense(site: Site) -> Iterator[Contribution]:
    """Operand (..., k) times weight (n, k) transposed, plus a bias (n)."""
    operand, weight = site.arguments[:2]
    bias = site.arguments[2] if len(site.arguments) > 2 else None
    rows, gradient = _rows(site, operand), _rows(site, site.gradient())
    biased = isinstance(bias, TensorRef)
    if isinstance(bias, TensorRef) and site.needs(bias):
        yield bias, site.like("SumExt", (gradient, (0,), False, site.kind(bias).dtype), bias)
    if site.needs(weight):
        if biased:
            yield weight, site.like("MatMul", (gradient, rows, True, False), weight)
        else:
            outputs, inputs = site.shape(weight)
            kind = TensorType((inputs, outputs), site.kind(weight).dtype)
            yield weight, _transposed(site, site.emit("MatMulExt", (_transposed(site, rows), gradient), kind))
    if site.needs(operand):
        kind = site.kind(rows)
        flat = (
            site.emit("MatMul", (gradient, weight, False, False), kind)
            if biased
            else site.emit("MatMulExt", (gradient, weight), kind)
        )
        yield operand, site.shaped(flat, site.shape(operand))


def grouped(site: Site) -> Iterator[Contribution]:
    """One operand's rows in groups, each times a matrix of its own: the same kernel gives both gradients."""
    if any(len(operands) != 1 for operands in site.arguments[:2]):
        raise InputError(
            f"{site.primitive}: no derivative rule for lists of several tensors; trace the network itself instead of "
            "an exported file"
        )
    (rows,), (weights,) = site.arguments[:2]
    place = _GROUP_TYPE[site.primitive]
    further, last = site.arguments[2:place], site.arguments[place + 1 :]
    if site.needs(weights):
        operands = (_swapped(site, rows),), (site.gradient(),)
        arguments = (*operands, *further, _GROUPED_INNER, *last)
        yield weights, site.emit(site.primitive, arguments, site.kind(weights), keep_attributes=True)
    if site.needs(rows):
        operands = (site.gradient(),), (_swapped(site, weights),)
        arguments = (*operands, *further, site.arguments[place], *last)
        yield rows, site.emit(site.primitive, arguments, site.kind(rows), keep_attributes=True)


def _swapped(site: Site, source: TensorRef) -> TensorRef:
    kind = site.kind(source)
    shape = (*kind.shape[:-2], kind.shape[-1], kind.shape[-2])
    return site.emit("TransposeExtView", (source, -1, -2), TensorType(shape, kind.dtype))


def einsum(site: Site) -> Iterator[Contribution]:
    """A product named by its axes: one kernel for all operands."""
    operands = site.operands
    kinds = [site.kind(operand) for operand in operands]
    results = site.emit_many("EinsumGrad", (site.arguments[0], site.gradient()), kinds, keep_attributes=True)
    for operand, result in zip(operands, results, strict=True):
        if site.needs(operand):
            yield operand, result


_GROUP_TYPE = {"GroupedMatmul": 9, "GroupedMatmulV2": 9, "GroupedMatmulV4": 13}
"""Place of the argument that says which axis is grouped."""
_GROUPED_INNER = 2
"""Groups along the axis that is summed over."""

RULES: dict[str, Rule] = {
    "BatchMatMul": product,
    "BatchMatMulExt": product_of_any_rank,
    "Dense": dense,
    "Einsum": einsum,
    "GroupedMatmul": grouped,
    "GroupedMatmulV2": grouped,
    "GroupedMatmulV4": grouped,
    "MatMul": product,
    "MatMulExt": product_of_any_rank,
    "Mm": product_of_any_rank,
}
