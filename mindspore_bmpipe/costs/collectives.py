"""Times of collectives among ranks of one or several nodes (alpha-beta model).

Within one node, and wherever nodes hold unequal numbers of the ranks, ranks form one ring over the slowest link between
any of them. With V the bytes of the whole tensor, n ranks, latency a and bandwidth B of the link:

    AllReduce                              2 (n - 1) a + 2 (n - 1) / n * V / B
    AllGather, ReduceScatter, AlltoAll       (n - 1) a +   (n - 1) / n * V / B

Otherwise the ranks have levels: n_0 in each node, n_1 nodes (of a group of nodes), n_2 groups, each with its link. HCCL
runs a collective level by level (HCCL user guide, "Hierarchical Communication Principle"), every level being the rings
above among ranks of the same place. With P_i = n_0 ... n_i:

    AllReduce        2 sum over i of (n_i - 1) a_i + (n_i - 1) / n_i * V / P_(i-1) / B_i
    AllGather          sum over i of (n_i - 1) a_i + (n_i - 1) / n_i * V P_i / n / B_i
    ReduceScatter    the same, outer levels first
    AlltoAll           sum over i of (n_i - 1) a_i + (n_i - 1) / n_i * V / B_i

or uses the links inside and between nodes at once (the same guide, "Pipeline"): in each of N - 1 rounds a rank passes
one share, V / n, on to the next of N nodes, and the one before it to the others of its node. With a', B' of the slowest
link between nodes:

    AllGather, ReduceScatter    (N - 1) max(a' + V / n / B', t) + t,   t = a_0 + (n_0 - 1) V / n / B_0
    AllReduce                   twice that

AlltoAll may send everything straight to where it belongs instead (the same guide, "Pairwise"):

    AlltoAll        sum over i of (n_i - 1) P_(i-1) (a_i + V / n / B_i)

HCCL chooses by itself; here the quickest is taken. All are maxima of straight lines in V.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspore_bmpipe.costs.hardware import Hardware, Link


class Line(NamedTuple):
    """A time that grows with the volume."""

    latency_ms: float
    """Time at no volume."""
    ms_per_byte: float
    """Time for every byte of the whole tensor."""


Algorithm = tuple[Line, ...]
"""One way to run a collective: it takes as long as the longest of its lines."""


@dataclass(frozen=True)
class Level:
    """Ranks, or nodes, or groups of nodes, that exchange data over one class of links."""

    members: int
    """How many, at least 2."""
    link: Link
    """What connects them."""


def levels_of(hardware: Hardware, ranks: Sequence[int]) -> tuple[Level, ...]:
    """Levels of a group, those inside a node first; empty for one rank, one level where nodes hold unequal parts."""
    node_of = [rank // hardware.devices_per_node for rank in ranks]
    in_node = Counter(node_of)
    in_group = Counter(node // hardware.nodes_per_group if hardware.inter_group is not None else 0 for node in in_node)
    if len(ranks) < 2:
        return ()
    if len(set(in_node.values())) > 1 or len(set(in_group.values())) > 1:
        return (Level(len(ranks), hardware.link_of(ranks)),)
    found = [
        (len(ranks) // len(in_node), hardware.intra_node),
        (len(in_node) // len(in_group), hardware.inter_node),
        (len(in_group), hardware.inter_group),
    ]
    return tuple(Level(members, link) for members, link in found if members > 1 and link is not None)


def algorithms_of(hardware: Hardware, primitive: str, ranks: Sequence[int]) -> tuple[Algorithm, ...]:
    """The ways to run a collective among ranks; the quickest counts. Empty for one rank.

    Args:
        hardware: the machine.
        primitive: a key of :data:`COLLECTIVES`.
        ranks: who takes part; they fill up node after node.
    """
    levels = levels_of(hardware, ranks)
    return COLLECTIVES[primitive](levels) if levels else ()


def collective_ms(hardware: Hardware, primitive: str, ranks: Sequence[int], volume_bytes: float) -> float:
    """Time of a collective on a tensor of so many bytes, whole: what AllGather makes, what the others are given."""
    found = algorithms_of(hardware, primitive, ranks)
    return min((algorithm_ms(lines, volume_bytes) for lines in found), default=0.0)


def algorithm_ms(lines: Algorithm, volume_bytes: float) -> float:
    """Time of one way to run a collective."""
    return max(line.latency_ms + line.ms_per_byte * volume_bytes for line in lines)


def _gather(levels: Sequence[Level]) -> tuple[Algorithm, ...]:
    parts = []
    share = 1.0 / _ranks(levels)
    for level in levels:
        # The level's rings make tensors of this share of the whole.
        share *= level.members
        parts.append(_ring(level, share))
    return ((_sum(parts),), *_pipelined(levels))


def _reduce(levels: Sequence[Level]) -> tuple[Algorithm, ...]:
    parts = []
    share = 1.0
    for level in levels:
        parts.extend([_ring(level, share)] * 2)
        share /= level.members
    return ((_sum(parts),), *(_twice(lines) for lines in _pipelined(levels)))


def _exchange(levels: Sequence[Level]) -> tuple[Algorithm, ...]:
    by_level = (_sum([_ring(level, 1.0) for level in levels]),)
    if len(levels) == 1:
        return (by_level,)
    straight, inside, ranks = [], 1, _ranks(levels)
    for level in levels:
        partners = (level.members - 1) * inside
        rate = level.link.group_bytes_per_ms(level.members)
        straight.append(Line(partners * level.link.latency_ms, partners / ranks / rate))
        inside *= level.members
    return by_level, (_sum(straight),)


def _pipelined(levels: Sequence[Level]) -> tuple[Algorithm, ...]:
    """Passing shares on between nodes while those that have arrived are passed on inside."""
    if len(levels) == 1:
        return ()
    inner, outer = levels[0], levels[1:]
    ranks, nodes = _ranks(levels), _ranks(outer)
    slowest = outer[-1].link
    between = Line(slowest.latency_ms, 1 / ranks / slowest.group_bytes_per_ms(nodes))
    inside = Line(inner.link.latency_ms, (inner.members - 1) / ranks / inner.link.group_bytes_per_ms(inner.members))
    return (tuple(_sum([_times(longer, nodes - 1), inside]) for longer in (between, inside)),)


def _ring(level: Level, share: float) -> Line:
    """N - 1 rounds in which each member sends one nth of a tensor that is this share of the whole."""
    rounds = level.members - 1
    rate = level.link.group_bytes_per_ms(level.members)
    return Line(rounds * level.link.latency_ms, rounds / level.members * share / rate)


def _ranks(levels: Sequence[Level]) -> int:
    ranks = 1
    for level in levels:
        ranks *= level.members
    return ranks


def _sum(lines: Sequence[Line]) -> Line:
    return Line(sum(line.latency_ms for line in lines), sum(line.ms_per_byte for line in lines))


def _times(line: Line, count: int) -> Line:
    return Line(count * line.latency_ms, count * line.ms_per_byte)


def _twice(lines: Algorithm) -> Algorithm:
    return tuple(_times(line, 2) for line in lines)


COLLECTIVES: dict[str, Callable[[Sequence[Level]], tuple[Algorithm, ...]]] = {
    "AllReduce": _reduce,
    "AllGather": _gather,
    "ReduceScatter": _gather,
    "AlltoAll": _exchange,
}
"""Primitives in which all ranks of a group exchange data."""
