"""Bytes a weight needs on one device whatever micro-batch runs: itself, its gradient, its optimizer state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspore_bmpipe.costs.weight_holders import is_shared_out, weight_holders
from mindspore_bmpipe.graph.cell_graph import ParameterInfo, Sharding
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT

GRADIENT_BYTES = 4
"""Gradients of micro-batches are added up in float32."""
MOMENT_BYTES = 4
"""Adam keeps two moments, in float32."""
MASTER_BYTES = 4
"""Weights of 16 bits have a float32 copy that the optimizer updates."""

_ONE_RANK = Sharding(1, 1)


@dataclass(frozen=True)
class StaticSettings:
    """What static memory depends on besides the weights."""

    sharding: Sharding = _ONE_RANK
    """Ranks of a stage."""
    optimizer_shard_level: int = 0
    """What ranks that hold the same share out among them: 0 nothing, 1 weights and optimizer state, 2 gradients as
    well, 3 the weights that are gathered for use as well (levels of MindSpore's ``parallel_optimizer``)."""
    float32_state: bool = True
    """Whether 16-bit weights have gradients, moments and a copy in float32. MindSpore's own Adam keeps no copy, and the
    rest in the type of the weight."""


def static_bytes(parameter: ParameterInfo, settings: StaticSettings) -> int:
    """Bytes of one weight, or of one rank's share of it, its gradient and Adam state on one device.

    At levels 1 and 2 every rank holds its share and, from the first use to the end of the step, the gathered weight;
    at level 3 the gathered weight lives only while it is used. A weight that is not trained is the weight alone.
    A 16-bit weight takes 18 bytes an element unshared, as in arXiv 2205.05198.
    """
    size = element_bytes(parameter)
    level = sharing_level(parameter, settings)
    state = 2 * MOMENT_BYTES + (MASTER_BYTES if size < MASTER_BYTES else 0) if settings.float32_state else 2 * size
    owned = _owned_elements(parameter, settings, level >= 1) * (size + (state if parameter.trainable else 0))
    gathered = weight_bytes(parameter) if level in (1, 2) else 0
    return owned + gathered + gradient_bytes(parameter, settings)


def gradient_bytes(parameter: ParameterInfo, settings: StaticSettings) -> int:
    """Bytes of the buffer in which one weight's gradients are added up."""
    if not parameter.trainable:
        return 0
    size = GRADIENT_BYTES if settings.float32_state else element_bytes(parameter)
    return _owned_elements(parameter, settings, sharing_level(parameter, settings) >= 2) * size


def sharing_level(parameter: ParameterInfo, settings: StaticSettings) -> int:
    """The optimizer shard level for one weight: 0 if it is too small to be shared out, or cannot be."""
    return settings.optimizer_shard_level if is_shared_out(parameter, settings.sharding) else 0


def weight_bytes(parameter: ParameterInfo) -> int:
    """Bytes of one whole weight, or of one rank's share of it; what a stage receives that reads another's weight."""
    return held_elements(parameter) * element_bytes(parameter)


def _owned_elements(parameter: ParameterInfo, settings: StaticSettings, is_shared: bool) -> int:
    """Elements of what a rank owns: all that it holds, or its part of that."""
    ranks = len(weight_holders(parameter, settings.sharding)) if is_shared else 1
    return held_elements(parameter) // ranks


def held_elements(parameter: ParameterInfo) -> int:
    """Elements of one whole weight, or of one rank's share of it."""
    return -(-math.prod(parameter.type.shape) // parameter.shares)


def element_bytes(parameter: ParameterInfo) -> int:
    """Bytes of one element of a weight."""
    return BYTES_PER_ELEMENT.get(parameter.type.dtype, 4)
