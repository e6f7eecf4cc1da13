"""PanGu-alpha-like decoder (arXiv 2104.12369): GPT-like layers, and on top a layer whose queries are learned positions.

`layers` counts the query layer too. The head is the embedding table. Parameters live in the compute type.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from tools.examples.bert import CrossAttention
from tools.examples.common import (
    COMPUTE_TYPES,
    INITIAL_DEVIATION,
    CausalMask,
    CrossEntropyLoss,
    LanguageModelHead,
    TokenEmbedding,
    positions,
    require_divisible,
    settings_of,
    token_ids,
)
from tools.examples.gpt import Block, PositionEmbedding, block_of

_COMMON = {"batch": 1, "dtype": "float16", "dropout": 0.1, "vocab": 40000, "sequence": 1024}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "layers": 3, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 256, "batch": 2, "sequence": 16,
        "dtype": "float32",
    },
    "2.6b": {**_COMMON, "layers": 32, "hidden": 2560, "heads": 32, "ffn": 10240},
    "200b": {**_COMMON, "layers": 64, "hidden": 16384, "heads": 128, "ffn": 65536},
}  # fmt: skip


class QueryAttention(nn.Cell):
    """Causal attention of one learned query per position over the states."""

    def __init__(self, length: int, hidden: int, heads: int, dtype: Any, dropout: float) -> None:
        super().__init__()
        self.queries = Parameter(initializer(Normal(INITIAL_DEVIATION), (length, hidden), dtype), name="queries")
        self.cast = ops.Cast()
        self.gather = ops.Gather()
        self.expand = ops.ExpandDims()
        self.tile = ops.Tile()
        self.mask = CausalMask(dtype)
        self.attention = CrossAttention(hidden, heads, dtype, dropout, hidden)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to (b, s, hidden)."""
        batch, length, _ = states.shape
        place = self.cast(positions(length), ms.int32)
        queries = self.tile(self.expand(self.gather(self.queries, place, 0), 0), (batch, 1, 1))
        return self.attention(queries, states, self.mask(length))


class PanguAlpha(nn.Cell):
    """Token ids and labels, both (b, s) int32, to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype, dropout = COMPUTE_TYPES[settings["dtype"]], settings["dropout"]
        hidden, length = settings["hidden"], settings["sequence"]
        self.embedding = TokenEmbedding(settings["vocab"], hidden, dtype)
        self.position = PositionEmbedding(length, hidden, dtype)
        self.embedding_dropout = nn.Dropout(p=dropout)
        self.blocks = nn.CellList([block_of(settings) for _ in range(settings["layers"] - 1)])
        self.query_layer = Block(
            hidden, settings["ffn"], dtype, dropout, QueryAttention(length, hidden, settings["heads"], dtype, dropout)
        )
        self.norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.head = LanguageModelHead(settings["vocab"], hidden, dtype, tied=True)
        self.loss = CrossEntropyLoss()

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over all b * s tokens."""
        states = self.embedding_dropout(self.position(self.embedding(input_ids)))
        for block in self.blocks:
            states = block(states)
        states = self.norm(self.query_layer(states))
        return self.loss(self.head(states, self.embedding.weight), labels)


def factory(size: str = "tiny", **overrides: Any) -> tuple[PanguAlpha, tuple[Tensor, Tensor]]:
    """Build a PanGu-alpha-like training network, in training mode, and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        **overrides: any of layers, hidden, heads, ffn, vocab, batch, sequence, dtype, dropout.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: int32 ids and labels, both (batch, sequence).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    settings = settings_of(PRESETS, size, overrides)
    require_divisible(settings, "hidden", "heads")
    shape = settings["batch"], settings["sequence"], settings["vocab"]
    network = PanguAlpha(settings)
    network.set_train()
    return network, (token_ids(*shape), token_ids(*shape, offset=1))
