"""Matrix products."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.ops.auto_generate import GroupedMatmul, GroupedMatmulV2, GroupedMatmulV4

from tests.derivative_cases.shapes import Case, one

ENDS = Tensor(np.array([2, 2, 4]), ms.int64)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    return ops.matmul(x, y)


def batch_matmul(x: Tensor, y: Tensor) -> Tensor:
    return ops.bmm(x, y)


def batch_matmul_tb(x: Tensor, y: Tensor) -> Tensor:
    return ops.BatchMatMul(transpose_b=True)(x, y)


def batch_matmul_ta(x: Tensor, y: Tensor) -> Tensor:
    return ops.BatchMatMul(transpose_a=True)(x, y)


def batch_matmul_tt(x: Tensor, y: Tensor) -> Tensor:
    return ops.BatchMatMul(transpose_a=True, transpose_b=True)(x, y)


def batch_matmul_extended(x: Tensor, y: Tensor) -> Tensor:
    return mint.bmm(x, y)


def matmul_old(x: Tensor, y: Tensor) -> Tensor:
    return ops.MatMul()(x, y)


def matmul_ta(x: Tensor, y: Tensor) -> Tensor:
    return ops.MatMul(transpose_a=True)(x, y)


def matmul_tb(x: Tensor, y: Tensor) -> Tensor:
    return ops.MatMul(transpose_b=True)(x, y)


def matmul_tt(x: Tensor, y: Tensor) -> Tensor:
    return ops.MatMul(transpose_a=True, transpose_b=True)(x, y)


def dense(x: Tensor, y: Tensor) -> Tensor:
    return ops.dense(x, y)


def dense_bias(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.dense(x, y, z)


def einsum(x: Tensor, y: Tensor) -> Tensor:
    return ops.einsum("bij,bkj->bik", x, y)


def grouped_matmul(x: Tensor, y: Tensor) -> Tensor:
    return GroupedMatmul(split_item=3, group_type=0)([x], [y], None, None, None, None, None, ENDS)[0]


def grouped_matmul_fourth(x: Tensor, y: Tensor) -> Tensor:
    return GroupedMatmulV4()(
        [x], [y], None, None, None, None, None, None, ENDS, None, None, None, 3, 0, 0, 0
    )[0]  # fmt: skip


def matrices(x: Tensor, y: Tensor) -> Tensor:
    return mint.mm(x, y)


def einsum_attention(x: Tensor, y: Tensor) -> Tensor:
    return ops.einsum("bqnd,bknd->bnqk", x, y)


def einsum_of_any_batch(x: Tensor, y: Tensor) -> Tensor:
    return ops.einsum("...ij,jk->...ik", x, y)


def einsum_of_one(x: Tensor) -> Tensor:
    return ops.einsum("bij->bj", x)


def einsum_of_three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.einsum("bi,ij,jk->bk", x, y, z)


def grouped_matmul_second(x: Tensor, y: Tensor) -> Tensor:
    return GroupedMatmulV2()([x], [y], None, None, None, None, None, [1, 2, x.shape[0]], 3, 0)[0]


CASES: list[Case] = [
    (matmul, lambda b, s, h: [(b, s, h), (h, 6)]), (matmul, lambda b, s, h: [(b, s, h), (b, h, 6)]),
    (matmul, lambda b, s, h: [(s, h), (h, 6)]), (matmul, lambda b, s, h: [(s, h), (b, h, 6)]),
    (matmul, lambda b, s, h: [(b, 3, s, h), (3, h, 6)]), (matmul, lambda b, s, h: [(b, 1, s, h), (b, 3, h, 6)]),
    (matmul, lambda b, s, h: [(b, s, h), (h,)]), (matmul, lambda b, s, h: [(h,), (h, s)]),
    (matmul, lambda b, s, h: [(h,), (b, h, s)]), (matmul, lambda b, s, h: [(s, h), (h,)]),
    (matmul, lambda b, s, h: [(h,), (h,)]), (batch_matmul, lambda b, s, h: [(b, s, h), (b, h, 6)]),
    (batch_matmul_tb, lambda b, s, h: [(b, s, h), (b, 6, h)]),
    (batch_matmul_ta, lambda b, s, h: [(b, 3, h, s), (b, 3, h, 6)]),
    (batch_matmul_tt, lambda b, s, h: [(b, 3, h, s), (b, 3, 6, h)]),
    (batch_matmul_extended, lambda b, s, h: [(b, s, h), (b, h, 6)]),
    (matmul_old, lambda b, s, h: [(s, h), (h, 6)]), (matmul_ta, lambda b, s, h: [(h, s), (h, 6)]),
    (matmul_tb, lambda b, s, h: [(s, h), (6, h)]), (matmul_tt, lambda b, s, h: [(h, s), (6, h)]),
    (dense, lambda b, s, h: [(b, s, h), (6, h)]), (dense, lambda b, s, h: [(s, h), (6, h)]),
    (dense_bias, lambda b, s, h: [(b, s, h), (6, h), (6,)]), (dense_bias, lambda b, s, h: [(s, h), (6, h), (6,)]),
    (einsum, lambda b, s, h: [(b, s, h), (b, 6, h)]),
    (grouped_matmul, lambda b, s, h: [(b * s, h), (3, h, 6)]),
    (grouped_matmul_fourth, lambda b, s, h: [(b * s, h), (3, h, 6)]),
    (matrices, lambda b, s, h: [(s, h), (h, 6)]),
    (einsum_attention, lambda b, s, h: [(b, s, 2, h), (b, 5, 2, h)]),
    (einsum_of_any_batch, lambda b, s, h: [(b, 2, s, h), (h, 6)]), (einsum_of_one, one),
    (einsum_of_three, lambda b, s, h: [(b, s), (s, h), (h, 6)]),
    (grouped_matmul_second, lambda b, s, h: [(b * s, h), (3, h, 6)]),
]  # fmt: skip
