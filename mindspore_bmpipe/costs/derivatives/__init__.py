"""Derivative rules of primitives, one module per family.

Which forward tensors a rule's operations read decides what a stage keeps per micro-batch, so every rule reads what
MindSpore's own gradient of the primitive reads. A primitive is added by naming its rule in the ``RULES`` of the fitting
family; a family by adding its module to :data:`FAMILIES`.
"""

from __future__ import annotations

from mindspore_bmpipe.costs.derivatives import (
    arithmetic,
    attention,
    communication,
    convolution,
    elementwise,
    indexing,
    loss,
    matmul,
    movement,
    normalisation,
    reduction,
    sorting,
    writing,
)
from mindspore_bmpipe.costs.derivatives.base import BACKWARD_SCOPE, Contribution, Rule, Site, Tape

FAMILIES = (
    arithmetic, attention, communication, convolution, elementwise, indexing, loss, matmul, movement, normalisation,
    reduction, sorting, writing,
)  # fmt: skip
"""Modules that hold rules."""

WITHOUT_GRADIENT = frozenset(
    {
        "ArgMaxExt", "Argmax", "Argmin", "BitwiseAnd", "BitwiseOr", "Ceil", "Equal", "Eye", "FillScalar", "FillV2",
        "FullLike", "Generator", "Greater", "GreaterEqual", "IsFinite", "IsInf", "IsNan", "Less", "LessEqual",
        "LogicalAnd", "LogicalNot", "LogicalOr", "LogicalXor", "NotEqual", "OneHot", "OneHotExt", "Ones", "OnesLike",
        "OnesLikeExt", "ReduceAll", "ReduceAny", "Round", "Sign", "StopGradient", "TensorShape", "Zeros", "ZerosLike",
        "ZerosLikeExt",
    }
)  # fmt: skip
"""Primitives whose result no gradient passes, whatever its type."""


def _collect() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for family in FAMILIES:
        for primitive, rule in family.RULES.items():
            assert primitive not in rules, f"{primitive} has two derivative rules"
            assert primitive not in WITHOUT_GRADIENT, f"{primitive} has a derivative rule and none"
            rules[primitive] = rule
    return rules


_RULES = _collect()


def differentiable_primitives() -> frozenset[str]:
    """All primitives that have a derivative rule."""
    return frozenset(_RULES)


def rule_of(primitive: str) -> Rule | None:
    """The derivative rule of a primitive, or ``None``."""
    return _RULES.get(primitive)


__all__ = ["BACKWARD_SCOPE", "FAMILIES", "WITHOUT_GRADIENT", "Contribution", "Rule", "Site", "Tape",
           "differentiable_primitives", "rule_of"]  # fmt: skip
