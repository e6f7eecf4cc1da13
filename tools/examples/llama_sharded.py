"""The LLaMA-like network with its large products shared out over tensor-parallel ranks, as Megatron-LM does it.

Query, key, value, gate and up projections are split by columns, output and down projections by rows, the head by rows
of its table. The loss has no strategy: MindSpore shares its rows over all ranks. Strategies take part only in parallel
compiles; elsewhere the network computes what `tools.examples.llama` does.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor
from mindspore.ops.auto_generate import SiLU

from tools.examples import llama
from tools.examples.common import Activation, LanguageModelHead, SplitHeads, shard_causal_mask, shard_row_product


def factory(
    size: str = "tiny",
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    **overrides: Any,
) -> tuple[llama.Llama, tuple[Tensor, Tensor]]:
    """Build the network with strategies for `data_parallel` x `tensor_parallel` ranks a stage.

    Args:
        size: as in `tools.examples.llama.factory`.
        data_parallel: ranks that share a batch.
        tensor_parallel: ranks that share each layer; divides heads, key/value heads, and `ffn`.
        sequence_parallel: whether these ranks share the tokens of each sample between the products (norms, residual
            sums), as Korthikanti et al. (arXiv 2205.05198) do; the sums behind products then leave each its tokens.
        **overrides: as in `tools.examples.llama.factory`.

    Returns:
        As `tools.examples.llama.factory`, for the batch of all data-parallel ranks.
    """
    network, inputs = llama.factory(size, **overrides)
    rows, columns = data_parallel, tensor_parallel
    between = (rows, columns if sequence_parallel else 1, 1)
    for block in network.blocks:
        attention, feed_forward = block.attention, block.feed_forward
        for norm in (block.attention_norm, block.feed_forward_norm):
            shard_norm(norm, between)
        for dense in (attention.q_proj, attention.k_proj, attention.v_proj, feed_forward.gate, feed_forward.up):
            dense.matmul.shard(((rows, 1), (columns, 1)))
        for dense in (attention.o_proj, feed_forward.down):
            shard_row_product(dense.matmul, rows, columns, sequence_parallel)
        for split in (attention.split_query, attention.split_key, attention.split_value):
            shard_split(split, rows, columns)
        shard_attention(attention, rows, columns)
        feed_forward.activation = Activation(SiLU(), ((rows, 1, columns),))
        feed_forward.multiply.shard(((rows, 1, columns), (rows, 1, columns)))
        for add in (block.add_attention, block.add_feed_forward):
            add.shard((between, between))
    shard_norm(network.norm, between)
    # A table that is the head as well is cut by rows, so that its ranks look up the same tokens.
    tokens = 1 if network.tied else between[1]
    network.embedding.gather.shard(((columns if network.tied else 1, 1), (rows, tokens)))
    shard_head(network.head, rows, columns)
    return network, inputs


def shard_norm(norm: llama.RMSNorm, states: tuple[int, int, int]) -> None:
    """Cut the states of a norm into so many parts along each axis."""
    for unary in (norm.square, norm.mean, norm.cast):
        unary.shard((states,))
    norm.rsqrt.shard((states,))
    norm.add.shard((states, ()))
    norm.normalise.shard((states, states))
    norm.scale.shard((states, (1,)))


def shard_split(split: SplitHeads, rows: int, columns: int) -> None:
    """Share samples among `rows` and heads among `columns` ranks."""
    split.transpose.shard(((rows, 1, columns, 1),))


def shard_attention(attention: llama.Attention, rows: int, columns: int) -> None:
    """Share samples and heads of what lies between the projections, as :func:`shard_split`."""
    heads = (rows, columns, 1, 1)
    for rotary in (attention.rotary_query, attention.rotary_key):
        rotary.angle.shard(((1, 1), (1, 1)))
        for unary in (rotary.cosine, rotary.sine, rotary.cast):
            unary.shard(((1, 1),))
        rotary.multiply_straight.shard((heads, (1, 1)))
        rotary.multiply_turned.shard((heads, (1, 1)))
        rotary.add.shard((heads, heads))
        rotary.negative.shard((heads,))
        rotary.split.shard((heads,))
        rotary.concatenate.shard((heads, heads))
    core = attention.core
    if isinstance(core, llama.UnfusedAttention):
        shard_causal_mask(core.mask)
        core.scale.shard((heads, ()))
        core.score.shard((heads, heads))
        core.add_mask.shard((heads, (1, 1)))
        core.softmax.shard((heads,))
        core.weigh.shard((heads, heads))
        for repeat in (core.repeat_key, core.repeat_value):
            repeat.tile.shard(((rows, columns, 1, 1),))
    else:
        core.attention.shard((heads, heads, heads, (1, 1)))
    attention.merge.transpose.shard((heads,))


def shard_head(head: LanguageModelHead, rows: int, columns: int) -> None:
    """Share tokens among `rows` and the vocabulary among `columns` ranks."""
    head.matmul.shard(((rows, 1), (columns, 1)))
