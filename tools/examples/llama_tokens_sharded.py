"""A LLaMA-like network as MindFormers 1.x trains it, whose tensor-parallel ranks share the tokens between the products.

Weights are float32 and cast to bfloat16 at every use, norms are the fused kernel in float32, positions rotate in
float32, attention is the fused kernel with a mask that is an input, the loss is shared by classes. States are
(b * s, hidden). Norms and residual sums are split by tokens: a gather before the products that are split by columns, a
reduce-scatter after those that are split by rows (arXiv 2205.05198).
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer
from mindspore.ops.auto_generate import RmsNorm, SiLU
from mindspore.ops.operations import nn_ops

from tools.examples.common import (
    INITIAL_DEVIATION,
    MergeHeads,
    SplitHeads,
    TokenEmbedding,
    require_divisible,
    settings_of,
    token_ids,
)
from tools.examples.llama import ROTARY_BASE

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 176, "vocab": 256, "batch": 2, "sequence": 16,
        "dtype": "bfloat16",
    },
    "175b": {
        "layers": 96, "hidden": 12288, "heads": 96, "kv_heads": 16, "ffn": 53248, "vocab": 160000, "batch": 1,
        "sequence": 8192, "dtype": "bfloat16",
    },
}  # fmt: skip


class Product(nn.Cell):
    """A product of (tokens, inputs) with a float32 weight of (outputs, inputs), in bfloat16."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = Parameter(initializer(Normal(INITIAL_DEVIATION), (outputs, inputs), ms.float32), name="weight")
        self.cast = ops.Cast()
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, states: Tensor) -> Tensor:
        """Return (tokens, outputs)."""
        return self.matmul(states, self.cast(self.weight, ms.bfloat16))


class Norm(nn.Cell):
    """The root-mean-square norm by the fused kernel, in float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (hidden,), ms.float32), name="weight")
        self.cast = ops.Cast()
        self.norm = RmsNorm(1e-5)
        self.cast_back = ops.Cast()

    def construct(self, states: Tensor) -> Tensor:
        """Return the normalised states, same shape and type."""
        return self.cast_back(self.norm(self.cast(states, ms.float32), self.weight)[0], ms.bfloat16)


class Rotary(nn.Cell):
    """Rotation by position of (b, heads, s, d) in float32, halves turned by a product with a constant matrix."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-np.arange(0, size, 2, dtype=np.float64) / size)
        angles = np.arange(length)[:, None] * np.tile(frequencies, 2)[None, :]
        turn = np.zeros((size, size), np.float32)
        half = size // 2
        turn[np.arange(half, size), np.arange(half)] = -1.0
        turn[np.arange(half), np.arange(half, size)] = 1.0
        self.cosine = Tensor(np.cos(angles).astype(np.float32))
        self.sine = Tensor(np.sin(angles).astype(np.float32))
        self.turn = Tensor(turn)
        self.cast = ops.Cast()
        self.swap = ops.BatchMatMul()
        self.multiply = ops.Mul()
        self.add = ops.Add()
        self.cast_back = ops.Cast()

    def construct(self, states: Tensor) -> Tensor:
        """Return the rotated states."""
        exact = self.cast(states, ms.float32)
        turned = self.multiply(self.swap(exact, self.turn), self.sine)
        return self.cast_back(self.add(self.multiply(exact, self.cosine), turned), ms.bfloat16)


