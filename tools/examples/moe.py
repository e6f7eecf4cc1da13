"""Mixture of experts: a router, routed experts with limited or unlimited places, and experts that see every token.

With a capacity, each expert takes so many tokens of a sample and the rest are dropped for it; tokens go there and back
by products with one-hot matrices (arXiv 2006.16668). Without, tokens are sorted by expert and the experts' products are
one grouped kernel, which runs on Ascend only.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer
from mindspore.ops.auto_generate import GroupedMatmul, MoeTokenPermute, MoeTokenUnpermute

from tools.examples.common import INITIAL_DEVIATION
from tools.examples.llama import FeedForward

SPLIT_RESULT = 3
"""The grouped kernel's `split_item` for one result that holds the rows of all experts."""
GROUPED_ROWS = 0
"""The grouped kernel's `group_type` for groups of rows of the left operand."""


class Router(nn.Cell):
    """The experts of each token and their weights, in float32 (arXiv 2412.19437, section 2.1.2).

    Scores are sigmoids. A bias that balances the load takes part in the choice only; it is set outside of training.
    """

    def __init__(self, hidden: int, experts: int, active: int, scaling: float) -> None:
        super().__init__()
        self.active, self.scaling = active, scaling
        self.weight = Parameter(initializer(Normal(INITIAL_DEVIATION), (experts, hidden), ms.float32), name="weight")
        self.bias = Parameter(initializer("zeros", (experts,), ms.float32), name="bias", requires_grad=False)
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Map (tokens, hidden) to experts, int32, and weights, float32, both (tokens, active)."""
        scores = ops.sigmoid(self.matmul(states.astype(ms.float32), self.weight))
        _, chosen = ops.topk(ops.stop_gradient(scores) + self.bias, self.active)
        picked = ops.gather_elements(scores, 1, chosen)
        return chosen, picked / picked.sum(-1, keepdims=True) * self.scaling


class ExpertWeights(nn.Cell):
    """SwiGLU weights of all experts, used by products that tell experts apart."""

    def __init__(self, hidden: int, ffn: int, experts: int, dtype: Any) -> None:
        super().__init__()
        values = Normal(INITIAL_DEVIATION)
        self.gate = Parameter(initializer(values, (experts, hidden, ffn), dtype), name="gate")
        self.up = Parameter(initializer(values, (experts, hidden, ffn), dtype), name="up")
        self.down = Parameter(initializer(values, (experts, ffn, hidden), dtype), name="down")
        self.activation = nn.SiLU()
        self.multiply = ops.Mul()


class BatchedExperts(ExpertWeights):
    """Experts over equally many places each."""

    def __init__(self, hidden: int, ffn: int, experts: int, dtype: Any) -> None:
        super().__init__(hidden, ffn, experts, dtype)
        self.matmul = ops.BatchMatMul()

    def construct(self, states: Tensor) -> Tensor:
        """Map (experts, places, hidden) to the same shape."""
        inner = self.multiply(self.activation(self.matmul(states, self.gate)), self.matmul(states, self.up))
        return self.matmul(inner, self.down)


class GroupedExperts(ExpertWeights):
    """Experts over neighbouring rows, as many as the router gave each."""

    def __init__(self, hidden: int, ffn: int, experts: int, dtype: Any) -> None:
        super().__init__(hidden, ffn, experts, dtype)
        self.matmul = GroupedMatmul(split_item=SPLIT_RESULT, group_type=GROUPED_ROWS)

    def construct(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Map (rows, hidden) and the int64 end of each expert's rows, (experts,), to (rows, hidden)."""
        gate = self.product(rows, self.gate, ends)
        inner = self.multiply(self.activation(gate), self.product(rows, self.up, ends))
        return self.product(inner, self.down, ends)

    def product(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return each expert's rows times its weight."""
        return self.matmul([rows], [weight], None, None, None, None, None, ends)[0]


class CapacityExperts(nn.Cell):
    """Routed experts that take `capacity_factor` times an even share of each sample's tokens."""

    def __init__(self, hidden: int, ffn: int, experts: int, capacity_factor: float, dtype: Any) -> None:
        super().__init__()
        self.count, self.capacity_factor, self.dtype = experts, capacity_factor, dtype
        self.experts = BatchedExperts(hidden, ffn, experts, dtype)
        self.one = Tensor(1.0, ms.float32)
        self.zero = Tensor(0.0, ms.float32)
        self.one_hot = ops.OneHot()
        self.places = ops.BatchMatMul(transpose_a=True)
        self.dispatch = ops.BatchMatMul(transpose_a=True)
        self.combine = ops.BatchMatMul()

    def construct(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Map states (b, s, hidden), experts and weights (b * s, active) to (b, s, hidden)."""
        batch, length, hidden = states.shape
        active, count = chosen.shape[1], self.count
        capacity = int(self.capacity_factor * active * length / count)
        # First choices of all tokens come before second ones.
        order = chosen.reshape(batch, length, active).swapaxes(1, 2).reshape(batch, active * length)
        expert = self.one_hot(order, count, self.one, self.zero)
        place = ((ops.cumsum(expert, 1) - 1.0) * expert).sum(-1).astype(ms.int32)
        # A place beyond the capacity gives a row of zeros: the token is dropped.
        seat = self.one_hot(place, capacity, self.one, self.zero)
        seats = self.by_token(seat, active, length)
        dispatch = self.places(self.by_token(expert, active, length), seats)
        dispatch = ops.stop_gradient(dispatch).astype(self.dtype).reshape(batch, length, count * capacity)
        shares = self.by_token(expert, active, length) * weights.reshape(batch * length, active, 1)
        combine = self.places(shares, seats).astype(self.dtype).reshape(batch, length, count * capacity)
        sent = self.by_expert(self.dispatch(dispatch, states).reshape(batch, count, capacity, hidden))
        back = self.experts(sent.reshape(count, batch * capacity, hidden)).reshape(count, batch, capacity, hidden)
        return self.combine(combine, self.by_expert(back).reshape(batch, count * capacity, hidden))

    def by_token(self, values: Tensor, active: int, length: int) -> Tensor:
        """From (b, active * s, n) to (b * s, active, n)."""
        batch, _, width = values.shape
        return values.reshape(batch, active, length, width).swapaxes(1, 2).reshape(batch * length, active, width)

    def by_expert(self, values: Tensor) -> Tensor:
        """Exchange the first two axes, samples and experts."""
        return values.swapaxes(0, 1)


class DroplessExperts(nn.Cell):
    """Routed experts that take every token sent to them."""

    def __init__(self, hidden: int, ffn: int, experts: int, dtype: Any) -> None:
        super().__init__()
        self.count, self.dtype = experts, dtype
        self.experts = GroupedExperts(hidden, ffn, experts, dtype)
        self.one = Tensor(1.0, ms.float32)
        self.zero = Tensor(0.0, ms.float32)
        self.one_hot = ops.OneHot()
        self.permute = MoeTokenPermute()
        self.unpermute = MoeTokenUnpermute()

    def construct(self, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Map states (b, s, hidden), experts and weights (b * s, active) to (b, s, hidden)."""
        batch, length, hidden = states.shape
        rows, order = self.permute(states.reshape(batch * length, hidden), chosen)
        expert = self.one_hot(chosen.reshape(-1), self.count, self.one, self.zero)
        ends = ops.cumsum(expert.sum(0), 0).astype(ms.int64)
        back = self.unpermute(self.experts(rows, ends), order, weights.astype(self.dtype))
        return back.reshape(batch, length, hidden)


class MixtureOfExperts(nn.Cell):
    """Routed experts plus the experts that every token passes."""

    def __init__(self, hidden: int, ffn: int, shared: int, router: Router, routed: nn.Cell, dtype: Any) -> None:
        super().__init__()
        self.router = router
        self.routed = routed
        self.shared = FeedForward(hidden, shared * ffn, dtype)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to (b, s, hidden)."""
        chosen, weights = self.router(states.reshape(-1, states.shape[-1]))
        return self.routed(states, chosen, weights) + self.shared(states)
