"""The LLaMA-like network with long samples shared out by tokens over context-parallel ranks.

States are (b, s, hidden), cut by samples, tokens and, between the projections, heads. Fused attention takes them in
that form, so that ranks are numbered alike inside and outside of it. Each rank attends with the queries of its own
tokens: it gathers all keys and values, or, with `heads_exchanged`, trades its tokens of all heads for all tokens of
some heads (arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SiLU
from mindspore.ops.operations import nn_ops

from tools.examples import llama
from tools.examples.common import (
    COMPUTE_TYPES,
    Activation,
    linear,
    positions,
    require_divisible,
    settings_of,
    token_ids,
)
from tools.examples.llama_sharded import shard_head, shard_norm


class RotaryByToken(llama.RotaryEmbedding):
    """The rotation of states that have the heads behind the tokens."""

    def construct(self, states: Tensor) -> Tensor:
        """Return the rotated states, (b, s, heads, d) as given."""
        angles = self.angle(self.reshape(positions(states.shape[1]), (-1, 1)), self.frequencies)
        angles = self.reshape(angles, (-1, 1, angles.shape[1]))
        first, second = self.split(states)
        turned = self.concatenate((self.negative(second), first))
        straight = self.multiply_straight(states, self.cast(self.cosine(angles), self.dtype))
        return self.add(straight, self.multiply_turned(turned, self.cast(self.sine(angles), self.dtype)))


class ContextAttention(nn.Cell):
    """Grouped-query causal self-attention by the fused kernel, without an axis of heads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        hidden, heads, kv_heads = settings["hidden"], settings["heads"], settings["kv_heads"]
        dtype, size = COMPUTE_TYPES[settings["dtype"]], hidden // heads
        self.size = size
        self.q_proj = linear(hidden, heads * size, dtype)
        self.k_proj = linear(hidden, kv_heads * size, dtype)
        self.v_proj = linear(hidden, kv_heads * size, dtype)
        self.o_proj = linear(heads * size, hidden, dtype)
        self.reshape = ops.Reshape()
        self.rotary_query = RotaryByToken(size, dtype)
        self.rotary_key = RotaryByToken(size, dtype)
        self.mask = llama.compressed_causal_mask()
        self.attention = nn_ops.FlashAttentionScore(
            heads, scale_value=size**-0.5, next_tokens=0, input_layout="BSH", sparse_mode=llama.CAUSAL_COMPRESSED
        )

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to (b, s, hidden)."""
        batch, length, _ = states.shape
        query, key = (
            self.reshape(rotary(self.reshape(made, (batch, length, -1, self.size))), (batch, length, -1))
            for rotary, made in (
                (self.rotary_query, self.q_proj(states)),
                (self.rotary_key, self.k_proj(states)),
            )
        )
        return self.o_proj(self.attention(query, key, self.v_proj(states), None, None, None, self.mask)[3])


class ContextLlama(llama.Llama):
    """Token ids and labels, both (b, s) int32, to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
        self.blocks = nn.CellList(
            [
                llama.Block(
                    hidden, dtype, ContextAttention(settings), llama.FeedForward(hidden, settings["ffn"], dtype)
                )
                for _ in range(settings["layers"])
            ]
        )


def factory(
    size: str = "tiny",
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    heads_exchanged: bool = False,
    **overrides: Any,
) -> tuple[ContextLlama, tuple[Tensor, Tensor]]:
    """Build the network with strategies for `data_parallel` x `context_parallel` x `tensor_parallel` ranks a stage.

    Args:
        size: as in `tools.examples.llama.factory`.
        data_parallel: ranks that share a batch.
        tensor_parallel: ranks that share each layer; divides heads, key/value heads, and `ffn`.
        context_parallel: ranks that share the tokens of each sample; divides the sequence.
        heads_exchanged: whether attention is shared by heads instead of tokens; tensor and context degrees together
            divide heads and key/value heads then.
        **overrides: as in `tools.examples.llama.factory`, except flash and qkv_bias; attention is fused, in 16 bits.

    Returns:
        As `tools.examples.llama.factory`, for the batch of all data-parallel ranks.
    """
    settings = settings_of(llama.PRESETS, size, {"dtype": "bfloat16", **overrides, "flash": True, "qkv_bias": False})
    llama.check_attention(settings)
    require_divisible({**settings, "context_parallel": context_parallel}, "sequence", "context_parallel")
    network = ContextLlama(settings)
    rows, tokens, columns = data_parallel, context_parallel, tensor_parallel
    states, inner = (rows, tokens, 1), (rows, tokens, columns)
    network.embedding.gather.shard(((1, 1), (rows, tokens)))
    for block in network.blocks:
        attention, feed_forward = block.attention, block.feed_forward
        for norm in (block.attention_norm, block.feed_forward_norm):
            shard_norm(norm, states)
        for dense in (attention.q_proj, attention.k_proj, attention.v_proj, feed_forward.gate, feed_forward.up):
            dense.matmul.shard(((rows * tokens, 1), (columns, 1)))
        for dense in (attention.o_proj, feed_forward.down):
            dense.matmul.shard(((rows * tokens, columns), (1, columns)))
        for rotary in (attention.rotary_query, attention.rotary_key):
            _shard_rotary(rotary, rows, tokens, columns)
        queries = (rows, 1, tokens * columns) if heads_exchanged else inner
        keys = (rows, 1, queries[2])
        attention.attention.shard((queries, keys, keys, (1, 1)))
        feed_forward.activation = Activation(SiLU(), (inner,))
        feed_forward.multiply.shard((inner, inner))
        for add in (block.add_attention, block.add_feed_forward):
            add.shard((states, states))
    shard_norm(network.norm, states)
    shard_head(network.head, rows * tokens, columns)
    shape = settings["batch"], settings["sequence"], settings["vocab"]
    return network, (token_ids(*shape), token_ids(*shape, offset=1))


def _shard_rotary(rotary: RotaryByToken, rows: int, tokens: int, columns: int) -> None:
    heads, table = (rows, tokens, columns, 1), (tokens, 1, 1)
    rotary.angle.shard(((tokens, 1), (1, 1)))
    for unary in (rotary.cosine, rotary.sine, rotary.cast):
        unary.shard((table,))
    rotary.multiply_straight.shard((heads, table))
    rotary.multiply_turned.shard((heads, table))
    rotary.add.shard((heads, heads))
    rotary.negative.shard((heads,))
    rotary.split.shard((heads,))
    rotary.concatenate.shard((heads, heads))
