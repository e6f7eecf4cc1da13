"""Options that are worth a planner's while."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore_bmpipe.problem import Option


def undominated_options(options: Sequence[Option]) -> tuple[int, ...]:
    """Options that no other is at least as good as in saved bytes, extra time and working set; the first among equals.

    Whatever a decision does with an option left out, it can do with one of these.
    """
    sizes = [(option.saved_bytes, option.extra_backward_ms, option.working_set_bytes) for option in options]
    return tuple(
        index
        for index, size in enumerate(sizes)
        if not any(
            all(a <= b for a, b in zip(other, size, strict=True)) and (other != size or place < index)
            for place, other in enumerate(sizes)
            if place != index
        )
    )
