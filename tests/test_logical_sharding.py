"""Graph of one rank derived from strategies, against the graph that MindSpore compiles for one rank, and its refusals.

Flops, saved, static and sent bytes of every unit must be equal. Two differences are known and bounded below: the mean
of the loss divides constants, which the derivative rules fold; and MindSpore puts the gradient of GPT's position table
into the next unit.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verify_plans import needs_compiler

from mindspore_bmpipe.cli import main
from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.costs.logical import graph_of_one_rank, logical_graph
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import (
    CellGraph,
    CellInfo,
    Operation,
    ParameterInfo,
    Phase,
    Sharding,
    Tensor,
    TensorRef,
)
from mindspore_bmpipe.graph.mindir import Constant, TensorType, load_module
from mindspore_bmpipe.graph.recorded import graph_of, recorded_trace
from mindspore_bmpipe.graph.sharded import COLLECTIVES
from mindspore_bmpipe.graph.symbols import symbol
from mindspore_bmpipe.graph.trace import trace
from mindspore_bmpipe.sources import build_factory, load_graph
from mindspore_bmpipe.verify.children import Rank, compile_ranks
from mindspore_bmpipe.verify.jobs import Compile
from mindspore_bmpipe.verify.stand_in import stand_in
from tools.verified_sharding import Case, all_cases, compile_cases, compiled, logical, numbers_of

EXACT = ("forward flops", "backward flops", "saved bytes", "static bytes", "forward sent", "backward sent")
FAST = [
    Case("llama", 2, 2, True),
    Case("gpt", 2, 2, True),
    Case("mixtral", 2, 2, expert_parallel=2, all_to_all=True),
    Case("mixtral", 4, 1, expert_parallel=2),
    Case("llama_context", 1, 2, context_parallel=2),
    Case("llama_context", 2, 1, context_parallel=2, heads_exchanged=True, all_to_all=True),
]
B = symbol("b")


class Compiled:
    """Cases compiled when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def graph(self, case: Case) -> CellGraph:
        compile_cases([case], self._folder)
        return compiled(case, self._folder)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("logical"))


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [*FAST, *(pytest.param(case, marks=pytest.mark.long) for case in all_cases() if case not in FAST)],
    ids=lambda case: case.name,
)
def test_every_unit_costs_what_mindspore_compiles(compiler: Compiled, case: Case) -> None:
    their_graph, our_graph = compiler.graph(case), logical(case)
    # Weights are held, and their gradients added up, by as many ranks.
    assert our_graph.parameters == their_graph.parameters
    assert [note for note in our_graph.notes if "gradients" in note] == list(their_graph.notes)
    theirs, ours = numbers_of(their_graph), numbers_of(our_graph)
    assert ours.keys() == theirs.keys()
    moved_to_the_next = {"position", "embedding_dropout"} if case.network == "gpt" else set()
    for unit, values in theirs.items():
        for measure in (*EXACT, *(name for name in values if name.startswith("number of"))):
            own, other = ours[unit].get(measure, 0), values.get(measure, 0)
            if measure == "backward flops" and unit == "loss":
                assert own == pytest.approx(other, rel=4e-4)
            elif measure != "backward flops" or unit not in moved_to_the_next:
                assert own == other, (unit, measure)
        assert len(ours[unit]) == len(values), unit
        if unit.startswith("blocks."):
            # Backward of the routing has no one order: it differs without sharding as well.
            if case.network != "mixtral":
                assert ours[unit]["working set"] == values["working set"]
            # Scalars that kernels read; derivative rules write them as constants.
            assert ours[unit]["forward moved"] == values["forward moved"]
            assert ours[unit]["backward moved"] == pytest.approx(values["backward moved"], abs=8)
    total = [sum(numbers[unit]["backward flops"] for unit in moved_to_the_next) for numbers in (ours, theirs)]
    # The rules add up over an axis of one sample, where MindSpore has nothing to add up.
    states = 16 * 64
    assert total[0] - total[1] in (0, states)


