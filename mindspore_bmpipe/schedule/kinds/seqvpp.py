"""MindSpore's `seqvpp` scheduler: `seqpipe` with groups of p div k micro-batches, so that a group has p parts."""

from __future__ import annotations

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.kinds import seqpipe
from mindspore_bmpipe.schedule.kinds.interleaved import looped_orders

NAME = "seqvpp"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int, parts: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk gives that of `seqpipe`.

    Raises:
        InputError: several chunks, and fewer parts of micro-batches than stages, or more parts than stages, which
            MindSpore refuses.
    """
    return grouped_orders(NAME, stages, chunks, micro_batches, 2, parts)


def grouped_orders(
    name: str, stages: int, chunks: int, micro_batches: int, distance: int, parts: int
) -> tuple[tuple[Action, ...], ...]:
    """Orders in groups of p parts.

    Raises:
        InputError: as for `orders`.
    """
    if chunks == 1:
        return seqpipe.orders(stages, chunks, micro_batches, parts)
    if parts > stages:
        raise InputError(
            f"sequence_parts: schedule {name} takes at most as many parts as stages ({stages}), got {parts}"
        )
    if micro_batches * parts < stages:
        raise InputError(
            f"micro_batches: schedule {name} with several chunks needs at least as many micro-batches as stages "
            f"({stages}), parts of sequences counted, got {micro_batches * parts}; give more micro-batches, or one "
            "chunk"
        )
    return looped_orders(stages, chunks, seqpipe.groups(stages // parts, micro_batches), distance, parts)
