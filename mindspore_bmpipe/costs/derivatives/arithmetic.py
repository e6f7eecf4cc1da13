"""Element-wise operations of several operands, which broadcast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.graph.cell_graph import TensorRef


def _negative(site: Site, gradient: TensorRef) -> TensorRef:
    return site.like("Neg", (gradient,), gradient)


def add(site: Site) -> Iterator[Contribution]:
    """Sum: the gradient itself; nothing is kept."""
    for operand in site.arguments[:2]:
        if site.needs(operand):
            yield operand, site.reduced(site.gradient(), operand)


def add_scaled(site: Site) -> Iterator[Contribution]:
    """Sum or difference with the second operand scaled by a number."""
    first, second, alpha = site.arguments[0], site.arguments[1], site.value(2, 1)
    if site.needs(first):
        yield first, site.reduced(site.gradient(), first)
    if site.needs(second):
        gradient = site.gradient()
        if site.primitive == "SubExt":
            gradient = _negative(site, gradient)
        if alpha != 1:
            gradient = site.like("Muls", (gradient, alpha), gradient)
        yield second, site.reduced(gradient, second)


def subtract(site: Site) -> Iterator[Contribution]:
    """Difference: nothing is kept."""
    first, second = site.arguments[:2]
    if site.needs(first):
        yield first, site.reduced(site.gradient(), first)
    if site.needs(second):
        yield second, site.reduced(_negative(site, site.gradient()), second)


def multiply(site: Site) -> Iterator[Contribution]:
    """Product: each operand is kept for the other's gradient."""
    first, second = site.arguments[:2]
    for operand, other in ((first, second), (second, first)):
        if site.needs(operand):
            yield operand, site.reduced(site.like("Mul", (other, site.gradient()), site.outputs[0]), operand)


def divide(site: Site) -> Iterator[Contribution]:
    """Quotient x / y: keeps y, and the result for the gradient of y."""
    first, second = site.arguments[:2]
    result, gradient = site.outputs[0], site.gradient()
    if site.needs(first):
        yield first, site.reduced(site.like("Div", (gradient, second), result), first)
    if site.needs(second):
        ratio = site.like("Div", (result, second), result)
        yield second, site.reduced(site.like("Mul", (_negative(site, gradient), ratio), result), second)


def real_divide(site: Site) -> Iterator[Contribution]:
    """Quotient by the older primitive, which divides the gradient first."""
    first, second = site.arguments[:2]
    result = site.outputs[0]
    scaled = site.like("RealDiv", (site.gradient(), second), result)
    if site.needs(first):
        yield first, site.reduced(scaled, first)
    if site.needs(second):
        yield second, site.reduced(_negative(site, site.like("Mul", (scaled, result), result)), second)


def scale(site: Site) -> Iterator[Contribution]:
    """A tensor times, or divided by, a number."""
    operand, number = site.arguments[:2]
    if site.needs(operand):
        yield operand, site.like(site.primitive, (site.gradient(), number), operand)


