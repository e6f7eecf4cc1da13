"""Collectives over several nodes: times by hand, and bytes against the algorithms run step by step on sets of data."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from mindspore.nn.utils import no_init_parameters

from mindspore_bmpipe.costs.collectives import COLLECTIVES, algorithm_ms, algorithms_of, collective_ms, levels_of
from mindspore_bmpipe.costs.hardware import Hardware, Link, load_hardware
from mindspore_bmpipe.costs.logical import logical_graph
from mindspore_bmpipe.costs.network import network_costs
from mindspore_bmpipe.graph.cell_graph import Sharding
from mindspore_bmpipe.graph.trace import trace
from mindspore_bmpipe.report.explain import unit_expressions
from tools.examples.llama_sharded import factory

INTRA, INTER, GROUPS = Link(1.0, 100.0, 100.0), Link(2.0, 10.0, 10.0), Link(5.0, 4.0, 4.0)
TOY = Hardware("toy", 1, {}, 1.0, 0.0, INTRA, INTER, devices_per_node=4)
"""Nodes of four devices; a millisecond and 100 bytes a millisecond inside, 2 and 10 between."""
GROUPED = replace(TOY, devices_per_node=2, inter_group=GROUPS, nodes_per_group=3)


def test_levels_follow_the_nodes() -> None:
    assert [(level.members, level.link) for level in levels_of(TOY, (0, 1, 4, 5))] == [(2, INTRA), (2, INTER)]
    assert [(level.members, level.link) for level in levels_of(TOY, (0, 4, 8))] == [(3, INTER)]
    assert [(level.members, level.link) for level in levels_of(TOY, (1, 2, 3))] == [(3, INTRA)]
    # Two devices in each of three nodes of two groups.
    assert [level.members for level in levels_of(GROUPED, range(12))] == [2, 3, 2]
    # One of each node, both groups.
    assert [(level.members, level.link) for level in levels_of(GROUPED, range(0, 12, 2))] == [(3, INTER), (2, GROUPS)]
    assert levels_of(TOY, (3,)) == ()


def test_nodes_of_unequal_shares_are_one_ring_over_the_slowest_link() -> None:
    assert [(level.members, level.link) for level in levels_of(TOY, (0, 1, 2, 4))] == [(4, INTER)]
    # 400 bytes: 3 rounds of 2 ms and 100 bytes at 10 bytes a millisecond.
    assert collective_ms(TOY, "AllGather", (0, 1, 2, 4), 400) == pytest.approx(3 * (2 + 10))
    # Nodes alike, but two in one group and one in the other.
    assert [(level.members, level.link) for level in levels_of(GROUPED, (0, 2, 6))] == [(3, GROUPS)]


@pytest.mark.parametrize(
    ("primitive", "expected"), [("AllReduce", 18.0), ("AllGather", 9.0), ("ReduceScatter", 9.0), ("AlltoAll", 9.0)]
)
def test_one_node_is_one_ring(primitive: str, expected: float) -> None:
    """4 devices, 800 bytes: 3 rounds of a millisecond and 200 bytes, 3 + 6 = 9."""
    assert collective_ms(TOY, primitive, range(4), 800) == pytest.approx(expected)


def test_two_nodes_by_hand() -> None:
    """Two devices in each of two nodes, 400 bytes; a rank's share is 100 bytes.

    Level by level, AllReduce: half inside, 1 + 200 / 100 = 3; the sum of halves between, 2 x (2 + 100 / 10) = 24; and 3
    to gather. Both at once: a share to the other node, 2 + 10 = 12, then inside, 1 + 1 = 2, each way.
    """
    group = (0, 1, 4, 5)
    by_level, at_once = algorithms_of(TOY, "AllReduce", group)
    assert algorithm_ms(by_level, 400) == pytest.approx(3 + 24 + 3)
    assert algorithm_ms(at_once, 400) == pytest.approx(2 * (12 + 2))
    assert collective_ms(TOY, "AllReduce", group, 400) == pytest.approx(28)
    # Gathered inside first, a node has 200 bytes: 1 + 100 / 100; then half of all between: 2 + 200 / 10.
    for primitive in ("AllGather", "ReduceScatter"):
        by_level, at_once = algorithms_of(TOY, primitive, group)
        assert algorithm_ms(by_level, 400) == pytest.approx(2 + 22)
        assert algorithm_ms(at_once, 400) == pytest.approx(12 + 2)
    # Half of everything moves inside, then half between: 1 + 2 and 2 + 20. Straight: 1 + 1, and 2 x (2 + 10) between.
    by_level, straight = algorithms_of(TOY, "AlltoAll", group)
    assert algorithm_ms(by_level, 400) == pytest.approx(3 + 22)
    assert algorithm_ms(straight, 400) == pytest.approx(2 + 24)
    # One ring of the four over the slow link would take 6 x (2 + 10) for AllReduce.
    assert collective_ms(TOY, "AllReduce", group, 400) < 72


def test_where_links_inside_are_the_slower_ones_they_set_the_pace() -> None:
    """Inside 20 + 1, between 2 + 10: two rounds at 21 of a ring of three nodes, then once more inside."""
    slow = replace(TOY, intra_node=Link(20.0, 100.0, 100.0))
    _, at_once = algorithms_of(slow, "AllGather", (0, 1, 4, 5, 8, 9))
    assert algorithm_ms(at_once, 600) == pytest.approx(2 * 21 + 21)


def test_the_published_formula_on_a_machine() -> None:
    """HCCL user guide, "Pipeline", AllGather: (p_inter - 1) max(s/p b' + a', s/p b + a) + s/p b + a.

    16 cards of two 910B servers gather 1.6 GB: s/p = 1e8 bytes; between servers 22.5 GB/s and 17 us, of a pair of cards
    19 GB/s and 10 us. Eight cards reach 7 x 19 = 133 GB/s, more than the 130 GB/s of a card: 7e8 / 130e6 inside.
    """
    machine = load_hardware("ascend910b")
    inside, between = 0.010 + 7e8 / 130e6, 0.017 + 1e8 / 22.5e6
    assert inside > between
    found = algorithms_of(machine, "AllGather", range(16))
    assert algorithm_ms(found[1], 1.6e9) == pytest.approx(2 * inside)
    # Two cards of each of two servers: 5e7 bytes over one pair's link.
    inside, between = 0.010 + 5e7 / 19e6, 0.017 + 5e7 / 22.5e6
    found = algorithms_of(machine, "AllReduce", (0, 1, 8, 9))
    assert algorithm_ms(found[1], 2e8) == pytest.approx(2 * (max(inside, between) + inside))


Place = tuple[int, ...]
"""Position of a rank in each level, innermost first."""


def run_rings(
    sizes: tuple[int, ...], level: int, held: dict[Place, dict[int, frozenset[Place]]], reduces: bool
) -> tuple[int, int]:
    """One ring among the ranks that differ in one level only; messages and parts that the first rank sends.

    `held` says of which ranks' values each rank has summed which parts. A sum leaves rank i with the i-th of its equal
    portions of the parts, a gather gives all of them everything.
    """
    messages = sent = 0
    members = sizes[level]
    rings = {place[:level] + place[level + 1 :] for place in held}
    for ring in rings:
        ranks = [(*ring[:level], index, *ring[level:]) for index in range(members)]
        if reduces:
            parts = sorted(held[ranks[0]])
            size = len(parts) // members
            portion = [parts[index * size : (index + 1) * size] for index in range(members)]
            moving = [{part: held[rank][part] for part in portion[(i - 1) % members]} for i, rank in enumerate(ranks)]
            for _ in range(members - 1):
                if ranks[0] == (0,) * len(sizes):
                    messages, sent = messages + 1, sent + len(moving[0])
                moving = [
                    {part: held[ranks[i]][part] | values for part, values in moving[(i - 1) % members].items()}
                    for i in range(members)
                ]
            for i, rank in enumerate(ranks):
                assert sorted(moving[i]) == portion[i]
                held[rank] = moving[i]
            continue
        moving = [dict(held[rank]) for rank in ranks]
        for _ in range(members - 1):
            if ranks[0] == (0,) * len(sizes):
                messages, sent = messages + 1, sent + len(moving[0])
            moving = [moving[(i - 1) % members] for i in range(members)]
            for i, rank in enumerate(ranks):
                held[rank] = {**held[rank], **moving[i]}
    return messages, sent


@pytest.mark.parametrize("sizes", [(2, 3, 2), (2, 3, 1), (1, 3, 2), (2, 1, 1)])
@pytest.mark.parametrize("primitive", ["AllReduce", "AllGather", "ReduceScatter"])
def test_levels_send_what_the_formulas_count(sizes: tuple[int, int, int], primitive: str) -> None:
    """Every rank ends with the right parts, summed over all; the rank's messages and bytes give the time."""
    places = list(itertools.product(*(range(size) for size in sizes)))
    parts = len(places)
    everyone = frozenset(places)
    number = {place: index for index, place in enumerate(places)}
    held: dict[Place, dict[int, frozenset[Place]]]
    if primitive == "AllGather":
        held = {place: {number[place]: everyone} for place in places}
    else:
        held = {place: {part: frozenset({place}) for part in range(parts)} for place in places}
    messages: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    sums = {"AllReduce": (0, 1, 2), "ReduceScatter": (2, 1, 0), "AllGather": ()}[primitive]
    gathers = {"AllReduce": (2, 1, 0), "ReduceScatter": (), "AllGather": (0, 1, 2)}[primitive]
    for level, reduces in (*((level, True) for level in sums), *((level, False) for level in gathers)):
        count, amount = run_rings(sizes, level, held, reduces)
        messages[level] += count
        sent[level] += amount
    for has in held.values():
        assert set(has.values()) == {everyone}
        assert len(has) == (1 if primitive == "ReduceScatter" else parts)
    links = (INTRA, INTER, GROUPS)
    volume = 1200.0
    expected = sum(
        messages[level] * link.latency_ms + sent[level] * volume / parts / link.bandwidth_bytes_per_ms
        for level, link in enumerate(links)
    )
    # Ranks of the machine: two devices a node, three nodes a group.
    ranks = sorted(inner + 2 * node + 6 * group for inner, node, group in places)
    assert algorithm_ms(algorithms_of(GROUPED, primitive, ranks)[0], volume) == pytest.approx(expected)


