"""1F1B: warm-up forwards, then one forward and one backward in turn (PipeDream-Flush, Megatron-LM, MindSpore)."""

from __future__ import annotations

from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, Action

NAME = "1f1b"
MAX_CHUNKS = 1


def orders(stages: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order of every stage: stage s runs min(m, p - 1 - s) forwards before it alternates."""
    del chunks
    forwards = tuple(Action(FORWARD, 0, micro_batch) for micro_batch in range(micro_batches))
    backwards = tuple(Action(BACKWARD, 0, micro_batch) for micro_batch in range(micro_batches))
    result = []
    for stage in range(stages):
        warmup = min(micro_batches, stages - 1 - stage)
        steady = micro_batches - warmup
        alternating = tuple(
            action for pair in zip(forwards[warmup:], backwards[:steady], strict=True) for action in pair
        )
        result.append(forwards[:warmup] + alternating + backwards[steady:])
    return tuple(result)
