"""MindSpore's `seqvpp` scheduler: `seqpipe` with groups of p div k micro-batches, so that a group has p parts."""

from __future__ import annotations

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.kinds import one_f_one_b
from mindspore_bmpipe.schedule.kinds.interleaved import looped_orders
from mindspore_bmpipe.schedule.kinds.seqpipe import groups

NAME = "seqvpp"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int, parts: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk gives plain 1F1B.

    Raises:
        InputError: several chunks, and fewer parts of micro-batches than stages; more parts than stages; or one chunk
            and split sequences. MindSpore refuses all of them.
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
        if parts > 1:
            raise InputError(
                f"sequence_parts: schedule {name} splits sequences only with several chunks; give chunks, or seqpipe"
            )
        return one_f_one_b.orders(stages, chunks, micro_batches)
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
    return looped_orders(stages, chunks, groups(stages // parts, micro_batches), distance, parts)
