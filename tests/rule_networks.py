"""Rows of small cells, with and without weights of their own, to show what the compiler takes on a stage."""

from __future__ import annotations

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

WIDTH = 8


class Weighted(nn.Cell):
    """A product with a weight."""

    def __init__(self, weight: Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.multiply = ops.MatMul()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, width) to (b, width)."""
        return self.multiply(states, self.weight)


class Borrowing(nn.Cell):
    """A product with a weight that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply = ops.MatMul()

    def construct(self, states: Tensor, weight: Tensor) -> Tensor:
        """Map (b, width) and a weight to (b, width)."""
        return self.multiply(states, weight)


class Converted(nn.Cell):
    """A product in half precision with a weight kept in float32."""

    def __init__(self, weight: Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.cast = ops.Cast()
        self.multiply = ops.MatMul()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, width) to (b, width)."""
        half = self.multiply(self.cast(states, mindspore.float16), self.cast(self.weight, mindspore.float16))
        return self.cast(half, mindspore.float32)


class Scale(nn.Cell):
    """A weight, but no matrix product."""

    def __init__(self, weight: Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.multiply = ops.Mul()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, width) to (b, width)."""
        return self.multiply(states, self.weight)


class Batched(nn.Cell):
    """A batched product with a weight."""

    def __init__(self, weight: Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.multiply = ops.BatchMatMul()
        self.reshape = ops.Reshape()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, width) to (b, width)."""
        width = states.shape[1]
        made = self.multiply(self.reshape(states, (1, -1, width)), self.reshape(self.weight, (1, width, width)))
        return self.reshape(made, (-1, width))


class Activation(nn.Cell):
    """No weight."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = ops.GeLU()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, width) to (b, width)."""
        return self.activation(states)


class Row(nn.Cell):
    """Cells one after the other, then the mean."""

    def __init__(self, kinds: str, width: int) -> None:
        super().__init__()

        def weight(name: str, trainable: bool = True) -> Parameter:
            return Parameter(initializer("ones", (width, width), mindspore.float32), name, requires_grad=trainable)

        shared = weight("shared")
        made = {
            "w": lambda index: Weighted(weight(f"weight_{index}")),
            "f": lambda index: Weighted(weight(f"weight_{index}", False)),
            "t": lambda index: Weighted(shared),
            "b": lambda index: Borrowing(),
            "s": lambda index: Scale(
                Parameter(initializer("ones", (width,), mindspore.float32), name=f"scale_{index}")
            ),
            "m": lambda index: Batched(weight(f"weight_{index}")),
            "c": lambda index: Converted(weight(f"weight_{index}")),
            "a": lambda index: Activation(),
        }
        self.borrows = tuple(kind == "b" for kind in kinds)
        self.layers = nn.CellList([made[kind](index) for index, kind in enumerate(kinds)])
        self.mean = ops.ReduceMean()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, width) to a scalar."""
        for index, layer in enumerate(self.layers):
            states = layer(states, self.layers[0].weight) if self.borrows[index] else layer(states)
        return self.mean(states)


def factory(kinds: str, width: int = WIDTH) -> tuple[Row, tuple[Tensor, ...]]:
    """A row with one cell for each letter.

    `w`eight of its own, the same in a `m`any-matrix product or `c`onverted to half precision, a `s`cale without a
    product, `f`rozen weight, `t`ied weight (one object in all cells `t`), `b`orrowed weight of the first cell, given in
    the call, `a`ctivation without any.
    """
    return Row(kinds, width), (Tensor(np.zeros((4, width)), mindspore.float32),)