@needs_compiler
@pytest.mark.parametrize("all_to_all", [False, True])
def test_layouts_change_as_mindspore_changes_them(all_to_all: bool, tmp_path: Path) -> None:
    """Forty changes among three axes and four ranks: the same collectives, groups and sizes, in the same order."""
    source, settings = "tests.sharding_networks:factory", {"ranks": 4, "seed": 7, "length": 40}
    sharding = Sharding(1, 4, all_to_all=all_to_all)
    wanted = Compile("chain", source, settings, sharding=sharding, records=True, varies=False)
    answer = compile_ranks([Rank(0, 4, (wanted,))], stand_in(), tmp_path)["chain"]
    assert answer.graph is not None, answer.error
    theirs = graph_of(recorded_trace(answer.graph.read_bytes(), load_module(answer.graph), "chain"))
    recorded, inputs = build_factory(source, settings)
    ours = logical_graph(trace(recorded, *inputs, symbols={}), sharding)
    assert exchanges(ours) == exchanges(theirs)
    assert any(name == "AlltoAll" for name, _, _ in exchanges(ours)) == all_to_all


def exchanges(graph: CellGraph) -> list[tuple[str, tuple[int, ...], int]]:
    """Collectives of forward, with the ranks that take part and the elements that each then holds."""
    return [
        (item.primitive, item.attributes["group_rank_ids"], math.prod(graph.tensors[item.outputs[0]].type.shape))
        for item in graph.operations
        if item.phase is Phase.FORWARD and item.primitive in COLLECTIVES
    ]


WEIGHT = TensorType((8, 8), "float32")


def network(*operations: tuple[str, tuple[Any, ...], tuple[Any, ...], Any], batch: Any = 8 * B) -> CellGraph:
    """A chain of operations from an input (batch, 8), tensor 0; tensor 1 is a trainable weight (8, 8).

    Each is a primitive, its arguments, the shape of its result, and its strategy.
    """
    tensors = [Tensor(TensorType((batch, 8), "float32"), None), Tensor(WEIGHT, None, parameter="w")]
    made = []
    for primitive, arguments, shape, strategy in operations:
        attributes = {} if strategy is None else {"in_strategy": strategy}
        tensors.append(Tensor(TensorType(shape, "float32"), len(made)))
        made.append(Operation(primitive, arguments, (len(tensors) - 1,), attributes, "layer", Phase.FORWARD,
                              f"Default/layer/{primitive}", str(len(made))))  # fmt: skip
    return CellGraph(
        name="Net", operations=tuple(made), tensors=tuple(tensors), inputs=(0,),
        cells=(CellInfo("", "Net", ("w",)), CellInfo("layer", "Layer", ("w",))),
        parameters={"w": ParameterInfo("w", WEIGHT, True)}, symbols={"b": 4}, notes=(),
        has_backward=False,
    )  # fmt: skip


def refs(*tensors: int) -> tuple[TensorRef, ...]:
    return tuple(map(TensorRef, tensors))


TURNED = (Constant(False), Constant(True))


def test_a_network_by_hand() -> None:
    """Two ranks share the inner axis: each multiplies halves, the sum completes the result; no rank shares samples.

    Rank 0 slices its half of the input, (8b, 4); the weight's half is (8, 4); both products of backward read halves.
    """
    graph = network(
        ("MatMul", (*refs(0, 1), *TURNED), (8 * B, 8), ((1, 2), (1, 2))),
        ("Square", refs(2), (8 * B, 8), ((1, 1),)),
        ("ReduceSum", (TensorRef(3), Constant((0, 1)), Constant(False)), (), ((1, 1),)),
    )
    found = logical_graph(graph, Sharding(1, 2))
    forward = [(item.primitive, [found.tensors[output].type.shape for output in item.outputs])
               for item in found.operations if item.phase is Phase.FORWARD]  # fmt: skip
    assert forward == [
        ("StridedSlice", [(8 * B, 4)]), ("MatMul", [(8 * B, 8)]), ("AllReduce", [(8 * B, 8)]),
        ("Square", [(8 * B, 8)]), ("ReduceSum", [()]),
    ]  # fmt: skip
    backward = [item.primitive for item in found.operations if item.phase is Phase.BACKWARD]
    assert backward[-2:] == ["AllReduce", "MatMul"]
    (gradient,) = found.operations[-1].outputs
    assert found.tensors[gradient].type.shape == (8, 4)
    assert found.parameters["w"].shares == 2
    assert found.operations[2].attributes["group_rank_ids"] == (0, 1)
    assert found.has_backward and found.sharding == Sharding(1, 2)


