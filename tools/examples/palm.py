"""PaLM-like decoder (arXiv 2204.02311): attention and SwiGLU side by side on one norm, one key/value head, no biases.

The width of a head is a setting of its own, and the head is the embedding table. Parameters live in the compute type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from tools.examples.common import (
    COMPUTE_TYPES,
    CrossEntropyLoss,
    LanguageModelHead,
    TokenEmbedding,
    settings_of,
    token_ids,
)
from tools.examples.llama import Attention, FeedForward

_COMMON = {"batch": 1, "dtype": "bfloat16", "flash": False, "head_size": 256, "vocab": 256000, "sequence": 2048}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "layers": 2, "hidden": 64, "heads": 4, "head_size": 8, "ffn": 256, "vocab": 256, "batch": 2,
        "sequence": 16, "dtype": "float32",
    },
    "8b": {**_COMMON, "layers": 32, "hidden": 4096, "heads": 16, "ffn": 16384},
    "62b": {**_COMMON, "layers": 64, "hidden": 8192, "heads": 32, "ffn": 32768},
    "540b": {**_COMMON, "layers": 118, "hidden": 18432, "heads": 48, "ffn": 73728},
}  # fmt: skip


class ScaleNorm(nn.Cell):
    """Layer normalisation over the last axis with a scale and no shift."""

    def __init__(self, hidden: int, dtype: Any) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (hidden,), dtype), name="weight")
        self.shift = Tensor(np.zeros(hidden), dtype)
        self.norm = ops.LayerNorm(-1, -1)

    def construct(self, states: Tensor) -> Tensor:
        """Return the normalised states, same shape."""
        return self.norm(states, self.weight, self.shift)[0]


class Block(nn.Cell):
    """One layer: the states, plus attention, plus MLP, both of the same normalised states."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
        self.norm = ScaleNorm(hidden, dtype)
        self.attention = Attention(
            hidden, settings["heads"], 1, dtype, settings["flash"], head_size=settings["head_size"]
        )
        self.feed_forward = FeedForward(hidden, settings["ffn"], dtype)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to (b, s, hidden)."""
        normed = self.norm(states)
        return states + self.attention(normed) + self.feed_forward(normed)


class Palm(nn.Cell):
    """Token ids and labels, both (b, s) int32, to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
        self.embedding = TokenEmbedding(settings["vocab"], hidden, dtype)
        self.blocks = nn.CellList([Block(settings) for _ in range(settings["layers"])])
        self.norm = ScaleNorm(hidden, dtype)
        self.head = LanguageModelHead(settings["vocab"], hidden, dtype, tied=True)
        self.loss = CrossEntropyLoss()

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over all b * s tokens."""
        states = self.embedding(input_ids)
        for block in self.blocks:
            states = block(states)
        return self.loss(self.head(self.norm(states), self.embedding.weight), labels)


def factory(size: str = "tiny", **overrides: Any) -> tuple[Palm, tuple[Tensor, Tensor]]:
    """Build a PaLM-like training network and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        **overrides: any of layers, hidden, heads, head_size, ffn, vocab, batch, sequence, dtype, flash.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: int32 ids and labels, both (batch, sequence).

    Raises:
        ValueError: if the size or a setting is unknown, or the head size is odd.
    """
    settings = settings_of(PRESETS, size, overrides)
    if settings["head_size"] % 2:
        raise ValueError(f"head_size is {settings['head_size']}; rotary positions need an even head size")
    shape = settings["batch"], settings["sequence"], settings["vocab"]
    return Palm(settings), (token_ids(*shape), token_ids(*shape, offset=1))
