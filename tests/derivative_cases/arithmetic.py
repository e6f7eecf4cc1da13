"""Operations of several operands that broadcast."""

from __future__ import annotations

from mindspore import Tensor, mint, ops
from mindspore.ops.auto_generate import AddScalar, SubScalar

from tests.derivative_cases.shapes import Case, one, two, with_column, with_gain_and_shift, with_vector


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def add_number(x: Tensor) -> Tensor:
    return x + 1.0


def add_scaled(x: Tensor, y: Tensor) -> Tensor:
    return mint.add(x, y, alpha=2)


def subtract(x: Tensor, y: Tensor) -> Tensor:
    return x - y


def subtract_from_number(x: Tensor) -> Tensor:
    return 1.0 - x


def subtract_extended(x: Tensor, y: Tensor) -> Tensor:
    return mint.sub(x, y)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def multiply_number(x: Tensor) -> Tensor:
    return x * 2.5


def divide(x: Tensor, y: Tensor) -> Tensor:
    return x / y


def divide_number(x: Tensor) -> Tensor:
    return x / 2.5


def divide_old(x: Tensor, y: Tensor) -> Tensor:
    return ops.RealDiv()(x, y)


def power(x: Tensor, y: Tensor) -> Tensor:
    return ops.pow(x, y)


def power_constant(x: Tensor) -> Tensor:
    return x**2


def power_number(x: Tensor) -> Tensor:
    return mint.pow(x, 2)


def power_of_number(x: Tensor) -> Tensor:
    return mint.pow(2.0, x)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    return ops.maximum(x, y)


def minimum(x: Tensor, y: Tensor) -> Tensor:
    return ops.minimum(x, y)


def where(x: Tensor, y: Tensor) -> Tensor:
    return ops.where(x > 0, x, y)


def select(x: Tensor, y: Tensor) -> Tensor:
    return ops.select(x > 0, x, y)


def masked_fill(x: Tensor) -> Tensor:
    return ops.masked_fill(x, x > 0, -1e4)


def add_many(x: Tensor, y: Tensor) -> Tensor:
    return ops.addn((x, y, x))


def bias_add(x: Tensor, y: Tensor) -> Tensor:
    return ops.BiasAdd()(x.reshape(-1, x.shape[-1]), y)


def lerp(x: Tensor, y: Tensor) -> Tensor:
    return ops.lerp(x, y, 0.25)


def xdivy(x: Tensor, y: Tensor) -> Tensor:
    return ops.xdivy(x, y)


def floor(x: Tensor) -> Tensor:
    return ops.floor(x) + x


def ceil(x: Tensor) -> Tensor:
    return ops.ceil(x) + x


def sign(x: Tensor) -> Tensor:
    return ops.sign(x) + x


def round_(x: Tensor) -> Tensor:
    return ops.round(x) + x


def trunc(x: Tensor) -> Tensor:
    return ops.trunc(x) + x


def add_scalar_primitive(x: Tensor) -> Tensor:
    return AddScalar()(x, 2.0, 3)


def subtract_scalar_primitive(x: Tensor) -> Tensor:
    return SubScalar()(x, 2.0, 3)


def floor_divide(x: Tensor, y: Tensor) -> Tensor:
    return ops.floor_divide(x, y) * x


def remainder(x: Tensor, y: Tensor) -> Tensor:
    return ops.Mod()(x, y)


def clip(x: Tensor) -> Tensor:
    return ops.clip_by_value(x, 0.1, 0.9)


def clamp_by_tensors(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return mint.clamp(x, y, z)


CASES: list[Case] = [
    (add, with_vector), (add_number, one), (add_scaled, with_vector), (subtract, with_column),
    (subtract_from_number, one), (subtract_extended, with_vector), (multiply, with_vector), (multiply_number, one),
    (divide, with_column), (divide_number, one), (divide_old, with_vector), (power, two), (power_constant, one),
    (power_number, one), (power_of_number, one), (maximum, with_vector), (minimum, with_vector),
    (where, with_vector), (select, two), (masked_fill, one), (add_many, two), (bias_add, with_vector),
    (lerp, two), (xdivy, two), (floor, one), (ceil, one), (sign, one), (round_, one), (trunc, one),
    (floor_divide, two), (add_scalar_primitive, one), (subtract_scalar_primitive, one),
    (remainder, with_vector), (clip, one), (clamp_by_tensors, with_gain_and_shift),
]  # fmt: skip
