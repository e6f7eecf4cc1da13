"""Vision transformer (arXiv 2010.11929): images to patches, pre-norm blocks with full attention, a class per image.

Its tower is the image side of the vision-language networks. Parameters live in the compute type; images come as float32
and are cast.
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
    FirstToken,
    linear,
    require_divisible,
    settings_of,
)
from tools.examples.gpt import Attention, Block, CoreAttention, PositionEmbedding

CHANNELS = 3

_COMMON = {"image": 224, "batch": 1, "classes": 1000, "dtype": "float16", "dropout": 0.0}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "image": 32, "patch": 8, "layers": 2, "hidden": 32, "heads": 2, "ffn": 128, "classes": 10,
        "batch": 2, "dtype": "float32",
    },
    "b16": {**_COMMON, "patch": 16, "layers": 12, "hidden": 768, "heads": 12, "ffn": 3072},
    "l16": {**_COMMON, "patch": 16, "layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096},
    "h14": {**_COMMON, "patch": 14, "layers": 32, "hidden": 1280, "heads": 16, "ffn": 5120},
}  # fmt: skip


class Patches(nn.Cell):
    """One vector per square patch of the image."""

    def __init__(self, patch: int, hidden: int, dtype: Any, bias: bool) -> None:
        super().__init__()
        self.dtype = dtype
        self.cast = ops.Cast()
        self.convolution = nn.Conv2d(
            CHANNELS,
            hidden,
            patch,
            stride=patch,
            pad_mode="valid",
            has_bias=bias,
            weight_init=Normal(INITIAL_DEVIATION),
            bias_init="zeros",
            dtype=dtype,
        )
        self.reshape = ops.Reshape()
        self.transpose = ops.Transpose()

    def construct(self, images: Tensor) -> Tensor:
        """Map (b, 3, height, width) to (b, patches, hidden)."""
        grid = self.convolution(self.cast(images, self.dtype))
        batch, hidden, rows, columns = grid.shape
        return self.transpose(self.reshape(grid, (batch, hidden, rows * columns)), (0, 2, 1))


class PatchEmbedding(nn.Cell):
    """The patches behind a class token, with learned positions."""

    def __init__(self, image: int, patch: int, hidden: int, dtype: Any, bias: bool) -> None:
        super().__init__()
        self.patches = Patches(patch, hidden, dtype, bias)
        self.class_token = Parameter(initializer("zeros", (1, 1, hidden), dtype), name="class_token")
        self.position = PositionEmbedding((image // patch) ** 2 + 1, hidden, dtype)
        self.tile = ops.Tile()
        self.concatenate = ops.Concat(1)

    def construct(self, images: Tensor) -> Tensor:
        """Map (b, 3, height, width) to (b, patches + 1, hidden)."""
        patches = self.patches(images)
        return self.position(self.concatenate((self.tile(self.class_token, (patches.shape[0], 1, 1)), patches)))


class VisionTower(nn.Cell):
    """The transformer without a head.

    Args:
        image: side of the images in pixels.
        patch: side of a patch in pixels.
        layers: number of blocks.
        hidden: width.
        heads: attention heads of a block.
        ffn: inner width of the MLP.
        dtype: compute type.
        dropout: probability in the blocks.
        patch_bias: whether the projection of the patches has a bias.
        pre_norm: whether a norm stands before the blocks.
        final_norm: whether a norm stands behind them.
        class_token: whether the class token is returned with the patches.
    """

    def __init__(
        self,
        image: int,
        patch: int,
        layers: int,
        hidden: int,
        heads: int,
        ffn: int,
        dtype: Any,
        dropout: float = 0.0,
        patch_bias: bool = True,
        pre_norm: bool = False,
        final_norm: bool = False,
        class_token: bool = True,
    ) -> None:
        super().__init__()
        self.has_pre_norm, self.has_final_norm, self.class_token = pre_norm, final_norm, class_token
        self.embedding = PatchEmbedding(image, patch, hidden, dtype, patch_bias)
        if pre_norm:
            self.pre_norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.blocks = nn.CellList(
            [
                Block(hidden, ffn, dtype, dropout, Attention(hidden, heads, dtype, core))
                for core in (CoreAttention(hidden // heads, dropout, mask=None) for _ in range(layers))
            ]
        )
        if final_norm:
            self.norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.drop_class_token = ops.StridedSlice()

    def construct(self, images: Tensor) -> Tensor:
        """Map (b, 3, height, width) to (b, patches, hidden), with one token more if the class token stays."""
        states = self.embedding(images)
        if self.has_pre_norm:
            states = self.pre_norm(states)
        for block in self.blocks:
            states = block(states)
        if self.has_final_norm:
            states = self.norm(states)
        if self.class_token:
            return states
        return self.drop_class_token(states, (0, 1, 0), states.shape, (1, 1, 1))


class VisionTransformer(nn.Cell):
    """Images (b, 3, height, width) float32 and labels (b,) int32, to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype = COMPUTE_TYPES[settings["dtype"]]
        self.tower = VisionTower(
            settings["image"],
            settings["patch"],
            settings["layers"],
            settings["hidden"],
            settings["heads"],
            settings["ffn"],
            dtype,
            dropout=settings["dropout"],
            final_norm=True,
        )
        self.first = FirstToken()
        self.head = linear(settings["hidden"], settings["classes"], dtype, bias=True)
        self.loss = CrossEntropyLoss()

    def construct(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over the images."""
        return self.loss(self.head(self.first(self.tower(images))), labels)


def image_batch(batch: int, side: int) -> Tensor:
    """Return float32 images of shape (batch, 3, side, side) whose values rise from -1 to 1."""
    pixels = np.linspace(-1, 1, batch * CHANNELS * side * side, dtype=np.float32)
    return Tensor(pixels.reshape(batch, CHANNELS, side, side))


def class_labels(batch: int, classes: int) -> Tensor:
    """Return int32 labels of shape (batch,) that count up modulo `classes`."""
    return Tensor((np.arange(batch) % classes).astype(np.int32))


def factory(size: str = "tiny", **overrides: Any) -> tuple[VisionTransformer, tuple[Tensor, Tensor]]:
    """Build a vision transformer with a classification loss, in training mode, and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        **overrides: any of image, patch, layers, hidden, heads, ffn, classes, batch, dtype, dropout.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: float32 images (batch, 3, image, image) and int32
        labels (batch,).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    settings = settings_of(PRESETS, size, overrides)
    require_divisible(settings, "image", "patch")
    require_divisible(settings, "hidden", "heads")
    network = VisionTransformer(settings)
    network.set_train()
    batch = settings["batch"]
    return network, (image_batch(batch, settings["image"]), class_labels(batch, settings["classes"]))