def test_the_batch_counts_samples_of_one_rank() -> None:
    graph = network(("MatMul", (*refs(0, 1), *TURNED), (B, 8), ((2, 1), (2, 1))), batch=B)
    found = logical_graph(graph, Sharding(2, 2))
    assert found.symbols == {"b": 2}
    product = next(item for item in found.operations if item.primitive == "MatMul")
    assert found.tensors[product.outputs[0]].type.shape == (B, 4)
    assert logical_graph(graph, Sharding(2, 2), {"b": 6}).symbols == {"b": 6}
    with pytest.raises(InputError, match="3 does not divide the traced micro-batch of 4"):
        logical_graph(graph, Sharding(3, 2))


def test_gradients_are_summed_by_the_ranks_that_hold_the_same_share() -> None:
    """The weight in two halves on four ranks: two ranks sum 8 x 4 floats, once a step, which is only noted."""
    graph = network(("MatMul", (*refs(0, 1), *TURNED), (8 * B, 8), ((2, 1), (2, 1))))
    (note,) = logical_graph(graph, Sharding(2, 2)).notes
    assert note.startswith("1 sums of weight gradients over ranks (128 bytes)")


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([("CumProd", (TensorRef(0), Constant(0)), (8 * B, 8), ((2, 1),))], "CumProd in cell layer: no rule says how"),
        (
            [("MatMul", (*refs(0, 1), *TURNED), (8 * B, 8), ((8, 1), (1, 1)))],
            "among 8 ranks, which do not divide the 4",
        ),
        (
            [
                ("MatMul", (*refs(0, 1), *TURNED), (8 * B, 8), ((2, 1), (2, 1))),
                ("MatMul", (*refs(2, 1), *TURNED), (8 * B, 8), ((2, 1), (1, 1))),
            ],
            "MatMul in cell layer: reads weight w cut into 1 x 1 parts, another operation reads it cut into 2 x 1",
        ),
    ],
)
def test_what_is_not_modelled_names_the_operation(operations: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        logical_graph(network(*operations), Sharding(2, 2))


def test_settings_decide_whether_one_rank_is_asked_for() -> None:
    graph = network(("MatMul", (*refs(0, 1), *TURNED), (8 * B, 8), ((1, 1), (2, 1))))
    assert graph_of_one_rank(graph, parse_config({"tensor_parallel": 2})).sharding == Sharding(1, 2)
    bare = replace(graph, operations=tuple(replace(item, attributes={}) for item in graph.operations))
    for same, config in (
        (graph, {}),
        (graph, {"tensor_parallel": 1, "data_parallel": 2}),
        (bare, {"tensor_parallel": 2}),
        (replace(graph, sharding=Sharding(1, 2)), {"tensor_parallel": 2}),
    ):
        assert graph_of_one_rank(same, parse_config(config)) is same


def test_an_exported_graph_keeps_its_equal_operations() -> None:
    """Only what sharding adds is made once: operations of the network may draw random numbers."""
    twice = [("Square", (TensorRef(0),), (8 * B, 8), None)] * 2
    graph = network(*twice, ("MatMul", (*refs(2, 1), *TURNED), (8 * B, 8), None),
                    ("Add", refs(4, 3), (8 * B, 8), None))  # fmt: skip
    operations = tuple(replace(item, unique_id=None) for item in graph.operations)
    found = logical_graph(replace(graph, operations=operations), Sharding(2, 1))
    names = [item.primitive for item in found.operations if item.phase is Phase.FORWARD]
    assert names == ["StridedSlice", "Square", "Square", "MatMul", "Add"]


CONFIG = "stages: 2\nmicro_batches: 4\nmemory_limit: 1GB\ntensor_parallel: 2\n"


@pytest.mark.parametrize(
    ("source", "further", "message"),
    [
        ("tools.examples.llama:factory", "", "no operation of Llama has a strategy"),
        ("tools.examples.llama_sharded:factory", "context_parallel: 2\n", "work among at most 2 ranks, but"),
        ("tools.examples.llama_sharded:factory", "expert_parallel: 2\n", "2 does not divide the 1 ranks"),
        (
            "tools.examples.llama_sharded:factory",
            "data_parallel: 2\nexpert_parallel: 2\n",
            "cut no weight among so many data-parallel ranks",
        ),
        ("tools.examples.llama_sharded:factory", "data_parallel: 4\n", "4 does not divide the traced micro-batch of 2"),
    ],
)
def test_refused_settings(
    source: str, further: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG + further)
    assert main(["plan", source, "--set", "layers=1", "-c", str(config), "-q"]) == 2
    assert message in capfd.readouterr().err


def test_settings_share_out_experts_and_their_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A block of 4 x 64 x 64 floats of attention, two norms, 8 x 64 of the router and 8 experts of 3 x 64 x 32.

    Two ranks hold the experts once. Each sends half of its samples' 8 x 4 places of 64 floats there and half back, and
    so do the gradients.
    """
    config = tmp_path / "config.yaml"
    config.write_text("stages: 2\nmicro_batches: 4\ndata_parallel: 2\nexpert_parallel: 2\nall_to_all: true\n")
    arguments = ["tools.examples.mixtral_sharded:factory", "--set", "layers=2", "-c", str(config), "-q", "--json"]
    assert main(["explain", *arguments]) == 0
    block = next(item for item in json.loads(capfd.readouterr().out)["units"] if item["name"] == "blocks.0")
    held = 4 * 64 * 64 + 2 * 64 + 8 * 64 + 8 * 3 * 64 * 32 // 2
    assert block["static_bytes"] == held * 16
    # 32 places of a sample of 16 tokens.
    assert block["forward_sent_bytes"] == block["backward_sent_bytes"] == f"{2 * 32 // 16 * 64 * 4 // 2}*b*s"


def test_a_contradiction_in_settings_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    arguments = ["tools.examples.llama_sharded:factory", "--set", "tensor_parallel=4", "-c", str(config), "-q"]
    assert main(["plan", *arguments]) == 2
    assert "contradicts the tensor_parallel of 2" in capfd.readouterr().err


def test_a_traced_file_with_strategies_is_planned_for_its_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file is the network traced whole; its strategies say what each of two ranks runs."""
    path, config, plan = tmp_path / "net.mindir", tmp_path / "config.yaml", tmp_path / "plan.json"
    config.write_text(CONFIG)
    arguments = ["--set", "layers=2", "--set", "tensor_parallel=2"]
    assert main(["trace", "tools.examples.llama_sharded:factory", *arguments, "-q", "-o", str(path)]) == 0
    assert main(["plan", str(path), "-c", str(config), "-q", "-o", str(plan)]) == 0
    assert main(["check", str(plan), str(path), "-c", str(config), "-q"]) == 0
    capfd.readouterr()
    assert main(["explain", str(path), "-c", str(config), "-q"]) == 0
    shown = capfd.readouterr().out
    # Forward sums behind attention and feed-forward: states of b x s x 64 floats, half of them sent twice.
    assert "2 x AllReduce among 2 ranks, 256*b*s bytes sent each" in shown
    whole = load_graph(str(path))
    assert whole.sharding is None
