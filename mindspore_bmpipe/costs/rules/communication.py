"""Collectives among the ranks of a stage.

Bytes and messages are those of the ring algorithms (Thakur, Rabenseifner, Gropp: Optimization of Collective
Communication Operations in MPICH, 2005): every rank sends its share of the data, one nth of it, to a neighbour in n - 1
rounds; an all-reduce is a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from typing import Any

from mindspore_bmpipe.costs.rules.base import Engine, OperationView, Rule, Traffic, Work, total_bytes
from mindspore_bmpipe.errors import InputError

_GROUP_ATTRIBUTES = ("group_rank_ids", "rank_list")
"""Where MindSpore's graphs hold the ranks of a collective, the surest first."""


def all_reduce(view: OperationView) -> Work:
    """Every rank gets the sum of V bytes of each: 2 (n - 1) rounds of V / n."""
    return _exchange(view, total_bytes(view.outputs), phases=2)


def all_gather(view: OperationView) -> Work:
    """Every rank gets V bytes, V / n from each: n - 1 rounds of V / n; V is the result."""
    return _exchange(view, total_bytes(view.outputs), phases=1)


def reduce_scatter(view: OperationView) -> Work:
    """Every rank gets one nth of the sum of V bytes of each: n - 1 rounds of V / n; V is the input."""
    return _exchange(view, total_bytes(view.inputs), phases=1)


def all_to_all(view: OperationView) -> Work:
    """Every rank sends V / n to every other: n - 1 rounds of V / n; V is the input."""
    return _exchange(view, total_bytes(view.inputs), phases=1)


def _exchange(view: OperationView, volume: Any, phases: int) -> Work:
    ranks = _group(view)
    rounds = phases * (len(ranks) - 1)
    return Work(
        Engine.NONE,
        0,
        total_bytes(view.inputs),
        total_bytes(view.outputs),
        Traffic(ranks, rounds, volume * rounds / len(ranks) if rounds else 0),
    )


def _group(view: OperationView) -> tuple[int, ...]:
    for name in _GROUP_ATTRIBUTES:
        ranks = view.attributes.get(name)
        if isinstance(ranks, tuple) and ranks and all(isinstance(rank, int) for rank in ranks):
            return ranks
    raise InputError(
        f"{view.primitive}: the graph does not say which ranks take part, so its time is unknown; write the file again "
        "with 'bmpipe trace --sharded'"
    )


RULES: dict[str, Rule] = {
    "AllReduce": all_reduce,
    "AllGather": all_gather,
    "ReduceScatter": reduce_scatter,
    "AlltoAll": all_to_all,
}
