"""One rank of networks with strategies, traced through MindSpore's Ascend front end: shapes, collectives, costs, plans.

b samples of one rank, s tokens, hidden size h = 64, 4 heads of 16 (2 key/value heads), vocabulary 256, float32; two
data-parallel times two tensor-parallel ranks. Expected values follow from the Megatron-LM scheme (arXiv 1909.08053).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sympy
import yaml
from verify_plans import hand_plan, keep_all, mixed, needs_compiler

from mindspore_bmpipe.cli import main
from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.costs.hardware import load_hardware
from mindspore_bmpipe.costs.logical import logical_graph
from mindspore_bmpipe.costs.network import NetworkCosts, network_costs
from mindspore_bmpipe.costs.rules.base import Engine
from mindspore_bmpipe.costs.unit_model import UnitModel
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import CellGraph, Operation, Phase, Sharding, read_tensors
from mindspore_bmpipe.graph.mindir import load_module
from mindspore_bmpipe.graph.sharded import COLLECTIVES
from mindspore_bmpipe.graph.symbols import symbol
from mindspore_bmpipe.report.explain import unit_expressions
from mindspore_bmpipe.sources import load_costs, load_graph
from mindspore_bmpipe.subjects import input_sizes, network_fingerprint, resolve_config, settle
from mindspore_bmpipe.verify.children import Rank, compile_ranks
from mindspore_bmpipe.verify.jobs import Compile
from mindspore_bmpipe.verify.run import verify
from mindspore_bmpipe.verify.sharded import record_sharded
from mindspore_bmpipe.verify.stand_in import stand_in

pytestmark = needs_compiler

NETWORKS = ("llama", "gpt")
SHARDING = Sharding(data_parallel=2, tensor_parallel=2)
SETTINGS = {"layers": 2, "batch": 4}
DEGREES = {"data_parallel": 2, "tensor_parallel": 2}
MOVED_BACKWARD = frozenset({"loss", "position", "embedding_dropout"})
"""Units whose backward flops differ: the mean of the loss divides constants, which derivative rules fold, and the
gradient of GPT's position table is in the unit behind it."""
B, S = symbol("b"), symbol("s")
H, VOCAB = 64, 256


def source(network: str) -> str:
    return f"tools.examples.{network}_sharded:factory"


class Traced:
    """One network traced as one rank, and whole."""

    def __init__(self, network: str, folder: Path) -> None:
        self.path = folder / f"{network}.mindir"
        arguments = ["--set", "layers=2", "--set", "batch=4", "--data-parallel", "2", "--tensor-parallel", "2"]
        assert main(["trace", source(network), "--sharded", *arguments, "-q", "-o", str(self.path)]) == 0
        self.graph = load_graph(str(self.path))
        self.costs = network_costs(self.graph)
        self.whole = load_costs(source(network), SETTINGS)

    def model(self, unit: str) -> UnitModel:
        return model_of(self.costs, unit)


