"""ZB-V (arXiv 2405.15362): two chunks per stage in a V, and weight gradients moved to where a stage would wait.

Chunk 0 runs through the stages forwards, chunk 1 backwards, so the last virtual stage is on stage 0 and every stage
holds at most 2 p chunks' micro-batches. As MindSpore compiles it, most backwards are whole (`BW`); only those on the
way of the first gradients and at the end are split into `B` and `W`:

1. 2 (p - s) - 1 forwards of chunk 0; then s times a forward of chunk 1 and one of chunk 0; then p - s times a forward
   and a backward of chunk 1.
2. While there are forwards: one of chunk 0, its oldest backward, one of chunk 1, its oldest backward.
3. s times a backward of chunk 0 and one of chunk 1, then p - s of chunk 0. The first s of all these are whole, the
   others leave their weight gradients for the end; from stage 1 on each of the last p - s is followed by one of them.
"""

from __future__ import annotations

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, WEIGHT, WHOLE, Action

NAME = "zero_bubble_v"
MIN_CHUNKS = MAX_CHUNKS = 2


def placement(stages: int, chunks: int) -> tuple[int, ...]:
    """Stage of each virtual stage: there and back."""
    del chunks
    return (*range(stages), *reversed(range(stages)))


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage.

    Raises:
        InputError: fewer micro-batches than twice the stages, which MindSpore refuses.
    """
    del chunks
    if micro_batches < 2 * stages:
        raise InputError(
            f"micro_batches: schedule {NAME} needs at least twice as many micro-batches as stages ({2 * stages}), got "
            f"{micro_batches}; give more micro-batches"
        )
    return tuple(_order(stages, stage, micro_batches) for stage in range(stages))


class _Order:
    """Actions so far; every kind goes through the micro-batches of a chunk in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.waiting: list[list[int]] = [[], []]
        """Micro-batches of each chunk whose weight gradients are left for later."""

    def forward(self, chunk: int) -> None:
        self.actions.append(Action(FORWARD, chunk, self.forwards[chunk]))
        self.forwards[chunk] += 1

    def backward(self, chunk: int, kind: str) -> None:
        self.actions.append(Action(kind, chunk, self.backwards[chunk]))
        if kind == BACKWARD:
            self.waiting[chunk].append(self.backwards[chunk])
        self.backwards[chunk] += 1

    def weight(self, chunk: int) -> None:
        self.actions.append(Action(WEIGHT, chunk, self.waiting[chunk].pop(0)))


def _order(stages: int, stage: int, micro_batches: int) -> tuple[Action, ...]:
    order = _Order()
    for _ in range(2 * (stages - stage) - 1):
        order.forward(0)
    for _ in range(stage):
        order.forward(1)
        order.forward(0)
    for left in reversed(range(stages - stage)):
        order.forward(1)
        if left:
            order.backward(1, BACKWARD)
            order.weight(1)
        else:
            order.backward(1, WHOLE)
    while order.forwards[1] < order.forwards[0] or order.forwards[0] < micro_batches:
        if order.forwards[0] < micro_batches:
            order.forward(0)
        order.backward(0, WHOLE)
        order.forward(1)
        order.backward(1, WHOLE)
    last = [0, 1] * stage + [0] * (stages - stage)
    for number, chunk in enumerate(last):
        order.backward(chunk, WHOLE if number < stage else BACKWARD)
        if number >= 2 * stage and stage > 0:
            order.weight(0)
    for chunk in (0, 1):
        while order.waiting[chunk]:
            order.weight(chunk)
    return tuple(order.actions)
