"""A network whose layouts change so that MindSpore puts every kind of collective between its operations."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops


class Layouts(nn.Cell):
    """Rows and columns of states are shared by two ranks in turn; inner axes that are cut are summed up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weights = [Parameter(Tensor(np.ones((width, width), np.float32)), name=f"w{number}") for number in range(4)]
        self.weights = ms.ParameterTuple(weights)
        self.by_rows = ops.MatMul().shard(((2, 1), (1, 1)))
        self.by_columns = ops.MatMul().shard(((1, 1), (1, 2)))
        self.summed = ops.MatMul().shard(((1, 2), (2, 1)))
        self.scattered = ops.MatMul().shard(((1, 2), (2, 1)), out_strategy=((2, 1),))
        self.rows = ops.Exp().shard(((2, 1),))
        self.columns = ops.Sin().shard(((1, 2),))
        self.total = ops.ReduceSum().shard(((2, 1),))

    def construct(self, x: Tensor) -> Tensor:
        x = self.rows(self.by_rows(x, self.weights[0]))
        x = self.by_columns(self.columns(x), self.weights[1])
        x = self.rows(self.summed(x, self.weights[2]))
        x = self.columns(x)
        return self.total(self.rows(self.scattered(x, self.weights[3])))


def factory(batch: int = 4, width: int = 8) -> tuple[nn.Cell, tuple[Tensor]]:
    """A network for two ranks, and its input; the compile exchanges parts where it can."""
    ms.set_auto_parallel_context(enable_alltoall=True)
    return Layouts(width), (Tensor(np.ones((batch, width), np.float32)),)
