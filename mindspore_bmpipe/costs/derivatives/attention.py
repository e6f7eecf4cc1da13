"""Fused attention: keeps its operands, the statistics of the softmax and the result, but no scores."""

from __future__ import annotations

from collections.abc import Iterator

from mindspore_bmpipe.costs.derivatives.base import Contribution, Rule, Site
from mindspore_bmpipe.graph.cell_graph import TensorRef
from mindspore_bmpipe.graph.mindir import TensorType

_FIRST_TENSORS = 3
_MASKS_END = 7
"""Query, key and value come first, then the shift and three masks, then lengths and settings."""


def flash_attention(site: Site) -> Iterator[Contribution]:
    """One kernel gives the gradients of query, key, value and the positional shift."""
    operands = site.arguments[:_FIRST_TENSORS]
    masks, settings = site.arguments[_FIRST_TENSORS:_MASKS_END], site.arguments[_MASKS_END:]
    result = len(site.outputs) - 1
    arguments = (*operands, site.gradient(result), *masks, *site.outputs, *settings)
    shift = masks[0]
    targets = (*operands, shift)
    empty = TensorType((0,), site.kind(operands[0]).dtype)
    kinds = [site.kind(target) if isinstance(target, TensorRef) else empty for target in targets]
    gradients = site.emit_many("FlashAttentionScoreGrad", arguments, kinds, keep_attributes=True)
    for target, gradient in zip(targets, gradients, strict=True):
        if site.needs(target):
            yield target, gradient


RULES: dict[str, Rule] = {"FlashAttentionScore": flash_attention}
