"""Tensors that depend on shapes, numbers or chance alone.

Numbers that are Python values are folded while compiling; ``mutable`` keeps them in the graph.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint, mutable, ops
from mindspore.ops.auto_generate import FillScalar, TupleToTensor

from tests.derivative_cases.shapes import Case, one


def eye(x: Tensor) -> Tensor:
    return x @ ops.eye(x.shape[-1], x.shape[-1], ms.float32)


def fill(x: Tensor) -> Tensor:
    return x + ops.Fill()(ms.float32, x.shape, mutable(2.0))


def fill_scalar(x: Tensor) -> Tensor:
    return x + FillScalar()(x.shape, 2.0, None)


def full_like(x: Tensor) -> Tensor:
    return x + mint.full_like(x, 2.0)


def ones_like(x: Tensor) -> Tensor:
    return x * mint.ones_like(x)


def linear_space(x: Tensor) -> Tensor:
    return x * ops.linspace(Tensor(0.0), Tensor(1.0), x.shape[-1])


def linear_space_extended(x: Tensor) -> Tensor:
    return x * mint.linspace(0.0, 1.0, x.shape[-1])


def number(x: Tensor) -> Tensor:
    return x * ops.scalar_to_tensor(mutable(2.0), ms.float32)


def numbers(x: Tensor) -> Tensor:
    return x * TupleToTensor()(mutable((2, 3)), ms.float32).sum()


def shape(x: Tensor) -> Tensor:
    return x * ops.TensorShape()(x).sum()


def normal(x: Tensor) -> Tensor:
    return x * ops.StandardNormal()(x.shape)


def uniform(x: Tensor) -> Tensor:
    return x * ops.UniformReal()(x.shape)


def uniform_integers(x: Tensor) -> Tensor:
    return x * ops.UniformInt()(x.shape, Tensor(0, ms.int32), Tensor(5, ms.int32)).astype(ms.float32)


CASES: list[Case] = [
    (eye, one), (fill, one), (fill_scalar, one), (full_like, one), (ones_like, one), (linear_space, one),
    (linear_space_extended, one), (number, one), (numbers, one), (shape, one), (normal, one), (uniform, one),
    (uniform_integers, one),
]  # fmt: skip
