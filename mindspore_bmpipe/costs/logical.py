"""Graph of one rank, derived from the graph of the whole network and the strategies of its operations."""

from __future__ import annotations

from collections.abc import Mapping

from mindspore_bmpipe.config import Config
from mindspore_bmpipe.costs.differentiate import differentiate
from mindspore_bmpipe.graph.cell_graph import CellGraph, Sharding
from mindspore_bmpipe.graph.trace_axes import BATCH, SEQUENCE
from mindspore_bmpipe.sharding.forward import has_strategies, shard_forward
from mindspore_bmpipe.sharding.repetition import without_repetition


def logical_graph(
    graph: CellGraph,
    sharding: Sharding,
    sizes: Mapping[str, int] | None = None,
    assume_elementwise: bool = False,
) -> CellGraph:
    """What one rank of a stage computes, keeps and exchanges, forward and backward.

    MindSpore differentiates a network after it has shared it out. So are the derivative rules applied to the sharded
    forward graph here; backward operations of ``graph`` are not used.

    Args:
        graph: a network traced or exported whole, with strategies on its operations.
        sharding: ranks that share it.
        sizes: values of symbols on one rank, other than those of the trace.
        assume_elementwise: as in :func:`differentiate`.

    Raises:
        InputError: as :func:`shard_forward` and :func:`differentiate`.
        UnknownPrimitiveError: as :func:`differentiate`.
    """
    return without_repetition(differentiate(shard_forward(graph, sharding, sizes or {}), assume_elementwise))


def graph_of_one_rank(graph: CellGraph, config: Config, assume_elementwise: bool = False) -> CellGraph:
    """The graph that settings ask for: that of one rank if tensor-parallel ranks share a network traced whole.

    A graph without strategies, or one that settings refuse for other reasons, is returned as it is.

    Raises:
        InputError: as :func:`logical_graph`.
        UnknownPrimitiveError: as :func:`logical_graph`.
    """
    others = max(config.expert_parallel or 1, config.context_parallel or 1)
    if graph.sharding is not None or (config.tensor_parallel or 1) == 1 or others > 1 or not has_strategies(graph):
        return graph
    given = {BATCH: config.micro_batch_size, SEQUENCE: config.sequence_length}
    sizes = {name: value for name, value in given.items() if isinstance(value, int)}
    return logical_graph(graph, sharding_of(config), sizes, assume_elementwise)


def sharding_of(config: Config) -> Sharding:
    """Ranks of a stage by the settings."""
    return Sharding(config.data_parallel or 1, config.tensor_parallel or 1)
