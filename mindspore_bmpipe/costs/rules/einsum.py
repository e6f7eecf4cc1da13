"""Products named by their axes, and their gradients.

Operands are multiplied one after the other; an axis that neither the result nor a later operand names is summed over in
the product that is the last to have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore_bmpipe.costs.rules.base import FLOPS_PER_MULTIPLY_ADD, Engine, OperationView, Rule, Work, moved
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.mindir import TensorType

Axes = tuple[str, ...]
"""Names of the axes of a tensor: letters, and ``...`` with a number from the right for those that an ellipsis holds."""


def product(view: OperationView) -> Work:
    """The products that lead to the result; one operand is summed, every element once."""
    operands, result, sizes = _named(view, view.inputs)
    if len(operands) == 1:
        return moved(view, Engine.VECTOR, _count(operands[0], sizes))
    return moved(view, Engine.MATMUL, sum(_products(operands, result, sizes), start=0))


def gradient(view: OperationView) -> Work:
    """Two products for each of forward; of those of forward all but the last are made again, for what they gave."""
    operands, result, sizes = _named(view, view.inputs[:-1])
    products = _products(operands, result, sizes)
    if not products:
        return moved(view, Engine.VECTOR, 0)
    return moved(view, Engine.MATMUL, 2 * sum(products, start=0) + sum(products[:-1], start=0))


def _products(operands: Sequence[Axes], result: Axes, sizes: dict[str, Any]) -> list[Any]:
    """Flops of each product: a multiply-add for every combination of the axes of both factors."""
    products: list[Any] = []
    held = operands[0]
    for number, operand in enumerate(operands[1:], start=2):
        both = tuple(dict.fromkeys((*held, *operand)))
        products.append(FLOPS_PER_MULTIPLY_ADD * _count(both, sizes))
        later = {axis for axes in (result, *operands[number:]) for axis in axes}
        held = tuple(axis for axis in both if axis in later)
    return products


def _count(axes: Axes, sizes: dict[str, Any]) -> Any:
    count: Any = 1
    for axis in dict.fromkeys(axes):
        count = count * sizes[axis]
    return count


def _named(view: OperationView, kinds: Sequence[TensorType]) -> tuple[list[Axes], Axes, dict[str, Any]]:
    """Axes of the operands and of the result by the equation, and the size of each."""
    equation = view.attributes.get("equation")
    if not isinstance(equation, str) or equation.count(",") + 1 != len(kinds):
        raise InputError(
            f"{view.primitive}: equation {equation!r} does not name {len(kinds)} operands, so its work is unknown; "
            "write the product with matmul"
        )
    text, arrow, wanted = equation.replace(" ", "").partition("->")
    operands: list[Axes] = []
    sizes: dict[str, Any] = {}
    for letters, kind in zip(text.split(","), kinds, strict=True):
        axes = _spelled(letters, len(kind.shape))
        operands.append(axes)
        for axis, size in zip(axes, kind.shape, strict=True):
            if sizes.get(axis, 1) == 1:  # an axis of one is repeated
                sizes[axis] = size
    if arrow:
        open_axes = max((sum(axis.startswith("...") for axis in axes) for axes in operands), default=0)
        result = _spelled(wanted, len(wanted.replace("...", "")) + (open_axes if "..." in wanted else 0))
    else:
        everything = [axis for axes in operands for axis in axes]
        result = tuple(axis for axis in sizes if axis.startswith("...") or everything.count(axis) == 1)
    return operands, result, sizes


def _spelled(letters: str, rank: int) -> Axes:
    """One name for each axis of a tensor of ``rank`` axes."""
    before, dots, after = letters.partition("...")
    count = rank - len(before) - len(after)
    held = tuple(f"...{place}" for place in range(count, 0, -1)) if dots else ()
    return (*before, *held, *after)


RULES: dict[str, Rule] = {"Einsum": product, "EinsumGrad": gradient}