class Attention(nn.Cell):
    """Grouped-query attention of (b * s, hidden) states by the fused kernel."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        hidden, heads, groups = settings["hidden"], settings["heads"], settings["kv_heads"]
        size = hidden // heads
        self.size = size
        self.q_proj = Product(hidden, hidden)
        self.k_proj = Product(hidden, groups * size)
        self.v_proj = Product(hidden, groups * size)
        self.split_query = SplitHeads(heads)
        self.split_key = SplitHeads(groups)
        self.split_value = SplitHeads(groups)
        self.rotary_query = Rotary(settings["sequence"], size)
        self.rotary_key = Rotary(settings["sequence"], size)
        self.reshape = ops.Reshape()
        self.attention = nn_ops.FlashAttentionScore(
            heads, scale_value=size**-0.5, next_tokens=0, input_layout="BNSD", sparse_mode=0
        )
        self.merge = MergeHeads()
        self.o_proj = Product(hidden, hidden)

    def construct(self, states: Tensor, mask: Tensor) -> Tensor:
        """Map (b * s, hidden) to the same shape; the mask is (b, 1, s, s), 1 where a token must not look."""
        batch, _, length, _ = mask.shape
        query, key, value = self.q_proj(states), self.k_proj(states), self.v_proj(states)
        query = self.rotary_query(self.split_query(self.reshape(query, (batch, length, -1))))
        key = self.rotary_key(self.split_key(self.reshape(key, (batch, length, -1))))
        value = self.split_value(self.reshape(value, (batch, length, -1)))
        seen = self.merge(self.attention(query, key, value, None, None, None, mask)[3])
        return self.o_proj(self.reshape(seen, states.shape))


class FeedForward(nn.Cell):
    """SwiGLU of (b * s, hidden) states."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = Product(hidden, ffn)
        self.up = Product(hidden, ffn)
        self.down = Product(ffn, hidden)
        self.silu = SiLU()
        self.multiply = ops.Mul()

    def construct(self, states: Tensor) -> Tensor:
        """Return the same shape."""
        return self.down(self.multiply(self.up(states), self.silu(self.gate(states))))


