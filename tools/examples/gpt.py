"""GPT-like decoder: LayerNorm, unfused attention, GELU MLP of four times the width, learned positions or ALiBi.

Dropout sits where Korthikanti et al. (arXiv 2205.05198) count its masks: on the softmax output, after the projection of
the attention, and after the MLP. Parameters live in the compute type. `alibi=True` gives a BLOOM-like network: a bias
that falls with distance in place of positions, and a norm behind the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from tools.examples.common import (
    COMPUTE_TYPES,
    INITIAL_DEVIATION,
    CausalMask,
    CrossEntropyLoss,
    LanguageModelHead,
    MergeHeads,
    TokenEmbedding,
    linear,
    positions,
    require_divisible,
    settings_of,
    token_ids,
)

_COMMON = {"batch": 1, "dtype": "float16", "tied": True, "alibi": False, "dropout": 0.1, "vocab": 51200}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 256, "batch": 2, "sequence": 16,
        "dtype": "float32",
    },
    "1.3b": {**_COMMON, "layers": 24, "hidden": 2048, "heads": 16, "ffn": 8192, "sequence": 2048},
    "22b": {**_COMMON, "layers": 48, "hidden": 6144, "heads": 64, "ffn": 24576, "sequence": 2048},
    "175b": {**_COMMON, "layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "sequence": 2048},
    "mt_nlg_530b": {**_COMMON, "layers": 105, "hidden": 20480, "heads": 128, "ffn": 81920, "sequence": 2048},
    "bloom_7b": {
        **_COMMON, "layers": 30, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 250880, "sequence": 2048,
        "alibi": True, "dropout": 0.0,
    },
    "bloom_176b": {
        **_COMMON, "layers": 70, "hidden": 14336, "heads": 112, "ffn": 57344, "vocab": 250880, "sequence": 2048,
        "dtype": "bfloat16", "alibi": True, "dropout": 0.0,
    },
}  # fmt: skip


class PositionEmbedding(nn.Cell):
    """A learned vector per position, added to the states."""

    def __init__(self, length: int, hidden: int, dtype: Any) -> None:
        super().__init__()
        self.weight = Parameter(initializer(Normal(INITIAL_DEVIATION), (length, hidden), dtype), name="weight")
        self.cast = ops.Cast()
        self.gather = ops.Gather()
        self.add = ops.Add()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to the same shape."""
        place = self.cast(positions(states.shape[1]), ms.int32)
        return self.add(states, self.gather(self.weight, place, 0))


class AlibiMask(nn.Cell):
    """The causal mask plus a bias per head that grows with the key's position (arXiv 2108.12409)."""

    def __init__(self, heads: int, dtype: Any) -> None:
        super().__init__()
        self.slopes = Tensor(alibi_slopes(heads).reshape(heads, 1, 1))
        self.dtype = dtype
        self.causal = CausalMask(dtype)
        self.reshape = ops.Reshape()
        self.scale = ops.Mul()
        self.cast = ops.Cast()
        self.add = ops.Add()

    def construct(self, length: int) -> Tensor:
        """Return the (heads, s, s) term added to the scores."""
        bias = self.scale(self.reshape(positions(length), (1, 1, -1)), self.slopes)
        return self.add(self.causal(length), self.cast(bias, self.dtype))


