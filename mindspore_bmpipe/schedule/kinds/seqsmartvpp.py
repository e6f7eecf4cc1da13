"""MindSpore's `seqsmartvpp` scheduler: `seqvpp` with the shortest warm-up.

Stage s runs (v - 1) g k + k - 1 + p - 1 - s forwards of parts before it alternates, so fewer are in flight than in
`seqvpp`, but every message is waited for.
"""

from __future__ import annotations

from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.kinds.seqvpp import grouped_orders

NAME = "seqsmartvpp"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int, parts: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk gives that of `seqpipe`.

    Raises:
        InputError: as for `seqvpp`.
    """
    return grouped_orders(NAME, stages, chunks, micro_batches, 1, parts)
