"""Elements picked or written by tensors of places."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.ops.auto_generate import Index, MoeTokenPermute, MoeTokenUnpermute

from tests.derivative_cases.shapes import Case, one

PLACES = Tensor(np.array([1, 2, 0]), ms.int32)
POINTS = Tensor(np.array([[0, 1], [1, 2]]), ms.int32)
ENDS = Tensor(np.array([1, 0, 1]), ms.int32)
ROWS = Tensor(np.array([[0], [1]]), ms.int32)


def gather(x: Tensor) -> Tensor:
    return ops.gather(x, PLACES, 0)


def gather_inner(x: Tensor) -> Tensor:
    return ops.gather(x, PLACES, 1)


def gather_last(x: Tensor) -> Tensor:
    return ops.gather(x, POINTS, -1)


def gather_elements(x: Tensor) -> Tensor:
    return ops.gather_d(x, 1, POINTS)


def gather_points(x: Tensor) -> Tensor:
    return ops.gather_nd(x, POINTS)


def embedding(x: Tensor) -> Tensor:
    return mint.nn.functional.embedding(PLACES, x)


def index_select(x: Tensor) -> Tensor:
    return mint.index_select(x, 1, PLACES)


def pick_rows(x: Tensor) -> Tensor:
    return x[:, PLACES]


def scatter_add(x: Tensor, y: Tensor) -> Tensor:
    return ops.tensor_scatter_add(x, ROWS, y)


def send_to_experts(x: Tensor) -> Tensor:
    return MoeTokenPermute()(x, ops.zeros((x.shape[0], 2), ms.int32))[0]


def return_from_experts(x: Tensor, y: Tensor) -> Tensor:
    return MoeTokenUnpermute()(x, ops.zeros((x.shape[0],), ms.int32), y)


def argmax(x: Tensor) -> Tensor:
    return ops.argmax(x, -1).astype(ms.float32) * x[..., 0]


def one_hot(x: Tensor) -> Tensor:
    return ops.one_hot(ops.arange(x.shape[0]), x.shape[1], Tensor(1.0), Tensor(0.0)) * x


def index(x: Tensor) -> Tensor:
    return Index()(x, (ENDS,))


def scatter_update(x: Tensor, y: Tensor) -> Tensor:
    return ops.TensorScatterUpdate()(x, ROWS, y)


def scatter_update_in_place(x: Tensor, y: Tensor) -> Tensor:
    return ops.scatter_nd_update(x, ROWS, y)


def one_hot_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.one_hot(ops.arange(x.shape[0]), x.shape[1]).astype(ms.float32) * x


def argmax_extended(x: Tensor) -> Tensor:
    return mint.argmax(x, -1).astype(ms.float32) * x[..., 0]


CASES: list[Case] = [
    (gather, lambda b, s, h: [(s, h)]), (gather_inner, one), (gather_last, one),
    (gather_elements, lambda b, s, h: [(2, h)]), (gather_points, one), (embedding, lambda b, s, h: [(s, h)]),
    (index_select, one), (pick_rows, one), (scatter_add, lambda b, s, h: [(s, h), (2, h)]), (argmax, one),
    (one_hot, lambda b, s, h: [(s, h)]), (send_to_experts, lambda b, s, h: [(s, h)]),
    (return_from_experts, lambda b, s, h: [(2 * s, h), (s, 2)]),
    (index, one), (scatter_update, lambda b, s, h: [(s, h), (2, h)]), (argmax_extended, one),
    (scatter_update_in_place, lambda b, s, h: [(s, h), (2, h)]), (one_hot_extended, lambda b, s, h: [(s, h)]),
]  # fmt: skip
