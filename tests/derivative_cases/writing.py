"""Cells that write into a weight of their own, as counters and running averages do."""

from __future__ import annotations

from mindspore import Parameter, Tensor, nn, ops

from tests.derivative_cases.shapes import Case, one


class Running(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Parameter(Tensor(0.0), name="kept", requires_grad=False)


class Count(Running):
    def construct(self, x: Tensor) -> Tensor:
        ops.assign_add(self.kept, Tensor(1.0))
        return x * self.kept


class CountDown(Running):
    def construct(self, x: Tensor) -> Tensor:
        ops.assign_sub(self.kept, Tensor(1.0))
        return x * self.kept


class Record(Running):
    def construct(self, x: Tensor) -> Tensor:
        ops.assign(self.kept, x.sum())
        return ops.exp(x)


class RecordSum(Running):
    def construct(self, x: Tensor) -> Tensor:
        ops.assign_add(self.kept, x.sum())
        return ops.exp(x)


class UseSum(Running):
    def construct(self, x: Tensor) -> Tensor:
        return x * ops.assign_add(self.kept, x.sum())


class UseDifference(Running):
    def construct(self, x: Tensor) -> Tensor:
        return x * ops.assign_sub(self.kept, x.sum())


CASES: list[Case] = [
    (Count, one),
    (CountDown, one),
    (Record, one),
    (RecordSum, one),
    (UseSum, one),
    (UseDifference, one),
]
