"""Writes into weights, as counters and running averages are: what is read afterwards depends on what was written."""

from __future__ import annotations

from collections.abc import Iterator

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site


def assign(site: Site) -> Iterator[Contribution]:
    """A new value: MindSpore gives it zeros as its gradient, whoever reads the weight afterwards."""
    value = site.arguments[1]
    if site.needs(value):
        yield value, site.constant(site.kind(value))


def accumulate(site: Site) -> Iterator[Contribution]:
    """A value added to, or taken from, a weight."""
    value = site.arguments[1]
    if site.needs(value):
        gradient = site.gradient()
        yield value, site.like("Neg", (gradient,), gradient) if site.primitive == "AssignSub" else gradient


RULES: dict[str, Rule] = {
    "Assign": assign,
    "AssignAdd": accumulate,
    "AssignSub": accumulate,
}
