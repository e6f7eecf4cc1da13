"""One function per way to use a primitive, by family; MindSpore parses each from its source, so none can be a lambda.

Shapes are functions of a batch, a length and a width, so that every case runs at several.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from tests.derivative_cases import (
    arithmetic,
    attention,
    conditions,
    constants,
    convolution,
    elementwise,
    indexing,
    loss,
    matmul,
    movement,
    normalisation,
    reduction,
    sorting,
    writing,
)
from tests.derivative_cases.shapes import Case

_FAMILIES = (
    arithmetic, elementwise, matmul, attention, reduction, normalisation, movement, indexing, loss, convolution,
    conditions, constants, sorting, writing,
)  # fmt: skip

CASES: dict[str, list[Case]] = {family.__name__.rsplit(".", 1)[1]: family.CASES for family in _FAMILIES}
"""By family: what is computed, and the shapes of its operands."""


class CaseCell(nn.Cell):
    """One case on operands that depend on weights, so that all of their gradients are needed."""

    def __init__(self, function: Any, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.function = function() if isinstance(function, type) else function
        self.weights = ms.ParameterTuple(
            [Parameter(Tensor(np.full(shape, 0.5, np.float32)), name=f"w{i}") for i, shape in enumerate(shapes)]
        )

    def construct(self) -> Tensor:
        operands = ()
        for weight in self.weights:
            operands = (*operands, ops.cos(weight))
        return self.function(*operands)


class CaseNetwork(nn.Cell):
    """All cases of one family at one size, each in the cell ``cases.<number>``."""

    def __init__(self, family: str, size: tuple[int, int, int]) -> None:
        super().__init__()
        self.cases = nn.CellList([CaseCell(function, shapes(*size)) for function, shapes in CASES[family]])

    def construct(self, start: Tensor) -> Tensor:
        loss = start
        for case in self.cases:
            loss = loss + ops.sin(case()).sum()
        return loss