def test_every_collective_has_its_algorithms() -> None:
    assert set(COLLECTIVES) == {"AllReduce", "AllGather", "ReduceScatter", "AlltoAll"}
    for primitive in COLLECTIVES:
        assert collective_ms(TOY, primitive, (5,), 1e9) == 0


def test_a_layer_whose_ranks_span_two_nodes() -> None:
    """8 tensor-parallel ranks on nodes of 4; a block sums its states, V = b s 64 values of 4 bytes, twice.

    Both kinds of links at once: a share of V / 8 to the other node, 22.5 GB/s and 17 us, then three of them to the
    others of the node over three pairs' links, 57 GB/s and 10 us; and back.
    """
    with no_init_parameters():
        network, inputs = factory(size="tiny", tensor_parallel=8, heads=8, kv_heads=8, ffn=128)
    costs = network_costs(logical_graph(trace(network, *inputs), Sharding(1, 8)))
    model = costs.models[[unit.name for unit in costs.split.units].index("blocks.0")]
    machine, sizes = replace(load_hardware("ascend910b"), devices_per_node=4), {"b": 4, "s": 4096}
    share = 4 * 4096 * 64 * 4 / 8
    once = 2 * (0.017 + share / 22.5e6 + 0.010 + 3 * share / 57e6)
    assert model.link_ms(machine, sizes)[: model.forward_count].sum() == pytest.approx(2 * once)
    # The expression that `explain` prints has four digits.
    expression = unit_expressions(model, machine)["forward_time_ms"]
    found = expression.subs({name: sizes[str(name)] for name in expression.free_symbols})
    assert float(found) == pytest.approx(model.operation_ms(machine, sizes)[: model.forward_count].sum(), rel=1e-3)
