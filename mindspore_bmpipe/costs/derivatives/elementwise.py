"""Element-wise operations of one operand: activations, dropout, casts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.graph.cell_graph import TensorRef
from mindspore_bmpipe.graph.mindir import TensorType


def kernel(primitive: str, reads: str) -> Rule:
    """A rule that is one kernel of MindSpore's.

    Args:
        primitive: the kernel's name.
        reads: its tensor arguments in order: ``g`` for the gradient, ``x`` for the operand, ``y`` for the result, and
            ``+`` last if the forward operation's further arguments follow.
    """

    def rule(site: Site) -> Iterator[Contribution]:
        operand = site.arguments[0]
        if site.needs(operand):
            tensors = {"g": site.gradient(), "x": operand, "y": site.outputs[0]}
            further = site.arguments[1:] if reads.endswith("+") else ()
            arguments = (*(tensors[letter] for letter in reads.rstrip("+")), *further)
            yield operand, site.emit(primitive, arguments, site.kind(operand), keep_attributes=True)

    return rule


def negative(site: Site) -> Iterator[Contribution]:
    """Negation: nothing is kept."""
    if site.needs(site.arguments[0]):
        yield site.arguments[0], site.like("Neg", (site.gradient(),), site.outputs[0])


def exponential(site: Site) -> Iterator[Contribution]:
    """exp(x): keeps the result."""
    if site.needs(site.arguments[0]):
        yield site.arguments[0], site.like("Mul", (site.gradient(), site.outputs[0]), site.outputs[0])


def exponential_minus_one(site: Site) -> Iterator[Contribution]:
    """exp(x) - 1: keeps the result."""
    operand, result = site.arguments[0], site.outputs[0]
    if site.needs(operand):
        slope = site.like("AddScalar", (result, 1.0, 1), result)
        yield operand, site.like("Mul", (site.gradient(), slope), result)


def logarithm(site: Site) -> Iterator[Contribution]:
    """log(x): keeps the operand."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.like("Div", (site.gradient(), operand), operand)


def logarithm_plus_one(site: Site) -> Iterator[Contribution]:
    """log(1 + x): keeps the operand."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.like("Div", (site.gradient(), site.like("AddScalar", (operand, 1.0, 1), operand)), operand)


def reciprocal(site: Site) -> Iterator[Contribution]:
    """1 / x: keeps the result."""
    operand, result = site.arguments[0], site.outputs[0]
    if site.needs(operand):
        opposite = site.like("Neg", (site.gradient(),), result)
        yield operand, site.like("Mul", (opposite, site.like("Mul", (result, result), result)), result)


def square(site: Site) -> Iterator[Contribution]:
    """Square: keeps the operand."""
    operand = site.arguments[0]
    if site.needs(operand):
        doubled = site.like("Muls", (site.like("PowTensorScalar", (operand, 1), operand), 2), operand)
        yield operand, site.like("Mul", (site.gradient(), doubled), operand)


def sine(site: Site) -> Iterator[Contribution]:
    """sin(x): keeps the operand."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.like("Mul", (site.gradient(), site.like("Cos", (operand,), operand)), operand)


def cosine(site: Site) -> Iterator[Contribution]:
    """cos(x): keeps the operand."""
    operand = site.arguments[0]
    if site.needs(operand):
        slope = site.like("Neg", (site.like("Sin", (operand,), operand),), operand)
        yield operand, site.like("Mul", (site.gradient(), slope), operand)


