"""Operations of one operand."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint, ops

from tests.derivative_cases.shapes import Case, one


def absolute(x: Tensor) -> Tensor:
    return ops.abs(x)


def atan(x: Tensor) -> Tensor:
    return ops.atan(x)


def cast(x: Tensor) -> Tensor:
    return ops.exp(x.astype(ms.float16)).astype(ms.float32)


def clamp(x: Tensor) -> Tensor:
    return ops.clamp(x, 0.1, 0.9)


def cosine(x: Tensor) -> Tensor:
    return ops.cos(x)


def sine(x: Tensor) -> Tensor:
    return ops.sin(x)


def dropout(x: Tensor) -> Tensor:
    return ops.dropout(x, 0.5)


def dropout_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.dropout(x, 0.5, True)


def elu(x: Tensor) -> Tensor:
    return ops.elu(x)


def erf(x: Tensor) -> Tensor:
    return ops.erf(x)


def exp(x: Tensor) -> Tensor:
    return ops.exp(x)


def expm1(x: Tensor) -> Tensor:
    return ops.expm1(x)


def gelu(x: Tensor) -> Tensor:
    return ops.gelu(x, approximate="tanh")


def gelu_exact(x: Tensor) -> Tensor:
    return ops.gelu(x)


def gelu_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.gelu(x)


def hard_swish(x: Tensor) -> Tensor:
    return ops.hardswish(x)


def leaky_relu(x: Tensor) -> Tensor:
    return ops.leaky_relu(x)


def log(x: Tensor) -> Tensor:
    return ops.log(x)


def log1p(x: Tensor) -> Tensor:
    return ops.log1p(x)


def log_sigmoid(x: Tensor) -> Tensor:
    return mint.nn.functional.logsigmoid(x)


def mish(x: Tensor) -> Tensor:
    return ops.mish(x)


def negative(x: Tensor) -> Tensor:
    return -x


def normalise_l2(x: Tensor) -> Tensor:
    return ops.L2Normalize(-1)(x)


def reciprocal(x: Tensor) -> Tensor:
    return ops.reciprocal(x)


def relu(x: Tensor) -> Tensor:
    return ops.relu(x)


def relu6(x: Tensor) -> Tensor:
    return ops.relu6(x)


def rsqrt(x: Tensor) -> Tensor:
    return ops.rsqrt(x)


def sigmoid(x: Tensor) -> Tensor:
    return ops.sigmoid(x)


def silu(x: Tensor) -> Tensor:
    return ops.silu(x)


def softplus(x: Tensor) -> Tensor:
    return ops.softplus(x)


def softplus_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.softplus(x)


def sqrt(x: Tensor) -> Tensor:
    return ops.sqrt(x)


def square(x: Tensor) -> Tensor:
    return ops.square(x)


def swiglu(x: Tensor) -> Tensor:
    return ops.swiglu(x)


def tanh(x: Tensor) -> Tensor:
    return ops.tanh(x)


def fast_gelu(x: Tensor) -> Tensor:
    return ops.fast_gelu(x)


def hard_sigmoid(x: Tensor) -> Tensor:
    return ops.hardsigmoid(x)


def inverse(x: Tensor) -> Tensor:
    return ops.inv(x)


def dropout_of_bits(x: Tensor) -> Tensor:
    kept = Tensor(0.5, ms.float32)
    return ops.DropoutDoMask()(x, ops.DropoutGenMask()(x.shape, kept), kept)


def cast_through_integers(x: Tensor) -> Tensor:
    return x.astype(ms.int32).astype(ms.float32) * x


def cast_through_integer_sum(x: Tensor) -> Tensor:
    return ops.exp((x.astype(ms.int32) + 3).astype(ms.float32))


CASES: list[Case] = [
    (absolute, one), (atan, one), (cast, one), (clamp, one), (cosine, one), (sine, one), (dropout, one),
    (dropout_extended, one), (elu, one), (erf, one), (exp, one), (expm1, one), (gelu, one), (gelu_exact, one),
    (gelu_extended, one), (hard_swish, one), (leaky_relu, one), (log, one), (log1p, one), (log_sigmoid, one),
    (mish, one), (negative, one), (normalise_l2, one), (reciprocal, one), (relu, one), (relu6, one), (rsqrt, one),
    (sigmoid, one), (silu, one), (softplus, one), (softplus_extended, one), (sqrt, one), (square, one),
    (swiglu, one), (tanh, one),
    (fast_gelu, one), (hard_sigmoid, one), (inverse, one), (dropout_of_bits, one), (cast_through_integers, one),
    (cast_through_integer_sum, one),
]  # fmt: skip
