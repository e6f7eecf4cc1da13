"""Flags and bits, which no gradient passes."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from tests.derivative_cases.shapes import Case, one, two

NUMBERS = Tensor(np.array([1, 2, 0]), ms.int32)


def is_finite(x: Tensor) -> Tensor:
    return ops.select(ops.isfinite(x), x, -x)


def is_infinite(x: Tensor) -> Tensor:
    return ops.select(ops.isinf(x), x, -x)


def is_not_a_number(x: Tensor) -> Tensor:
    return ops.select(ops.isnan(x), x, -x)


def logical_not(x: Tensor) -> Tensor:
    return ops.select(ops.logical_not(x > 0), x, -x)


def logical_or(x: Tensor, y: Tensor) -> Tensor:
    return ops.select(ops.logical_or(x > 0, y > 0), x, y)


def logical_xor(x: Tensor, y: Tensor) -> Tensor:
    return ops.select(ops.logical_xor(x > 0, y > 0), x, y)


def all_of(x: Tensor) -> Tensor:
    return ops.select((x > 0).all(-1, True), x, -x)


def any_of(x: Tensor) -> Tensor:
    return ops.select((x > 0).any(-1, True), x, -x)


def bits_and(x: Tensor) -> Tensor:
    return ops.bitwise_and(ops.argmax(x, -1), 1).astype(ms.float32) * x[..., 0]


def bits_or(x: Tensor) -> Tensor:
    return ops.bitwise_or(ops.argmax(x, -1), 1).astype(ms.float32) * x[..., 0]


def bits_inverted(x: Tensor) -> Tensor:
    return ops.invert(NUMBERS).astype(ms.float32).sum() * x


CASES: list[Case] = [
    (is_finite, one), (is_infinite, one), (is_not_a_number, one), (logical_not, one), (logical_or, two),
    (logical_xor, two), (all_of, one), (any_of, one), (bits_and, one), (bits_or, one), (bits_inverted, one),
]  # fmt: skip
