"""Normalisations: one kernel gives all gradients from the operand and the statistics of forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.graph.cell_graph import TensorRef


def _kernel(
    site: Site, primitive: str, arguments: tuple[Any, ...], operands: Sequence[TensorRef]
) -> Iterator[Contribution]:
    """One kernel whose results are the gradients of ``operands``."""
    results = site.emit_many(primitive, arguments, [site.kind(operand) for operand in operands])
    for operand, result in zip(operands, results, strict=True):
        if site.needs(operand):
            yield operand, result


def layer_norm(site: Site) -> Iterator[Contribution]:
    """Keeps the operand, mean and variance."""
    operand, gain, shift = site.arguments[:3]
    _, centre, variance = site.outputs
    arguments = (operand, site.gradient(), variance, centre, gain, *site.arguments[3:5])
    return _kernel(site, "LayerNormGrad", arguments, (operand, gain, shift))


def layer_norm_extended(site: Site) -> Iterator[Contribution]:
    """Keeps the operand, mean and reciprocal deviation; reads the shift too."""
    operand, shape, gain, shift = site.arguments[:4]
    _, centre, deviation = site.outputs
    operands = tuple(item for item in (operand, gain, shift) if isinstance(item, TensorRef))
    arguments = (site.gradient(), operand, shape, centre, deviation, gain, shift)
    return _kernel(site, "LayerNormGradExt", arguments, operands)


def rms_norm(site: Site) -> Iterator[Contribution]:
    """Keeps the operand and the reciprocal root mean square."""
    operand, gain = site.arguments[:2]
    return _kernel(site, "RmsNormGrad", (site.gradient(), operand, site.outputs[1], gain), (operand, gain))


def group_norm(site: Site) -> Iterator[Contribution]:
    """Keeps the operand, mean and reciprocal deviation."""
    operand, groups, gain, shift = site.arguments[:4]
    _, centre, deviation = site.outputs
    operands = tuple(item for item in (operand, gain, shift) if isinstance(item, TensorRef))
    wanted = (True, True, True)
    return _kernel(
        site, "GroupNormGrad", (site.gradient(), operand, centre, deviation, gain, groups, *wanted), operands
    )


def batch_norm(site: Site) -> Iterator[Contribution]:
    """Keeps the operand and the statistics; the gradients of running averages are constant zeros."""
    operand, gain, shift = site.arguments[:3]
    _, _, variance, centre, deviation = site.outputs
    arguments = (site.gradient(), operand, gain, centre, deviation, variance, *site.arguments[5:7])
    yield from _kernel(site, "BatchNormGrad", arguments, (operand, gain, shift))
    for average in site.arguments[3:5]:
        if site.needs(average):
            yield average, site.constant(site.kind(average))


RULES: dict[str, Rule] = {
    "BatchNorm": batch_norm,
    "GroupNorm": group_norm,
    "LayerNorm": layer_norm,
    "LayerNormExt": layer_norm_extended,
    "RmsNorm": rms_norm,
}