class Traces:
    """Each network traced when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Traced] = {}

    def __getitem__(self, network: str) -> Traced:
        if network not in self._made:
            self._made[network] = Traced(network, self._folder)
        return self._made[network]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return Traces(tmp_path_factory.mktemp("sharded"))


def model_of(costs: NetworkCosts, unit: str) -> UnitModel:
    return costs.models[[item.name for item in costs.split.units].index(unit)]


def operations(graph: CellGraph, cell: str, primitive: str, phase: Phase) -> list[Operation]:
    return [
        operation
        for operation in graph.operations
        if (operation.cell, operation.primitive, operation.phase) == (cell, primitive, phase)
    ]


def shapes(graph: CellGraph, operation: Operation) -> list[tuple[Any, ...]]:
    tensors = [*read_tensors(operation), *operation.outputs]
    return [tuple(sympy.sympify(size) for size in graph.tensors[tensor].type.shape) for tensor in tensors]


def block_collectives(graph: CellGraph, phase: Phase) -> list[Operation]:
    return [
        operation
        for operation in graph.operations
        if operation.primitive in COLLECTIVES and operation.phase is phase and operation.cell.startswith("blocks.1")
    ]


def test_shapes_are_those_of_one_device(traces: Traces) -> None:
    """Column-parallel weights have half their rows, row-parallel ones half their columns; states are whole."""
    graph = traces["llama"].graph
    block = "blocks.1.attention"
    for cell, left, right, result in (
        (f"{block}.q_proj", (B * S, H), (H // 2, H), (B * S, H // 2)),
        (f"{block}.k_proj", (B * S, H), (H // 4, H), (B * S, H // 4)),
        (f"{block}.o_proj", (B * S, H // 2), (H, H // 2), (B * S, H)),
        ("blocks.1.feed_forward.gate", (B * S, H), (88, H), (B * S, 88)),
        ("blocks.1.feed_forward.down", (B * S, 88), (H, 88), (B * S, H)),
        ("head", (B * S, H), (VOCAB // 2, H), (B * S, VOCAB // 2)),
    ):
        (product,) = operations(graph, cell, "MatMul", Phase.FORWARD)
        assert shapes(graph, product) == [left, right, result], cell
    (softmax,) = operations(graph, f"{block}.core", "Softmax", Phase.FORWARD)
    assert shapes(graph, softmax)[0] == (B, 2, S, S)
    assert graph.symbols == {"b": 2, "s": 16}
    assert graph.sharding == SHARDING


@pytest.mark.parametrize("network", NETWORKS)
def test_every_layer_has_two_sums_forward_and_two_backward(traces: Traces, network: str) -> None:
    """After attention and after the feed-forward, of the states: 4 b s h bytes, over pairs of neighbouring ranks."""
    graph = traces[network].graph
    for phase in Phase:
        found = block_collectives(graph, phase)
        assert [operation.primitive for operation in found] == ["AllReduce", "AllReduce"]
        for operation in found:
            (kind,) = [graph.tensors[output].type for output in operation.outputs]
            assert sympy.prod(kind.shape) == B * S * H and kind.dtype == "float32"
            assert operation.attributes["group_rank_ids"] == (0, 1)
    cells = {operation.cell for operation in block_collectives(graph, Phase.FORWARD)}
    assert cells == {"blocks.1.attention.o_proj", "blocks.1.feed_forward.down"}


@pytest.mark.parametrize("network", NETWORKS)
def test_sent_bytes_and_times_of_a_layer(traces: Traces, network: str) -> None:
    """Two ranks: an all-reduce of V sends 2 x 1/2 V in 2 rounds over the one link of a pair, 19 GB/s and 10 us."""
    model = traces[network].model("blocks.1")
    machine = load_hardware("ascend910b")
    sizes = {"b": 4, "s": 4096}
    volume = 4 * 4096 * H * 4
    times = model.link_ms(machine, sizes)
    whole = model.operation_ms(machine, sizes)
    for part in (slice(0, model.forward_count), slice(model.forward_count, None)):
        assert sympy.simplify(model.basis.expression(model.sent_bytes[part].sum(axis=0)) - 2 * 4 * B * S * H) == 0
        assert times[part].sum() == pytest.approx(2 * (2 * 0.01 + volume / 1.9e7))
        assert (whole[part] >= times[part]).all()


@pytest.mark.parametrize("network", NETWORKS)
def test_products_of_all_tensor_parallel_ranks_are_those_of_the_whole(traces: Traces, network: str) -> None:
    """Every product of weights and of attention is split over the two ranks, for the samples of one of them."""
    traced = traces[network]
    sizes = {"b": 2, "s": 16}
    for unit in ("blocks.0", "blocks.1", "head"):
        for phase in Phase:
            share = product_flops(traced.model(unit), phase, sizes)
            assert share > 0
            assert 2 * share == product_flops(model_of(traced.whole, unit), phase, sizes), (unit, phase)


def product_flops(model: UnitModel, phase: Phase, sizes: dict[str, int]) -> float:
    chosen = [item.engine is Engine.MATMUL and item.phase is phase for item in model.operations]
    return float((model.flops @ model.basis.values(sizes))[chosen].sum())


def test_weights_of_one_device(traces: Traces) -> None:
    """Projections are halved, norms and the untied table are not: 16 bytes an element of float32 with Adam."""
    traced = traces["llama"]
    settled = settle(traced.costs, parse_config({"stages": 2, "memory_limit": "1GB", "hardware": "ascend910b"}))
    static = {unit.unit.name: unit.static_bytes for unit in settled.evaluated.units}
    projections = 2 * H * H + 2 * H * H // 2 + 3 * H * 176
    assert static["blocks.0"] == 16 * (projections // 2 + 2 * H)
    assert static["head"] == 16 * VOCAB * H // 2
    assert static["embedding"] == 16 * VOCAB * H
    assert (settled.config.data_parallel, settled.config.tensor_parallel) == (2, 2)


def test_a_tied_table_is_split_by_rows(traces: Traces) -> None:
    """Each rank looks up its half of the vocabulary; the sum over ranks completes the states."""
    traced = traces["gpt"]
    assert traced.graph.parameters["embedding.weight"].shares == 2
    (gathered,) = [
        operation for operation in traced.graph.operations
        if operation.cell == "embedding" and operation.primitive == "AllReduce" and operation.phase is Phase.FORWARD
    ]  # fmt: skip
    assert traced.graph.tensors[gathered.outputs[0]].type.shape == (B, S, H)
    assert set(traced.costs.split.shared_parameters) == {"embedding.weight"}


@pytest.mark.parametrize("network", NETWORKS)
def test_costs_derived_from_strategies_are_those_of_the_compiled_graph(traces: Traces, network: str) -> None:
    """The same polynomials in b and s, from the network traced whole and its strategies."""
    traced = traces[network]
    derived = network_costs(logical_graph(load_graph(source(network), {**SETTINGS, **DEGREES}), SHARDING))
    assert derived.graph.symbols == traced.graph.symbols
    assert derived.graph.notes == traced.graph.notes
    assert derived.graph.parameters == traced.graph.parameters
    for unit, ours, theirs in zip(derived.split.units, derived.models, traced.costs.models, strict=True):
        own, other = (unit_expressions(model, load_hardware("ascend910b")) for model in (ours, theirs))
        for name in ("forward_flops", "backward_flops", "saved_bytes", "forward_sent_bytes", "backward_sent_bytes"):
            if name == "backward_flops" and unit.name in MOVED_BACKWARD:
                continue
            assert sympy.expand(own[name] - other[name]) == 0, (unit.name, name)


@pytest.mark.parametrize("network", NETWORKS)
def test_cells_and_units_are_those_of_the_whole_network(traces: Traces, network: str) -> None:
    traced = traces[network]
    assert network_fingerprint(traced.costs) == network_fingerprint(traced.whole)
    for unit, own in zip(traced.costs.split.units, traced.whole.split.units, strict=True):
        assert (unit.name, unit.cells) == (own.name, own.cells)
    for cell in ("blocks.0.attention.o_proj", "blocks.1.feed_forward.down", "head"):
        for phase in Phase:
            found = operations(traced.graph, cell, "MatMul", phase)
            assert len(found) == len(operations(traced.whole.graph, cell, "MatMul", phase)) > 0


def test_a_training_step_without_marks_has_the_same_operations(traces: Traces, tmp_path: Path) -> None:
    """Marks change neither products nor collectives; the step also holds the sums of gradients that we leave out."""
    wanted = Compile("plain", source("llama"), {**SETTINGS, **DEGREES})
    answer = compile_ranks([Rank(0, 4, (wanted,))], stand_in(), tmp_path)["plain"]
    assert answer.graph is not None, answer.error
    module = load_module(answer.graph)
    nodes = [node for function in (module.entry, *module.functions.values()) for node in function.nodes]
    plain = Counter(node.operation for node in nodes if "Mirror" not in node.scope)
    mirrors = sum("Mirror" in node.scope and node.operation == "AllReduce" for node in nodes)
    graph = traces["llama"].graph
    marked = Counter(operation.primitive for operation in graph.operations)
    for primitive in ("MatMul", "BatchMatMul", "Gather", "Softmax", "SiLU", "SiLUGrad", "RsqrtGrad", *COLLECTIVES):
        assert marked[primitive] == plain[primitive], primitive
    assert any(f"{mirrors} sums of weight gradients over ranks" in note for note in graph.notes)


def test_summed_gradients_are_all_weights(traces: Traces) -> None:
    """Two data-parallel ranks sum every gradient once a step, the tied table's for each of its uses."""
    graph = traces["gpt"].graph
    held = 4 * sum(
        int(sympy.prod(info.type.shape)) // info.shares * (2 if name == "embedding.weight" else 1)
        for name, info in graph.parameters.items()
    )
    assert any(f"({held} bytes)" in note for note in graph.notes)


