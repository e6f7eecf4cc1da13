"""Ranks of a stage that hold the same part of a weight, and whether MindSpore shares that part out among them.

Read off compiled graphs (`tests/test_verify_weight_exchange.py`); names of settings are MindSpore's.
"""

from __future__ import annotations

from mindspore_bmpipe.graph.cell_graph import ParameterInfo, Sharding
from mindspore_bmpipe.graph.mindir import BYTES_PER_ELEMENT

SMALLEST_SHARED_BYTES = 64 * 1024
"""Weights smaller than this are not shared out: the default of `parallel_optimizer_threshold`."""


def weight_holders(weight: ParameterInfo, sharding: Sharding) -> tuple[int, ...]:
    """Ranks of a stage that hold the same part of a weight as its first rank does.

    Tensor-parallel ranks lie side by side, those of them that hold the same part next to each other, and so do groups
    of them that hold the same experts.
    """
    across = sharding.tensor_parallel
    apart = sharding.ranks // across // weight.data_shares
    inside = across * weight.data_shares // weight.shares
    return tuple(outer * across + inner for outer in range(apart) for inner in range(inside))


def is_shared_out(weight: ParameterInfo, sharding: Sharding) -> bool:
    """Whether the ranks that hold a part of a weight share it out where `parallel_optimizer` is on.

    The whole weight, over all its parts, must be large enough, and the rows of a part must go evenly among all of its
    holders; MindSpore does not try fewer. Weights that are not trained are shared out too.
    """
    ranks = len(weight_holders(weight, sharding))
    shape = weight.type.shape
    return ranks > 1 and _whole_bytes(weight) >= SMALLEST_SHARED_BYTES and shape[0] // weight.row_shares % ranks == 0


def _whole_bytes(weight: ParameterInfo) -> int:
    size = BYTES_PER_ELEMENT.get(weight.type.dtype, 4)
    for length in weight.type.shape:
        size *= length
    return size
