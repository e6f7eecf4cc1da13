"""A network whose tensor changes its layout from operation to operation, for the compiler and for the rules."""

from __future__ import annotations

import itertools
import random

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

SIZES = (8, 16, 24)
"""Shape of the tensor: each axis divides by 8."""


def strategies(ranks: int, seed: int, length: int) -> list[tuple[int, ...]]:
    """So many ways to cut the axes, each among all ranks or a part of them."""
    known = [cuts for cuts in itertools.product((1, 2, 4, 8), repeat=3) if ranks % (cuts[0] * cuts[1] * cuts[2]) == 0]
    return random.Random(seed).choices(known, k=length)


class Layouts(nn.Cell):
    """Squares, each cut in its own way."""

    def __init__(self, chain: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(shape=SIZES, dtype=ms.float32, init="ones"), name="weight")
        self.scale = ops.Mul().shard((chain[0], chain[0]))
        self.squares = [ops.Square().shard((cuts,)) for cuts in chain]
        self.total = ops.ReduceSum().shard((chain[-1],))

    def construct(self, states: Tensor) -> Tensor:
        """Map a tensor of `SIZES` to a scalar."""
        states = self.scale(states, self.weight)
        for square in self.squares:
            states = square(states)
        return self.total(states)


def factory(ranks: int, seed: int, length: int = 12) -> tuple[nn.Cell, tuple[Tensor, ...]]:
    """The network and its input."""
    return Layouts(strategies(ranks, seed, length)), (Tensor(shape=SIZES, dtype=ms.float32, init="ones"),)
