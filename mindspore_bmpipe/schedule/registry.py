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
def make_schedule(name: str, stages: int, chunks: int, micro_batches: int) -> Schedule:
    """The schedule of a registered kind.

    Raises:
        InputError: unknown name, numbers below 1, or more chunks than the kind allows.
    """
    kind = lookup(name)
    for label, number in (("stages", stages), ("chunks", chunks), ("micro_batches", micro_batches)):
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
    made = kind.orders(stages, chunks, micro_batches)
    schedule = Schedule(kind.name, stages, chunks, micro_batches, made, kind.placement(stages, chunks))
    validate_schedule(schedule)
    return schedule


for _kind in (
    ScheduleKind(gpipe.NAME, gpipe.orders, gpipe.MAX_CHUNKS),
    ScheduleKind(interleaved.NAME, interleaved.orders, interleaved.MAX_CHUNKS),
    ScheduleKind(interleaved_less_memory.NAME, interleaved_less_memory.orders, interleaved_less_memory.MAX_CHUNKS),
    ScheduleKind(seqpipe.NAME, seqpipe.orders, seqpipe.MAX_CHUNKS),
    ScheduleKind(seqsmartvpp.NAME, seqsmartvpp.orders, seqsmartvpp.MAX_CHUNKS),
    ScheduleKind(seqvpp.NAME, seqvpp.orders, seqvpp.MAX_CHUNKS),
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
