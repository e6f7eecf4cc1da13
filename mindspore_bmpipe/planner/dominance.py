"""Options and choices of options that are worth a planner's while."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.problem import Option
from mindspore_bmpipe.split_backward import Repeats

_COMPARED = 256
"""Rows compared at once."""
_SAME_TIME = 1e-12


def undominated_options(options: Sequence[Option], repeats: Repeats | None = None) -> tuple[int, ...]:
    """Options that no other is at least as good as in saved bytes, extra time and working set; the first among equals.

    Where backwards are split, what weight gradients run again counts too. Whatever a decision does with an option left
    out, it can do with one of these.
    """
    sizes = [
        (
            option.saved_bytes,
            option.extra_backward_ms,
            option.working_set_bytes,
            *(() if repeats is None else (repeats.first[number], repeats.after[number])),
        )
        for number, option in enumerate(options)
    ]
    return tuple(
        index
        for index, size in enumerate(sizes)
        if not any(
            all(a <= b for a, b in zip(other, size, strict=True)) and (other != size or place < index)
            for place, other in enumerate(sizes)
            if place != index
        )
    )


def undominated_rows(
    costs: npt.NDArray[np.float64], order: npt.NDArray[np.intp], most: int | None = None
) -> npt.NDArray[np.intp]:
    """Rows of which no other is at most as large everywhere; at most the first `most`.

    Args:
        costs: shape (n, columns).
        order: rows in an order that puts none before one that is as small everywhere; the first of equal rows is kept.
        most: how many are enough.
    """
    columns = np.ascontiguousarray(costs[order].T)
    kept = np.zeros(0, dtype=np.intp)
    for first in range(0, len(order), _COMPARED):
        block = np.arange(first, min(first + _COMPARED, len(order)))
        block = block[~_beaten(columns, kept, block).any(axis=0)]
        # A row is beaten by an earlier one only; by one that is itself beaten, then also by what beats that.
        block = block[~np.triu(_beaten(columns, block, block), 1).any(axis=0)]
        kept = np.concatenate((kept, block))[:most]
        if len(kept) == most:
            break
    return order[kept]


def _beaten(
    columns: npt.NDArray[np.float64], rows: npt.NDArray[np.intp], others: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    """Which of `rows` is at most as large as which of `others` in every one of the columns."""
    result = np.ones((len(rows), len(others)), dtype=bool)
    for column in columns:
        result &= column[rows][:, None] <= column[others][None, :] + _SAME_TIME
    return result
