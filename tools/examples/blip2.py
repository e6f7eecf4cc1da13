"""BLIP-2-like network (arXiv 2301.12597): frozen ViT tower, Q-Former, frozen GPT-like language model.

Learned queries read the image by cross-attention in every second layer of the Q-Former; their projection goes before
the text. Only the Q-Former and the projection are trained. Parameters live in the compute type.
"""

from __future__ import annotations

from typing import Any

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from tools.examples import bert
from tools.examples.common import COMPUTE_TYPES, INITIAL_DEVIATION, freeze, linear, require_divisible, settings_of
from tools.examples.gpt import PositionEmbedding, block_of
from tools.examples.vision_language import VisionLanguage, check_tower, micro_batch, tower_of

CROSS_EVERY = 2
"""One layer in so many of the Q-Former reads the image."""

_COMMON = {"batch": 1, "dtype": "float16", "dropout": 0.0, "tied": True}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "image": 32, "patch": 8, "vision_layers": 2, "vision_hidden": 32, "vision_heads": 2,
        "vision_ffn": 128, "queries": 4, "query_layers": 2, "query_hidden": 48, "query_heads": 3, "query_ffn": 96,
        "layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 256, "batch": 2, "sequence": 16,
        "dtype": "float32",
    },
    "opt_2.7b": {
        **_COMMON, "image": 224, "patch": 14, "vision_layers": 39, "vision_hidden": 1408, "vision_heads": 16,
        "vision_ffn": 6144, "queries": 32, "query_layers": 12, "query_hidden": 768, "query_heads": 12,
        "query_ffn": 3072, "layers": 32, "hidden": 2560, "heads": 32, "ffn": 10240, "vocab": 50272, "sequence": 480,
    },
}  # fmt: skip


class QFormerLayer(bert.Block):
    """A post-norm encoder layer over the queries; with `image_width`, they also attend over the image."""

    def __init__(
        self, hidden: int, heads: int, ffn: int, dtype: Any, dropout: float, image_width: int | None = None
    ) -> None:
        super().__init__(hidden, heads, ffn, dtype, dropout)
        self.crosses = image_width is not None
        if self.crosses:
            self.cross_attention = bert.CrossAttention(hidden, heads, dtype, dropout, image_width)
            self.cross_dropout = nn.Dropout(p=dropout)
            self.add_cross = ops.Add()
            self.cross_norm = nn.LayerNorm((hidden,), dtype=dtype)

    def construct(self, queries: Tensor, image: Tensor) -> Tensor:
        """Map (b, queries, hidden) and (b, tokens, image_width) to (b, queries, hidden)."""
        queries = self.attended(queries)
        if self.crosses:
            seen = self.cross_dropout(self.cross_attention(queries, image))
            queries = self.cross_norm(self.add_cross(queries, seen))
        return self.transformed(queries)


class QFormer(nn.Cell):
    """Learned queries that read the image, projected to the width of the language model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype, dropout = COMPUTE_TYPES[settings["dtype"]], settings["dropout"]
        hidden, width = settings["query_hidden"], settings["vision_hidden"]
        self.image_norm = nn.LayerNorm((width,), dtype=dtype)
        self.queries = Parameter(
            initializer(Normal(INITIAL_DEVIATION), (1, settings["queries"], hidden), dtype), name="queries"
        )
        self.tile = ops.Tile()
        self.norm = nn.LayerNorm((hidden,), dtype=dtype)
        self.dropout = nn.Dropout(p=dropout)
        self.blocks = nn.CellList(
            [
                QFormerLayer(
                    hidden,
                    settings["query_heads"],
                    settings["query_ffn"],
                    dtype,
                    dropout,
                    width if layer % CROSS_EVERY == 0 else None,
                )
                for layer in range(settings["query_layers"])
            ]
        )
        self.projection = linear(hidden, settings["hidden"], dtype, bias=True)

    def construct(self, image: Tensor) -> Tensor:
        """Map (b, tokens, vision_hidden) to (b, queries, hidden)."""
        image = self.image_norm(image)
        queries = self.dropout(self.norm(self.tile(self.queries, (image.shape[0], 1, 1))))
        for block in self.blocks:
            queries = block(queries, image)
        return self.projection(queries)


def factory(size: str = "tiny", **overrides: Any) -> tuple[VisionLanguage, tuple[Tensor, Tensor, Tensor]]:
    """Build a BLIP-2-like training network, in training mode, and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        **overrides: any of image, patch, vision_layers, vision_hidden, vision_heads, vision_ffn for the tower, queries,
            query_layers, query_hidden, query_heads, query_ffn for the Q-Former, and layers, hidden, heads, ffn, vocab,
            batch, sequence, dtype, tied, dropout; `sequence` counts text tokens only.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: float32 images (batch, 3, image, image) and int32
        ids and labels, both (batch, sequence).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    settings = settings_of(PRESETS, size, overrides)
    check_tower(settings)
    require_divisible(settings, "query_hidden", "query_heads")
    require_divisible(settings, "hidden", "heads")
    dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
    network = VisionLanguage(
        tower_of(settings),
        QFormer(settings),
        [block_of(settings) for _ in range(settings["layers"])],
        nn.LayerNorm((hidden,), dtype=dtype),
        settings,
        PositionEmbedding(settings["queries"] + settings["sequence"], hidden, dtype),
    )
    for part in (network.vision, network.embedding, network.position, network.blocks, network.norm, network.head):
        freeze(part)
    network.set_train()
    return network, micro_batch(settings)