class Block(nn.Cell):
    """One pre-norm layer."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        hidden = settings["hidden"]
        self.attention_norm = Norm(hidden)
        self.attention = Attention(settings)
        self.add_attention = ops.Add()
        self.feed_forward_norm = Norm(hidden)
        self.feed_forward = FeedForward(hidden, settings["ffn"])
        self.add_feed_forward = ops.Add()

    def construct(self, states: Tensor, mask: Tensor) -> Tensor:
        """Map (b * s, hidden) to the same shape."""
        states = self.add_attention(states, self.attention(self.attention_norm(states), mask))
        return self.add_feed_forward(states, self.feed_forward(self.feed_forward_norm(states)))


class VocabularyLoss(nn.Cell):
    """Mean cross-entropy over tokens in float32, written so that ranks can share the classes of every token."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.cast = ops.Cast()
        self.largest = ops.ReduceMax(keep_dims=True)
        self.subtract = ops.Sub()
        self.exponential = ops.Exp()
        self.total = ops.ReduceSum(keep_dims=True)
        self.logarithm = ops.Log()
        self.one_hot = ops.OneHot()
        self.on = Tensor(1.0, ms.float32)
        self.off = Tensor(0.0, ms.float32)
        self.pick = ops.Mul()
        self.sum = ops.ReduceSum()
        self.reshape = ops.Reshape()
        self.mean = ops.ReduceMean()
        self.negative = ops.Neg()

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Map logits (tokens, classes) and as many int32 labels to a scalar."""
        exact = self.cast(logits, ms.float32)
        below = self.subtract(exact, ops.stop_gradient(self.largest(exact, 1)))
        log_probability = self.subtract(below, self.logarithm(self.total(self.exponential(below), 1)))
        wanted = self.one_hot(self.reshape(labels, (-1,)), self.classes, self.on, self.off)
        return self.negative(self.mean(self.sum(self.pick(log_probability, wanted), 1)))


class Llama(nn.Cell):
    """Ids and labels, both (b, s) int32, and a (b, 1, s, s) uint8 mask to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        hidden, vocab = settings["hidden"], settings["vocab"]
        self.hidden = hidden
        self.embedding = TokenEmbedding(vocab, hidden, ms.float32)
        self.cast = ops.Cast()
        self.flatten = ops.Reshape()
        self.blocks = nn.CellList([Block(settings) for _ in range(settings["layers"])])
        self.norm = Norm(hidden)
        self.head = Product(hidden, vocab)
        self.loss = VocabularyLoss(vocab)

    def construct(self, input_ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """Return the mean cross-entropy over all b * s tokens."""
        states = self.flatten(self.cast(self.embedding(input_ids), ms.bfloat16), (-1, self.hidden))
        for block in self.blocks:
            states = block(states, mask)
        return self.loss(self.head(self.norm(states)), labels)


def factory(
    size: str = "tiny", data_parallel: int = 1, tensor_parallel: int = 1, **overrides: Any
) -> tuple[Llama, tuple[Tensor, Tensor, Tensor]]:
    """Build the network with strategies for `data_parallel` x `tensor_parallel` ranks a stage.

    Args:
        size: a key of `PRESETS`.
        data_parallel: ranks that share a batch.
        tensor_parallel: ranks that share each layer and its tokens; divides heads, key/value heads, `ffn` and tokens.
        **overrides: any of layers, hidden, heads, kv_heads, ffn, vocab, batch, sequence.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: int32 ids and labels, both (batch, sequence), and
        the causal mask. The sequence is fixed: tables of rotations are constants.

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    settings = settings_of(PRESETS, size, overrides)
    require_divisible(settings, "hidden", "heads")
    require_divisible(settings, "heads", "kv_heads")
    batch, length, vocab = settings["batch"], settings["sequence"], settings["vocab"]
    network = Llama(settings)
    rows, columns = data_parallel, tensor_parallel
    states = (rows * columns, 1)
    network.embedding.gather.shard(((columns, 1), (rows, 1)))
    network.cast.shard(((rows, 1, 1),))
    for block in network.blocks:
        _shard_block(block, rows, columns)
    _shard_norm(network.norm, states)
    _shard_columns(network.head, rows, columns)
    _shard_loss(network.loss, rows, columns)
    mask = Tensor(np.triu(np.ones((length, length), np.uint8), k=1)[None, None].repeat(batch, axis=0))
    return network, (token_ids(batch, length, vocab), token_ids(batch, length, vocab, offset=1), mask)


def _shard_block(block: Block, rows: int, columns: int) -> None:
    states, heads, inner = (rows * columns, 1), (rows, columns, 1, 1), (rows, columns)
    attention, feed_forward = block.attention, block.feed_forward
    for norm in (block.attention_norm, block.feed_forward_norm):
        _shard_norm(norm, states)
    for add in (block.add_attention, block.add_feed_forward):
        add.shard((states, states))
    for product in (attention.q_proj, attention.k_proj, attention.v_proj, feed_forward.gate, feed_forward.up):
        _shard_columns(product, rows, columns)
    for product in (attention.o_proj, feed_forward.down):
        product.cast.shard(((1, columns),))
        product.matmul.shard(((rows, columns), (1, columns)), (states,))
    for split in (attention.split_query, attention.split_key, attention.split_value):
        split.transpose.shard(((rows, 1, columns, 1),))
    for rotary in (attention.rotary_query, attention.rotary_key):
        rotary.cast.shard((heads,))
        rotary.cast_back.shard((heads,))
        rotary.swap.shard((heads, (1, 1)))
        rotary.multiply.shard((heads, (1, 1)))
        rotary.add.shard((heads, heads))
    attention.attention.shard((heads, heads, heads, (rows, 1, 1, 1)))
    attention.merge.transpose.shard((heads,))
    feed_forward.silu.shard((inner,))
    feed_forward.multiply.shard((inner, inner))


def _shard_loss(loss: VocabularyLoss, rows: int, columns: int) -> None:
    classes = (rows, columns)
    for unary in (loss.cast, loss.largest, loss.exponential, loss.total, loss.sum):
        unary.shard((classes,))
    loss.subtract.shard((classes, (rows, 1)))
    loss.logarithm.shard(((rows, 1),))
    loss.one_hot.shard((classes, (), ()))
    loss.pick.shard((classes, classes))
    loss.mean.shard(((rows,),))


def _shard_norm(norm: Norm, states: tuple[int, int]) -> None:
    norm.cast.shard((states,))
    norm.norm.shard((states, (1,)))
    norm.cast_back.shard((states,))


def _shard_columns(product: Product, rows: int, columns: int) -> None:
    product.cast.shard(((columns, 1),))
    product.matmul.shard(((rows, 1), (columns, 1)))
