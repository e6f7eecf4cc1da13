"""Losses that are one primitive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.graph.mindir import TensorType


def negative_log_likelihood(site: Site) -> Iterator[Contribution]:
    """Keeps the log-probabilities, labels, weights and their total."""
    operand, labels, weights = site.arguments[:3]
    if site.needs(operand):
        arguments = (operand, site.gradient(), labels, weights, site.outputs[1], *site.arguments[3:])
        yield operand, site.like("NLLLossGrad", arguments, operand)


def softmax_cross_entropy(site: Site) -> Iterator[Contribution]:
    """The kernel's second result is the gradient but for a factor; that of the labels is taken to be zero."""
    operand, labels = site.arguments[:2]
    if site.needs(labels):
        yield labels, site.constant(site.kind(labels))
    if site.needs(operand):
        kind = site.kind(site.outputs[0])
        column = site.emit("ExpandDims", (site.gradient(), -1), TensorType((*kind.shape, 1), kind.dtype))
        yield operand, site.like("Mul", (site.outputs[1], column), operand)


def sparse_softmax_cross_entropy(site: Site) -> Iterator[Contribution]:
    """The same kernel run again in its gradient form: keeps its operands."""
    operand, labels = site.arguments[:2]
    if site.needs(operand):
        slope = site.like("SparseSoftmaxCrossEntropyWithLogits", (operand, labels), operand)
        yield operand, site.like("Mul", (slope, site.gradient()), operand)


def binary_cross_entropy(site: Site) -> Iterator[Contribution]:
    """Of logits: keeps logits and targets."""
    operand, target = site.arguments[:2]
    gradient = site.gradient()
    if site.needs(target):
        slope = site.like("Mul", (site.like("Neg", (operand,), operand), gradient), operand)
        yield target, site.like("Divs", (slope, _count(site, operand)), target)
    if site.needs(operand):
        arguments = (gradient, operand, target, *site.arguments[2:])
        yield operand, site.like("BinaryCrossEntropyWithLogitsBackward", arguments, operand)


def smooth_absolute(site: Site) -> Iterator[Contribution]:
    """Keeps both operands."""
    first, second = site.arguments[:2]
    for operand, other in ((second, first), (first, second)):
        if site.needs(operand):
            arguments = (operand, other, site.gradient(), *site.arguments[2:])
            yield operand, site.like("SmoothL1LossGrad", arguments, operand)


def divergence(site: Site) -> Iterator[Contribution]:
    """Keeps log-probabilities and target; the target's gradient is taken to be zero."""
    operand, target = site.arguments[:2]
    if site.needs(target):
        yield target, site.constant(site.kind(target))
    if site.needs(operand):
        arguments = (site.gradient(), operand, target)
        yield operand, site.emit("KLDivLossGrad", arguments, site.kind(operand), keep_attributes=True)


def half_square_sum(site: Site) -> Iterator[Contribution]:
    """Half of the sum of squares: keeps the operand."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.like("Mul", (operand, site.gradient()), operand)


def square_sums(site: Site) -> Iterator[Contribution]:
    """A sum of squares for each operand: keeps both."""
    for number, operand in enumerate(site.arguments[:2]):
        if site.needs(operand):
            yield (
                operand,
                site.like("Muls", (site.like("Mul", (site.gradient(number), operand), operand), 2.0), operand),
            )


def _count(site: Site, operand: Any) -> Any:
    count: Any = 1
    for size in site.shape(operand):
        count = count * size
    return count


RULES: dict[str, Rule] = {
    "BCEWithLogitsLoss": binary_cross_entropy,
    "KLDivLoss": divergence,
    "L2Loss": half_square_sum,
    "NLLLoss": negative_log_likelihood,
    "SmoothL1Loss": smooth_absolute,
    "SoftmaxCrossEntropyWithLogits": softmax_cross_entropy,
    "SquareSumAll": square_sums,
    "SparseSoftmaxCrossEntropyWithLogits": sparse_softmax_cross_entropy,
}
