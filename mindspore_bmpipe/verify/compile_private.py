"""Every private MindSpore name that compiling for Ascend uses; `tests/test_verify_private.py` checks them.

Only child processes import this module: it switches MindSpore to the Ascend target.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import nn
from mindspore.communication import init
from mindspore.graph.api import _cell_graph_executor
from mindspore.nn.utils import no_init_parameters
from mindspore.nn.wrap.cell_wrapper import _TrainGradAccuStepCell, _VirtualDatasetCell

from mindspore_bmpipe.graph.compile_private import JointStep

JIT_LEVEL = "O0"
"""MindSpore's own default on Ascend 910B. Under O2 the less-memory interleaved schedule is silently not used."""

_counter = itertools.count()
_REUSED = "lazy_inline_bmpipe_verify"


def start() -> None:
    """Switch this process to the Ascend target; rank and number of ranks come from `RANK_ID` and `RANK_SIZE`."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="Ascend", jit_config={"jit_level": JIT_LEVEL})
    init()


@contextmanager
def parallel(**settings: Any) -> Iterator[None]:
    """Within the context, compile semi-automatically in parallel with these further settings."""
    mindspore.reset_auto_parallel_context()
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel", **settings)
    try:
        yield
    finally:
        mindspore.reset_auto_parallel_context()


def whole_batch(inputs: tuple[Any, ...], micro_batches: int) -> tuple[Any, ...]:
    """Inputs of a whole step, given those of one micro-batch; their values do not matter to a compile."""
    return tuple(
        mindspore.Tensor(np.zeros((item.shape[0] * micro_batches, *item.shape[1:]), np.int8), item.dtype)
        if isinstance(item, mindspore.Tensor) and item.shape
        else item
        for item in inputs
    )


def pipeline_step(network: nn.Cell, micro_batches: int) -> nn.Cell:
    """The training step that `Model.train` builds around a pipeline: micro-batches, accumulation, optimizer."""
    with no_init_parameters():
        # As one function per chunk, called once for each micro-batch; without it every micro-batch is spelt out.
        network.cell_init_args = f"{_REUSED}_{next(_counter)}"
        pipeline = nn.PipelineCell(network, micro_batches)
        step = _TrainGradAccuStepCell(_VirtualDatasetCell(pipeline), _optimizer(pipeline))
    step.set_train()
    return step


def plain_step(network: nn.Cell) -> nn.Cell:
    """The training step without a pipeline."""
    with no_init_parameters():
        step = nn.TrainOneStepCell(_VirtualDatasetCell(network), _optimizer(network))
    step.set_train()
    return step


def joint_step(network: nn.Cell) -> nn.Cell:
    """Loss and gradients of one micro-batch, whose samples the ranks share, without an optimizer."""
    step = JointStep(_VirtualDatasetCell(network))
    step.set_train()
    return step


def _optimizer(network: nn.Cell) -> nn.Cell:
    """Adam, in the form that takes the network's weights: the fused one knows no bfloat16."""
    weights = network.trainable_params()
    fused = all(weight.dtype in (mindspore.float16, mindspore.float32) for weight in weights)
    return nn.Adam(weights) if fused else nn.AdamWeightDecay(weights)


def rank_graph_bytes(step: nn.Cell, inputs: tuple[Any, ...]) -> bytes:
    """Compile a training step and return the MindIR protobuf of this rank's optimised graph.

    Raises:
        Exception: whatever MindSpore raises; the caller explains it.
    """
    step.init_parameters_data = lambda *_, **__: {}  # keeps the compile from allocating weights
    step.compile(*inputs)
    return bytes(_cell_graph_executor._graph_executor.get_func_graph_proto(step.compile_phase, "mind_ir", False))
