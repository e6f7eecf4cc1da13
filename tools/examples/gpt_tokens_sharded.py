"""The GPT-like network whose tensor-parallel ranks share the tokens between the large products (arXiv 2205.05198).

Norms, dropouts and residual sums are split by tokens: a gather before the products that are split by columns, a
reduce-scatter after those that are split by rows. States are (b * s, hidden): tokens of (b, s, hidden) split along s
would lie apart in the rows of the products.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops

from tools.examples import gpt, gpt_sharded
from tools.examples.common import Activation


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
    size: str = "tiny", data_parallel: int = 1, tensor_parallel: int = 1, **overrides: Any
) -> tuple[gpt.Gpt, tuple[Tensor, Tensor]]:
    """Build the network with strategies for `data_parallel` x `tensor_parallel` ranks a stage.

    Args:
        size: as in `tools.examples.gpt.factory`.
        data_parallel: ranks that share a batch.
        tensor_parallel: ranks that share each layer and its tokens; divides heads, `ffn`, `vocab` and the tokens.
        **overrides: as in `tools.examples.gpt.factory`.

    Returns:
        As `tools.examples.gpt.factory`, for the batch of all data-parallel ranks.

    Raises:
        ValueError: if `alibi` is set, whose biases have no strategy.
    """
    degrees = {"data_parallel": data_parallel, "tensor_parallel": tensor_parallel}
    network, inputs = gpt_sharded.factory(size, build=FlatGpt, **degrees, **overrides)
    rows, columns = data_parallel, tensor_parallel
    tokens = rows * columns
    states = (tokens, 1)
    network.embedding_dropout.dropout.shard((states,))
    for block in network.blocks:
        for dropout in (block.attention_dropout, block.feed_forward_dropout):
            dropout.dropout.shard((states,))
        for add in (block.add_attention, block.add_feed_forward):
            add.shard((states, states))
        for product in (block.attention.o_proj, block.feed_forward.down):
            gpt_sharded.shard_rows(product, rows, columns, sequence_parallel=True)
        block.feed_forward.activation = Activation(ops.GeLU(), ((rows, columns),))
    for norm in (network.norm, *(n for b in network.blocks for n in (b.attention_norm, b.feed_forward_norm))):
        norm.layer_norm.shard((states, (1,), (1,)))
    return network, inputs
