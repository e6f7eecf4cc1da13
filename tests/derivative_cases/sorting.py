"""Orders along an axis."""

from __future__ import annotations

from mindspore import Tensor, mint, ops

from tests.derivative_cases.shapes import Case, one


def sort(x: Tensor) -> Tensor:
    return ops.sort(x)[0]


def sort_descending(x: Tensor) -> Tensor:
    return ops.sort(x, 1, True)[0]


def sort_extended(x: Tensor) -> Tensor:
    return mint.sort(x, dim=1)[0]


def top_few_extended(x: Tensor) -> Tensor:
    return mint.topk(x, 2)[0]


CASES: list[Case] = [
    (sort, one), (sort_descending, one), (sort_extended, one), (top_few_extended, one),
]  # fmt: skip
