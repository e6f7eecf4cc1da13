"""Cost rules of primitives, one module per family.

A primitive is added by naming its rule in the ``RULES`` of the fitting family; a family by adding its module to
:data:`FAMILIES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mindspore_bmpipe.costs.rules import communication, einsum, elementwise, matmul, movement, reduction
from mindspore_bmpipe.costs.rules.base import OperationView, Rule, Work
from mindspore_bmpipe.costs.rules.movement import VIEWS
from mindspore_bmpipe.errors import UnknownPrimitiveError

FAMILIES = (matmul, einsum, elementwise, reduction, movement, communication)
"""Modules that hold rules."""


def _collect() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for family in FAMILIES:
        for primitive, rule in family.RULES.items():
            assert primitive not in rules, f"{primitive} has two rules"
            rules[primitive] = rule
    return rules


_RULES = _collect()


def known_primitives() -> frozenset[str]:
    """All primitives that have a rule."""
    return frozenset(_RULES)


def work_of(view: OperationView, assume_elementwise: bool = False) -> Work:
    """Work of one operation; unknown primitives were refused by :func:`require_known` unless assumed element-wise."""
    rule = _RULES.get(view.primitive)
    if rule is None:
        assert assume_elementwise, f"{view.primitive} has no rule"
        rule = elementwise.one_per_element
    return rule(view)


def require_known(primitives: Iterable[str]) -> None:
    """Refuse primitives without a rule.

    Args:
        primitives: primitive of every operation; how often one occurs is reported.

    Raises:
        UnknownPrimitiveError: some have none; all of them are named.
    """
    counts = Counter(name for name in primitives if name not in _RULES)
    if counts:
        listed = ", ".join(f"{name} ({count} times)" for name, count in sorted(counts.items()))
        raise UnknownPrimitiveError(
            f"no cost rule for {listed}; add one under costs/rules, or accept that they are taken as element-wise "
            "with --assume-elementwise (assume_elementwise=True), which the plan records",
            dict(counts),
        )


def unknown_primitives(primitives: Iterable[str]) -> dict[str, int]:
    """Primitives without a rule and how often each occurs."""
    return dict(Counter(name for name in primitives if name not in _RULES))


__all__ = ["FAMILIES", "VIEWS", "OperationView", "Rule", "Work", "known_primitives", "require_known",
           "unknown_primitives", "work_of"]  # fmt: skip
