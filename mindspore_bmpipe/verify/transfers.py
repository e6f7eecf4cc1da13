"""Messages between stages: those that the plan's borders need, against those that were compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mindspore_bmpipe.graph.mindir import TensorType
from mindspore_bmpipe.schedule.actions import FORWARD, Action
from mindspore_bmpipe.verify.expected import Expected
from mindspore_bmpipe.verify.finding import Finding
from mindspore_bmpipe.verify.rank_graph import RankGraph, Transfer

_SHARED_OVER_RANKS = TensorType((), "")


@dataclass(frozen=True)
class Message:
    """Messages of one kind in one micro-batch."""

    arrives: bool
    """Whether the stage looked at receives it in the forward (and sends its gradient back)."""
    peer: int
    """The other stage."""
    chunk: int
    """Chunk of the stage looked at."""
    micro_batch: int
    """The micro-batch."""
    type: TensorType
    """What is sent; left open where ranks of a stage share tensors."""


@dataclass
class _Planned:
    counts: Counter[Message] = field(default_factory=Counter)
    gradients: Counter[Message] = field(default_factory=Counter)
    makers: dict[Message, str] = field(default_factory=dict)


def check_transfers(expected: Expected, stage: int, rank: RankGraph, ranks: int) -> Iterable[Finding]:
    """Every planned border of every micro-batch is sent once to each cell that reads it, and its gradient back."""
    stages = len(expected.plan.stages)
    typed = expected.has_types_of(ranks)
    planned = _planned(expected, stage, typed)
    found: Counter[Message] = Counter()
    gradients: Counter[Message] = Counter()
    weights: Counter[tuple[bool, int]] = Counter()
    shared = {weight.type for weight in expected.shared if stage in (weight.owner, *weight.readers)}
    for transfer in rank.transfers:
        peer = transfer.peer * stages // ranks
        if _moves_a_weight(transfer, shared, typed):
            weights[transfer.sends, peer] += 1
            continue
        if transfer.action is None:
            continue
        kind = transfer.type if typed else _SHARED_OVER_RANKS
        forward = transfer.action.kind == FORWARD
        message = Message(transfer.sends != forward, peer, transfer.action.chunk, transfer.action.micro_batch, kind)
        (found if forward else gradients)[message] += 1
    yield from _differences(stage, planned, planned.counts, found, "")
    yield from _differences(stage, planned, planned.gradients, gradients, "gradient of ")
    for weight in expected.shared:
        others = weight.readers if stage == weight.owner else (weight.owner,) if stage in weight.readers else ()
        for peer in others:
            for sends in (True, False):
                if not weights[sends, peer]:
                    verb = "sent to" if sends else "received from"
                    yield Finding(
                        stage, "transfers", weight.name,
                        f"the weight is shared with stage {peer}, and neither it nor its gradient is {verb} that stage",
                    )  # fmt: skip


def check_pairs(expected: Expected, graphs: Mapping[int, RankGraph], ranks: int) -> tuple[list[Finding], list[str]]:
    """Whether stages send each other what the other receives, in one order; findings, and warnings.

    A gradient that no weight needs is sent all the same and not received. That is a property of the network, not of the
    plan: any cut between where such a tensor is made and read has it.
    """
    stages = len(expected.plan.stages)
    findings: list[Finding] = []
    warnings: list[str] = []
    for sender, graph in graphs.items():
        for receiver, other in graphs.items():
            if sender == receiver:
                continue
            sent = _messages(graph, receiver, ranks, stages, sends=True)
            received = _messages(other, sender, ranks, stages, sends=False)
            if sent == received:
                continue
            tags = {tag for tag, _ in received}
            lost = [item for item in sent if item[0] not in tags]
            if [item for item in sent if item[0] in tags] == received and _are_useless(
                expected, sender, receiver, graph, lost
            ):
                kinds = Counter(kind for _, kind in lost)
                text = ", ".join(f"{number} of {type_text(kind)}" for kind, number in kinds.items())
                warnings.append(
                    f"stage {sender} sends gradients to stage {receiver} that are never received ({text}): tensors "
                    "without a weight behind them cross the border, such as masks. On a cluster the sender may wait "
                    "for ever; make them in the cells that read them"
                )
                continue
            place = next(
                (number for number, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b),
                min(len(sent), len(received)),
            )
            findings.append(
                Finding(
                    sender, "transfers", "",
                    f"sends {len(sent)} messages to stage {receiver}, which receives {len(received)}; they differ from "
                    f"number {place} on, so the two stages would wait for each other",
                )
            )  # fmt: skip
    return findings, warnings


def type_text(kind: TensorType) -> str:
    """A type for people."""
    return f"{kind.dtype}{list(kind.shape)}" if kind != _SHARED_OVER_RANKS else "of any shape"


def _planned(expected: Expected, stage: int, typed: bool) -> _Planned:
    planned = _Planned()
    places = sorted(set(expected.places))
    for place in places:
        for border in expected.borders(place):
            if stage not in (place[0], border.made_at[0]) or place[0] == border.made_at[0]:
                continue
            arrives = place[0] == stage
            peer, chunk = (border.made_at[0], place[1]) if arrives else (place[0], border.made_at[1])
            kind = expected.type_of(border.tensor) if typed else _SHARED_OVER_RANKS
            for micro_batch in range(int(expected.plan.settings["micro_batches"])):
                message = Message(arrives, peer, chunk, micro_batch, kind)
                planned.counts[message] += 1
                planned.makers[message] = expected.describe(border.producer)
                # The reader sends a gradient whether or not the maker has a use for it.
                if kind.dtype not in _WITHOUT_GRADIENT and (arrives or expected.needs_gradient(border)):
                    planned.gradients[message] += 1
    return planned


_WITHOUT_GRADIENT = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def _differences(
    stage: int, planned: _Planned, wanted: Counter[Message], found: Counter[Message], what: str
) -> Iterable[Finding]:
    """One finding for all micro-batches that differ in the same way."""
    groups: dict[tuple[Message, int, int], list[int]] = {}
    for message in sorted({*wanted, *found}, key=str):
        if wanted[message] != found[message]:
            anyone = Message(message.arrives, message.peer, message.chunk, 0, message.type)
            groups.setdefault((anyone, wanted[message], found[message]), []).append(message.micro_batch)
    for (message, want, have), micro_batches in groups.items():
        maker = next(
            (text for key, text in planned.makers.items() if (key.peer, key.type, key.arrives)
             == (message.peer, message.type, message.arrives)), "",
        )  # fmt: skip
        direction = "from" if message.arrives != bool(what) else "to"
        yield Finding(
            stage, "transfers", maker.rpartition(" of ")[2],
            f"{have} messages with the {what}{maker or 'a tensor no plan has'} ({type_text(message.type)}) {direction} "
            f"stage {message.peer} in micro-batch {', '.join(map(str, micro_batches))}, the plan needs {want}",
        )  # fmt: skip


def _moves_a_weight(transfer: Transfer, shared: set[TensorType], typed: bool) -> bool:
    """Shared weights are sent before the first and their gradients after the last micro-batch, outside all chunks."""
    if not shared:
        return False
    first = transfer.action in (None, Action(FORWARD, 0, 0)) or (
        transfer.action is not None and transfer.action.kind == FORWARD and transfer.action.micro_batch == 0
    )
    return first and (transfer.type in shared if typed else transfer.action is None)


def _messages(graph: RankGraph, peer_stage: int, ranks: int, stages: int, sends: bool) -> list[tuple[int, TensorType]]:
    chosen: list[Transfer] = [transfer for transfer in graph.transfers if transfer.sends == sends]
    return [(item.tag, item.type) for item in chosen if item.peer * stages // ranks == peer_stage]


def _are_useless(
    expected: Expected, sender: int, receiver: int, graph: RankGraph, lost: list[tuple[int, TensorType]]
) -> bool:
    """Whether all lost messages are gradients of tensors that no weight stands behind."""
    useless = {
        (expected.type_of(border.tensor).dtype, len(expected.type_of(border.tensor).shape))
        for place in set(expected.places)
        if place[0] == sender
        for border in expected.borders(place)
        if border.made_at[0] == receiver and not expected.needs_gradient(border)
    }
    tags = {tag for tag, _ in lost}
    backward = all(
        transfer.action is not None and transfer.action.kind != FORWARD
        for transfer in graph.transfers
        if transfer.sends and transfer.tag in tags
    )
    return backward and all((kind.dtype, len(kind.shape)) in useless for _, kind in lost)
