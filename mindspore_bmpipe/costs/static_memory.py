"""Bytes a weight needs on one device whatever micro-batch runs: itself, its gradient, its optimizer state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspore_bmpipe.graph.cell_graph import ParameterInfo
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT

GRADIENT_BYTES = 4
"""Gradients of micro-batches are added up in float32."""
MOMENT_BYTES = 4
"""Adam keeps two moments, in float32."""
MASTER_BYTES = 4
"""Weights of 16 bits have a float32 copy that the optimizer updates."""


@dataclass(frozen=True)
class StaticSettings:
    """What static memory depends on besides the weights."""

    data_parallel: int = 1
    """Ranks that hold the same weights, or share out among them those that are cut (:attr:`ParameterInfo.data_shares`),
    at least 1."""
    optimizer_shard_level: int = 0
    """What these ranks share out among them: 0 nothing, 1 weights and optimizer state, 2 gradients as well, 3 the
    weights that are gathered for use as well (levels of MindSpore's ``parallel_optimizer``)."""
    float32_state: bool = True
    """Whether 16-bit weights have gradients, moments and a copy in float32. MindSpore's own Adam keeps no copy, and the
    rest in the type of the weight."""


def static_bytes(parameter: ParameterInfo, settings: StaticSettings) -> int:
    """Bytes of one weight, or of one rank's share of it, its gradient and Adam state on one device.

    At levels 1 and 2 every rank holds its share and, from the first use to the end of the step, the gathered weight;
    at level 3 the gathered weight lives only while it is used. Shares are rounded up to whole elements.
    A 16-bit weight takes 18 bytes an element unshared, as in arXiv 2205.05198.
    """
    if not parameter.trainable:
        return weight_bytes(parameter)
    size = element_bytes(parameter)
    count = held_elements(parameter)
    ranks = _holders(parameter, settings)
    level = settings.optimizer_shard_level if ranks > 1 else 0
    share = -(-count // ranks)
    state = 2 * MOMENT_BYTES + (MASTER_BYTES if size < MASTER_BYTES else 0) if settings.float32_state else 2 * size
    owned = (share if level >= 1 else count) * (size + state)
    gathered = weight_bytes(parameter) if level in (1, 2) else 0
    return owned + gathered + gradient_bytes(parameter, settings)


def gradient_bytes(parameter: ParameterInfo, settings: StaticSettings) -> int:
    """Bytes of the buffer in which one weight's gradients are added up."""
    if not parameter.trainable:
        return 0
    count, ranks = held_elements(parameter), _holders(parameter, settings)
    shared_out = ranks > 1 and settings.optimizer_shard_level >= 2
    size = GRADIENT_BYTES if settings.float32_state else element_bytes(parameter)
    return (-(-count // ranks) if shared_out else count) * size


def weight_bytes(parameter: ParameterInfo) -> int:
    """Bytes of one whole weight, or of one rank's share of it; what a stage receives that reads another's weight."""
    return held_elements(parameter) * element_bytes(parameter)


def _holders(parameter: ParameterInfo, settings: StaticSettings) -> int:
    """Data-parallel ranks that hold the same share of a weight."""
    return max(1, settings.data_parallel // parameter.data_shares)


def held_elements(parameter: ParameterInfo) -> int:
    """Elements of one whole weight, or of one rank's share of it."""
    return -(-math.prod(parameter.type.shape) // parameter.shares)


def element_bytes(parameter: ParameterInfo) -> int:
    """Bytes of one element of a weight."""
    return BYTES_PER_ELEMENT.get(parameter.type.dtype, 4)
