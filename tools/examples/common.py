"""What the example networks share: settings, positions, projections, masks and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

MASKED_SCORE = -10000.0
"""Added to the score of a pair that must not attend; representable in every compute type."""

INITIAL_DEVIATION = 0.02
"""Standard deviation of every weight matrix at the start of training."""

COMPUTE_TYPES = {"float16": ms.float16, "bfloat16": ms.bfloat16, "float32": ms.float32}


def settings_of(presets: Mapping[str, Mapping[str, Any]], size: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset named `size` with `overrides` laid over it.

    Args:
        presets: settings by name of size; all presets have the same keys.
        size: one of the names in `presets`.
        overrides: settings that replace those of the preset; `None` keeps the preset's value.

    Raises:
        ValueError: if the size or a setting is unknown, or the compute type is not one of `COMPUTE_TYPES`.
    """
    if size not in presets:
        raise ValueError(f"unknown size {size!r}; choose one of {', '.join(presets)}")
    settings = dict(presets[size])
    unknown = [name for name in overrides if name not in settings]
    if unknown:
        raise ValueError(f"unknown settings {', '.join(unknown)}; available: size, {', '.join(settings)}")
    settings.update({name: value for name, value in overrides.items() if value is not None})
    if settings["dtype"] not in COMPUTE_TYPES:
        raise ValueError(f"unknown dtype {settings['dtype']!r}; choose one of {', '.join(COMPUTE_TYPES)}")
    return settings


def require_divisible(settings: Mapping[str, Any], dividend: str, divisor: str) -> int:
    """Return `settings[dividend] / settings[divisor]`.

    Raises:
        ValueError: if the division leaves a remainder.
    """
    quotient, remainder = divmod(settings[dividend], settings[divisor])
    if remainder:
        raise ValueError(f"{dividend} ({settings[dividend]}) must be a multiple of {divisor} ({settings[divisor]})")
    return quotient


def token_ids(batch: int, sequence: int, vocab: int, offset: int = 0) -> Tensor:
    """Return int32 ids of shape (batch, sequence) that count up from `offset` modulo `vocab`."""
    ids = (np.arange(batch * sequence, dtype=np.int64) + offset) % vocab
    return Tensor(ids.reshape(batch, sequence).astype(np.int32))


def freeze(cell: nn.Cell) -> None:
    """Take every weight of a cell out of training."""
    for parameter in cell.get_parameters():
        parameter.requires_grad = False


@ops.constexpr
def positions(length: int) -> Tensor:
    """Return the float32 positions 0..length-1; evaluated while the graph is built."""
    return Tensor(np.arange(length, dtype=np.float32))


def linear(inputs: int, outputs: int, dtype: Any, bias: bool = False) -> nn.Dense:
    """Return a projection whose weight is (outputs, inputs) in the compute type."""
    return nn.Dense(
        inputs, outputs, weight_init=Normal(INITIAL_DEVIATION), bias_init="zeros", has_bias=bias, dtype=dtype
    )


