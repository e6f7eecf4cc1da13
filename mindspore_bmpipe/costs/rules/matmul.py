"""Operations on the matrix engine."""

from __future__ import annotations

from typing import Any

from mindspore_bmpipe.costs.rules.base import (
    FLOPS_PER_MULTIPLY_ADD,
    Engine,
    OperationView,
    Rule,
    Work,
    elements,
    flag,
    moved,
)
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.attention import ATTENTION_LAYOUTS, BAND_MODE, CAUSAL_MODES
from mindspore_bmpipe.graph.mindir import TensorType

FLASH_BACKWARD_FACTOR = 2.5
"""Backward of fused attention does five matrix products where forward does two (arXiv 2205.14135, appendix B)."""


def matrix_product(view: OperationView) -> Work:
    """(..., m, k) x (..., k, n): 2 m k n for every batch; k is read off the first operand."""
    first, result = view.inputs[0], view.outputs[0]
    inner = first.shape[-2] if flag(view, "transpose_a", 2) and len(first.shape) > 1 else first.shape[-1]
    return moved(view, Engine.MATMUL, FLOPS_PER_MULTIPLY_ADD * elements(result) * inner)


def dense(view: OperationView) -> Work:
    """X (..., k) times weight (n, k): 2 k for every element of the result."""
    return moved(view, Engine.MATMUL, FLOPS_PER_MULTIPLY_ADD * elements(view.outputs[0]) * view.inputs[0].shape[-1])


def grouped_product(view: OperationView) -> Work:
    """Each row meets the matrix of its own group only, so groups add no flops; gradients of weights count alike."""
    operands, results = view.arguments[0], view.outputs
    if len(operands) == len(results):
        pairs = zip(operands, results, strict=True)
        products = sum((elements(operand) * result.shape[-1] for operand, result in pairs), start=0)
    elif len(operands) == 1:
        products = sum((elements(result) * operands[0].shape[-1] for result in results), start=0)
    else:
        products = sum((elements(operand) * results[0].shape[-1] for operand in operands), start=0)
    return moved(view, Engine.MATMUL, FLOPS_PER_MULTIPLY_ADD * products)


def convolution(view: OperationView) -> Work:
    """Every element of the result is a dot product over (channels per group, kernel)."""
    weight = view.inputs[1]
    return moved(view, Engine.MATMUL, _products(view.outputs[0], weight))


def convolution_input_gradient(view: OperationView) -> Work:
    """As many products as forward: every output gradient meets every weight of its filter."""
    gradient, weight = view.inputs[0], view.inputs[1]
    return moved(view, Engine.MATMUL, _products(gradient, weight))


def convolution_weight_gradient(view: OperationView) -> Work:
    """As many products as forward: every output gradient meets every input of its window."""
    gradient, weight = view.inputs[0], view.outputs[0]
    return moved(view, Engine.MATMUL, _products(gradient, weight))


def convolution_gradients(view: OperationView) -> Work:
    """Gradients of input, weight and bias at once: twice the products of forward; the sum for the bias is left out."""
    gradient, weight = view.inputs[0], view.inputs[2]
    return moved(view, Engine.MATMUL, 2 * _products(gradient, weight))


def _products(result: TensorType, weight: TensorType) -> Any:
    """Flops of one dot product over a filter for every element of a convolution's result."""
    filter_elements = elements(TensorType(weight.shape[1:], weight.dtype))
    return FLOPS_PER_MULTIPLY_ADD * elements(result) * filter_elements


def flash_attention(view: OperationView) -> Work:
    """Two products of (s, d) with (s, d) for every head, half of that under a causal mask."""
    return moved(view, Engine.MATMUL, _attention_flops(view))


def flash_attention_gradient(view: OperationView) -> Work:
    """Five products instead of two."""
    return moved(view, Engine.MATMUL, _attention_flops(view) * FLASH_BACKWARD_FACTOR)


def _attention_flops(view: OperationView) -> Any:
    """Of ranks that share the queries of a causal mask, all wait for the one with the last tokens."""
    query, key = view.inputs[0], view.inputs[1]
    axis = _sequence_axis(view)
    queries, keys = query.shape[axis], key.shape[axis]
    products = 2 * FLOPS_PER_MULTIPLY_ADD * elements(query) * keys
    mode = _setting(view, "sparse_mode", -1)
    if mode == BAND_MODE and queries != keys:
        return products - FLOPS_PER_MULTIPLY_ADD * elements(query) * queries
    return products / 2 if mode in CAUSAL_MODES else products


def _sequence_axis(view: OperationView) -> int:
    layout = _setting(view, "input_layout", -2)
    name = ATTENTION_LAYOUTS[layout] if isinstance(layout, int) and layout < len(ATTENTION_LAYOUTS) else str(layout)
    if "S" not in name:
        raise InputError(
            f"{view.primitive}: layout {name} packs sequences of unknown lengths, so its work is unknown; give layers "
            "with known costs as a layer table, or use BNSD or BSH"
        )
    return name.index("S")


def _setting(view: OperationView, name: str, position: int) -> Any:
    """A setting of the fused kernel: an attribute, or in joint graphs one of its last arguments."""
    return view.attributes[name] if name in view.attributes else view.arguments[position]


RULES: dict[str, Rule] = {
    "MatMul": matrix_product,
    "BatchMatMul": matrix_product,
    "MatMulExt": matrix_product,
    "BatchMatMulExt": matrix_product,
    "Mm": matrix_product,
    "Dense": dense,
    "GroupedMatmul": grouped_product,
    "GroupedMatmulV2": grouped_product,
    "GroupedMatmulV4": grouped_product,
    "Conv2D": convolution,
    "Conv2DExt": convolution,
    "ConvolutionGrad": convolution_gradients,
    "Conv2DBackpropInput": convolution_input_gradient,
    "Conv2DBackpropFilter": convolution_weight_gradient,
    "FlashAttentionScore": flash_attention,
    "FlashAttentionScoreGrad": flash_attention_gradient,
}
