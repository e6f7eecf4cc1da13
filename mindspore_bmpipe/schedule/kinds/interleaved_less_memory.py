"""The interleaved order with the shortest warm-up: fewer micro-batches in flight, but every message is waited for.

Stage s runs (v - 1) g + p - s - 1 forwards before it alternates. MindSpore compiles it for the 1f1b scheduler with
interleave when the environment has `ENABLE_LESS_MEM_VPP=1` and the jit level is O0.
"""

from __future__ import annotations

from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.kinds import one_f_one_b
from mindspore_bmpipe.schedule.kinds.interleaved import groups, looped_orders, require_micro_batches

NAME = "interleaved_less_memory"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk gives plain 1F1B.

    Raises:
        InputError: several chunks, and fewer micro-batches than stages, which MindSpore refuses.
    """
    require_micro_batches(NAME, stages, chunks, micro_batches)
    if chunks == 1:
        return one_f_one_b.orders(stages, chunks, micro_batches)
    return looped_orders(stages, chunks, groups(stages, micro_batches), 1)
