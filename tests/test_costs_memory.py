"""What backward keeps: published formulas, tensors told by hand, and MindSpore's semantics of recomputation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from mindspore.nn.utils import no_init_parameters

from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.costs.hardware import load_hardware
from mindspore_bmpipe.costs.network import NetworkCosts, network_costs, unit_static_bytes
from mindspore_bmpipe.costs.options import Measure, NamedOption, combinations, measure_of, named_options
from mindspore_bmpipe.costs.polynomial import Basis, undominated
from mindspore_bmpipe.costs.recipes import RECIPES, recipes_of
from mindspore_bmpipe.costs.recompute import RecomputeModel, evaluate_rows
from mindspore_bmpipe.costs.static_memory import StaticSettings, static_bytes
from mindspore_bmpipe.costs.unit_model import UnitModel, indices_of
from mindspore_bmpipe.graph.cell_graph import ParameterInfo, Sharding
from mindspore_bmpipe.graph.mindir import TensorType
from mindspore_bmpipe.graph.trace import trace
from mindspore_bmpipe.sources import load_costs
from mindspore_bmpipe.subjects import settle
from tests.graph_networks import FACTORIES, build, costs_of, stack
from tools.examples import gpt


def model_of(costs: NetworkCosts, name: str) -> UnitModel:
    return next(model for unit, model in zip(costs.split.units, costs.models, strict=True) if unit.name == name)


@pytest.mark.parametrize(
    ("hidden", "heads", "sequence", "batch"), [(512, 8, 256, 1), (1024, 16, 512, 2), (768, 12, 1024, 3)]
)
def test_saved_bytes_of_a_gpt_layer_follow_korthikanti(hidden: int, heads: int, sequence: int, batch: int) -> None:
    """arXiv 2205.05198, equation 1: s b h (34 + 5 a s / h) for 16-bit activations and dropout masks of one byte.

    MindSpore's `Dropout` on CPU keeps masks in the element type, two bytes. Counted as the formula counts them, what is
    left is the float32 mean and variance of the two layer norms, 16 bytes a token, which the formula leaves out.
    """
    settings = {"layers": 1, "hidden": hidden, "heads": heads, "sequence": sequence, "dtype": "float16"}
    with no_init_parameters():
        network, inputs = gpt.factory(size="tiny", batch=2, vocab=64, **settings)
    model = model_of(network_costs(trace(network, *inputs)), "blocks.0")
    sizes = {"b": batch, "s": sequence}
    kept, _ = RecomputeModel(model).kept(())
    values = model.sizes @ model.basis.values(sizes)
    in_bytes = {place: float(values[place]) for place in indices_of(kept)}
    # `Dropout` makes its result, then its mask; of the two dropouts on the residual path only the mask is kept.
    dropouts = [place for place in in_bytes if model.storage_names[place].startswith("Dropout of blocks")]
    score = 2 * batch * heads * sequence**2
    token = 2 * batch * sequence * hidden
    of_weights = [place for place in dropouts if in_bytes[place] == score]
    of_residual = [place for place in dropouts if in_bytes[place] == token]
    assert len(of_weights) == 2 and len(of_residual) == 2
    counted = sum(in_bytes.values()) - score / 2 - 2 * token / 2
    formula = sequence * batch * hidden * (34 + 5 * heads * sequence / hidden)
    assert counted - formula == 16 * batch * sequence
    assert counted == pytest.approx(formula, rel=0.02)


BATCH, WIDTH, INNER = 4, 8, 32


@pytest.fixture(scope="module")
def layer() -> UnitModel:
    """The middle layer of a stack: x -> up -> tanh -> down, float32."""
    network, states = stack(layers=3, width=WIDTH, inner=INNER, batch=BATCH)
    return model_of(network_costs(trace(network, states)), "layers.1")


def kept_bytes(model: UnitModel, cells: tuple[str, ...], batch: int = BATCH) -> float:
    option = RecomputeModel(model).option(cells)
    return float(option.saved @ model.basis.values({"b": batch}))


def test_kept_tensors_by_hand(layer: UnitModel) -> None:
    state, inner = 4 * BATCH * WIDTH, 4 * BATCH * INNER
    # Weight gradients read x and tanh(u); the gradient of tanh reads its own result.
    assert kept_bytes(layer, ()) == state + inner
    # Only x is kept; the last product is the unit's result, which the next layer keeps.
    assert kept_bytes(layer, ("0",)) == state
    # The one operation of `activation` is its result, and results of recomputed cells are kept.
    assert kept_bytes(layer, ("0.activation",)) == state + inner


def test_repeated_operations_by_hand(layer: UnitModel) -> None:
    recompute = RecomputeModel(layer)
    assert recompute.kept(())[1] == ()
    repeated = [layer.operations[number].primitive for number in recompute.kept(("0",))[1]]
    # The second product makes the unit's result, which no backward operation reads.
    assert repeated == ["MatMul", "Tanh"]


def test_an_operation_whose_result_leaves_runs_again_for_what_stays() -> None:
    """As the compiled graph shows: a BERT block ends in a layer norm, whose mean and variance its backward reads."""
    model = model_of(costs_of("bert"), "blocks.1")
    recompute = RecomputeModel(model)
    kept, repeated = recompute.kept(("0.feed_forward_norm",))
    assert [model.operations[number].primitive for number in repeated] == ["LayerNorm"]
    plain = recompute.kept(())[0]
    assert model.bytes_of(plain & ~kept) @ model.basis.values({"b": 2, "s": 16}) == 2 * 4 * 2 * 16


def test_a_cell_runs_again_for_what_it_dropped_and_not_for_what_it_kept() -> None:
    """As the compiled graph shows: the norm comes right before its own gradient, after others that read its result."""
    model = model_of(costs_of("bert"), "blocks.1")
    recompute = RecomputeModel(model)
    cells = ("0.attention_norm",)
    timeline = recompute._backward_timeline(cells, recompute.kept(cells)[1])
    again = next(step for step, operation in enumerate(timeline) if operation.primitive == "LayerNorm")
    assert timeline[again + 1].primitive == "LayerNormGrad"
    assert any(operation.reads & timeline[again].writes for operation in timeline[:again])


def test_a_tied_table_has_no_sum_of_gradients() -> None:
    """No stage of a compiled GPT makes it; the embedding's gradient of the table goes into the buffer at once."""
    vocab, hidden, batch, sequence = 256, 64, 2, 16
    costs = costs_of("gpt")
    embedding = model_of(costs, "embedding")
    assert [operation.primitive for operation in embedding.operations] == ["Gather", "UnsortedSegmentSum"]
    values = embedding.basis.values({"b": batch, "s": sequence})
    working = evaluate_rows(RecomputeModel(embedding).option(()).working_set, values)
    assert working == 4 * vocab * hidden + 4 * batch * sequence * hidden
    # The head's gradient of the table comes last, so what it is made of stays: logits' gradient and normalised states.
    head = model_of(costs, "head")
    held = head.bytes_of(head.held) @ head.basis.values({"b": batch, "s": sequence})
    assert held == 4 * batch * sequence * (vocab + hidden)


