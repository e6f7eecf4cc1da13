"""Convolutions and other operations on images."""

from __future__ import annotations

from mindspore import Tensor, mint, ops

from tests.derivative_cases.shapes import Case, image


def convolution(x: Tensor, y: Tensor) -> Tensor:
    return ops.conv2d(x, y, stride=2, pad_mode="pad", padding=1)


def convolution_grouped(x: Tensor, y: Tensor) -> Tensor:
    return ops.conv2d(x, y, groups=2)


def convolution_bias(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.conv2d(x, y, z)


def convolution_extended(x: Tensor, y: Tensor) -> Tensor:
    return mint.nn.functional.conv2d(x, y)


def max_pool(x: Tensor) -> Tensor:
    return ops.MaxPool(2, 2)(x)


def max_pool_with_places(x: Tensor) -> Tensor:
    return ops.max_pool2d(x, 2)


def average_pool(x: Tensor) -> Tensor:
    return ops.AvgPool(2, 2)(x)


def average_pool_of_volumes(x: Tensor) -> Tensor:
    return ops.avg_pool2d(x, 2)


def windows(x: Tensor) -> Tensor:
    return ops.unfold(x, 2)


def resize(x: Tensor) -> Tensor:
    return ops.interpolate(x, size=(7, 7), mode="bilinear")


CASES: list[Case] = [
    (convolution, lambda b, s, h: [(b, h, s, s), (6, h, 3, 3)]),
    (convolution_grouped, lambda b, s, h: [(b, h, s, s), (6, h // 2, 3, 3)]),
    (convolution_bias, lambda b, s, h: [(b, h, s, s), (6, h, 2, 2), (6,)]),
    (convolution_extended, lambda b, s, h: [(b, h, s, s), (6, h, 3, 3)]), (max_pool, image),
    (max_pool_with_places, image), (average_pool, image), (average_pool_of_volumes, image),
    (windows, image), (resize, image),
]  # fmt: skip
