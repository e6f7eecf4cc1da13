"""MindSpore's `seqpipe` scheduler: the interleaved order in groups of nearly equal size, sequences in k parts.

Seq1F1B (arXiv 2406.03488) passes parts of a sequence through the pipeline as 1F1B passes micro-batches, backwards from
the last part to the first. Micro-batches form m div p groups (one if there are fewer than p); what is left over goes to
the groups in turn, one each. Stage s runs (v - 1) g k + k - 1 + d (p - 1 - s) forwards of parts before it alternates,
with d = 2, or 1 for one chunk, and g the size of the first group.
"""

from __future__ import annotations

from mindspore_bmpipe.schedule.actions import Action
from mindspore_bmpipe.schedule.kinds.interleaved import looped_orders

NAME = "seqpipe"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int, parts: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk and whole sequences give plain 1F1B."""
    sizes = groups(min(stages, micro_batches), micro_batches)
    return looped_orders(stages, chunks, sizes, 1 if chunks == 1 else 2, parts)


def groups(size: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of each group: at least `size`, the rest one each from the first group on and round again."""
    number = micro_batches // size
    return tuple(micro_batches // number + (group < micro_batches % number) for group in range(number))
