"""Reductions over axes, softmax, running sums."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint, ops

from tests.derivative_cases.shapes import Case, one


def softmax(x: Tensor) -> Tensor:
    return ops.softmax(x, -1)


def log_softmax(x: Tensor) -> Tensor:
    return ops.log_softmax(x, -1)


def log_softmax_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.log_softmax(x, -1)


def total(x: Tensor) -> Tensor:
    return ops.sum(x, 1)


def total_old(x: Tensor) -> Tensor:
    return ops.ReduceSum()(x, 1)


def total_of_all(x: Tensor) -> Tensor:
    return ops.ReduceSum(keep_dims=True)(x)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def mean_kept(x: Tensor) -> Tensor:
    return ops.mean(x, -1, True)


def mean_extended(x: Tensor) -> Tensor:
    return mint.mean(x, -1, True)


def reduce_max(x: Tensor) -> Tensor:
    return ops.ReduceMax()(x, -1)


def reduce_min(x: Tensor) -> Tensor:
    return ops.ReduceMin()(x, -1)


def max_with_place(x: Tensor) -> Tensor:
    return ops.max(x, -1)[0]


def max_dim(x: Tensor) -> Tensor:
    return mint.max(x, -1)[0]


def min_with_place(x: Tensor) -> Tensor:
    return ops.min(x, -1)[0]


def min_dim(x: Tensor) -> Tensor:
    return mint.min(x, -1)[0]


def variance(x: Tensor) -> Tensor:
    return ops.var(x, -1)


def vector_norm(x: Tensor) -> Tensor:
    return mint.norm(x)


def top_few(x: Tensor) -> Tensor:
    return ops.topk(x, 2)[0]


def cumsum(x: Tensor) -> Tensor:
    return ops.cumsum(x, 1)


def cumsum_extended(x: Tensor) -> Tensor:
    return mint.cumsum(x, 1)


def cumprod(x: Tensor) -> Tensor:
    return ops.cumprod(x, 1)


def log_sum_exp(x: Tensor) -> Tensor:
    return ops.logsumexp(x, -1)


def product(x: Tensor) -> Tensor:
    return ops.ReduceProd()(x, -1)


def product_kept(x: Tensor) -> Tensor:
    return ops.ReduceProd(keep_dims=True)(x, (0, 1))


def product_of_all(x: Tensor) -> Tensor:
    return ops.ReduceProd()(x)


def product_of_first(x: Tensor) -> Tensor:
    return ops.ReduceProd()(x, 0)


def largest_place(x: Tensor) -> Tensor:
    return mint.max(mint.argmax(x, -1)).astype(ms.float32) * x


def smallest_place(x: Tensor) -> Tensor:
    return mint.min(ops.argmin(x, -1)).astype(ms.float32) * x


CASES: list[Case] = [
    (softmax, one), (log_softmax, one), (log_softmax_extended, one), (total, one), (total_old, one),
    (total_of_all, one), (mean, one), (mean_kept, one), (mean_extended, one), (reduce_max, one), (reduce_min, one),
    (min_with_place, one), (min_dim, one),
    (max_with_place, one), (max_dim, one), (variance, one), (vector_norm, one), (top_few, one), (cumsum, one),
    (cumsum_extended, one), (cumprod, one), (log_sum_exp, one),
    (product, one), (product_kept, one), (product_of_all, one), (product_of_first, one), (largest_place, one),
    (smallest_place, one),
]  # fmt: skip
