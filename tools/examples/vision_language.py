"""Vision-language network: a ViT tower, a projector, and LLaMA-like blocks over image and text tokens.

The units differ in size and kind along the network, which is what makes it hard to split evenly. Parameters live in the
compute type; images come as float32 and are cast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from tools.examples.common import (
    COMPUTE_TYPES,
    INITIAL_DEVIATION,
    CrossEntropyLoss,
    LanguageModelHead,
    TokenEmbedding,
    linear,
    require_divisible,
    settings_of,
    token_ids,
)
from tools.examples.gpt import Block as VisionBlock
from tools.examples.gpt import PositionEmbedding
from tools.examples.llama import RMSNorm, block_of, check_attention

CHANNELS = 3

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "image": 32, "patch": 8, "vision_layers": 2, "vision_hidden": 32, "vision_heads": 2, "vision_ffn": 128,
        "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 176, "vocab": 256,
        "batch": 2, "sequence": 16, "dtype": "float32", "tied": False, "flash": False,
    },
    "7b": {
        "image": 336, "patch": 14, "vision_layers": 24, "vision_hidden": 1024, "vision_heads": 16, "vision_ffn": 4096,
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000,
        "batch": 1, "sequence": 1472, "dtype": "bfloat16", "tied": False, "flash": False,
    },
}  # fmt: skip


class PatchEmbedding(nn.Cell):
    """One vector per square patch of the image, a class token before them, and learned positions."""

    def __init__(self, image: int, patch: int, hidden: int, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype
        self.cast = ops.Cast()
        self.patches = nn.Conv2d(
            CHANNELS,
            hidden,
            patch,
            stride=patch,
            pad_mode="valid",
            has_bias=False,
            weight_init=Normal(INITIAL_DEVIATION),
            dtype=dtype,
        )
        self.class_token = Parameter(initializer("zeros", (1, 1, hidden), dtype), name="class_token")
        self.position = PositionEmbedding((image // patch) ** 2 + 1, hidden, dtype)
        self.reshape = ops.Reshape()
        self.transpose = ops.Transpose()
        self.tile = ops.Tile()
        self.concatenate = ops.Concat(1)

    def construct(self, images: Tensor) -> Tensor:
        """Map (b, 3, height, width) to (b, patches + 1, hidden)."""
        grid = self.patches(self.cast(images, self.dtype))
        batch, hidden, rows, columns = grid.shape
        patches = self.transpose(self.reshape(grid, (batch, hidden, rows * columns)), (0, 2, 1))
        return self.position(self.concatenate((self.tile(self.class_token, (batch, 1, 1)), patches)))


class VisionTower(nn.Cell):
    """A vision transformer (arXiv 2010.11929) that returns its patch tokens without the class token."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype = COMPUTE_TYPES[settings["dtype"]]
        hidden, heads = settings["vision_hidden"], settings["vision_heads"]
        self.embedding = PatchEmbedding(settings["image"], settings["patch"], hidden, dtype)
        self.pre_norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.blocks = nn.CellList(
            [
                VisionBlock(hidden, heads, settings["vision_ffn"], dtype, dropout=0.0, mask=None)
                for _ in range(settings["vision_layers"])
            ]
        )
        self.drop_class_token = ops.StridedSlice()

    def construct(self, images: Tensor) -> Tensor:
        """Map (b, 3, height, width) to (b, patches, vision_hidden)."""
        states = self.pre_norm(self.embedding(images))
        for block in self.blocks:
            states = block(states)
        return self.drop_class_token(states, (0, 1, 0), states.shape, (1, 1, 1))


class Projector(nn.Cell):
    """Two projections from the width of the tower to the width of the language blocks."""

    def __init__(self, inputs: int, outputs: int, dtype: Any) -> None:
        super().__init__()
        self.first = linear(inputs, outputs, dtype, bias=True)
        self.activation = nn.GELU()
        self.second = linear(outputs, outputs, dtype, bias=True)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, patches, inputs) to (b, patches, outputs)."""
        return self.second(self.activation(self.first(states)))


class VisionLanguage(nn.Cell):
    """Images (b, 3, height, width) float32, ids and labels (b, s) int32, to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype = COMPUTE_TYPES[settings["dtype"]]
        hidden = settings["hidden"]
        self.tied = settings["tied"]
        self.vision = VisionTower(settings)
        self.projector = Projector(settings["vision_hidden"], hidden, dtype)
        self.embedding = TokenEmbedding(settings["vocab"], hidden, dtype)
        self.join = ops.Concat(1)
        self.blocks = nn.CellList([block_of(settings) for _ in range(settings["layers"])])
        self.take_text = ops.StridedSlice()
        self.norm = RMSNorm(hidden, dtype)
        self.head = LanguageModelHead(settings["vocab"], hidden, dtype, self.tied)
        self.loss = CrossEntropyLoss()

    def construct(self, images: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over the b * s text tokens, which follow the image tokens."""
        seen = self.projector(self.vision(images))
        states = self.join((seen, self.embedding(input_ids)))
        for block in self.blocks:
            states = block(states)
        states = self.norm(self.take_text(states, (0, seen.shape[1], 0), states.shape, (1, 1, 1)))
        logits = self.head(states, self.embedding.weight) if self.tied else self.head(states)
        return self.loss(logits, labels)


def factory(size: str = "tiny", **overrides: Any) -> tuple[VisionLanguage, tuple[Tensor, Tensor, Tensor]]:
    """Build a vision-language training network and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        **overrides: any of image, patch, vision_layers, vision_hidden, vision_heads, vision_ffn for the tower, and
            layers, hidden, heads, kv_heads, ffn, vocab, batch, sequence, dtype, tied, flash for the language part;
            `sequence` counts text tokens only.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: float32 images (batch, 3, image, image) and int32
        ids and labels, both (batch, sequence).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    settings = settings_of(PRESETS, size, overrides)
    require_divisible(settings, "image", "patch")
    require_divisible(settings, "vision_hidden", "vision_heads")
    check_attention(settings)
    batch, side = settings["batch"], settings["image"]
    pixels = np.linspace(-1, 1, batch * CHANNELS * side * side, dtype=np.float32)
    shape = batch, settings["sequence"], settings["vocab"]
    images = Tensor(pixels.reshape(batch, CHANNELS, side, side))
    return VisionLanguage(settings), (images, token_ids(*shape), token_ids(*shape, offset=1))
