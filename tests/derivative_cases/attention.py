"""Fused attention."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.ops.operations import nn_ops

from tests.derivative_cases.shapes import Case

CAUSAL = Tensor(np.triu(np.ones((2048, 2048)), 1), ms.uint8)


def fused_attention(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    kernel = nn_ops.FlashAttentionScore(4, scale_value=0.25, input_layout="BNSD")
    return kernel(x.astype(ms.float16), y.astype(ms.float16), z.astype(ms.float16), None, None, None, None)[3]


def fused_attention_flat(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    kernel = nn_ops.FlashAttentionScore(4, scale_value=0.25, input_layout="BSH")
    return kernel(x.astype(ms.float16), y.astype(ms.float16), z.astype(ms.float16), None, None, None, None)[3]


def fused_attention_causal(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    kernel = nn_ops.FlashAttentionScore(4, scale_value=0.25, next_tokens=0, input_layout="BNSD", sparse_mode=2)
    return kernel(x.astype(ms.float16), y.astype(ms.float16), z.astype(ms.float16), None, None, None, CAUSAL)[3]


CASES: list[Case] = [
    (fused_attention, lambda b, s, h: [(b, 4, s, h)] * 3),
    (fused_attention, lambda b, s, h: [(b, 4, s, h), (b, 2, s, h), (b, 2, s, h)]),
    (fused_attention_flat, lambda b, s, h: [(b, s, 4 * h)] * 3),
    (fused_attention_causal, lambda b, s, h: [(b, 4, s, h)] * 3),
]  # fmt: skip
