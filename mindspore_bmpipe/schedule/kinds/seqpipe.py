"""MindSpore's `seqpipe` scheduler, sequences not split: the interleaved order, also for few micro-batches."""

from __future__ import annotations

from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.kinds.interleaved import looped_orders

NAME = "seqpipe"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk gives plain 1F1B."""
    return looped_orders(stages, chunks, micro_batches, 2)
