"""Interleaved 1F1B: every stage holds several chunks and passes groups of micro-batches through them in turn.

The large-memory order of Megatron-LM (arXiv 2104.04473, section 2.2) and MindSpore. Forwards go through the chunks in
groups of g = p micro-batches: the i-th forward is chunk (i mod g v) // g of micro-batch (i // (g v)) g + i mod g.
Backwards do the same with the chunks reversed. Stage s runs (v - 1) g + 2 (p - s - 1) forwards before it alternates,
twice the distance to the last stage, so that a message has a whole action's time to arrive.
"""

from __future__ import annotations

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, Action

NAME = "interleaved"
MAX_CHUNKS = None


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage; one chunk gives plain 1F1B.

    Raises:
        InputError: several chunks, and the micro-batches are no multiple of the stages.
    """
    if chunks == 1:
        return grouped_orders(chunks, micro_batches, [stages - 1 - stage for stage in range(stages)], stages)
    require_whole_groups(NAME, stages, micro_batches)
    warm_ups = [(chunks - 1) * stages + 2 * (stages - 1 - stage) for stage in range(stages)]
    return grouped_orders(chunks, micro_batches, warm_ups, stages)


def require_whole_groups(name: str, stages: int, micro_batches: int) -> None:
    """Refuse a last group with fewer micro-batches than stages.

    Raises:
        InputError: the micro-batches are no multiple of the stages.
    """
    if micro_batches % stages:
        below, above = micro_batches // stages * stages, -(-micro_batches // stages) * stages
        allowed = f"{below} or {above}" if below else f"{above}"
        raise InputError(
            f"micro_batches: schedule {name} with several chunks passes micro-batches on in groups of the {stages} "
            f"stages, and {micro_batches} is no multiple; give {allowed}"
        )


def grouped_orders(
    chunks: int, micro_batches: int, warm_ups: list[int], group: int
) -> tuple[tuple[Action, ...], ...]:
    """Orders whose stage s runs warm_ups[s] forwards, then forwards and backwards in turn.

    Args:
        chunks: chunks per stage.
        micro_batches: micro-batches.
        warm_ups: forwards before the first backward may follow; more than there are means all.
        group: micro-batches that pass one chunk before the next one's turn; the last group may be smaller.
    """
    forwards, backwards = [], []
    for first in range(0, micro_batches, group):
        members = range(first, min(first + group, micro_batches))
        forwards += [Action(FORWARD, chunk, member) for chunk in range(chunks) for member in members]
        backwards += [Action(BACKWARD, chunk, member) for chunk in reversed(range(chunks)) for member in members]
    result = []
    for wanted in warm_ups:
        warm_up = min(len(forwards), wanted)
        steady = len(forwards) - warm_up
        alternating = [action for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for action in pair]
        result.append((*forwards[:warm_up], *alternating, *backwards[steady:]))
    return tuple(result)
