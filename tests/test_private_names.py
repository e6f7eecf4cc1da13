"""Every private MindSpore name that tracing relies on, so that a new MindSpore version fails here and says where."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindspore_bmpipe.graph.compile_private import compiled_once, joint_graph_bytes, mindspore_version, training_flags
from mindspore_bmpipe.graph.mindir import decode_module, with_metadata
from tests.private_names import require_name

WHERE = f"MindSpore {mindspore_version()}: adapt mindspore_bmpipe/graph/compile_private.py"


@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [
        ("mindspore.graph.api", "_cell_graph_executor.compile", {"obj", "phase", "do_convert"}),
        ("mindspore.graph.api", "_cell_graph_executor._get_func_graph_proto", {"exec_id", "ir_type"}),
        ("mindspore.graph.api", "_cell_graph_executor._graph_executor.del_net_res", None),
        ("mindspore.nn", "Cell.init_parameters_data", {"auto_parallel_mode"}),
        ("mindspore.nn", "Cell.add_flags", None),
        ("mindspore.nn.utils", "no_init_parameters", set()),
    ],
)
def test_name_exists(module: str, name: str, parameters: set[str] | None) -> None:
    require_name(module, name, parameters, WHERE)


def test_supported_version() -> None:
    assert mindspore_version().startswith(("2.9.", "2.10.")), WHERE


def test_cells_marked_with_a_key_become_functions() -> None:
    class Network(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Dense(4, 4)
            self.second = nn.Dense(4, 4)

        def construct(self, states: Tensor) -> Tensor:
            return ops.ReduceSum()(self.second(self.first(states)))

    network = Network()
    before = vars(network.first).get("_cell_init_args")
    with training_flags(network), compiled_once(network, {"first": "a", "second": "b"}):
        data = joint_graph_bytes(network, (Tensor(np.zeros((2, 4)), mindspore.float32),))
    names = list(decode_module(data, "test").functions)
    for mark in ("▸", "◂"):
        assert sum(mark in name and "CR_" in name for name in names) == 2, f"functions are {names}; {WHERE}"
    assert vars(network.first).get("_cell_init_args") == before


def test_the_protobuf_has_a_place_for_our_text() -> None:
    network = nn.Dense(4, 4)
    with training_flags(network):
        data = joint_graph_bytes(network, (Tensor(np.zeros((2, 4)), mindspore.float32),))
    assert decode_module(data, "test").metadata is None
    assert decode_module(with_metadata(data, "text"), "test").metadata == "text", WHERE