class CoreAttention(nn.Cell):
    """From query, key and value to the values weighed: what selective recomputation (arXiv 2205.05198) runs again."""

    def __init__(self, size: int, dropout: float, mask: nn.Cell | None) -> None:
        super().__init__()
        self.inverse_root = size**-0.5
        self.masked = mask is not None
        self.scale = ops.Mul()
        self.score = ops.BatchMatMul(transpose_b=True)
        if self.masked:
            self.mask = mask
        self.add_mask = ops.Add()
        self.softmax = ops.Softmax(-1)
        self.weights_dropout = nn.Dropout(p=dropout)
        self.weigh = ops.BatchMatMul()

    def construct(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map three times (b, heads, s, d) to (b, heads, s, d)."""
        scores = self.biased(self.score(self.scale(query, self.inverse_root), key))
        return self.weigh(self.weights_dropout(self.softmax(scores)), value)

    def biased(self, scores: Tensor) -> Tensor:
        """Return the (b, heads, s, s) scores with what is added before the softmax."""
        return self.add_mask(scores, self.mask(scores.shape[-1])) if self.masked else scores


class Attention(nn.Cell):
    """Multi-head attention around a cell that weighs the values of all tokens."""

    def __init__(self, hidden: int, heads: int, dtype: Any, core: nn.Cell) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = linear(hidden, 3 * hidden, dtype, bias=True)
        self.reshape = ops.Reshape()
        self.transpose = ops.Transpose()
        self.split = ops.Split(-1, 3)
        self.core = core
        self.merge = MergeHeads()
        self.o_proj = linear(hidden, hidden, dtype, bias=True)

    def construct(self, states: Tensor, tokens: tuple[int, int] | None = None) -> Tensor:
        """Map (b, s, hidden), or (b * s, hidden) where `tokens` is (b, s), to the same shape."""
        batch, length = states.shape[:2] if tokens is None else tokens
        joint = self.reshape(self.qkv_proj(states), (batch, length, self.heads, 3 * states.shape[-1] // self.heads))
        query, key, value = self.split(self.transpose(joint, (0, 2, 1, 3)))
        merged = self.merge(self.core(query, key, value))
        return self.o_proj(merged if tokens is None else self.reshape(merged, states.shape))


class FeedForward(nn.Cell):
    """Two projections with a GELU between them."""

    def __init__(self, hidden: int, ffn: int, dtype: Any) -> None:
        super().__init__()
        self.up = linear(hidden, ffn, dtype, bias=True)
        self.activation = nn.GELU()
        self.down = linear(ffn, hidden, dtype, bias=True)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to (b, s, hidden)."""
        return self.down(self.activation(self.up(states)))


class Block(nn.Cell):
    """One pre-norm transformer layer around a cell that maps (b, s, hidden) to the same shape by attention."""

    def __init__(self, hidden: int, ffn: int, dtype: Any, dropout: float, attention: nn.Cell) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.attention = attention
        self.attention_dropout = nn.Dropout(p=dropout)
        self.add_attention = ops.Add()
        self.feed_forward_norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.feed_forward = FeedForward(hidden, ffn, dtype)
        self.feed_forward_dropout = nn.Dropout(p=dropout)
        self.add_feed_forward = ops.Add()

    def construct(self, states: Tensor, *tokens: tuple[int, int]) -> Tensor:
        """Map (b, s, hidden) to (b, s, hidden); `tokens` goes on to the attention."""
        attended = self.attention_dropout(self.attention(self.attention_norm(states), *tokens))
        states = self.add_attention(states, attended)
        transformed = self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(states)))
        return self.add_feed_forward(states, transformed)


class Gpt(nn.Cell):
    """Token ids and labels, both (b, s) int32, to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype = COMPUTE_TYPES[settings["dtype"]]
        hidden = settings["hidden"]
        self.tied = settings["tied"]
        self.embedding = TokenEmbedding(settings["vocab"], hidden, dtype)
        if settings["alibi"]:
            self.position = nn.LayerNorm((hidden,), dtype=dtype)
        else:
            self.position = PositionEmbedding(settings["sequence"], hidden, dtype)
        self.embedding_dropout = nn.Dropout(p=settings["dropout"])
        self.blocks = nn.CellList([block_of(settings) for _ in range(settings["layers"])])
        self.norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.head = LanguageModelHead(settings["vocab"], hidden, dtype, self.tied)
        self.loss = CrossEntropyLoss()

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over all b * s tokens."""
        states = self.embedding_dropout(self.position(self.embedding(input_ids)))
        for block in self.blocks:
            states = block(states)
        states = self.norm(states)
        logits = self.head(states, self.embedding.weight) if self.tied else self.head(states)
        return self.loss(logits, labels)


def block_of(settings: dict[str, Any]) -> Block:
    """Return one causal layer for settings with hidden, heads, ffn, dtype and dropout; `alibi` may be left out."""
    dtype, dropout = COMPUTE_TYPES[settings["dtype"]], settings["dropout"]
    hidden, heads = settings["hidden"], settings["heads"]
    mask = AlibiMask(heads, dtype) if settings.get("alibi") else CausalMask(dtype)
    core = CoreAttention(hidden // heads, dropout, mask)
    return Block(hidden, settings["ffn"], dtype, dropout, Attention(hidden, heads, dtype, core))


def alibi_slopes(heads: int) -> np.ndarray:
    """Return the float32 slope of each head.

    The slopes of a power of two are a geometric sequence that ends at 2**-8. Other counts take those of the next lower
    power of two, then every second one of the next higher, as the paper's authors propose.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return np.array(slopes, np.float32)


def factory(
    size: str = "tiny", build: Callable[[dict[str, Any]], Gpt] = Gpt, **overrides: Any
) -> tuple[Gpt, tuple[Tensor, Tensor]]:
    """Build a GPT-like training network, in training mode, and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        build: makes the network of complete settings.
        **overrides: any of layers, hidden, heads, ffn, vocab, batch, sequence, dtype, tied, alibi, dropout. A given
            `hidden` makes `ffn` four times its value unless that is given too.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: int32 ids and labels, both (batch, sequence).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    if overrides.get("hidden") is not None and overrides.get("ffn") is None:
        overrides["ffn"] = 4 * overrides["hidden"]
    settings = settings_of(PRESETS, size, overrides)
    require_divisible(settings, "hidden", "heads")
    shape = settings["batch"], settings["sequence"], settings["vocab"]
    network = build(settings)
    network.set_train()
    return network, (token_ids(*shape), token_ids(*shape, offset=1))
