"""The list of what a unit keeps, on layers whose kept tensors are told by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mindspore_bmpipe.config import Config
from mindspore_bmpipe.costs.network import network_costs
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.trace import trace
from mindspore_bmpipe.report.memory import render_unit_memory, unit_memory
from mindspore_bmpipe.subjects import settle
from tests.graph_networks import stack


@functools.cache
def kept(name: str) -> dict[str, Any]:
    """Four layers of width 8 and inner width 32, batch 4, float32."""
    network, states = stack(layers=4)
    costs = network_costs(trace(network, states))
    settled = settle(costs, Config())
    return unit_memory(costs, settled.evaluated, settled.sizes, name)


def test_a_layer_keeps_its_input_and_the_result_of_its_activation() -> None:
    # The second product's gradients read the activation and the weight, the activation's its own result, the first
    # product's the layer's input. Run again, the layer needs its input only.
    document = kept("layers.1")
    assert document["sizes"] == {"b": 4}
    assert document["tensors"] == [
        {"made_by": "Tanh of layers.1.activation", "shape": "(b, 32)", "dtype": "float32", "bytes": "128*b",
         "bytes_now": 512, "shared": False, "kept_under": ["none"]},
        {"made_by": "MatMul of layers.0.down", "shape": "(b, 8)", "dtype": "float32", "bytes": "32*b",
         "bytes_now": 128, "shared": False, "kept_under": ["none", "full"]},
    ]  # fmt: skip


def test_equal_units_name_their_own_cells() -> None:
    assert [tensor["made_by"] for tensor in kept("layers.2")["tensors"]] == [
        "Tanh of layers.2.activation", "an earlier unit",
    ]  # fmt: skip


def test_text_lists_the_largest_first_and_what_numbers_of_options_mean() -> None:
    text = render_unit_memory(kept("layers.1"))
    assert text.startswith("layers.1 at b = 4, for each micro-batch in flight")
    assert text.index("Tanh") < text.index("MatMul")
    assert text.endswith("0: recompute none\n1: recompute full")


def test_units_that_do_not_exist_are_named() -> None:
    with pytest.raises(InputError, match=r"no unit named layers\.9; the units are layers\.0, layers\.1"):
        kept("layers.9")
