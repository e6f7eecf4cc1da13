"""Losses that are one primitive, or a few."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint, ops
from mindspore.ops.operations import math_ops, nn_ops

from tests.derivative_cases.shapes import Case, one, two


def cross_entropy(x: Tensor) -> Tensor:
    return ops.cross_entropy(x, ops.zeros((x.shape[0],), ms.int32))


def cross_entropy_of_odds(x: Tensor, y: Tensor) -> Tensor:
    return ops.cross_entropy(x, y)


def cross_entropy_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.cross_entropy(x, ops.zeros((x.shape[0],), ms.int64))


def nll_loss(x: Tensor) -> Tensor:
    return ops.nll_loss(x, ops.zeros((x.shape[0],), ms.int32))


def softmax_cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    return ops.SoftmaxCrossEntropyWithLogits()(x, y)[0]


def sparse_cross_entropy(x: Tensor) -> Tensor:
    return ops.SparseSoftmaxCrossEntropyWithLogits()(x, ops.zeros((x.shape[0],), ms.int32))


def mean_square_error(x: Tensor, y: Tensor) -> Tensor:
    return ops.mse_loss(x, y)


def binary_cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    return ops.binary_cross_entropy_with_logits(x, y, None, None)


def absolute_error(x: Tensor, y: Tensor) -> Tensor:
    return ops.l1_loss(x, y)


def smooth_absolute_error(x: Tensor, y: Tensor) -> Tensor:
    return ops.smooth_l1_loss(x, y)


def divergence(x: Tensor, y: Tensor) -> Tensor:
    return ops.kl_div(x, y)


def half_square_sum(x: Tensor) -> Tensor:
    return nn_ops.L2Loss()(x)


def square_sums(x: Tensor, y: Tensor) -> Tensor:
    first, second = math_ops.SquareSumAll()(x, y)
    return first * second


def square_sum_of_one(x: Tensor, y: Tensor) -> Tensor:
    return math_ops.SquareSumAll()(x, y)[0]


CASES: list[Case] = [
    (cross_entropy, lambda b, s, h: [(s, h)]), (cross_entropy_of_odds, lambda b, s, h: [(s, h), (s, h)]),
    (cross_entropy_extended, lambda b, s, h: [(s, h)]), (nll_loss, lambda b, s, h: [(s, h)]),
    (softmax_cross_entropy, lambda b, s, h: [(s, h), (s, h)]), (sparse_cross_entropy, lambda b, s, h: [(s, h)]),
    (mean_square_error, two), (binary_cross_entropy, two), (absolute_error, two), (smooth_absolute_error, two),
    (divergence, two),
    (half_square_sum, one), (square_sums, two), (square_sum_of_one, two),
]  # fmt: skip
