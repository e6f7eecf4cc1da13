"""BERT-like encoder for pre-training: padding mask, token types, masked-token and next-sentence heads.

The decoder of the masked-token head is the embedding table. Layers normalise after the residual addition, as in
arXiv 1810.04805. Parameters live in the compute type.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from tools.examples.common import (
    COMPUTE_TYPES,
    MASKED_SCORE,
    CrossEntropyLoss,
    FirstToken,
    LanguageModelHead,
    MergeHeads,
    SplitHeads,
    TokenEmbedding,
    linear,
    require_divisible,
    settings_of,
    token_ids,
)
from tools.examples.gpt import FeedForward, PositionEmbedding

TOKEN_TYPES = 2
IGNORED_LABEL = -100
"""Label of a token that is not to be predicted."""
PREDICTED_EVERY = 7
"""One token in so many is predicted, near the usual 15 %."""

_COMMON = {"batch": 1, "dtype": "float16", "dropout": 0.1, "vocab": 30522}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 256, "batch": 2, "sequence": 16,
        "dtype": "float32",
    },
    "base": {**_COMMON, "layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "sequence": 512},
    "large": {**_COMMON, "layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "sequence": 512},
}  # fmt: skip


class Embeddings(nn.Cell):
    """Sum of token, position and token-type embeddings, then norm and dropout."""

    def __init__(self, vocab: int, length: int, hidden: int, dtype: Any, dropout: float) -> None:
        super().__init__()
        self.token = TokenEmbedding(vocab, hidden, dtype)
        self.token_type = TokenEmbedding(TOKEN_TYPES, hidden, dtype)
        self.position = PositionEmbedding(length, hidden, dtype)
        self.add = ops.Add()
        self.norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.dropout = nn.Dropout(p=dropout)

    def construct(self, ids: Tensor, token_types: Tensor) -> Tensor:
        """Map ids and types, both (b, s), to (b, s, hidden)."""
        states = self.position(self.add(self.token(ids), self.token_type(token_types)))
        return self.dropout(self.norm(states))


class PaddingMask(nn.Cell):
    """The (b, 1, 1, s) term added to attention scores so that no token sees padding."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype
        self.equal = ops.Equal()
        self.cast = ops.Cast()
        self.scale = ops.Mul()
        self.reshape = ops.Reshape()

    def construct(self, present: Tensor) -> Tensor:
        """Map (b, s), 1 for a token and 0 for padding, to the term."""
        batch, length = present.shape
        padding = self.cast(self.equal(present, 0), self.dtype)
        return self.reshape(self.scale(padding, MASKED_SCORE), (batch, 1, 1, length))


