"""The interleaved order with MindSpore's switch for less memory (`ENABLE_LESS_MEM_VPP`).

MindSpore 2.10 compiles the same order with and without the switch, so as many micro-batches are in flight as in
`interleaved`; a plan that counted fewer would not fit. `seqsmartvpp` is the order with the shorter warm-up.
"""

from __future__ import annotations

from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.kinds.interleaved import looped_orders, require_micro_batches

NAME = "interleaved_less_memory"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk gives plain 1F1B.

    Raises:
        InputError: several chunks, and fewer micro-batches than stages, which MindSpore refuses.
    """
    require_micro_batches(NAME, stages, chunks, micro_batches)
    return looped_orders(stages, chunks, micro_batches, 2)