def test_what_a_stage_without_the_tied_table_of_its_own_holds() -> None:
    costs = costs_of("gpt")
    numbers = {unit.name: number for number, unit in enumerate(costs.split.units)}
    table = 4 * 256 * 64
    # Weight, gradient and two moments on both stages; the head's also receives a copy, which is gone at the update.
    assert unit_static_bytes(costs, numbers["embedding"], StaticSettings()) == (4 * table, table)
    assert unit_static_bytes(costs, numbers["head"], StaticSettings()) == (5 * table, 0)


def test_working_set_by_hand(layer: UnitModel) -> None:
    state, inner, weight = 4 * BATCH * WIDTH, 4 * BATCH * INNER, 4 * WIDTH * INNER
    values = layer.basis.values({"b": BATCH})
    plain = evaluate_rows(RecomputeModel(layer).option(()).working_set, values)
    # MindSpore runs dW_down, d tanh(u), d u, dW_up, d x. The largest moment is dW_down beside the gradient that
    # arrives; tanh(u) is gone when dW_up is made, and kept bytes are not counted again.
    assert plain == max(state + weight, state + 2 * inner)
    whole = evaluate_rows(RecomputeModel(layer).option(("0",)).working_set, values)
    # u and tanh(u) are made again before dW_down; u goes once tanh(u) is there, tanh(u) stays until d u.
    assert whole == max(state + inner + weight, state + 2 * inner)