def shift(site: Site) -> Iterator[Contribution]:
    """A tensor plus, or minus, a number."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.gradient()


def power(site: Site) -> Iterator[Contribution]:
    """Power x ** y: keeps x for its own gradient; the gradient of y keeps x, y and the result."""
    base, exponent = site.arguments[:2]
    result, gradient = site.outputs[0], site.gradient()
    if site.needs(exponent):
        zero = site.like("Equal", (base, 0), result, "bool")
        positive = site.like("GreaterEqual", (exponent, 0), exponent, "bool")
        harmless = site.like("LogicalAnd", (zero, positive), result, "bool")
        grown = site.like("Mul", (result, site.like("Log", (base,), base)), result)
        yield (
            exponent,
            site.reduced(
                site.like("Mul", (gradient, site.like("Select", (harmless, 0, grown), result)), result), exponent
            ),
        )
    if site.needs(base):
        lower: Any = exponent
        if isinstance(exponent, TensorRef):
            lower = site.like("SubScalar", (exponent, 1.0, 1), exponent)
        slope = site.like("Mul", (exponent, site.like("Pow", (base, lower), result)), result)
        yield base, site.reduced(site.like("Mul", (slope, gradient), result), base)


def power_of_number(site: Site) -> Iterator[Contribution]:
    """Power x ** c for a number c: keeps x."""
    operand, exponent = site.arguments[0], site.value(1)
    if site.needs(operand):
        lower = site.like("PowTensorScalar", (operand, exponent - 1), operand)
        slope = site.like("Muls", (lower, exponent), operand)
        yield operand, site.like("Mul", (site.gradient(), slope), operand)


def number_to_power(site: Site) -> Iterator[Contribution]:
    """Power c ** x for a number c: keeps the result."""
    operand, result = site.arguments[1], site.outputs[0]
    if site.needs(operand):
        yield operand, site.like("Mul", (site.gradient(), site.like("Muls", (result, None), result)), result)


def extremum(site: Site) -> Iterator[Contribution]:
    """The larger or the smaller of two: keeps both, and shares the gradient where they are equal."""
    first, second = site.arguments[:2]
    result, gradient = site.outputs[0], site.gradient()
    before, after = ("Less", "Greater") if site.primitive == "Maximum" else ("Greater", "Less")
    zeros = site.like("FillV2", (site.shape(result), 0), result)
    tie = site.like("Equal", (first, second), result, "bool")
    shared = site.like("Select", (tie, site.like("Divs", (gradient, 2.0), result), gradient), result)
    for operand, loses in ((first, before), (second, after)):
        if site.needs(operand):
            lost = site.like(loses, (first, second), result, "bool")
            yield operand, site.reduced(site.like("Select", (lost, zeros, shared), result), operand)


def select(site: Site) -> Iterator[Contribution]:
    """Where the condition holds x, else y: keeps the condition."""
    condition, first, second = site.arguments[:3]
    result, gradient = site.outputs[0], site.gradient()
    zeros = site.like("ZerosLikeExt", (gradient, None), gradient)
    for operand, choices in ((first, (gradient, zeros)), (second, (zeros, gradient))):
        if site.needs(operand):
            yield operand, site.reduced(site.like("Select", (condition, *choices), result), operand)


def masked_fill(site: Site) -> Iterator[Contribution]:
    """A tensor with a value written where a mask holds: keeps the mask."""
    operand, mask, value = site.arguments[:3]
    if site.needs(operand):
        filled = site.like("MaskedFill", (site.gradient(), mask, 0), site.outputs[0])
        yield operand, site.reduced(filled, operand)
    if site.needs(value):
        zeros = site.like("ZerosLikeExt", (site.gradient(), None), site.outputs[0])
        picked = site.like("Select", (mask, site.gradient(), zeros), site.outputs[0])
        yield value, site.reduced(picked, value)


def add_many(site: Site) -> Iterator[Contribution]:
    """A sum of tensors of equal shape."""
    for operand in site.operands:
        if site.needs(operand):
            yield operand, site.gradient()


def bias_add(site: Site) -> Iterator[Contribution]:
    """A tensor plus a bias along the channels."""
    operand, bias = site.arguments[:2]
    if site.needs(bias):
        yield bias, site.like("BiasAddGrad", (site.gradient(), *site.arguments[2:]), bias)
    if site.needs(operand):
        yield operand, site.gradient()


def interpolate(site: Site) -> Iterator[Contribution]:
    """Mixture x + w * (y - x) for a weight w that needs no gradient."""
    first, second, weight = site.arguments[:3]
    result, gradient = site.outputs[0], site.gradient()
    towards = site.like("Mul", (gradient, weight), result)
    if site.needs(second):
        yield second, site.reduced(towards, second)
    if site.needs(first):
        rest = site.like("Sub", (1, weight), weight) if isinstance(weight, TensorRef) else None
        yield first, site.reduced(site.like("Mul", (gradient, rest), result), first)


def safe_divide(site: Site) -> Iterator[Contribution]:
    """Quotient x / y that is zero where x is zero: keeps both."""
    first, second = site.arguments[:2]
    result, gradient = site.outputs[0], site.gradient()
    if site.needs(second):
        opposite = site.like("Neg", (first,), first)
        slope = site.like("Xdivy", (opposite, site.like("Square", (second,), second)), result)
        yield second, site.reduced(site.like("Mul", (slope, gradient), result), second)
    if site.needs(first):
        present = site.like("NotEqual", (first, 0), first, "bool")
        slope = site.like("Xdivy", (site.like("Cast", (present, site.kind(first).dtype), first), second), result)
        yield first, site.reduced(site.like("Mul", (slope, gradient), result), first)


def remainder(site: Site) -> Iterator[Contribution]:
    """Remainder x - y * floor(x / y): keeps both for the gradient of y."""
    first, second = site.arguments[:2]
    result, gradient = site.outputs[0], site.gradient()
    if site.needs(second):
        quotient = site.like("FloorDiv", (first, second), result)
        yield second, site.reduced(site.like("Mul", (_negative(site, gradient), quotient), result), second)
    if site.needs(first):
        yield first, site.reduced(gradient, first)


def vanishing(site: Site) -> Iterator[Contribution]:
    """Steps have slope zero; MindSpore carries the zeros on as a constant, so what lies before them still runs."""
    for operand in site.operands[-1:]:
        if site.needs(operand):
            yield operand, site.constant(site.kind(operand))


RULES: dict[str, Rule] = {
    "Add": add,
    "AddExt": add_scaled,
    "AddN": add_many,
    "AddScalar": shift,
    "BiasAdd": bias_add,
    "Div": divide,
    "Divs": scale,
    "Floor": vanishing,
    "FloorDiv": vanishing,
    "Lerp": interpolate,
    "MaskedFill": masked_fill,
    "Maximum": extremum,
    "Minimum": extremum,
    "Mod": remainder,
    "Mul": multiply,
    "Muls": scale,
    "Pow": power,
    "PowScalarTensor": number_to_power,
    "PowTensorScalar": power_of_number,
    "RealDiv": real_divide,
    "Select": select,
    "Sub": subtract,
    "SubExt": add_scaled,
    "SubScalar": shift,
    "Trunc": vanishing,
    "Xdivy": safe_divide,
}