def absolute(site: Site) -> Iterator[Contribution]:
    """abs(x): keeps the operand."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.like("Mul", (site.gradient(), site.like("Sign", (operand,), operand)), operand)


def error_function(site: Site) -> Iterator[Contribution]:
    """erf(x): keeps the operand."""
    operand = site.arguments[0]
    if site.needs(operand):
        exponent = site.like("Neg", (site.like("PowTensorScalar", (operand, 2), operand),), operand)
        slope = site.like("Muls", (site.like("Exp", (exponent,), operand), None), operand)
        yield operand, site.like("Mul", (slope, site.gradient()), operand)


def mish(site: Site) -> Iterator[Contribution]:
    """Mish, x * tanh(softplus(x)): keeps the operand."""
    operand, gradient = site.arguments[0], site.gradient()
    if site.needs(operand):
        inner = site.like("Tanh", (site.like("Softplus", (operand,), operand),), operand)
        outer = site.like("Mul", (inner, gradient), operand)
        bent = site.like("TanhGrad", (inner, site.like("Mul", (operand, gradient), operand)), operand)
        yield operand, site.like("Add", (outer, site.like("SoftplusGrad", (bent, operand), operand)), operand)


def clamp(site: Site) -> Iterator[Contribution]:
    """A tensor limited to a range of numbers: keeps the operand."""
    operand, lowest, highest = site.arguments[0], site.value(1), site.value(2)
    if not site.needs(operand):
        return
    tests: list[TensorRef] = []
    if lowest is not None:
        tests.append(site.like("GreaterEqual", (operand, lowest), operand, "bool"))
    if highest is not None:
        tests.append(site.like("LessEqual", (operand, highest), operand, "bool"))
    inside = site.like("LogicalAnd", tuple(tests), operand, "bool") if len(tests) > 1 else tests[0]
    yield operand, site.like("Select", (inside, site.gradient(), 0), operand)


def clamp_by_tensors(site: Site) -> Iterator[Contribution]:
    """A tensor limited to a range of tensors: keeps all three; each gets the gradient where it is the result."""
    operand, lowest, highest = site.arguments[:3]
    result, gradient = site.outputs[0], site.gradient()
    chosen = (
        (highest, ("Greater", operand, highest), ("Less", highest, lowest), "LogicalOr"),
        (lowest, ("Less", operand, lowest), ("Less", lowest, highest), "LogicalAnd"),
        (operand, ("GreaterEqual", operand, lowest), ("LessEqual", operand, highest), "LogicalAnd"),
    )
    for target, *tests, both in chosen:
        if site.needs(target):
            found = tuple(
                site.emit(name, (x, y), TensorType(_broadcast(site.shape(x), site.shape(y)), "bool"))
                for name, x, y in tests
            )
            where = site.like(both, found, result, "bool")
            yield target, site.reduced(site.like("Select", (where, gradient, 0), result), target)


def _broadcast(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shape of two operands together."""
    rank = max(len(first), len(second))
    pairs = zip(*((1,) * (rank - len(shape)) + shape for shape in (first, second)), strict=True)
    return tuple(y if x == 1 else x for x, y in pairs)


def cast(site: Site) -> Iterator[Contribution]:
    """Another element type: nothing is kept."""
    operand = site.arguments[0]
    if site.needs(operand):
        kind = site.kind(operand)
        same = kind.dtype == site.kind(site.outputs[0]).dtype
        yield operand, site.gradient() if same else site.like("Cast", (site.gradient(), kind.dtype), operand)


def dropout(site: Site) -> Iterator[Contribution]:
    """Random zeros: keeps the mask, which is the second output."""
    operand = site.arguments[0]
    if site.needs(operand):
        further = (site.arguments[1],) if site.primitive == "DropoutExt" else ()
        name = "DropoutGradExt" if site.primitive == "DropoutExt" else "DropoutGrad"
        yield operand, site.like(name, (site.gradient(), site.outputs[1], *further), operand)


def dropout_by_mask(site: Site) -> Iterator[Contribution]:
    """Zeros where a mask of bits, made by another operation, says so: keeps the mask."""
    operand, mask, probability = site.arguments[:3]
    if site.needs(operand):
        yield operand, site.like("DropoutDoMask", (site.gradient(), mask, probability), operand)


def log_sigmoid(site: Site) -> Iterator[Contribution]:
    """log(sigmoid(x)): keeps x and the kernel's second output."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.like("LogSigmoidGrad", (site.gradient(), operand, site.outputs[1]), operand)


RULES: dict[str, Rule] = {
    "Abs": absolute,
    "Atan": kernel("AtanGrad", "xg"),
    "Cast": cast,
    "ClampScalar": clamp,
    "ClampTensor": clamp_by_tensors,
    "Cos": cosine,
    "Dropout": dropout,
    "DropoutDoMask": dropout_by_mask,
    "DropoutExt": dropout,
    "Elu": kernel("EluGrad", "gy"),
    "Erf": error_function,
    "Exp": exponential,
    "Expm1": exponential_minus_one,
    "FastGeLU": kernel("FastGeLUGrad", "gx"),
    "GeLU": kernel("GeLUGrad", "gxy"),
    "GeluExt": kernel("GeluGradExt", "gx+"),
    "HSigmoid": kernel("HSigmoidGrad", "gx"),
    "HSwish": kernel("HSwishGrad", "gx"),
    "Inv": kernel("InvGrad", "yg"),
    "L2Normalize": kernel("L2NormalizeGrad", "xyg"),
    "Log": logarithm,
    "Log1p": logarithm_plus_one,
    "LogSigmoid": log_sigmoid,
    "Mish": mish,
    "Neg": negative,
    "ReLU": kernel("ReluGrad", "gy"),
    "ReLU6": kernel("ReLU6Grad", "gx"),
    "Reciprocal": reciprocal,
    "Rsqrt": kernel("RsqrtGrad", "yg"),
    "SiLU": kernel("SiLUGrad", "gx"),
    "Sigmoid": kernel("SigmoidGrad", "yg"),
    "Sin": sine,
    "Softplus": kernel("SoftplusGrad", "gx"),
    "SoftplusExt": kernel("SoftplusGradExt", "gx+"),
    "Sqrt": kernel("SqrtGrad", "yg"),
    "Square": square,
    "Swiglu": kernel("SwigluGrad", "gx+"),
    "Tanh": kernel("TanhGrad", "yg"),
}