@pytest.mark.parametrize("name", FACTORIES)
def test_recomputing_more_never_keeps_more(name: str) -> None:
    costs = costs_of(name)
    sizes = {"b": 2, "s": 16}
    # BERT's sentence head reads one token in sixteen: keeping that is less than keeping the input to find it again.
    names = {
        id(model): unit.name
        for unit, model in zip(costs.split.units, costs.models, strict=True)
        if unit.name != "next_sentence_head"
    }
    for unit_name in names.values():
        unit = model_of(costs, unit_name)
        recompute = RecomputeModel(unit)
        values = unit.basis.values(sizes)
        everything = recompute.option(recompute.whole())
        nothing = recompute.option(())
        assert everything.saved @ values <= nothing.saved @ values
        for cell in recompute.cells:
            option = recompute.option((cell,))
            assert option.saved @ values >= everything.saved @ values
            assert set(option.repeated) <= set(range(unit.forward_count))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_full_recomputation_of_a_block_keeps_its_input(name: str) -> None:
    model = model_of(costs_of(name), "blocks.1")
    recompute = RecomputeModel(model)
    saved = recompute.option(recompute.whole()).saved @ model.basis.values({"b": 2, "s": 16})
    # float32, hidden 64. Each block of BERT keeps a padding mask of its own, as it receives one on another stage.
    assert saved == 4 * 2 * 16 * 64 + (4 * 2 * 16 if name == "bert" else 0)


def test_no_combination_of_cells_beats_the_frontier() -> None:
    """Every set of cells of a GPT block of which none lies inside another, tried one by one."""
    model = model_of(costs_of("gpt"), "blocks.0")
    recompute = RecomputeModel(model)
    measure = measure_at(model, recompute, {"b": 2, "s": 64})
    # Cells whose every operation leaves them change nothing, so leaving them out loses nothing.
    useful = [cell for cell in recompute.cells if measure((cell,)) != measure(())]
    points = set()
    for count in range(len(useful) + 1):
        for cells in itertools.combinations(useful, count):
            if not any(a != b and b.startswith(a + ".") for a in cells for b in cells):
                points.add(measure(cells))
    reached = {measure(places) for places in combinations(recompute, measure, model)}
    assert all(any(q[0] <= p[0] and q[1] <= p[1] for q in reached) for p in points)


@pytest.mark.parametrize(("unit", "length"), [("layers.1", 8), ("norm", 64)])
def test_the_frontier_equals_all_sets_of_cells_and_primitives(unit: str, length: int) -> None:
    """Every set of cells and primitives of two small units, tried one by one."""
    if unit == "norm":
        model, sizes = model_of(costs_of("llama"), "norm"), {"b": 2, "s": length}
    else:
        network, states = stack(layers=3, width=WIDTH, inner=INNER, batch=BATCH)
        model, sizes = model_of(network_costs(trace(network, states)), unit), {"b": length}
    recompute = RecomputeModel(model)
    measure = measure_at(model, recompute, sizes)
    parts = (*recompute.cells, *recompute.primitives)
    assert len(parts) <= 12 and recompute.primitives
    points = {measure(places) for n in range(len(parts) + 1) for places in itertools.combinations(parts, n)}
    best = {p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)}
    reached = {measure(places) for places in combinations(recompute, measure, model)}
    assert best == reached and len(best) > 1


def measure_at(model: UnitModel, recompute: RecomputeModel, sizes: dict[str, int]) -> Measure:
    times = model.operation_ms(load_hardware("ascend910b"), sizes)
    return measure_of(recompute, times, model.basis.values(sizes), model)


def options_at(model: UnitModel, sizes: dict[str, int], most: int) -> dict[str, NamedOption]:
    recompute = RecomputeModel(model)
    times = model.operation_ms(load_hardware("ascend910b"), sizes)
    values = model.basis.values(sizes)
    found = named_options(recompute, recipes_of(recompute, model), times, values, model, most)
    return {named.name: named for named in found}


@pytest.mark.parametrize("most", [0, 1, 3])
def test_recipes_come_by_name_with_what_is_asked_for_beside_them(most: int) -> None:
    names = list(options_at(model_of(costs_of("llama"), "blocks.0"), {"b": 2, "s": 16}, most))
    assert (names[0], names[-1]) == ("none", "full")
    assert set(RECIPES) <= set(names)
    assert len(names) == len(RECIPES) + most


