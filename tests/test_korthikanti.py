"""Graphs of one rank against the published memory and layer times of four GPTs (arXiv 2205.05198)."""

from __future__ import annotations

import pytest
from verify_plans import needs_compiler

from mindspore_bmpipe.costs.hardware import load_hardware
from mindspore_bmpipe.costs.network import NetworkCosts
from tools.korthikanti_table import CORE, kept, layer_costs, layer_of, layer_times, measure, published

pytestmark = needs_compiler

DATA = published()
ORDER = DATA["analytic_gib"]["order"]
SEQUENCE, VOCAB = DATA["s"], DATA["vocab"]


def traced(name: str) -> tuple[NetworkCosts, NetworkCosts]:
    whole, shared = (layer_costs(DATA["models"][name], SEQUENCE, VOCAB, flag) for flag in (False, True))
    return whole, shared


@pytest.fixture(scope="module")
def smallest() -> tuple[NetworkCosts, NetworkCosts]:
    return traced("22B")


def check_memory(name: str, costs: tuple[NetworkCosts, NetworkCosts]) -> None:
    """Within 2 % of the paper's own formulas, counted as it counts."""
    row = measure(DATA["models"][name], *costs, SEQUENCE)
    expected = {key: values[ORDER.index(name)] for key, values in DATA["analytic_gib"].items() if key != "order"}
    assert row.static == pytest.approx(expected["parameters_and_optimizer"], rel=0.02)
    assert row.none[0] == pytest.approx(expected["activations_none"], rel=0.02)
    assert row.selective[0] == pytest.approx(expected["activations_sp_selective"], rel=0.02)


def test_memory_of_the_smallest_model(smallest: tuple[NetworkCosts, NetworkCosts]) -> None:
    check_memory("22B", smallest)


def test_what_the_graph_keeps_beyond_the_paper(smallest: tuple[NetworkCosts, NetworkCosts]) -> None:
    """Masks of two bytes, not one: a s^2 b / t + 2 s b h. Shared tokens: two gathered inputs of 2 s b h, not a tth."""
    model = DATA["models"]["22B"]
    batch, heads, hidden, ranks = model["b"], model["a"], model["h"], model["t"]
    tokens = batch * SEQUENCE * hidden
    sizes = {"b": batch, "s": SEQUENCE}
    none = kept(layer_of(smallest[0]), sizes, ())
    assert none.graph_bytes - none.paper_bytes == heads * SEQUENCE**2 * batch / ranks + 2 * tokens
    selective = kept(layer_of(smallest[1]), sizes, CORE)
    gathered = 2 * 2 * tokens * (ranks - 1) / ranks
    assert selective.graph_bytes - selective.paper_bytes == 2 * tokens / ranks + gathered


def test_layer_times_as_measured_on_a100(smallest: tuple[NetworkCosts, NetworkCosts]) -> None:
    """Ratios to the layer without recomputation, forward and backward together, within 10 % of the measured ones."""
    measured = {name: sum(values) for name, values in DATA["measured_layer_ms_22B"].items() if name != "columns"}
    times = layer_times(layer_of(smallest[0]), load_hardware("a100"), {"b": DATA["models"]["22B"]["b"], "s": SEQUENCE})
    assert times.full_ratio == pytest.approx(measured["full"] / measured["none"], rel=0.10)
    assert times.selective_ratio == pytest.approx(measured["selective"] / measured["none"], rel=0.10)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ORDER if name != "22B"])
def test_memory_of_the_larger_models(name: str) -> None:
    check_memory(name, traced(name))
