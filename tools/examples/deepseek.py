"""DeepSeek-V3-like decoder (arXiv 2412.19437): low-rank attention, shared and routed experts, multi-token prediction.

Queries, and keys with values, pass a narrow projection; positions rotate a part of each head of their own, which all
key heads share. `dropless=True` sends every token to its experts by the grouped kernel; else experts take
`capacity_factor` times an even share. Routing has no groups of experts. Parameters live in the compute type.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, mint, nn, ops

from tools.examples.common import (
    COMPUTE_TYPES,
    CrossEntropyLoss,
    LanguageModelHead,
    MergeHeads,
    SplitHeads,
    TokenEmbedding,
    linear,
    settings_of,
    token_ids,
)
from tools.examples.llama import Block, FeedForward, RMSNorm, RotaryEmbedding, UnfusedAttention
from tools.examples.moe import CapacityExperts, DroplessExperts, MixtureOfExperts, Router

PREDICTION_WEIGHT = 0.3
"""Weight of the loss of the token after the next one, as in the first part of the published training."""

_COMMON = {"batch": 1, "dtype": "bfloat16", "dropless": False, "capacity_factor": 1.0, "scaling": 2.5, "mtp": True}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON, "layers": 3, "dense_layers": 1, "hidden": 64, "heads": 4, "query_rank": 24, "kv_rank": 16,
        "plain_size": 16, "rotary_size": 8, "value_size": 16, "ffn": 176, "expert_ffn": 32, "experts": 8, "active": 2,
        "shared": 1, "vocab": 256, "batch": 2, "sequence": 16, "dtype": "float32",
    },
    "671b": {
        **_COMMON, "layers": 61, "dense_layers": 3, "hidden": 7168, "heads": 128, "query_rank": 1536, "kv_rank": 512,
        "plain_size": 128, "rotary_size": 64, "value_size": 128, "ffn": 18432, "expert_ffn": 2048, "experts": 256,
        "active": 8, "shared": 1, "vocab": 129280, "sequence": 4096,
    },
}  # fmt: skip


class LatentAttention(nn.Cell):
    """Multi-head latent attention: heads of `plain_size + rotary_size` for scores and `value_size` for values."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype, hidden, heads = COMPUTE_TYPES[settings["dtype"]], settings["hidden"], settings["heads"]
        query_rank, kv_rank = settings["query_rank"], settings["kv_rank"]
        self.heads, self.kv_rank = heads, kv_rank
        self.plain, self.rotary, self.value = settings["plain_size"], settings["rotary_size"], settings["value_size"]
        size = self.plain + self.rotary
        self.query_down = linear(hidden, query_rank, dtype)
        self.query_norm = RMSNorm(query_rank, dtype)
        self.query_up = linear(query_rank, heads * size, dtype)
        self.kv_down = linear(hidden, kv_rank + self.rotary, dtype)
        self.kv_norm = RMSNorm(kv_rank, dtype)
        self.kv_up = linear(kv_rank, heads * (self.plain + self.value), dtype)
        self.split_query = SplitHeads(heads)
        self.split_kv = SplitHeads(heads)
        self.split_rotary = SplitHeads(1)
        self.rotary_query = RotaryEmbedding(self.rotary, dtype)
        self.rotary_key = RotaryEmbedding(self.rotary, dtype)
        self.core = UnfusedAttention(size, 1, dtype)
        self.merge = MergeHeads()
        self.o_proj = linear(heads * self.value, hidden, dtype)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, hidden) to (b, s, hidden)."""
        query = self.split_query(self.query_up(self.query_norm(self.query_down(states))))
        plain_query, turned_query = mint.split(query, (self.plain, self.rotary), -1)
        narrow, turned_key = mint.split(self.kv_down(states), (self.kv_rank, self.rotary), -1)
        plain_key, value = mint.split(self.split_kv(self.kv_up(self.kv_norm(narrow))), (self.plain, self.value), -1)
        turned_key = mint.tile(self.rotary_key(self.split_rotary(turned_key)), (1, self.heads, 1, 1))
        query = mint.cat((plain_query, self.rotary_query(turned_query)), -1)
        key = mint.cat((plain_key, turned_key), -1)
        return self.o_proj(self.merge(self.core(query, key, value)))


class NextButOne(nn.Cell):
    """Multi-token prediction: one layer that guesses the token after the next, with the network's table and head."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
        self.gather = ops.Gather()
        self.states_norm = RMSNorm(hidden, dtype)
        self.token_norm = RMSNorm(hidden, dtype)
        self.join = ops.Concat(-1)
        self.projection = linear(2 * hidden, hidden, dtype)
        self.block = expert_block(settings)
        self.norm = RMSNorm(hidden, dtype)
        self.head = LanguageModelHead(settings["vocab"], hidden, dtype, tied=True)
        self.loss = CrossEntropyLoss()

    def construct(self, states: Tensor, next_ids: Tensor, labels: Tensor, table: Tensor, head: Tensor) -> Tensor:
        """Map states (b, s, hidden), the next token and the one after it, both (b, s), to a scalar loss."""
        tokens = self.token_norm(self.gather(table, next_ids, 0))
        states = self.projection(self.join((self.states_norm(states), tokens)))
        return self.loss(self.head(self.norm(self.block(states)), head), labels)


