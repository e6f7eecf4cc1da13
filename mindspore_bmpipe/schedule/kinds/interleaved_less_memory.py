"""Interleaved 1F1B with the shortest warm-up: fewer micro-batches in flight, but every message is waited for.

Groups and chunks as in `interleaved`; stage s runs (v - 1) p + p - s - 1 forwards before it alternates, so at most
(v - 1) p + p - s of its chunks' micro-batches are in flight.
"""

from __future__ import annotations

from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.kinds.interleaved import grouped_orders, require_whole_groups

NAME = "interleaved_less_memory"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk gives plain 1F1B.

    Raises:
        InputError: several chunks, and the micro-batches are no multiple of the stages.
    """
    if chunks > 1:
        require_whole_groups(NAME, stages, micro_batches)
    warm_ups = [(chunks - 1) * stages + stages - 1 - stage for stage in range(stages)]
    return grouped_orders(chunks, micro_batches, warm_ups, stages)
