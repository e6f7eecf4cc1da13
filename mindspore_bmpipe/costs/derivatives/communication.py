"""Collectives: MindSpore's gradient of an exchange is the exchange the other way, among the same ranks."""

from __future__ import annotations

from collections.abc import Iterator

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site

_BACK = {
    "AllGather": "ReduceScatter",
    "AllReduce": "AllReduce",
    "AlltoAll": "AlltoAll",
    "ReduceScatter": "AllGather",
}
"""Collective -> its gradient."""


def exchange(site: Site) -> Iterator[Contribution]:
    """A gathered part gets the sum of all ranks' gradients of it; a sum gives its gradient, summed, to every part."""
    operand = site.arguments[0]
    if site.needs(operand):
        kind = site.kind(operand)
        yield operand, site.emit(_BACK[site.primitive], (site.gradient(),), kind, keep_attributes=True)


def exchange_of_parts(site: Site) -> Iterator[Contribution]:
    """Parts along one axis become parts along another: the gradient's are exchanged back."""
    operand = site.arguments[0]
    if site.needs(operand):
        axes = {"split_dim": site.attributes.get("concat_dim"), "concat_dim": site.attributes.get("split_dim")}
        (gradient,) = site.emit_many("AlltoAll", (site.gradient(),), [site.kind(operand)], True, axes)
        yield operand, gradient


RULES: dict[str, Rule] = {**dict.fromkeys(_BACK, exchange), "AlltoAll": exchange_of_parts}