@pytest.mark.parametrize("name", FACTORIES)
def test_every_unit_has_every_recipe_and_says_which_are_the_same(name: str) -> None:
    costs = costs_of(name)
    for model in {id(model): model for model in costs.models}.values():
        options = options_at(model, {"b": 2, "s": 16}, 2)
        assert set(RECIPES) <= set(options)
        for option in options.values():
            same = [
                other.name
                for other in options.values()
                if (other.option.kept, other.option.repeated) == (option.option.kept, option.option.repeated)
            ]
            assert (option.equals or option.name) == same[0]
        # Traced whole, nothing is exchanged between ranks.
        assert (options["comm"].equals, options["both"].equals or "both") == (
            "none",
            options["select"].equals or "select",
        )


WEIGHT = ParameterInfo("w", TensorType((1000, 100), "float16"), True)
"""200000 bytes: large enough to be shared out (64 KB), and of rows that 4 ranks can share."""
D3, D4 = Sharding(3, 1), Sharding(4, 1)


@pytest.mark.parametrize(
    ("parameter", "settings", "bytes_an_element"),
    [
        # Weight 2, gradient 4, master 4, moments 8 (arXiv 2205.05198: 18 bytes).
        (WEIGHT, StaticSettings(), 18),
        (WEIGHT, StaticSettings(optimizer_shard_level=3), 18),
        # Weight 4, gradient 4, moments 8: no copy is needed.
        (ParameterInfo("w", TensorType((1000, 100), "float32"), True), StaticSettings(), 16),
        # A weight that is not trained is shared out as well: a quarter and, until the end of the step, the whole.
        (ParameterInfo("w", TensorType((1000, 100), "float16"), False), StaticSettings(), 2),
        (ParameterInfo("w", TensorType((1000, 100), "float16"), False), StaticSettings(D4, 2), 0.5 + 2),
        (ParameterInfo("w", TensorType((1000, 100), "float16"), False), StaticSettings(D4, 3), 0.5),
        # MindSpore's own Adam keeps gradient and moments in the type of the weight.
        (WEIGHT, StaticSettings(float32_state=False), 8),
        (ParameterInfo("w", TensorType((1000, 100), "float32"), True), StaticSettings(float32_state=False), 16),
        # Shares of 4 ranks: (2 + 12) / 4, gathered weight 2, whole gradient 4.
        (WEIGHT, StaticSettings(D4, 1), 3.5 + 2 + 4),
        (WEIGHT, StaticSettings(D4, 2), 3.5 + 2 + 1),
        (WEIGHT, StaticSettings(D4, 3), 3.5 + 1),
        # Four tensor-parallel ranks that hold the same share it like four that have other samples.
        (WEIGHT, StaticSettings(Sharding(1, 4), 3), 3.5 + 1),
        (WEIGHT, StaticSettings(Sharding(2, 2), 1), 3.5 + 2 + 4),
        # 1000 rows do not go among 3.
        (WEIGHT, StaticSettings(D3, 3), 18),
        # Parts of two ranks, each a half of the weight: 500 rows of 4 ranks, or 1000 rows of half the columns.
        (replace(WEIGHT, shares=2, row_shares=2), StaticSettings(Sharding(4, 2), 3), (3.5 + 1) / 2),
        (replace(WEIGHT, shares=2), StaticSettings(Sharding(4, 2), 3), (3.5 + 1) / 2),
        # A half has 500 rows, which do not go among 8, as the 1000 of half the columns do.
        (replace(WEIGHT, shares=2, row_shares=2), StaticSettings(Sharding(8, 2), 3), 18 / 2),
        (replace(WEIGHT, shares=2), StaticSettings(Sharding(8, 2), 3), (1.75 + 0.5) / 2),
    ],
)
def test_static_bytes_by_hand(parameter: ParameterInfo, settings: StaticSettings, bytes_an_element: float) -> None:
    assert static_bytes(parameter, settings) == bytes_an_element * 100_000


