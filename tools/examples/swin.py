"""Swin transformer (arXiv 2103.14030): attention in windows, every second one shifted, patches merged between stages.

Width and heads double from stage to stage while the side of the grid halves; there is no stochastic depth. Parameters
live in the compute type; images come as float32 and are cast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from tools.examples.common import (
    COMPUTE_TYPES,
    INITIAL_DEVIATION,
    MASKED_SCORE,
    CrossEntropyLoss,
    linear,
    require_divisible,
    settings_of,
)
from tools.examples.gpt import Attention, Block, CoreAttention
from tools.examples.vit import Patches, class_labels, image_batch

FFN_RATIO = 4
"""Inner width of the MLP by the width of the states."""

_COMMON = {"image": 224, "patch": 4, "window": 7, "batch": 1, "classes": 1000, "dtype": "float16"}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "image": 32, "patch": 2, "window": 4, "layers": "2,2", "hidden": 16, "heads": 2, "classes": 10,
        "batch": 2, "dtype": "float32",
    },
    "t": {**_COMMON, "layers": "2,2,6,2", "hidden": 96, "heads": 3},
    "b": {**_COMMON, "layers": "2,2,18,2", "hidden": 128, "heads": 4},
    "l": {**_COMMON, "layers": "2,2,18,2", "hidden": 192, "heads": 6},
}  # fmt: skip


class WindowAttention(CoreAttention):
    """Attention inside windows, with a learned bias by relative place; `mask` separates what the shift put together."""

    def __init__(self, size: int, heads: int, window: int, dtype: Any, mask: Tensor | None) -> None:
        super().__init__(size, dropout=0.0, mask=None)
        self.window = window
        self.table = Parameter(initializer(Normal(INITIAL_DEVIATION), ((2 * window - 1) ** 2, heads), dtype), "table")
        self.places = Tensor(relative_places(window))
        self.gather = ops.Gather()
        self.reshape = ops.Reshape()
        self.transpose = ops.Transpose()
        self.add_bias = ops.Add()
        self.shifted = mask is not None
        if self.shifted:
            self.apart = mask
        self.add_apart = ops.Add()

    def biased(self, scores: Tensor) -> Tensor:
        """Return the (windows, heads, tokens, tokens) scores with bias and mask."""
        count, heads, tokens, _ = scores.shape
        bias = self.reshape(self.gather(self.table, self.places, 0), (tokens, tokens, heads))
        scores = self.add_bias(scores, self.transpose(bias, (2, 0, 1)))
        if not self.shifted:
            return scores
        windows = self.apart.shape[0]
        separate = self.reshape(scores, (count // windows, windows, heads, tokens, tokens))
        return self.reshape(self.add_apart(separate, self.apart), scores.shape)


class CyclicShift(nn.Cell):
    """The grid moved by `shift` rows and columns, what leaves it coming in on the other side."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.join_rows = ops.Concat(1)
        self.join_columns = ops.Concat(2)

    def construct(self, grid: Tensor) -> Tensor:
        """Return the grid, (b, side, side, hidden), with row `shift` and column `shift` first."""
        grid = self.join_rows((grid[:, self.shift :], grid[:, : self.shift]))
        return self.join_columns((grid[:, :, self.shift :], grid[:, :, : self.shift]))