class ProjectedAttention(nn.Cell):
    """Multi-head attention of states over a source of `source_width`, with dropout on its weights."""

    def __init__(self, hidden: int, heads: int, dtype: Any, dropout: float, source_width: int) -> None:
        super().__init__()
        self.inverse_root = (hidden // heads) ** -0.5
        self.q_proj = linear(hidden, hidden, dtype, bias=True)
        self.k_proj = linear(source_width, hidden, dtype, bias=True)
        self.v_proj = linear(source_width, hidden, dtype, bias=True)
        self.o_proj = linear(hidden, hidden, dtype, bias=True)
        self.split_query = SplitHeads(heads)
        self.split_key = SplitHeads(heads)
        self.split_value = SplitHeads(heads)
        self.scale = ops.Mul()
        self.score = ops.BatchMatMul(transpose_b=True)
        self.add_mask = ops.Add()
        self.softmax = ops.Softmax(-1)
        self.weights_dropout = nn.Dropout(p=dropout)
        self.weigh = ops.BatchMatMul()
        self.merge = MergeHeads()

    def attend(self, states: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        """Map (b, s, hidden) and (b, t, source_width) to (b, s, hidden); the mask is added to the scores."""
        query = self.scale(self.split_query(self.q_proj(states)), self.inverse_root)
        scores = self.score(query, self.split_key(self.k_proj(source)))
        if mask is not None:
            scores = self.add_mask(scores, mask)
        weights = self.weights_dropout(self.softmax(scores))
        return self.o_proj(self.merge(self.weigh(weights, self.split_value(self.v_proj(source)))))


class Attention(ProjectedAttention):
    """Self-attention over both directions."""

    def __init__(self, hidden: int, heads: int, dtype: Any, dropout: float) -> None:
        super().__init__(hidden, heads, dtype, dropout, hidden)

    def construct(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (b, s, hidden) and the (b, 1, 1, s) mask to (b, s, hidden)."""
        return self.attend(states, states, mask)


class CrossAttention(ProjectedAttention):
    """Attention over another sequence."""

    def construct(self, states: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (b, s, hidden) and (b, t, source_width) to (b, s, hidden); the mask is added to the scores."""
        return self.attend(states, source, mask)


class Block(nn.Cell):
    """One post-norm encoder layer."""

    def __init__(self, hidden: int, heads: int, ffn: int, dtype: Any, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, dtype, dropout)
        self.attention_dropout = nn.Dropout(p=dropout)
        self.add_attention = ops.Add()
        self.attention_norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.feed_forward = FeedForward(hidden, ffn, dtype)
        self.feed_forward_dropout = nn.Dropout(p=dropout)
        self.add_feed_forward = ops.Add()
        self.feed_forward_norm = nn.LayerNorm((hidden,), dtype=dtype)

    def construct(self, states: Tensor, mask: Tensor) -> Tensor:
        """Map (b, s, hidden) and the (b, 1, 1, s) mask to (b, s, hidden)."""
        return self.transformed(self.attended(states, mask))

    def attended(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the states after attention, residual and norm."""
        attended = self.attention_dropout(self.attention(states, mask))
        return self.attention_norm(self.add_attention(states, attended))

    def transformed(self, states: Tensor) -> Tensor:
        """Return the states after the MLP, residual and norm."""
        transformed = self.feed_forward_dropout(self.feed_forward(states))
        return self.feed_forward_norm(self.add_feed_forward(states, transformed))


class MaskedTokenHead(nn.Cell):
    """Transform, norm, and the tied decoder with a bias of its own."""

    def __init__(self, vocab: int, hidden: int, dtype: Any) -> None:
        super().__init__()
        self.transform = linear(hidden, hidden, dtype, bias=True)
        self.activation = nn.GELU()
        self.norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.decoder = LanguageModelHead(vocab, hidden, dtype, tied=True)
        self.bias = Parameter(initializer("zeros", (vocab,), dtype), name="bias")
        self.add_bias = ops.Add()

    def construct(self, states: Tensor, table: Tensor) -> Tensor:
        """Map (b, s, hidden) and the (vocab, hidden) table to logits (b * s, vocab)."""
        transformed = self.norm(self.activation(self.transform(states)))
        return self.add_bias(self.decoder(transformed, table), self.bias)


class NextSentenceHead(nn.Cell):
    """Pooling of the first token, then two classes."""

    def __init__(self, hidden: int, dtype: Any) -> None:
        super().__init__()
        self.first = FirstToken()
        self.pooler = linear(hidden, hidden, dtype, bias=True)
        self.tanh = ops.Tanh()
        self.classifier = linear(hidden, 2, dtype, bias=True)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to logits (b, 2)."""
        return self.classifier(self.tanh(self.pooler(self.first(states))))


class MaskedTokenLoss(nn.Cell):
    """Mean cross-entropy over the tokens whose label is not `IGNORED_LABEL`, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.cast = ops.Cast()
        self.log_softmax = ops.LogSoftmax()
        self.maximum = ops.Maximum()
        self.pick = ops.GatherD()
        self.reshape = ops.Reshape()
        self.predicted = ops.GreaterEqual()
        self.multiply = ops.Mul()
        self.sum = ops.ReduceSum()
        self.divide = ops.RealDiv()
        self.negative = ops.Neg()

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Map logits (tokens, vocab) and as many int32 labels to a scalar."""
        labels = self.reshape(labels, (-1, 1))
        log_probability = self.log_softmax(self.cast(logits, ms.float32))
        picked = self.pick(log_probability, 1, self.maximum(labels, 0))
        weights = self.cast(self.predicted(labels, 0), ms.float32)
        return self.negative(self.divide(self.sum(self.multiply(picked, weights)), self.sum(weights)))


class Bert(nn.Cell):
    """Ids, token types, padding mask, token labels (all (b, s)) and sentence labels (b,) to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype, dropout = COMPUTE_TYPES[settings["dtype"]], settings["dropout"]
        hidden, vocab = settings["hidden"], settings["vocab"]
        self.embedding = Embeddings(vocab, settings["sequence"], hidden, dtype, dropout)
        self.mask = PaddingMask(dtype)
        self.blocks = nn.CellList(
            [Block(hidden, settings["heads"], settings["ffn"], dtype, dropout) for _ in range(settings["layers"])]
        )
        self.head = MaskedTokenHead(vocab, hidden, dtype)
        self.next_sentence_head = NextSentenceHead(hidden, dtype)
        self.loss = MaskedTokenLoss()
        self.next_sentence_loss = CrossEntropyLoss()
        self.add_losses = ops.Add()

    def construct(
        self, input_ids: Tensor, token_types: Tensor, present: Tensor, labels: Tensor, next_sentence: Tensor
    ) -> Tensor:
        """Return the sum of both losses."""
        mask = self.mask(present)
        states = self.embedding(input_ids, token_types)
        for block in self.blocks:
            states = block(states, mask)
        token_loss = self.loss(self.head(states, self.embedding.token.weight), labels)
        sentence_loss = self.next_sentence_loss(self.next_sentence_head(states), next_sentence)
        return self.add_losses(token_loss, sentence_loss)


def micro_batch(batch: int, sequence: int, vocab: int) -> tuple[Tensor, ...]:
    """Return ids, token types, padding mask, token labels and sentence labels; the last eighth of a row is padding."""
    ids = token_ids(batch, sequence, vocab)
    place = np.tile(np.arange(sequence), (batch, 1))
    types = (place >= sequence // 2).astype(np.int32)
    present = (place < sequence - sequence // 8).astype(np.int32)
    labels = np.where((place % PREDICTED_EVERY == 0) & (present == 1), ids.asnumpy(), IGNORED_LABEL)
    sentences = np.arange(batch) % 2
    return (
        ids,
        Tensor(types),
        Tensor(present),
        Tensor(labels.astype(np.int32)),
        Tensor(sentences.astype(np.int32)),
    )


def factory(size: str = "tiny", **overrides: Any) -> tuple[Bert, tuple[Tensor, ...]]:
    """Build a BERT-like pre-training network, in training mode, and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        **overrides: any of layers, hidden, heads, ffn, vocab, batch, sequence, dtype, dropout. A given `hidden` makes
            `ffn` four times its value unless that is given too.

    Returns:
        The network, whose call gives the scalar loss, and its int32 inputs: ids, token types, padding mask and token
        labels, each (batch, sequence), and sentence labels (batch,).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    if overrides.get("hidden") is not None and overrides.get("ffn") is None:
        overrides["ffn"] = 4 * overrides["hidden"]
    settings = settings_of(PRESETS, size, overrides)
    require_divisible(settings, "hidden", "heads")
    network = Bert(settings)
    network.set_train()
    return network, micro_batch(settings["batch"], settings["sequence"], settings["vocab"])