@pytest.mark.parametrize(
    ("rows", "shares", "shared_out"),
    # 16 bytes a row: 64 KB are 4096 rows. The whole weight counts, not the half that a rank holds.
    [(4096, 1, True), (4092, 1, False), (4096, 2, True), (4092, 2, False)],
)
def test_weights_below_64_kb_are_not_shared_out(rows: int, shares: int, shared_out: bool) -> None:
    weight = ParameterInfo("w", TensorType((rows, 4), "float32"), True, shares=shares)
    held = rows * 4 // shares
    for level in (1, 2, 3):
        found = static_bytes(weight, StaticSettings(Sharding(2, shares), level, float32_state=False))
        owned = {1: held // 2 * 12 + held * 8, 2: held // 2 * 16 + held * 4, 3: held // 2 * 16}[level]
        assert found == (owned if shared_out else held * 16)


def test_equal_units_share_one_model_and_different_ones_do_not() -> None:
    for name in ("llama", "gpt", "bert"):
        costs = costs_of(name)
        models = {unit.name: id(model) for unit, model in zip(costs.split.units, costs.models, strict=True)}
        assert models["blocks.0"] == models["blocks.1"] != models["head"]
    costs = costs_of("vision_language")
    models = {unit.name: id(model) for unit, model in zip(costs.split.units, costs.models, strict=True)}
    assert models["blocks.0"] != models["vision.blocks.0"]


@pytest.mark.parametrize(
    ("name", "elements"),
    [("llama", 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176), ("gpt", 12 * 64 * 64)],
)
def test_gradients_of_weights_are_told_from_those_of_inputs(name: str, elements: int) -> None:
    """Two flops for every token and every element of a matrix (LLaMA: half as many keys as queries)."""
    block = model_of(costs_of(name), "blocks.0")
    flops = block.flops[list(block.weight_gradients)].sum(axis=0)
    assert flops @ block.basis.values({"b": 3, "s": 20}) == 2 * 3 * 20 * elements
    norm = model_of(costs_of(name), "norm")
    assert norm.weight_gradients == ()


def test_norms_with_weights_are_recomputed_as_cells_only() -> None:
    """MindSpore does not compile a recomputed primitive that reads a weight beside a recomputed cell."""
    recompute = RecomputeModel(model_of(costs_of("gpt"), "blocks.0"))
    assert "0.attention_norm" in recompute.cells
    assert "0.attention_norm.layer_norm" not in recompute.primitives
    assert "0.attention.core.softmax" in recompute.primitives


def test_costs_do_not_depend_on_the_size_that_was_traced() -> None:
    network, inputs = build("llama", batch=1, sequence=32)
    other = network_costs(trace(network, *inputs))
    sizes = {"b": 2, "s": 48}
    for name in ("blocks.0", "head", "loss"):
        first, second = model_of(costs_of("llama"), name), model_of(other, name)
        for model in (first, second):
            assert len(model.operations) == len(first.operations)
        np.testing.assert_allclose(first.flops @ first.basis.values(sizes), second.flops @ second.basis.values(sizes))
        np.testing.assert_allclose(
            RecomputeModel(first).option(()).saved @ first.basis.values(sizes),
            RecomputeModel(second).option(()).saved @ second.basis.values(sizes),
        )


def test_dropping_dominated_rows_never_changes_the_largest_value() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        rows = generator.integers(-5, 6, size=(12, 4)).astype(float)
        left = undominated(rows)
        for _ in range(20):
            point = generator.integers(1, 50, size=4).astype(float)
            assert (rows @ point).max() == (left @ point).max()


def test_polynomials_survive_the_way_through_coefficients() -> None:
    basis = Basis(["b", "s"])
    b, s = basis._symbols
    expression = 3 * b * s**2 + b * s / 2 + 7
    rows = [basis.terms(expression)]
    vector = basis.matrix(rows)[0]
    assert (basis.expression(vector) - expression).simplify() == 0
    assert vector @ basis.values({"b": 2, "s": 4}) == 3 * 2 * 16 + 4 + 7


def test_a_mask_that_all_layers_share_counts_once() -> None:
    """`select` adds the mask to the scores again, so it stays: 128 x 128 floats, for any number of layers."""
    settings = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 128, "vocab": 64, "sequence": 128, "batch": 4}
    config = parse_config({"stages": 2, "micro_batches": 4, "hardware": "ascend910b", "memory_limit": "60GB"})
    evaluated = settle(load_costs("tools.examples.gpt:factory", settings), config).evaluated
    assert evaluated.shared_saved_bytes == 128 * 128 * 4