class Windows(nn.Cell):
    """The grid of patches cut into windows, attention in each, and the grid put together again."""

    def __init__(self, side: int, window: int, shift: int, attention: nn.Cell) -> None:
        super().__init__()
        self.side, self.window, self.shifted = side, window, shift > 0
        self.attention = attention
        if self.shifted:
            self.shift = CyclicShift(shift)
            self.shift_back = CyclicShift(side - shift)
        self.reshape = ops.Reshape()
        self.transpose = ops.Transpose()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, side * side, hidden) to the same shape."""
        batch, tokens, hidden = states.shape
        number, window = self.side // self.window, self.window
        grid = self.reshape(states, (batch, self.side, self.side, hidden))
        if self.shifted:
            grid = self.shift(grid)
        grid = self.reshape(grid, (batch, number, window, number, window, hidden))
        windows = self.transpose(grid, (0, 1, 3, 2, 4, 5))
        seen = self.attention(self.reshape(windows, (batch * number * number, window * window, hidden)))
        grid = self.reshape(seen, (batch, number, number, window, window, hidden))
        grid = self.reshape(self.transpose(grid, (0, 1, 3, 2, 4, 5)), (batch, self.side, self.side, hidden))
        if self.shifted:
            grid = self.shift_back(grid)
        return self.reshape(grid, (batch, tokens, hidden))


class PatchMerging(nn.Cell):
    """Four neighbours side by side, normalised, and projected to twice the width."""

    def __init__(self, side: int, hidden: int, dtype: Any) -> None:
        super().__init__()
        self.side = side
        self.norm = nn.LayerNorm((4 * hidden,), dtype=dtype)
        self.projection = linear(4 * hidden, 2 * hidden, dtype)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, side * side, hidden) to (b, side * side / 4, 2 * hidden)."""
        batch, tokens, hidden = states.shape
        half = self.side // 2
        corners = states.reshape(batch, half, 2, half, 2, hidden).transpose(0, 1, 3, 4, 2, 5)
        return self.projection(self.norm(corners.reshape(batch, tokens // 4, 4 * hidden)))


class Stage(nn.Cell):
    """Blocks at one resolution, then merging unless it is the last stage."""

    def __init__(self, side: int, hidden: int, heads: int, layers: int, window: int, dtype: Any, last: bool) -> None:
        super().__init__()
        window = min(window, side)
        blocks = []
        for layer in range(layers):
            shift = window // 2 if layer % 2 and window < side else 0
            mask = Tensor(shifted_mask(side, window, shift), dtype) if shift else None
            core = WindowAttention(hidden // heads, heads, window, dtype, mask)
            attention = Attention(hidden, heads, dtype, core)
            windows = Windows(side, window, shift, attention)
            blocks.append(Block(hidden, FFN_RATIO * hidden, dtype, 0.0, windows))
        self.blocks = nn.CellList(blocks)
        self.last = last
        if not last:
            self.merge = PatchMerging(side, hidden, dtype)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, side * side, hidden) to the next stage's states."""
        for block in self.blocks:
            states = block(states)
        return states if self.last else self.merge(states)


class PatchEmbedding(nn.Cell):
    """Patches and a norm; places come into the attention."""

    def __init__(self, patch: int, hidden: int, dtype: Any) -> None:
        super().__init__()
        self.patches = Patches(patch, hidden, dtype, bias=True)
        self.norm = nn.LayerNorm((hidden,), dtype=dtype)

    def construct(self, images: Tensor) -> Tensor:
        """Map (b, 3, height, width) to (b, patches, hidden)."""
        return self.norm(self.patches(images))


class Classifier(nn.Cell):
    """Classes of the mean over all patches."""

    def __init__(self, hidden: int, classes: int, dtype: Any) -> None:
        super().__init__()
        self.projection = linear(hidden, classes, dtype, bias=True)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, patches, hidden) to logits (b, classes)."""
        return self.projection(states.mean(1))


class Swin(nn.Cell):
    """Images (b, 3, height, width) float32 and labels (b,) int32, to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
        layers = stage_layers(settings)
        side = settings["image"] // settings["patch"]
        self.embedding = PatchEmbedding(settings["patch"], hidden, dtype)
        self.stages = nn.CellList(
            [
                Stage(
                    side >> stage,
                    hidden << stage,
                    settings["heads"] << stage,
                    count,
                    settings["window"],
                    dtype,
                    last=stage == len(layers) - 1,
                )
                for stage, count in enumerate(layers)
            ]
        )
        width = hidden << (len(layers) - 1)
        self.norm = nn.LayerNorm((width,), dtype=dtype)
        self.head = Classifier(width, settings["classes"], dtype)
        self.loss = CrossEntropyLoss()

    def construct(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over the images."""
        states = self.embedding(images)
        for stage in self.stages:
            states = stage(states)
        return self.loss(self.head(self.norm(states)), labels)


def relative_places(window: int) -> np.ndarray:
    """Return, for every pair of tokens of a window, the row of the bias table; int32 of shape (window ** 4,)."""
    rows, columns = (axis.reshape(-1) for axis in np.mgrid[:window, :window])
    row = rows[:, None] - rows[None, :] + window - 1
    column = columns[:, None] - columns[None, :] + window - 1
    return (row * (2 * window - 1) + column).reshape(-1).astype(np.int32)


def shifted_mask(side: int, window: int, shift: int) -> np.ndarray:
    """Return the float32 mask (windows, 1, tokens, tokens) that parts tokens which are no neighbours unshifted."""
    region = np.digitize(np.arange(side), [side - window, side - shift])
    regions = region[:, None] * 3 + region[None, :]
    number = side // window
    windows = regions.reshape(number, window, number, window).transpose(0, 2, 1, 3).reshape(-1, window * window)
    apart = windows[:, None, :, None] != windows[:, None, None, :]
    return np.where(apart, MASKED_SCORE, 0.0).astype(np.float32)


def stage_layers(settings: dict[str, Any]) -> list[int]:
    """Return the number of blocks of each stage from the setting `layers`, numbers with commas between them."""
    return [int(count) for count in str(settings["layers"]).split(",")]


def check_grid(settings: dict[str, Any]) -> None:
    """Check that patches, windows and mergings divide the grid of every stage.

    Raises:
        ValueError: naming the stage where they do not.
    """
    side = require_divisible(settings, "image", "patch")
    require_divisible(settings, "hidden", "heads")
    stages = len(stage_layers(settings))
    for stage in range(stages):
        window = min(settings["window"], side)
        if side % window or (side % 2 and stage < stages - 1):
            raise ValueError(f"stage {stage} has {side} x {side} patches, which windows of {window} or merging by 2 do "
                             "not fill")  # fmt: skip
        side //= 2


def factory(size: str = "tiny", **overrides: Any) -> tuple[Swin, tuple[Tensor, Tensor]]:
    """Build a Swin transformer with a classification loss, in training mode, and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        **overrides: any of image, patch, window, layers, hidden, heads, classes, batch, dtype. `layers` is text such as
            "2,2,6,2", one number a stage; `hidden` and `heads` are those of the first stage.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: float32 images (batch, 3, image, image) and int32
        labels (batch,).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    settings = settings_of(PRESETS, size, overrides)
    check_grid(settings)
    network = Swin(settings)
    network.set_train()
    batch = settings["batch"]
    return network, (image_batch(batch, settings["image"]), class_labels(batch, settings["classes"]))
