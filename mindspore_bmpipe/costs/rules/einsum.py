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
    """The products that lead to the result."""
    operands, result, sizes = _named(view, view.inputs)
    return moved(view, Engine.MATMUL, _flops(operands, result, sizes))


def gradient(view: OperationView) -> Work:
    """For each operand the products of the result's gradient with all other operands."""
    operands, result, sizes = _named(view, view.inputs[:-1])
    flops: Any = 0
    for number, operand in enumerate(operands):
        others = [axes for place, axes in enumerate(operands) if place != number]
        flops = flops + _flops([result, *others], operand, sizes)
    return moved(view, Engine.MATMUL, flops)


def _flops(operands: Sequence[Axes], result: Axes, sizes: dict[str, Any]) -> Any:
    """A multiply-add for every combination of the axes of both factors; of one operand each element is added once."""
    if len(operands) == 1:
        return _count(operands[0], sizes)
    flops: Any = 0
    held = operands[0]
    for number, operand in enumerate(operands[1:], start=2):
        both = tuple(dict.fromkeys((*held, *operand)))
        flops = flops + FLOPS_PER_MULTIPLY_ADD * _count(both, sizes)
        later = {axis for axes in (result, *operands[number:]) for axis in axes}
        held = tuple(axis for axis in both if axis in later)
    return flops


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