class DeepSeek(nn.Cell):
    """Ids, the tokens after them, and the tokens after those, all (b, s) int32, to the scalar loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
        dense = settings["dense_layers"]
        self.embedding = TokenEmbedding(settings["vocab"], hidden, dtype)
        self.blocks = nn.CellList(
            [dense_block(settings) if layer < dense else expert_block(settings) for layer in range(settings["layers"])]
        )
        self.norm = RMSNorm(hidden, dtype)
        self.head = LanguageModelHead(settings["vocab"], hidden, dtype, tied=False)
        self.loss = CrossEntropyLoss()
        self.predicts = settings["mtp"]
        if self.predicts:
            self.next_but_one = NextButOne(settings)

    def construct(self, input_ids: Tensor, labels: Tensor, later_labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over all b * s tokens, with that of the second prediction added."""
        states = self.embedding(input_ids)
        for block in self.blocks:
            states = block(states)
        loss = self.loss(self.head(self.norm(states)), labels)
        if not self.predicts:
            return loss
        later = self.next_but_one(states, labels, later_labels, self.embedding.weight, self.head.weight)
        return loss + later * PREDICTION_WEIGHT


def dense_block(settings: dict[str, Any]) -> Block:
    """Return a layer whose MLP every token passes."""
    dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
    return Block(hidden, dtype, LatentAttention(settings), FeedForward(hidden, settings["ffn"], dtype))


def expert_block(settings: dict[str, Any]) -> Block:
    """Return a layer with experts."""
    dtype, hidden = COMPUTE_TYPES[settings["dtype"]], settings["hidden"]
    ffn, experts = settings["expert_ffn"], settings["experts"]
    if settings["dropless"]:
        routed: nn.Cell = DroplessExperts(hidden, ffn, experts, dtype)
    else:
        routed = CapacityExperts(hidden, ffn, experts, settings["capacity_factor"], dtype)
    router = Router(hidden, experts, settings["active"], settings["scaling"])
    mixture = MixtureOfExperts(hidden, ffn, settings["shared"], router, routed, dtype)
    return Block(hidden, dtype, LatentAttention(settings), mixture)


def factory(size: str = "tiny", **overrides: Any) -> tuple[DeepSeek, tuple[Tensor, Tensor, Tensor]]:
    """Build a DeepSeek-V3-like training network and one micro-batch for it.

    Args:
        size: a key of `PRESETS`.
        **overrides: any of layers, dense_layers (the first ones, without experts), hidden, heads, query_rank, kv_rank,
            plain_size, rotary_size, value_size, ffn, expert_ffn, experts, active, shared, capacity_factor, dropless,
            scaling, mtp, vocab, batch, sequence, dtype.

    Returns:
        The network, whose call gives the scalar loss, and its inputs: int32 ids, labels, and labels one token later,
        all (batch, sequence).

    Raises:
        ValueError: if the size or a setting is unknown, or settings do not fit together.
    """
    settings = settings_of(PRESETS, size, overrides)
    if settings["active"] > settings["experts"]:
        raise ValueError(f"active ({settings['active']}) must not exceed experts ({settings['experts']})")
    if settings["rotary_size"] % 2:
        raise ValueError(f"rotary_size is {settings['rotary_size']}; rotary positions need an even one")
    if settings["dropless"] and settings["dtype"] == "float32":
        raise ValueError("dropless=True needs dtype float16 or bfloat16: the grouped kernel has no float32 form")
    shape = settings["batch"], settings["sequence"], settings["vocab"]
    return DeepSeek(settings), (token_ids(*shape), token_ids(*shape, offset=1), token_ids(*shape, offset=2))
