"""Convolutions and pooling over images (b, c, h, w)."""

from __future__ import annotations

from collections.abc import Iterator

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.costs.derivatives.elementwise import kernel
from mindspore_bmpipe.graph.cell_graph import TensorRef
from mindspore_bmpipe.graph.mindir import TensorType


def convolution(site: Site) -> Iterator[Contribution]:
    """Keeps operand and weight, each for the gradient of the other."""
    operand, weight = site.arguments[:2]
    gradient = site.gradient()
    if site.needs(weight):
        arguments = (gradient, operand, site.shape(weight))
        yield weight, site.emit("Conv2DBackpropFilter", arguments, site.kind(weight), keep_attributes=True)
    if site.needs(operand):
        arguments = (gradient, weight, site.shape(operand))
        yield operand, site.emit("Conv2DBackpropInput", arguments, site.kind(operand), keep_attributes=True)


def windows(site: Site) -> Iterator[Contribution]:
    """Windows of an image side by side: each element gets the sum of its copies."""
    operand = site.arguments[0]
    if site.needs(operand):
        arguments = (site.gradient(), site.shape(operand)[-2:])
        yield operand, site.emit("Col2Im", arguments, site.kind(operand), keep_attributes=True)


def resize(site: Site) -> Iterator[Contribution]:
    """An image at another size: the kernel reads the operand, for its shape."""
    operand = site.arguments[0]
    if site.needs(operand):
        yield operand, site.like("ResizeBilinearGrad", (site.gradient(), operand, *site.arguments[2:]), operand)


def convolution_extended(site: Site) -> Iterator[Contribution]:
    """One kernel gives the gradients of operand, weight and bias."""
    operand, weight, bias = site.arguments[:3]
    further = (bias if not isinstance(bias, TensorRef) else site.shape(bias), *site.arguments[3:])
    kinds = [site.kind(operand), site.kind(weight), TensorType(site.shape(weight)[:1], site.kind(weight).dtype)]
    results = site.emit_many("ConvolutionGrad", (site.gradient(), operand, weight, *further), kinds, True)
    for target, result in zip((operand, weight, bias), results, strict=True):
        if site.needs(target):
            yield target, result


def max_pool_with_places(site: Site) -> Iterator[Contribution]:
    """Keeps the operand and where its largest elements were."""
    operand = site.arguments[0]
    if site.needs(operand):
        arguments = (operand, site.gradient(), site.outputs[1])
        yield operand, site.emit("MaxPoolGradWithArgmaxV2", arguments, site.kind(operand), keep_attributes=True)


def average_pool_of_volumes(site: Site) -> Iterator[Contribution]:
    """Only the shape of the operand is needed."""
    operand = site.arguments[0]
    if site.needs(operand):
        arguments = (site.shape(operand), site.gradient())
        yield operand, site.emit("AvgPool3DGrad", arguments, site.kind(operand), keep_attributes=True)


RULES: dict[str, Rule] = {
    "AvgPool": kernel("AvgPoolGrad", "xyg+"),
    "AvgPool3D": average_pool_of_volumes,
    "Conv2D": convolution,
    "Conv2DExt": convolution_extended,
    "Im2Col": windows,
    "MaxPool": kernel("MaxPoolGrad", "xyg"),
    "MaxPoolWithArgmaxV2": max_pool_with_places,
    "ResizeBilinearV2": resize,
}