def test_plan_check_and_explain_take_the_file(
    traces: Traces, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"stages": 2, "micro_batches": 4, "memory_limit": "1GB", "micro_batch_size": 1}))
    plan, path = tmp_path / "plan.json", str(traces["llama"].path)
    assert main(["plan", path, "-c", str(config), "-q", "-o", str(plan), "--json"]) == 0
    assert json.loads(plan.read_text())["settings"]["tensor_parallel"] == 2
    assert main(["check", str(plan), path, "-c", str(config), "-q"]) == 0
    capfd.readouterr()
    assert main(["explain", path, "-c", str(config), "-q", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["sizes"] == {"b": 1, "s": 16}
    block = next(unit for unit in document["units"] if unit["name"] == "blocks.0")
    assert block["forward_sent_bytes"] == block["backward_sent_bytes"] == "512*b*s"
    # Two all-reduces of 1 x 16 x 64 floats, as above.
    assert block["forward_communication_ms"] == pytest.approx(2 * (0.02 + 4096 / 1.9e7))
    assert block["forward_ms"] > block["forward_communication_ms"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_parallel": 4}, "config: tensor_parallel: 4, but Llama was traced for 2"),
        ({"data_parallel": 1}, "config: data_parallel: 1, but Llama was traced for 2"),
        ({"context_parallel": 2}, "config: context_parallel: 2, but Llama was traced for 1"),
        ({"all_to_all": True}, "config: all_to_all: True, but Llama was traced for False"),
    ],
)
def test_settings_that_contradict_the_file(
    traces: Traces, tmp_path: Path, change: dict[str, int], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"stages": 2, "micro_batches": 4, **change}))
    assert main(["plan", str(traces["llama"].path), "-c", str(config)]) == 2
    assert message in capfd.readouterr().err


