"""Normalisations."""

from __future__ import annotations

from mindspore import Tensor, ops

from tests.derivative_cases.shapes import Case, with_gain_and_shift, with_vector


def layer_norm(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.LayerNorm(-1, -1)(x, y, z)[0]


def layer_norm_extended(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.layer_norm(x, (x.shape[-1],), y, z)


def rms_norm(x: Tensor, y: Tensor) -> Tensor:
    return ops.rms_norm(x, y)[0]


def group_norm(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.group_norm(x.transpose(0, 2, 1), 2, y, z)


def batch_norm(x: Tensor, g: Tensor, s: Tensor, m: Tensor, v: Tensor) -> Tensor:
    return ops.BatchNorm(True)(x, g, s, m, v)[0]


CASES: list[Case] = [
    (layer_norm, with_gain_and_shift), (layer_norm_extended, with_gain_and_shift), (rms_norm, with_vector),
    (group_norm, with_gain_and_shift), (batch_norm, lambda b, s, h: [(b, h, s, s), (h,), (h,), (h,), (h,)]),
]  # fmt: skip
