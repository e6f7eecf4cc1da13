"""LLaMA-like decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Qwen2.5 is the same with biases on query, key and value (`qkv_bias`) and slower rotary positions. Parameters live in the
compute type; norms compute in float32 and keep their weight in float32 too. Every shape that depends on the batch or
the sequence is derived from the inputs, so the network can be traced at other sizes.
"""

from __future__ import annotations

import functools
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer
from mindspore.ops.operations import nn_ops

from tools.examples.common import (
    COMPUTE_TYPES,
    CausalMask,
    CrossEntropyLoss,
    LanguageModelHead,
    MergeHeads,
    SplitHeads,
    TokenEmbedding,
    linear,
    positions,
    require_divisible,
    settings_of,
    token_ids,
)

ROTARY_BASE = 10000.0
COMPRESSED_MASK_SIZE = 2048
"""Side of the causal mask that the fused attention kernel expects when it applies the mask by itself."""
CAUSAL_COMPRESSED = 2
"""The fused kernel's `sparse_mode` for a causal mask given in compressed form."""

_COMMON = {
    "batch": 1, "dtype": "bfloat16", "tied": False, "flash": False, "vocab": 32000, "qkv_bias": False,
    "rotary_base": ROTARY_BASE,
}  # fmt: skip
_QWEN = {**_COMMON, "qkv_bias": True, "rotary_base": 1000000.0, "vocab": 152064, "sequence": 4096}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 176, "vocab": 256, "batch": 2,
        "sequence": 16, "dtype": "float32",
    },
    "7b": {**_COMMON, "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "sequence": 4096},
    "13b": {**_COMMON, "layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40, "ffn": 13824, "sequence": 4096},
    "70b": {**_COMMON, "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "sequence": 4096},
    "qwen2.5_0.5b": {
        **_QWEN, "layers": 24, "hidden": 896, "heads": 14, "kv_heads": 2, "ffn": 4864, "vocab": 151936, "tied": True,
    },
    "qwen2.5_7b": {**_QWEN, "layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "ffn": 18944},
    "qwen2.5_72b": {**_QWEN, "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 29568},
}  # fmt: skip


class RMSNorm(nn.Cell):
    """Division by the root mean square over the last axis (arXiv 1910.07467), then a learned scale."""

    def __init__(self, hidden: int, dtype: Any, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (hidden,), ms.float32), name="weight")
        self.dtype = dtype
        self.epsilon = epsilon
        self.cast = ops.Cast()
        self.square = ops.Square()
        self.mean = ops.ReduceMean(keep_dims=True)
        self.add = ops.Add()
        self.rsqrt = ops.Rsqrt()
        self.normalise = ops.Mul()
        self.scale = ops.Mul()

    def construct(self, states: Tensor) -> Tensor:
        """Return the normalised states in the compute type, same shape."""
        exact = self.cast(states, ms.float32)
        inverse = self.rsqrt(self.add(self.mean(self.square(exact), -1), self.epsilon))
        return self.cast(self.scale(self.normalise(exact, inverse), self.weight), self.dtype)


class RotaryEmbedding(nn.Cell):
    """Rotation of each head's pairs (i, i + d/2) by an angle that grows with the position (arXiv 2104.09864)."""

    def __init__(self, head_size: int, dtype: Any, base: float = ROTARY_BASE) -> None:
        super().__init__()
        frequencies = base ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
        self.frequencies = Tensor(np.tile(frequencies, 2)[None, :].astype(np.float32))
        self.dtype = dtype
        self.angle = ops.Mul()
        self.cosine = ops.Cos()
        self.sine = ops.Sin()
        self.cast = ops.Cast()
        self.reshape = ops.Reshape()
        self.split = ops.Split(-1, 2)
        self.negative = ops.Neg()
        self.concatenate = ops.Concat(-1)
        self.multiply_straight = ops.Mul()
        self.multiply_turned = ops.Mul()
        self.add = ops.Add()

    def construct(self, states: Tensor) -> Tensor:
        """Return the rotated states, (b, heads, s, d) as given."""
        angles = self.angle(self.reshape(positions(states.shape[2]), (-1, 1)), self.frequencies)
        first, second = self.split(states)
        turned = self.concatenate((self.negative(second), first))
        straight = self.multiply_straight(states, self.cast(self.cosine(angles), self.dtype))
        return self.add(straight, self.multiply_turned(turned, self.cast(self.sine(angles), self.dtype)))


class RepeatHeads(nn.Cell):
    """Each key/value head repeated for the query heads of its group."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats
        self.reshape = ops.Reshape()
        self.tile = ops.Tile()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, kv_heads, s, d) to (b, kv_heads * repeats, s, d)."""
        if self.repeats == 1:
            return states
        batch, heads, length, size = states.shape
        repeated = self.tile(self.reshape(states, (batch, heads, 1, length * size)), (1, 1, self.repeats, 1))
        return self.reshape(repeated, (batch, heads * self.repeats, length, size))


class UnfusedAttention(nn.Cell):
    """Causal softmax attention that materialises the (b, heads, s, s) scores, in the compute type."""

    def __init__(self, head_size: int, repeats: int, dtype: Any) -> None:
        super().__init__()
        self.repeat_key = RepeatHeads(repeats)
        self.repeat_value = RepeatHeads(repeats)
        self.mask = CausalMask(dtype)
        self.inverse_root = head_size**-0.5
        self.scale = ops.Mul()
        self.score = ops.BatchMatMul(transpose_b=True)
        self.add_mask = ops.Add()
        self.softmax = ops.Softmax(-1)
        self.weigh = ops.BatchMatMul()

    def construct(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map (b, heads, s, d) queries and (b, kv_heads, s, d) keys and values to (b, heads, s, d)."""
        scores = self.score(self.scale(query, self.inverse_root), self.repeat_key(key))
        weights = self.softmax(self.add_mask(scores, self.mask(query.shape[2])))
        return self.weigh(weights, self.repeat_value(value))


@functools.cache
def compressed_causal_mask() -> Tensor:
    """Return the (2048, 2048) mask the fused kernel takes, 1 above the diagonal; all layers share it."""
    return Tensor(np.triu(np.ones((COMPRESSED_MASK_SIZE, COMPRESSED_MASK_SIZE), np.uint8), k=1))


class FlashAttention(nn.Cell):
    """Causal attention by the fused Ascend kernel; keeps no (s, s) tensor. Needs a 16-bit compute type."""

    def __init__(self, heads: int, head_size: int) -> None:
        super().__init__()
        self.mask = compressed_causal_mask()
        self.attention = nn_ops.FlashAttentionScore(
            heads,
            scale_value=head_size**-0.5,
            next_tokens=0,
            input_layout="BNSD",
            sparse_mode=CAUSAL_COMPRESSED,
        )

    def construct(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map (b, heads, s, d) queries and (b, kv_heads, s, d) keys and values to (b, heads, s, d)."""
        return self.attention(query, key, value, None, None, None, self.mask)[3]


class Attention(nn.Cell):
    """Grouped-query self-attention with rotary positions (arXiv 2305.13245)."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        dtype: Any,
        flash: bool,
        bias: bool = False,
        rotary_base: float = ROTARY_BASE,
        head_size: int | None = None,
    ) -> None:
        super().__init__()
        size = hidden // heads if head_size is None else head_size
        self.q_proj = linear(hidden, heads * size, dtype, bias)
        self.k_proj = linear(hidden, kv_heads * size, dtype, bias)
        self.v_proj = linear(hidden, kv_heads * size, dtype, bias)
        self.o_proj = linear(heads * size, hidden, dtype)
        self.split_query = SplitHeads(heads)
        self.split_key = SplitHeads(kv_heads)
        self.split_value = SplitHeads(kv_heads)
        self.rotary_query = RotaryEmbedding(size, dtype, rotary_base)
        self.rotary_key = RotaryEmbedding(size, dtype, rotary_base)
        self.core = FlashAttention(heads, size) if flash else UnfusedAttention(size, heads // kv_heads, dtype)
        self.merge = MergeHeads()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to (b, s, hidden)."""
        query = self.rotary_query(self.split_query(self.q_proj(states)))
        key = self.rotary_key(self.split_key(self.k_proj(states)))
        value = self.split_value(self.v_proj(states))
        return self.o_proj(self.merge(self.core(query, key, value)))


class FeedForward(nn.Cell):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, hidden: int, ffn: int, dtype: Any) -> None:
        super().__init__()
        self.gate = linear(hidden, ffn, dtype)
        self.up = linear(hidden, ffn, dtype)
        self.down = linear(ffn, hidden, dtype)
        self.activation = nn.SiLU()
        self.multiply = ops.Mul()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to (b, s, hidden)."""
        return self.down(self.multiply(self.activation(self.gate(states)), self.up(states)))


class Block(nn.Cell):
    """One pre-norm transformer layer around two cells that map (b, s, hidden) to the same shape."""

    def __init__(self, hidden: int, dtype: Any, attention: nn.Cell, feed_forward: nn.Cell) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden, dtype)
        self.attention = attention
        self.add_attention = ops.Add()
        self.feed_forward_norm = RMSNorm(hidden, dtype)
        self.feed_forward = feed_forward
        self.add_feed_forward = ops.Add()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to (b, s, hidden)."""
        states = self.add_attention(states, self.attention(self.attention_norm(states)))
        return self.add_feed_forward(states, self.feed_forward(self.feed_forward_norm(states)))


class Llama(nn.Cell):
    """Token ids and labels, both (b, s) int32, to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype = COMPUTE_TYPES[settings["dtype"]]
        hidden = settings["hidden"]
        self.tied = settings["tied"]
        self.embedding = TokenEmbedding(settings["vocab"], hidden, dtype)
        self.blocks = nn.CellList([block_of(settings) for _ in range(settings["layers"])])
        self.norm = RMSNorm(hidden, dtype)
        self.head = LanguageModelHead(settings["vocab"], hidden, dtype, self.tied)
        self.loss = CrossEntropyLoss()

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over all b * s tokens."""
        states = self.embedding(input_ids)
        for block in self.blocks:
            states = block(states)
        states = self.norm(states)
        logits = self.head(states, self.embedding.weight) if self.tied else self.head(states)
        return self.loss(logits, labels)


def block_of(settings: dict[str, Any]) -> Block:
    """Return one layer for settings with hidden, heads, kv_heads, ffn, dtype, flash, qkv_bias and rotary_base."""
    dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
    attention = Attention(
        hidden,
        settings["heads"],
        settings["kv_heads"],
        dtype,
        settings["flash"],
        settings["qkv_bias"],
        settings["rotary_base"],
    )
    return Block(hidden, dtype, attention, FeedForward(hidden, settings["ffn"], dtype))


def check_attention(settings: dict[str, Any]) -> None:
    """Check that heads divide the hidden size evenly and flash attention has a 16-bit compute type.

    Raises:
        ValueError: naming the settings that do not fit together.
    """
    head_size = require_divisible(settings, "hidden", "heads")
    require_divisible(settings, "heads", "kv_heads")
    if head_size % 2:
        raise ValueError(f"hidden / heads is {head_size}; rotary positions need an even head size")
    if settings["flash"] and settings["dtype"] == "float32":
        raise ValueError("flash=True needs dtype float16 or bfloat16: the fused kernel has no float32 form")


def factory(size: str = "tiny", **overrides: Any) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Build a LLaMA-like training network and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        **overrides: any of layers, hidden, heads, kv_heads, ffn, vocab, batch, sequence, dtype, tied, flash,
            qkv_bias, rotary_base.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: int32 ids and labels, both (batch, sequence).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    settings = settings_of(PRESETS, size, overrides)
    check_attention(settings)
    shape = settings["batch"], settings["sequence"], settings["vocab"]
    return Llama(settings), (token_ids(*shape), token_ids(*shape, offset=1))
