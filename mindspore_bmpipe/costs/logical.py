"""Graph of one rank, derived from the graph of the whole network and the strategies of its operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from mindspore_bmpipe.config import Config
from mindspore_bmpipe.costs.differentiate import differentiate
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import CellGraph, Sharding
from mindspore_bmpipe.graph.sharded import require_degrees, require_experts
from mindspore_bmpipe.graph.trace_axes import BATCH, SEQUENCE
from mindspore_bmpipe.sharding.forward import has_strategies, shard_forward
from mindspore_bmpipe.sharding.repetition import without_repetition

DEGREES = tuple(field.name for field in fields(Sharding))
"""Settings that say how ranks share a network."""
_EXAMPLES = {
    "tensor_parallel": "llama_sharded",
    "expert_parallel": "mixtral_sharded",
    "context_parallel": "llama_context_sharded",
}
"""Degrees -> example network with strategies for them."""
_ALWAYS = ("data_parallel", "tensor_parallel")
"""Degrees that settings of a sharded graph always name."""


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
    """The graph that settings ask for: that of one rank if ranks share more than the samples of a network traced whole.

    A graph without strategies is returned as it is.

    Raises:
        InputError: as :func:`logical_graph`, or strategies that do not share out experts as the settings say.
        UnknownPrimitiveError: as :func:`logical_graph`.
    """
    sharding = sharding_of(config)
    if graph.sharding is not None or not sharding.is_shared or not has_strategies(graph):
        return graph
    require_degrees(sharding)
    given = {BATCH: config.micro_batch_size, SEQUENCE: config.sequence_length}
    sizes = {name: value for name, value in given.items() if isinstance(value, int)}
    found = logical_graph(graph, sharding, sizes, assume_elementwise)
    require_experts(graph.name, found.parameters, sharding)
    return found


def sharding_of(config: Config) -> Sharding:
    """Ranks of a stage by the settings."""
    given = {key: getattr(config, key) for key in DEGREES}
    return Sharding(**{"data_parallel": 1, "tensor_parallel": 1, **{key: n for key, n in given.items() if n}})


def with_degrees_of(graph: CellGraph, config: Config) -> Config:
    """Settings with the parallel degrees that a sharded graph was made for.

    Raises:
        InputError: other degrees, or degrees for which a graph has no strategies.
    """
    asked = sharding_of(config)
    if graph.sharding is None:
        for key in ("tensor_parallel", "expert_parallel", "context_parallel"):
            if getattr(asked, key) > 1:
                raise InputError(
                    f"config: {key}: {getattr(asked, key)}, but no operation of {graph.name} has a strategy, so "
                    "nothing says what each rank would run; set strategies with Primitive.shard in the network, as "
                    f"tools.examples.{_EXAMPLES[key]} does, or give a layer table with the costs of one device"
                )
        return config
    for key, traced in vars(graph.sharding).items():
        given = getattr(config, key)
        if given is not None and given != traced:
            raise InputError(
                f"config: {key}: {given}, but {graph.name} was traced for {traced}; leave it out, or trace the network "
                f"for it (bmpipe trace --sharded {_trace_option(key, given)})"
            )
    found = {key: value for key, value in vars(graph.sharding).items() if key in _ALWAYS or value not in (1, False)}
    return replace(config, **found)


def _trace_option(degree: str, value: int | bool) -> str:
    """Option of 'bmpipe trace' for a degree."""
    option = f"--{degree.replace('_', '-')}"
    return (option if value else f"without {option}") if isinstance(value, bool) else f"{option} {value}"
