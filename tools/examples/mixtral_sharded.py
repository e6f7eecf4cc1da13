"""A LLaMA-like network whose feed-forward layers are experts (arXiv 2401.04088), shared out over expert-parallel ranks.

Each of the data-parallel ranks routes its own samples. Groups of `expert_parallel` among them hold all experts once:
tokens travel from the rank that holds the sample to the rank that holds the expert, and back. Experts have limited
places for each sample; tokens go there and back by products with one-hot matrices (arXiv 2006.16668). Tensor-parallel
ranks share the width of each expert and repeat the routing.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer
from mindspore.ops.auto_generate import SiLU

from tools.examples.common import (
    COMPUTE_TYPES,
    INITIAL_DEVIATION,
    Activation,
    CrossEntropyLoss,
    LanguageModelHead,
    TokenEmbedding,
    require_divisible,
    settings_of,
    token_ids,
)
from tools.examples.llama import ROTARY_BASE, Attention, Block, RMSNorm, check_attention
from tools.examples.llama_sharded import shard_attention, shard_head, shard_norm, shard_split
from tools.examples.moe import ExpertWeights

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 32, "experts": 8, "active": 2,
        "capacity_factor": 1.0, "vocab": 256, "batch": 2, "sequence": 16, "dtype": "float32", "flash": False,
    },
    "8x7b": {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "experts": 8, "active": 2,
        "capacity_factor": 1.0, "vocab": 32000, "batch": 1, "sequence": 4096, "dtype": "bfloat16", "flash": True,
    },
}  # fmt: skip


class Router(nn.Cell):
    """The experts of each token and their weights: the largest probabilities, divided by their sum, in float32."""

    def __init__(self, hidden: int, experts: int, active: int) -> None:
        super().__init__()
        self.active = active
        self.weight = Parameter(initializer(Normal(INITIAL_DEVIATION), (experts, hidden), ms.float32), name="weight")
        self.reshape = ops.Reshape()
        self.cast = ops.Cast()
        self.matmul = ops.MatMul(transpose_b=True)
        self.softmax = ops.Softmax(-1)
        self.largest = ops.TopK()
        self.pick = ops.GatherD()
        self.total = ops.ReduceSum(keep_dims=True)
        self.divide = ops.RealDiv()

    def construct(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Map (b, s, hidden) to experts, int32, and weights, float32, both (b * s, active)."""
        tokens = self.cast(self.reshape(states, (-1, states.shape[-1])), ms.float32)
        scores = self.softmax(self.matmul(tokens, self.weight))
        _, chosen = self.largest(ops.stop_gradient(scores), self.active)
        picked = self.pick(scores, 1, chosen)
        return chosen, self.divide(picked, self.total(picked, -1))


class Experts(ExpertWeights):
    """SwiGLU of all experts over equally many places each, every product with a strategy of its own."""

    def __init__(self, hidden: int, ffn: int, experts: int, dtype: Any) -> None:
        super().__init__(hidden, ffn, experts, dtype)
        self.product_gate = ops.BatchMatMul()
        self.product_up = ops.BatchMatMul()
        self.product_down = ops.BatchMatMul()

    def construct(self, states: Tensor) -> Tensor:
        """Map (experts, places, hidden) to the same shape."""
        gate = self.activation(self.product_gate(states, self.gate))
        return self.product_down(self.multiply(gate, self.product_up(states, self.up)), self.down)