def test_the_batch_is_that_of_one_rank(traces: Traces) -> None:
    graph = traces["llama"].graph
    for given, expected in (({}, 2), ({"data_parallel": 2}, 2), ({"micro_batch_size": 6}, 6)):
        config, _, _ = resolve_config(graph, parse_config({"stages": 2, **given}))
        assert input_sizes(graph, config)["b"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((source("llama"), "--tensor-parallel", "3"), "3 ranks; MindSpore takes 1, 2, 4 or a multiple of 8"),
        ((source("llama"), "--tensor-parallel", "0"), "give a number of ranks above 0"),
        (
            (source("llama"), "--tensor-parallel", "2", "--set", "tensor_parallel=4"),
            "contradicts the tensor_parallel of 2",
        ),
        ((source("llama"), "--data-parallel", "4"), "batch of 2 cannot be shared evenly by 4"),
        ((source("llama"), "--tensor-parallel", "4", "--set", "layers=1"), "does not compile for the given inputs"),
        (
            ("tools.examples.llama:factory", "--tensor-parallel", "2", "--set", "layers=1"),
            "set strategies with Primitive.shard",
        ),
        (("tools.examples.nothing:factory", "--tensor-parallel", "2"), "cannot import tools.examples.nothing"),
    ],
)
def test_networks_and_ranks_that_cannot_be(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "net.mindir"
    assert main(["trace", *arguments, "--sharded", "-q", "-o", str(output)]) == 2
    assert message in capfd.readouterr().err
    assert not output.exists()


def test_degrees_need_the_switch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "net.mindir")
    assert main(["trace", source("llama"), "--tensor-parallel", "2", "-o", output]) == 2
    assert "--tensor-parallel: only with --sharded" in capfd.readouterr().err


def test_without_a_compiler_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    output = tmp_path / "net.mindir"
    assert main(["trace", source("llama"), "--tensor-parallel", "2", "--sharded", "-o", str(output)]) == 2
    assert "compiler" in capfd.readouterr().err
    assert not output.exists()


@pytest.mark.long
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("choose", [keep_all, mixed, lambda unit, names: names[-1]], ids=["none", "mixed", "full"])
def test_a_plan_of_one_rank_compiles_as_planned(traces: Traces, tmp_path: Path, network: str, choose: Any) -> None:
    """Every operation, collectives included, is computed once where planned, and again exactly where planned."""
    plan = hand_plan(traces[network].costs, (3 if network == "llama" else 4,), choose)
    plan.save(tmp_path / "plan.json")
    result = verify(plan, str(tmp_path / "plan.json"), source(network), SETTINGS)
    assert [str(finding) for finding in result.findings] == []
    assert result.ranks == 8


def test_a_factory_must_exist_before_its_degrees_are_looked_at() -> None:
    with pytest.raises(InputError, match="has no function nothing"):
        record_sharded("tools.examples.llama_sharded:nothing", {}, Sharding(1, 2))