class Activation(nn.Cell):
    """One primitive as a cell. Functional forms share one primitive among all uses, which a strategy would reach."""

    def __init__(self, primitive: Any, strategy: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.primitive = primitive.shard(strategy)

    def construct(self, states: Tensor) -> Tensor:
        """Return the states with the primitive applied, same shape."""
        return self.primitive(states)


class TokenEmbedding(nn.Cell):
    """Rows of a (vocab, hidden) table, picked by ids of shape (b, s)."""

    def __init__(self, vocab: int, hidden: int, dtype: Any) -> None:
        super().__init__()
        self.weight = Parameter(initializer(Normal(INITIAL_DEVIATION), (vocab, hidden), dtype), name="weight")
        self.gather = ops.Gather()

    def construct(self, ids: Tensor) -> Tensor:
        """Return the embeddings, (b, s, hidden)."""
        return self.gather(self.weight, ids, 0)


class LanguageModelHead(nn.Cell):
    """Logits over the vocabulary, from a weight of its own or from the embedding table (tied)."""

    def __init__(self, vocab: int, hidden: int, dtype: Any, tied: bool) -> None:
        super().__init__()
        self.tied = tied
        if not tied:
            self.weight = Parameter(initializer(Normal(INITIAL_DEVIATION), (vocab, hidden), dtype), name="weight")
        self.matmul = ops.MatMul(transpose_b=True)
        self.reshape = ops.Reshape()

    def construct(self, states: Tensor, table: Tensor | None = None) -> Tensor:
        """Map states (..., hidden) to logits (tokens, vocab); `table` is the embedding table when tied."""
        weight = table if self.tied else self.weight
        return self.matmul(self.reshape(states, (-1, states.shape[-1])), weight)


class CrossEntropyLoss(nn.Cell):
    """Mean over the tokens of minus the log-probability of the label, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.cast = ops.Cast()
        self.log_softmax = ops.LogSoftmax()
        self.pick = ops.GatherD()
        self.reshape = ops.Reshape()
        self.mean = ops.ReduceMean()
        self.negative = ops.Neg()

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Map logits (tokens, classes) and as many int32 labels to a scalar."""
        log_probability = self.log_softmax(self.cast(logits, ms.float32))
        picked = self.pick(log_probability, 1, self.reshape(labels, (-1, 1)))
        return self.negative(self.mean(picked))


class CausalMask(nn.Cell):
    """The (s, s) term added to attention scores so that no token sees a later one."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype
        self.later = ops.Less()
        self.cast = ops.Cast()
        self.scale = ops.Mul()
        self.reshape = ops.Reshape()

    def construct(self, length: int) -> Tensor:
        """Return zeros on and below the diagonal, `MASKED_SCORE` above it."""
        place = positions(length)
        later = self.later(self.reshape(place, (-1, 1)), self.reshape(place, (1, -1)))
        return self.scale(self.cast(later, self.dtype), MASKED_SCORE)


def shard_causal_mask(mask: CausalMask) -> None:
    """Have every rank make the whole mask; it is smaller than the messages that sharing it would take."""
    mask.later.shard(((1, 1), (1, 1)))
    mask.cast.shard(((1, 1),))
    mask.scale.shard(((1, 1), ()))


def shard_row_product(product: Any, rows: int, columns: int, scatter: bool) -> None:
    """Split a product of (tokens, inputs) with (outputs, inputs) by its inputs over `columns` ranks.

    Args:
        product: the `MatMul`.
        rows: ranks that share the tokens.
        columns: ranks that share the inputs and add up their results.
        scatter: whether each of them keeps its part of the tokens; otherwise each keeps the whole sum.
    """
    strategy = ((rows, columns), (1, columns))
    if scatter:
        product.shard(strategy, ((rows * columns, 1),))
    else:
        product.shard(strategy)


class FirstToken(nn.Cell):
    """From (b, s, hidden) to the (b, hidden) states of the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.slice = ops.StridedSlice()
        self.reshape = ops.Reshape()

    def construct(self, states: Tensor) -> Tensor:
        """Return the states of the first token of every sample."""
        batch, _, hidden = states.shape
        return self.reshape(self.slice(states, (0, 0, 0), (batch, 1, hidden), (1, 1, 1)), (batch, hidden))


class SplitHeads(nn.Cell):
    """From (b, s, heads * d) to (b, heads, s, d)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.reshape = ops.Reshape()
        self.transpose = ops.Transpose()

    def construct(self, states: Tensor) -> Tensor:
        """Return the states with one axis per head."""
        batch, length, width = states.shape
        split = self.reshape(states, (batch, length, self.heads, width // self.heads))
        return self.transpose(split, (0, 2, 1, 3))


class MergeHeads(nn.Cell):
    """From (b, heads, s, d) to (b, s, heads * d)."""

    def __init__(self) -> None:
        super().__init__()
        self.reshape = ops.Reshape()
        self.transpose = ops.Transpose()

    def construct(self, states: Tensor) -> Tensor:
        """Return the states with the heads side by side again."""
        batch, heads, length, size = states.shape
        return self.reshape(self.transpose(states, (0, 2, 1, 3)), (batch, length, heads * size))
