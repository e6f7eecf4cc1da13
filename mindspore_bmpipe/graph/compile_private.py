"""Every private MindSpore name that tracing uses; ``tests/test_private_names.py`` checks them on each version."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import mindspore
from mindspore import ParameterTuple, nn, ops
from mindspore.graph.api import _cell_graph_executor

_counter = itertools.count()


class JointStep(nn.Cell):
    """Loss and gradients of all trainable weights of a network, as one graph."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = ParameterTuple(network.trainable_params())
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, *inputs: Any) -> Any:
        """Return the loss and the gradients of all trainable weights."""
        return self.network(*inputs), self.gradient(self.network, self.weights)(*inputs)

    def init_parameters_data(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Keep the compile from allocating the weights, which nothing here reads."""
        return {}


def joint_graph_bytes(network: nn.Cell, inputs: tuple[Any, ...]) -> bytes:
    """Compile loss and gradients by the front end only and return the MindIR protobuf.

    Raises:
        Exception: whatever MindSpore's front end raises; the caller explains it.
    """
    step = JointStep(network)
    phase = f"export.mindspore_bmpipe_{next(_counter)}"
    full_phase = None
    try:
        full_phase, _ = _cell_graph_executor.compile(step, *inputs, phase=phase, do_convert=False)
        return bytes(_cell_graph_executor._get_func_graph_proto(step, full_phase, "mind_ir"))
    finally:
        # The graph of a large network holds hundreds of megabytes that training needs.
        if full_phase is not None:
            _cell_graph_executor._graph_executor.del_net_res(step, {full_phase})


@contextlib.contextmanager
def compiled_once(network: nn.Cell, keys: Mapping[str, str]) -> Iterator[None]:
    """Within the context, cells of equal key are compiled as one function. ``keys`` maps cell paths to keys."""
    missing = object()
    saved: list[tuple[nn.Cell, Any]] = []
    try:
        for path, cell in network.cells_and_names():
            if path in keys and not isinstance(cell, (nn.CellList, nn.CellDict)):
                saved.append((cell, vars(cell).get("_cell_init_args", missing)))
                cell.cell_init_args = f"lazy_inline_{type(cell).__name__}_{keys[path]}"
        yield
    finally:
        for cell, value in saved:
            if value is missing:
                vars(cell).pop("_cell_init_args", None)
            else:
                vars(cell)["_cell_init_args"] = value


@contextlib.contextmanager
def training_flags(network: nn.Cell) -> Iterator[None]:
    """Within the context the network is in training mode; each cell's own flag is put back afterwards."""
    saved = [(cell, cell.training) for _, cell in network.cells_and_names()]
    network.set_train(True)
    try:
        yield
    finally:
        for cell, value in saved:
            cell.add_flags(training=value)


def mindspore_version() -> str:
    """Version of the MindSpore in use."""
    return str(mindspore.__version__)
