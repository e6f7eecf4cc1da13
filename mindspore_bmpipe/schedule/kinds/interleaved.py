"""Interleaved 1F1B: every stage holds several chunks and passes groups of micro-batches through them in turn.

The large-memory order of Megatron-LM (arXiv 2104.04473, section 2.2) as MindSpore compiles it. Micro-batches form
groups of p; what is left over joins the first group, which then has g = p + m mod p. Forwards take a group through
chunk 0, 1, ... before the next group; backwards do the same with the chunks reversed. Stage s runs
(v - 1) g + 2 (p - s - 1) forwards before it alternates, twice the distance to the last stage, so that a message has a
whole action's time to arrive.
"""

from __future__ import annotations

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, Action
from mindspore_bmpipe.schedule.kinds import one_f_one_b

NAME = "interleaved"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk gives plain 1F1B.

    Raises:
        InputError: several chunks, and fewer micro-batches than stages, which MindSpore refuses.
    """
    require_micro_batches(NAME, stages, chunks, micro_batches)
    if chunks == 1:
        return one_f_one_b.orders(stages, chunks, micro_batches)
    return looped_orders(stages, chunks, groups(stages, micro_batches), 2)


def require_micro_batches(name: str, stages: int, chunks: int, micro_batches: int) -> None:
    """Refuse fewer micro-batches than stages where there are several chunks.

    Raises:
        InputError: there are fewer.
    """
    if chunks > 1 and micro_batches < stages:
        raise InputError(
            f"micro_batches: schedule {name} with several chunks needs at least as many micro-batches as stages "
            f"({stages}), got {micro_batches}; give more micro-batches, or one chunk"
        )


def groups(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of each group: p each, and what is left over in the first."""
    first = min(micro_batches, stages + micro_batches % stages)
    return (first, *(stages for _ in range(first, micro_batches, stages)))


def looped_orders(
    stages: int, chunks: int, groups: tuple[int, ...], distance: int, parts: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Orders of the interleaved family.

    Args:
        stages: stages p.
        chunks: chunks v.
        groups: micro-batches of each group.
        distance: warm-up forwards for every stage between a stage and the last one.
        parts: parts k of each sequence. The gradients of a part need those of the parts after it, so backwards take
            the parts of a micro-batch from the last to the first.
    """
    forwards, backwards = [], []
    start = 0
    for size in groups:
        members = range(start, start + size)
        pieces = [member * parts + part for member in members for part in range(parts)]
        returning = [member * parts + part for member in members for part in reversed(range(parts))]
        forwards += [Action(FORWARD, chunk, piece) for chunk in range(chunks) for piece in pieces]
        backwards += [Action(BACKWARD, chunk, piece) for chunk in reversed(range(chunks)) for piece in returning]
        start += size
    result = []
    for stage in range(stages):
        before = (chunks - 1) * groups[0] * parts + parts - 1
        warm_up = min(len(forwards), before + distance * (stages - 1 - stage))
        steady = len(forwards) - warm_up
        alternating = [action for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for action in pair]
        result.append((*forwards[:warm_up], *alternating, *backwards[steady:]))
    return tuple(result)