class ByToken(nn.Cell):
    """From (b, active * s, n) to (b * s, active, n)."""

    def __init__(self, active: int) -> None:
        super().__init__()
        self.active = active
        self.reshape = ops.Reshape()
        self.transpose = ops.Transpose()

    def construct(self, values: Tensor) -> Tensor:
        """Return the values with the choices of each token side by side."""
        batch, length, width = values.shape
        split = self.reshape(values, (batch, self.active, length // self.active, width))
        return self.reshape(self.transpose(split, (0, 2, 1, 3)), (-1, self.active, width))


class ExpertLayer(nn.Cell):
    """Routed experts that take `capacity_factor` times an even share of each sample's tokens.

    Samples stand in the order that lets each group of `parts` ranks keep its own.
    """

    def __init__(self, settings: dict[str, Any], parts: int) -> None:
        super().__init__()
        self.parts = parts
        hidden, dtype = settings["hidden"], COMPUTE_TYPES[settings["dtype"]]
        self.count, self.active = settings["experts"], settings["active"]
        self.capacity_factor, self.dtype = settings["capacity_factor"], dtype
        self.router = Router(hidden, self.count, self.active)
        self.experts = Experts(hidden, settings["ffn"], self.count, dtype)
        self.on = Tensor(1.0, ms.float32)
        self.off = Tensor(0.0, ms.float32)
        self.reshape = ops.Reshape()
        self.choices_first = ops.Transpose()
        self.expert_of = ops.OneHot()
        self.count_up = ops.CumSum()
        self.before = ops.Sub()
        self.own = ops.Mul()
        self.place_of = ops.ReduceSum()
        self.whole_number = ops.Cast()
        self.seat_of = ops.OneHot()
        self.expert_by_token = ByToken(self.active)
        self.seat_by_token = ByToken(self.active)
        self.weigh = ops.Mul()
        self.seats = ops.BatchMatMul(transpose_a=True)
        self.weighted_seats = ops.BatchMatMul(transpose_a=True)
        self.cast_seats = ops.Cast()
        self.cast_weighted_seats = ops.Cast()
        self.dispatch = ops.BatchMatMul(transpose_a=True)
        self.experts_first = ops.Transpose()
        self.samples_first = ops.Transpose()
        self.combine = ops.BatchMatMul()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to the same shape."""
        batch, length, hidden = states.shape
        active, count, parts = self.active, self.count, self.parts
        own = batch // parts
        places = int(self.capacity_factor * active * length / count)
        chosen, weights = self.router(states)
        # First choices of all tokens come before second ones.
        order = self.choices_first(self.reshape(chosen, (batch, length, active)), (0, 2, 1))
        expert = self.expert_of(self.reshape(order, (batch, active * length)), count, self.on, self.off)
        place = self.place_of(self.own(self.before(self.count_up(expert, 1), 1.0), expert), -1)
        # A place beyond the capacity gives a row of zeros: the token is dropped.
        seat = self.seat_of(self.whole_number(place, ms.int32), places, self.on, self.off)
        expert, seat = self.expert_by_token(expert), self.seat_by_token(seat)
        seats = self.cast_seats(ops.stop_gradient(self.seats(expert, seat)), self.dtype)
        shares = self.weigh(expert, self.reshape(weights, (-1, active, 1)))
        shares = self.cast_weighted_seats(self.weighted_seats(shares, seat), self.dtype)
        sent = self.dispatch(self.reshape(seats, (batch, length, count * places)), states)
        sent = self.experts_first(self.reshape(sent, (parts, own, count, places, hidden)), (2, 1, 0, 3, 4))
        made = self.experts(self.reshape(sent, (count, batch * places, hidden)))
        back = self.samples_first(self.reshape(made, (count, own, parts, places, hidden)), (2, 1, 0, 3, 4))
        shares = self.reshape(shares, (batch, length, count * places))
        return self.combine(shares, self.reshape(back, (batch, count * places, hidden)))


class Mixtral(nn.Cell):
    """Token ids and labels, both (b, s) int32, to the scalar loss."""

    def __init__(self, settings: dict[str, Any], parts: int) -> None:
        super().__init__()
        dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
        self.embedding = TokenEmbedding(settings["vocab"], hidden, dtype)
        self.blocks = nn.CellList([_block(settings, parts) for _ in range(settings["layers"])])
        self.norm = RMSNorm(hidden, dtype)
        self.head = LanguageModelHead(settings["vocab"], hidden, dtype, tied=False)
        self.loss = CrossEntropyLoss()

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over all b * s tokens."""
        states = self.embedding(input_ids)
        for block in self.blocks:
            states = block(states)
        return self.loss(self.head(self.norm(states)), labels)


def _block(settings: dict[str, Any], parts: int) -> Block:
    dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
    attention = Attention(
        hidden, settings["heads"], settings["kv_heads"], dtype, settings["flash"], rotary_base=ROTARY_BASE
    )
    return Block(hidden, dtype, attention, ExpertLayer(settings, parts))


def factory(
    size: str = "tiny", data_parallel: int = 1, tensor_parallel: int = 1, expert_parallel: int = 1, **overrides: Any
) -> tuple[Mixtral, tuple[Tensor, Tensor]]:
    """Build the network with strategies for `data_parallel` x `tensor_parallel` ranks a stage.

    Args:
        size: a key of `PRESETS`.
        data_parallel: ranks that share a batch.
        tensor_parallel: ranks that share each layer; divides heads, key/value heads, and `ffn`.
        expert_parallel: data-parallel ranks among which the experts are shared out; divides `data_parallel` and
            `experts`.
        **overrides: any of layers, hidden, heads, kv_heads, ffn, experts, active, capacity_factor, vocab, batch,
            sequence, dtype, flash.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: int32 ids and labels, both (batch, sequence).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    settings = settings_of(PRESETS, size, overrides)
    check_attention(settings)
    degrees = {"data_parallel": data_parallel, "expert_parallel": expert_parallel, "experts": settings["experts"]}
    groups = require_divisible(degrees, "data_parallel", "expert_parallel")
    require_divisible(degrees, "experts", "expert_parallel")
    network = Mixtral(settings, expert_parallel)
    states = (data_parallel, 1, 1)
    network.embedding.gather.shard(((1, 1), (data_parallel, 1)))
    for block in network.blocks:
        attention = block.attention
        for norm in (block.attention_norm, block.feed_forward_norm):
            shard_norm(norm, states)
        for dense in (attention.q_proj, attention.k_proj, attention.v_proj):
            dense.matmul.shard(((data_parallel, 1), (tensor_parallel, 1)))
        attention.o_proj.matmul.shard(((data_parallel, tensor_parallel), (1, tensor_parallel)))
        for split in (attention.split_query, attention.split_key, attention.split_value):
            shard_split(split, data_parallel, tensor_parallel)
        shard_attention(attention, data_parallel, tensor_parallel)
        for add in (block.add_attention, block.add_feed_forward):
            add.shard((states, states))
        _shard_router(block.feed_forward.router, data_parallel)
        _shard_dispatch(block.feed_forward, expert_parallel, groups)
        _shard_experts(block.feed_forward.experts, expert_parallel, groups, tensor_parallel)
    shard_norm(network.norm, states)
    shard_head(network.head, data_parallel, tensor_parallel)
    shape = settings["batch"], settings["sequence"], settings["vocab"]
    return network, (token_ids(*shape), token_ids(*shape, offset=1))


def _shard_router(router: Router, rows: int) -> None:
    tokens = (rows, 1)
    for unary in (router.cast, router.softmax, router.total, router.largest):
        unary.shard((tokens,))
    router.matmul.shard((tokens, (1, 1)))
    router.pick.shard((tokens, tokens))
    router.divide.shard((tokens, tokens))


def _shard_dispatch(layer: ExpertLayer, parts: int, groups: int) -> None:
    rows = parts * groups
    samples = (rows, 1, 1)
    unary = (layer.choices_first, layer.count_up, layer.place_of, layer.cast_seats, layer.cast_weighted_seats)
    for primitive in unary:
        primitive.shard((samples,))
    for one_hot in (layer.expert_of, layer.seat_of):
        one_hot.shard((samples, (), ()))
    layer.whole_number.shard(((rows, 1),))
    layer.before.shard((samples, ()))
    for binary in (layer.own, layer.weigh, layer.seats, layer.weighted_seats, layer.dispatch, layer.combine):
        binary.shard((samples, samples))
    for by_token in (layer.expert_by_token, layer.seat_by_token):
        by_token.transpose.shard(((rows, 1, 1, 1),))
    layer.experts_first.shard(((parts, groups, 1, 1, 1),))
    layer.samples_first.shard(((parts, groups, 1, 1, 1),))


def _shard_experts(experts: Experts, parts: int, groups: int, columns: int) -> None:
    """Experts over the `parts` ranks of each group, the width of each over `columns`."""
    inner = (parts, groups, columns)
    for product in (experts.product_gate, experts.product_up):
        product.shard(((parts, groups, 1), (parts, 1, columns)))
    experts.activation = Activation(SiLU(), (inner,))
    experts.multiply.shard((inner, inner))
    experts.product_down.shard((inner, (parts, columns, 1)))
