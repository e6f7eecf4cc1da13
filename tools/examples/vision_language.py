"""Vision-language network: a ViT tower, a projector, and LLaMA-like blocks over image and text tokens, as in LLaVA.

The units differ in size and kind along the network, which is what makes it hard to split evenly. `freeze_vision=True`
takes the tower out of training, as LLaVA does. Parameters live in the compute type; images come as float32 and are
cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, nn, ops

from tools.examples.common import (
    COMPUTE_TYPES,
    CrossEntropyLoss,
    LanguageModelHead,
    TokenEmbedding,
    freeze,
    linear,
    require_divisible,
    settings_of,
    token_ids,
)
from tools.examples.llama import ROTARY_BASE, RMSNorm, block_of, check_attention
from tools.examples.vit import VisionTower, image_batch

_COMMON = {
    "batch": 1, "dtype": "bfloat16", "tied": False, "flash": False, "qkv_bias": False, "rotary_base": ROTARY_BASE,
    "freeze_vision": False, "vocab": 32000,
}  # fmt: skip
_CLIP = {
    "image": 336, "patch": 14, "vision_layers": 24, "vision_hidden": 1024, "vision_heads": 16, "vision_ffn": 4096,
    "sequence": 1472,
}  # fmt: skip
_VICUNA_7B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008}
_VICUNA_13B = {"layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40, "ffn": 13824}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "image": 32, "patch": 8, "vision_layers": 2, "vision_hidden": 32, "vision_heads": 2,
        "vision_ffn": 128, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 176, "vocab": 256,
        "batch": 2, "sequence": 16, "dtype": "float32",
    },
    "7b": {**_COMMON, **_CLIP, **_VICUNA_7B},
    "llava_7b": {**_COMMON, **_CLIP, **_VICUNA_7B, "freeze_vision": True},
    "llava_13b": {**_COMMON, **_CLIP, **_VICUNA_13B, "freeze_vision": True},
}  # fmt: skip


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
    """Images (b, 3, height, width) float32, ids and labels (b, s) int32, to the scalar loss.

    Args:
        vision: maps images to (b, tokens, its width).
        projector: maps these to (b, image tokens, hidden).
        blocks: layers over image and text tokens, which keep the shape.
        norm: stands before the head.
        settings: vocab, hidden, dtype and tied.
        position: adds positions to image and text tokens; `None` where the blocks do it.
    """

    def __init__(
        self,
        vision: nn.Cell,
        projector: nn.Cell,
        blocks: Sequence[nn.Cell],
        norm: nn.Cell,
        settings: dict[str, Any],
        position: nn.Cell | None = None,
    ) -> None:
        super().__init__()
        dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
        self.tied = settings["tied"]
        self.vision = vision
        self.projector = projector
        self.embedding = TokenEmbedding(settings["vocab"], hidden, dtype)
        self.join = ops.Concat(1)
        self.has_position = position is not None
        if self.has_position:
            self.position = position
        self.blocks = nn.CellList(list(blocks))
        self.take_text = ops.StridedSlice()
        self.norm = norm
        self.head = LanguageModelHead(settings["vocab"], hidden, dtype, self.tied)
        self.loss = CrossEntropyLoss()

    def construct(self, images: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over the b * s text tokens, which follow the image tokens."""
        seen = self.projector(self.vision(images))
        states = self.join((seen, self.embedding(input_ids)))
        if self.has_position:
            states = self.position(states)
        for block in self.blocks:
            states = block(states)
        states = self.norm(self.take_text(states, (0, seen.shape[1], 0), states.shape, (1, 1, 1)))
        logits = self.head(states, self.embedding.weight) if self.tied else self.head(states)
        return self.loss(logits, labels)


def tower_of(settings: dict[str, Any], **options: bool) -> VisionTower:
    """Return the tower for settings with image, patch, dtype and vision_...; `options` go to `VisionTower`."""
    return VisionTower(
        settings["image"],
        settings["patch"],
        settings["vision_layers"],
        settings["vision_hidden"],
        settings["vision_heads"],
        settings["vision_ffn"],
        COMPUTE_TYPES[settings["dtype"]],
        **options,
    )


def micro_batch(settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, ids and labels for settings with batch, image, sequence and vocab."""
    shape = settings["batch"], settings["sequence"], settings["vocab"]
    return image_batch(settings["batch"], settings["image"]), token_ids(*shape), token_ids(*shape, offset=1)


def check_tower(settings: dict[str, Any]) -> None:
    """Check that patches fill the image and heads divide the width of the tower.

    Raises:
        ValueError: naming the settings that do not fit together.
    """
    require_divisible(settings, "image", "patch")
    require_divisible(settings, "vision_hidden", "vision_heads")


def factory(size: str = "tiny", **overrides: Any) -> tuple[VisionLanguage, tuple[Tensor, Tensor, Tensor]]:
    """Build a vision-language training network and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        **overrides: any of image, patch, vision_layers, vision_hidden, vision_heads, vision_ffn and freeze_vision for
            the tower, and layers, hidden, heads, kv_heads, ffn, vocab, batch, sequence, dtype, tied, flash, qkv_bias,
            rotary_base for the language part; `sequence` counts text tokens only.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: float32 images (batch, 3, image, image) and int32
        ids and labels, both (batch, sequence).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    settings = settings_of(PRESETS, size, overrides)
    check_tower(settings)
    check_attention(settings)
    dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
    network = VisionLanguage(
        tower_of(settings, patch_bias=False, pre_norm=True, class_token=False),
        Projector(settings["vision_hidden"], hidden, dtype),
        [block_of(settings) for _ in range(settings["layers"])],
        RMSNorm(hidden, dtype),
        settings,
    )
    if settings["freeze_vision"]:
        freeze(network.vision)
    return network, micro_batch(settings)
