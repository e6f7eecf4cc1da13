"""Collectives: bytes and rounds against a ring run step by step, rates against what was measured on a machine."""

from __future__ import annotations

from typing import Any

import pytest

from mindspore_bmpipe.costs.hardware import Link, load_hardware
from mindspore_bmpipe.costs.rules import work_of
from mindspore_bmpipe.costs.rules.base import OperationView
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.mindir import TensorType
from mindspore_bmpipe.graph.symbols import symbol

ELEMENTS = 240
"""Divisible by every group size below, so that shares are equal."""


def collective(primitive: str, elements: tuple[Any, Any], ranks: int, **attributes: Any) -> OperationView:
    kinds = [TensorType((count,), "float32") for count in elements]
    given = attributes or {"group_rank_ids": tuple(range(ranks))}
    return OperationView(primitive, (kinds[0],), (kinds[0],), (kinds[1],), given)


def ring(ranks: int, reduces: bool, gathers: bool) -> tuple[int, int]:
    """Messages and elements that rank 0 sends when a ring of ranks sums, then gathers, shares of ELEMENTS values."""
    share = ELEMENTS // ranks
    # known[r][k]: which ranks' values rank r has added into share k; at first its own only.
    known = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    messages = sent = 0
    for step in range(ranks - 1 if reduces else 0):
        moving = [(rank, (rank - step) % ranks, set(known[rank][(rank - step) % ranks])) for rank in range(ranks)]
        for rank, part, values in moving:
            known[(rank + 1) % ranks][part] |= values
        messages, sent = messages + 1, sent + share
    whole = set(range(ranks))
    if reduces:
        assert all(known[rank][(rank + 1) % ranks] == whole for rank in range(ranks))
    have = [{(rank + 1) % ranks} for rank in range(ranks)]
    for _ in range(ranks - 1 if gathers else 0):
        moving_parts = [set(parts) for parts in have]
        for rank in range(ranks):
            # Each passes on what it received last; the union is what it ends up with.
            have[(rank + 1) % ranks] |= moving_parts[rank]
        messages, sent = messages + 1, sent + share
    if gathers:
        assert all(len(parts) == ranks for parts in have)
    return messages, sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_sends_what_the_rules_count(ranks: int) -> None:
    share = ELEMENTS // ranks
    for primitive, sizes, reduces, gathers in (
        ("AllReduce", (ELEMENTS, ELEMENTS), True, True),
        ("AllGather", (share, ELEMENTS), False, True),
        ("ReduceScatter", (ELEMENTS, share), True, False),
    ):
        traffic = work_of(collective(primitive, sizes, ranks)).traffic
        assert traffic is not None
        messages, sent = ring(ranks, reduces, gathers)
        assert (traffic.rounds, traffic.sent_bytes) == (messages, 4 * sent), primitive


def test_all_to_all_keeps_one_share_at_home() -> None:
    """Of 240 values among 4 ranks, 60 stay and 3 x 60 go to the others, 4 bytes each."""
    traffic = work_of(collective("AlltoAll", (240, 240), 4)).traffic
    assert traffic is not None
    assert (traffic.rounds, traffic.sent_bytes) == (3, 720)


def test_a_group_of_one_exchanges_nothing() -> None:
    traffic = work_of(collective("AllReduce", (240, 240), 1)).traffic
    assert traffic is not None
    assert (traffic.rounds, traffic.sent_bytes) == (0, 0)


def test_symbols_go_through() -> None:
    b = symbol("b")
    traffic = work_of(collective("AllReduce", (8 * b, 8 * b), 4)).traffic
    assert traffic is not None
    assert traffic.sent_bytes == 48 * b  # 2 x 3/4 of 32 b bytes


def test_ranks_that_are_not_said_are_not_guessed() -> None:
    with pytest.raises(InputError, match="does not say which ranks take part"):
        work_of(collective("AllReduce", (240, 240), 4, group="hccl_world_group"))


def test_a_mesh_gives_small_groups_fewer_links() -> None:
    """Published for eight 910B cards: 38 GB/s all-gather over 2 of them, 149 GB/s over 8 (the machine's file)."""
    machine = load_hardware("ascend910b")
    for ranks, measured in ((2, 38e6), (8, 149e6)):
        gathered = 1e9
        rate = machine.link_of(range(ranks)).group_bytes_per_ms(ranks)
        milliseconds = gathered * (ranks - 1) / ranks / rate
        assert gathered / milliseconds == pytest.approx(measured, rel=0.01)


def test_a_switch_gives_every_group_the_whole_link() -> None:
    link = Link(0.01, 300.0, 300.0)
    assert link.group_bytes_per_ms(2) == link.group_bytes_per_ms(8) == 300.0


def test_ranks_of_several_nodes_talk_over_the_network() -> None:
    machine = load_hardware("ascend910b")
    assert machine.link_of((0, 7)) == machine.link_of((8, 12)) == machine.intra_node
    assert machine.link_of((0, 8)) == machine.inter_node


def test_groups_of_nodes_have_a_link_of_their_own() -> None:
    """Nodes of 8 and groups of 32 nodes: rank 255 is the last of the first group."""
    machine = load_hardware("h100")
    assert machine.link_of((0, 255)) == machine.inter_node
    assert machine.link_of((255, 256)) == machine.link_of((0, 511)) == machine.inter_group
    # A stride leaves the node sooner: four ranks every other device stay, every eighth device do not.
    assert machine.link_of(range(0, 8, 2)) == machine.intra_node
    assert machine.link_of(range(0, 32, 8)) == machine.inter_node


@pytest.mark.parametrize(
    ("stages", "ranks", "between"),
    [
        # Eight devices a node: four stages of two share one, so only every fourth transfer leaves it.
        (8, 2, {3, 7}),
        (4, 2, set()),
        # A stage of a whole node, or of more.
        (4, 8, {0, 1, 2, 3}),
        (2, 16, {0, 1}),
        # Stages of three: the third lies across two nodes, and devices 3-5 send to 6-8, of which 8 is elsewhere.
        (3, 3, {1, 2}),
    ],
)
def test_stages_that_share_a_node_send_inside_it(stages: int, ranks: int, between: set[int]) -> None:
    machine = load_hardware("ascend910b")
    links = machine.stage_links(stages, ranks)
    assert {stage for stage, link in enumerate(links) if link == machine.inter_node} == between
    assert {stage for stage, link in enumerate(links) if link == machine.intra_node} == set(range(stages)) - between
