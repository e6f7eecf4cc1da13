"""GPipe: all forwards, then all backwards, both in micro-batch order as MindSpore compiles them."""

from __future__ import annotations

from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, Action

NAME = "gpipe"
MAX_CHUNKS = 1


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; the same for all of them."""
    del chunks
    forwards = tuple(Action(FORWARD, 0, micro_batch) for micro_batch in range(micro_batches))
    backwards = tuple(Action(BACKWARD, 0, micro_batch) for micro_batch in range(micro_batches))
    return (forwards + backwards,) * stages
