"""GPipe: all forwards, then all backwards, both in micro-batch order as MindSpore compiles them.

With several chunks all micro-batches pass one chunk before the next one's turn. With one chunk MindSpore ignores the
scheduler's name and compiles 1F1B, so that is the order here too.
"""

from __future__ import annotations

from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, Action
from mindspore_bmpipe.schedule.kinds import one_f_one_b

NAME = "gpipe"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; the same for all of them where there are several chunks."""
    if chunks == 1:
        return one_f_one_b.orders(stages, chunks, micro_batches)
    members = range(micro_batches)
    forwards = tuple(Action(FORWARD, chunk, member) for chunk in range(chunks) for member in members)
    backwards = tuple(Action(BACKWARD, chunk, member) for chunk in reversed(range(chunks)) for member in members)
    return (forwards + backwards,) * stages
