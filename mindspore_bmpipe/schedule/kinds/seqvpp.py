"""MindSpore's `seqvpp` scheduler with unsplit sequences: the interleaved order."""

from __future__ import annotations

from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.kinds.interleaved import looped_orders, require_micro_batches

NAME = "seqvpp"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk gives plain 1F1B.

    Raises:
        InputError: several chunks, and fewer micro-batches than stages, which MindSpore refuses.
    """
    require_micro_batches(NAME, stages, chunks, micro_batches)
    return looped_orders(stages, chunks, micro_batches, 2)
