"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.kinds import (
    gpipe,
    interleaved,
    interleaved_less_memory,
    one_f_one_b,
    seqpipe,
    seqsmartvpp,
    seqvpp,
    zero_bubble_v,
)
from mindspore_bmpipe.schedule.schedule import Schedule, looped_placement, validate_schedule

OrderMaker = Callable[[int, int, int], tuple[tuple[Action, ...], ...]]
"""Orders of (stages, chunks, micro_batches)."""
PartOrderMaker = Callable[[int, int, int, int], tuple[tuple[Action, ...], ...]]
"""Orders of (stages, chunks, micro_batches, parts of a sequence)."""


@dataclass(frozen=True)
class ScheduleKind:
    """How to make the schedules of one kind."""

    name: str
    """Normalised name."""
    orders: OrderMaker
    """Makes the order of every stage."""
    max_chunks: int | None
    """Most chunks per stage the kind allows; `None` for no limit."""
    placement: Callable[[int, int], tuple[int, ...]] = looped_placement
    """Stage of each virtual stage of (stages, chunks)."""
    min_chunks: int = 1
    """Fewest chunks per stage the kind allows."""
    part_orders: PartOrderMaker | None = None
    """Makes the orders where sequences pass in parts; `None` if the kind cannot split them."""


_REGISTRY: dict[str, ScheduleKind] = {}


def normalise(name: str) -> str:
    """The spelling under which a name is stored: lower case, underscores."""
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def register(kind: ScheduleKind) -> None:
    """Add a kind under its normalised name.

    Raises:
        InputError: the name is taken.
    """
    name = normalise(kind.name)
    if name in _REGISTRY:
        raise InputError(f"schedule {name} is already registered; choose another name")
    _REGISTRY[name] = replace(kind, name=name)


def registered() -> tuple[str, ...]:
    """Names of all schedules, sorted."""
    return tuple(sorted(_REGISTRY))


def lookup(name: str) -> ScheduleKind:
    """The kind of a name in any spelling.

    Raises:
        InputError: there is none; the message lists those that exist.
    """
    kind = _REGISTRY.get(normalise(name))
    if kind is None:
        raise InputError(f"schedule: unknown schedule {name!r}; this version plans {', '.join(registered())}")
    return kind


@lru_cache(maxsize=32)
def make_schedule(
    name: str, stages: int, chunks: int, micro_batches: int, sequence_parts: int = 1, sends_block: bool = False
) -> Schedule:
    """The schedule of a registered kind.

    Args:
        name: name of the kind in any spelling.
        stages: stages p.
        chunks: chunks v per stage.
        micro_batches: micro-batches m.
        sequence_parts: parts k in which each sequence passes; the schedule's own micro-batches are then the m k parts.
        sends_block: whether a stage is busy while it sends to another.

    Raises:
        InputError: unknown name, numbers below 1, more chunks than the kind allows, or parts where it has none.
    """
    kind = lookup(name)
    for label, number in (
        ("stages", stages), ("chunks", chunks), ("micro_batches", micro_batches), ("sequence_parts", sequence_parts)
    ):  # fmt: skip
        if number < 1:
            raise InputError(f"{label}: {number} is below 1; a schedule needs at least 1")
    if kind.max_chunks is not None and chunks > kind.max_chunks:
        raise InputError(
            f"chunks: schedule {kind.name} takes at most {kind.max_chunks} chunk(s) per stage, got {chunks}; "
            "lower chunks"
        )
    if chunks < kind.min_chunks:
        raise InputError(
            f"chunks: schedule {kind.name} takes at least {kind.min_chunks} chunks per stage, got {chunks}; "
            "raise chunks"
        )
    if sequence_parts == 1:
        made = kind.orders(stages, chunks, micro_batches)
    elif kind.part_orders is not None:
        made = kind.part_orders(stages, chunks, micro_batches, sequence_parts)
    else:
        able = ", ".join(other for other in registered() if _REGISTRY[other].part_orders is not None)
        raise InputError(
            f"sequence_parts: schedule {kind.name} does not split sequences, got {sequence_parts} parts; give 1, or "
            f"one of the schedules {able}"
        )
    pieces = micro_batches * sequence_parts
    placement = kind.placement(stages, chunks)
    schedule = Schedule(kind.name, stages, chunks, pieces, made, placement, sequence_parts, sends_block)
    validate_schedule(schedule)
    return schedule


for _kind in (
    ScheduleKind(gpipe.NAME, gpipe.orders, gpipe.MAX_CHUNKS),
    ScheduleKind(interleaved.NAME, interleaved.orders, interleaved.MAX_CHUNKS),
    ScheduleKind(interleaved_less_memory.NAME, interleaved_less_memory.orders, interleaved_less_memory.MAX_CHUNKS),
    ScheduleKind(seqpipe.NAME, seqpipe.orders, seqpipe.MAX_CHUNKS, part_orders=seqpipe.orders),
    ScheduleKind(seqsmartvpp.NAME, seqsmartvpp.orders, seqsmartvpp.MAX_CHUNKS, part_orders=seqsmartvpp.orders),
    ScheduleKind(seqvpp.NAME, seqvpp.orders, seqvpp.MAX_CHUNKS, part_orders=seqvpp.orders),
    ScheduleKind(
        zero_bubble_v.NAME,
        zero_bubble_v.orders,
        zero_bubble_v.MAX_CHUNKS,
        zero_bubble_v.placement,
        zero_bubble_v.MIN_CHUNKS,
    ),
    ScheduleKind(one_f_one_b.NAME, one_f_one_b.orders, one_f_one_b.MAX_CHUNKS),
):
    register(_kind)
