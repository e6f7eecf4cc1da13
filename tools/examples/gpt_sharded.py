"""The GPT-like network with its large products shared out over tensor-parallel ranks, as Megatron-LM does it.

The joint projection of attention and the first of the MLP are split by columns, those after them by rows, the embedding
table, which is the head as well, by rows. The loss has no strategy: MindSpore shares its rows over all ranks.

With sequence parallelism the ranks also share the tokens between these products (arXiv 2205.05198): norms, dropouts and
residual sums are split by tokens, with a gather before the products that are split by columns and a reduce-scatter
after those that are split by rows. States are (b * s, hidden) then: tokens of (b, s, hidden) split along s would lie
apart in the rows of the products.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops

from tools.examples import gpt
from tools.examples.common import Activation, shard_causal_mask, shard_row_product


class FlatGpt(gpt.Gpt):
    """The same network with states of (b * s, hidden) after the positions."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.flatten = ops.Reshape()

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over all b * s tokens."""
        states = self.position(self.embedding(input_ids))
        states = self.embedding_dropout(self.flatten(states, (-1, states.shape[-1])))
        for block in self.blocks:
            states = block(states, input_ids.shape)
        states = self.norm(states)
        logits = self.head(states, self.embedding.weight) if self.tied else self.head(states)
        return self.loss(logits, labels)


def factory(
    size: str = "tiny",
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    **overrides: Any,
) -> tuple[gpt.Gpt, tuple[Tensor, Tensor]]:
    """Build the network with strategies for `data_parallel` x `tensor_parallel` ranks a stage.

    Args:
        size: as in `tools.examples.gpt.factory`.
        data_parallel: ranks that share a batch.
        tensor_parallel: ranks that share each layer; divides heads, `ffn` and `vocab`.
        sequence_parallel: whether they share the tokens between the products; divides the tokens then.
        **overrides: as in `tools.examples.gpt.factory`.

    Returns:
        As `tools.examples.gpt.factory`, for the batch of all data-parallel ranks.

    Raises:
        ValueError: if `alibi` is set, whose biases have no strategy.
    """
    build = FlatGpt if sequence_parallel else gpt.Gpt
    network, inputs = gpt.factory(size, build=build, **overrides)
    if not isinstance(network.position, gpt.PositionEmbedding):
        raise ValueError("alibi=True has no strategies; use tools.examples.gpt, or alibi=False")
    rows, columns = data_parallel, tensor_parallel
    whole = (rows, 1, 1)
    between = (rows * columns, 1) if sequence_parallel else whole
    network.embedding.gather.shard(((columns if network.tied else 1, 1), (rows, 1)))
    network.position.cast.shard(((1,),))
    network.position.gather.shard(((1, 1), (1,)))
    network.position.add.shard((whole, (1, 1)))
    for dropout in (network.embedding_dropout, *(d for b in network.blocks for d in _dropouts(b))):
        dropout.dropout.shard((between,))
    for norm in (network.norm, *(n for b in network.blocks for n in (b.attention_norm, b.feed_forward_norm))):
        norm.layer_norm.shard((between, (1,), (1,)))
    for block in network.blocks:
        _shard_attention(block.attention, rows, columns, sequence_parallel)
        feed_forward = block.feed_forward
        _shard_columns(feed_forward.up, rows, columns)
        inner = (rows, columns) if sequence_parallel else (rows, 1, columns)
        feed_forward.activation = Activation(ops.GeLU(), (inner,))
        _shard_rows(feed_forward.down, rows, columns, sequence_parallel)
        for add in (block.add_attention, block.add_feed_forward):
            add.shard((between, between))
    network.head.matmul.shard(((rows, 1), (columns, 1)))
    return network, inputs


def _dropouts(block: gpt.Block) -> tuple[nn.Dropout, nn.Dropout]:
    return block.attention_dropout, block.feed_forward_dropout


def _shard_columns(dense: nn.Dense, rows: int, columns: int) -> None:
    dense.matmul.shard(((rows, 1), (columns, 1)))
    dense.bias_add.shard(((rows, columns), (columns,)))


def _shard_rows(dense: nn.Dense, rows: int, columns: int, sequence_parallel: bool) -> None:
    """Split a dense layer by its inputs; with `sequence_parallel` every rank keeps the sums of its own tokens."""
    shard_row_product(dense.matmul, rows, columns, sequence_parallel)
    dense.bias_add.shard(((rows * columns if sequence_parallel else rows, 1), (1,)))


def _shard_attention(attention: gpt.Attention, rows: int, columns: int, sequence_parallel: bool) -> None:
    heads = (rows, columns, 1, 1)
    _shard_columns(attention.qkv_proj, rows, columns)
    attention.transpose.shard(((rows, 1, columns, 1),))
    attention.split.shard((heads,))
    core = attention.core
    core.scale.shard((heads, ()))
    core.score.shard((heads, heads))
    shard_causal_mask(core.mask)
    core.add_mask.shard((heads, (1, 1)))
    core.softmax.shard((heads,))
    core.weights_dropout.dropout.shard((heads,))
    core.weigh.shard((heads, heads))
    attention.merge.transpose.shard((heads,))
    _shard_rows(attention.o_proj, rows, columns, sequence_parallel)
