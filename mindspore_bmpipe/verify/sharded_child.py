"""The part of a compiling process that records the joint graph of one rank; see :mod:`mindspore_bmpipe.verify.sharded`.

The cells are marked as in a plain trace, so that each stays a function of its own through MindSpore's parallel passes:
operations they add (collectives, slices) stand in the function of the cell whose tensors they rearrange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import nn

from mindspore_bmpipe.graph.cell_graph import Sharding
from mindspore_bmpipe.graph.cell_keys import structural_keys
from mindspore_bmpipe.graph.compile_private import compiled_once, training_flags
from mindspore_bmpipe.graph.primitive_names import named_primitives
from mindspore_bmpipe.graph.recorded import traced_file
from mindspore_bmpipe.graph.trace import record_compiled
from mindspore_bmpipe.verify import compile_private


def recorded_file(network: nn.Cell, inputs: Sequence[Any], sharding: Sharding, varies: bool) -> bytes:
    """Bytes of a traced file of one rank.

    Args:
        network: network with strategies on its primitives.
        inputs: inputs of one micro-batch, for all data-parallel ranks together.
        sharding: ranks that share the network; this process must be one of them.
        varies: whether to compile at several sizes and solve for symbols.

    Raises:
        InputError: the network does not compile, or its inputs cannot be shared.
    """
    with training_flags(network):
        keys = structural_keys(network)

        def compile_joint(sized: tuple[Any, ...]) -> bytes:
            with compiled_once(network, keys), named_primitives(network):
                return compile_private.rank_graph_bytes(compile_private.joint_step(network), sized)

        return traced_file(record_compiled(network, inputs, compile_joint, None if varies else {}, sharding))
