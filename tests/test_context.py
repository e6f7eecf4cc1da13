"""The context key and the pass before the first training compile, on real MindSpore up to where its compiler starts."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import mindspore
import mindspore.dataset
import numpy as np
import pytest
from apply_networks import RECOMPUTE, WIDTH, Network, batch, make_plan, written
from mindspore import Tensor, nn, ops
from mindspore.context import get_auto_parallel_context, reset_auto_parallel_context, set_auto_parallel_context
from mindspore.graph.api import _CellGraphExecutor, _JitExecutor
from mindspore.parallel import nn as parallel_nn
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.train.dataset_helper import _generate_dataset_sink_mode_net

import mindspore_bmpipe
from mindspore_bmpipe import context, context_key
from mindspore_bmpipe.errors import InfeasibleError, InputError

MICRO_BATCHES = 4


class CompileStarts(Exception):
    """Raised where MindSpore's own compile would start."""


class Calls:
    """What the planning function was asked, and the networks' state when MindSpore's compile started."""

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.requests: list[tuple[Any, list[Any], dict[str, Any]]] = []
        self.at_compile: list[dict[str, Any]] = []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Registered key, a planning function that answers at once, and a stop where MindSpore's compile starts."""
    mindspore.reset_auto_parallel_context()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    context_key.register()
    found = Calls()

    def plan(network: Any, *inputs: Any, **options: Any) -> Any:
        found.requests.append((network, list(inputs), options))
        found.plans.append(make_plan(network, changes=RECOMPUTE))
        return found.plans[-1]

    def stop(*_: Any, **__: Any) -> None:
        found.at_compile.extend(written(network) for network, _, _ in found.requests[-1:])
        raise CompileStarts

    monkeypatch.setattr(mindspore_bmpipe, "plan", plan)
    monkeypatch.setattr(context.tables, "render_plan", lambda plan: f"[plan] of {plan.source}")
    monkeypatch.setattr(_CellGraphExecutor, "compile", stop)
    monkeypatch.setattr(_JitExecutor, "_generate_compile_args", stop)
    yield found
    # The package registers when it is imported; later tests in this process find it so.
    context_key.register()
    mindspore.reset_auto_parallel_context()


EXPECTED = {
    **{f"{path}:pipeline_stage": 0 for path in ("embedding", "blocks.0", "blocks.1")},
    **{f"{path}:pipeline_stage": 1 for path in ("blocks.2", "blocks.3", "head")},
    "blocks.0:recompute": True,
    "blocks.1.attention:recompute": True,
    "blocks.2.attention.softmax:recompute": True,
}


def turn_on(**settings: Any) -> None:
    mindspore.set_auto_parallel_context(
        **{"parallel_mode": "semi_auto_parallel", "pipeline_stages": 2, "device_num": 2, **settings},
        pipeline_planner="bmpipe",
    )


def dataset(size: int = 8) -> Any:
    data = {"x": np.ones((2 * size, WIDTH), np.float32), "y": np.ones((2 * size, 1), np.float32)}
    return mindspore.dataset.NumpySlicesDataset(data).batch(size)


def train_cell(pipeline: nn.Cell) -> nn.Cell:
    return nn.TrainOneStepCell(pipeline, nn.SGD(pipeline.trainable_params(), 0.1))


def check_planned(calls: Calls, network: nn.Cell, size: int = 8, **further: Any) -> None:
    """One plan, asked for with the inputs of one micro-batch, and written before MindSpore's compile."""
    assert len(calls.requests) == 1
    planned, inputs, options = calls.requests[0]
    assert planned is network
    assert options == {"stages": 2, "micro_batches": MICRO_BATCHES, **further}
    assert [(item.shape, item.dtype) for item in inputs] == [
        ((size // MICRO_BATCHES, WIDTH), mindspore.float32),
        ((size // MICRO_BATCHES, 1), mindspore.float32),
    ]
    assert calls.at_compile == [EXPECTED]


def check_planned_once(calls: Calls, network: nn.Cell) -> None:
    assert [request[0] for request in calls.requests] == [network]
    assert all(state == EXPECTED for state in calls.at_compile)


# --- the key ---------------------------------------------------------------------------------------------------------


def test_the_key_can_be_set_read_and_reset(calls: Calls) -> None:
    assert mindspore.get_auto_parallel_context("pipeline_planner") is None
    mindspore.set_auto_parallel_context(pipeline_planner="bmpipe", pipeline_stages=2)
    assert mindspore.context.get_auto_parallel_context("pipeline_planner") == "bmpipe"
    assert get_auto_parallel_context("pipeline_planner") == "bmpipe"
    reset_auto_parallel_context()
    assert mindspore.get_auto_parallel_context("pipeline_planner") is None
    assert mindspore.get_auto_parallel_context("pipeline_stages") == 1
    set_auto_parallel_context(pipeline_planner="bmpipe")
    assert get_auto_parallel_context("pipeline_planner") == "bmpipe"


@pytest.mark.parametrize("value", [None, ""])
def test_the_key_can_be_unset(calls: Calls, value: str | None) -> None:
    set_auto_parallel_context(pipeline_planner="bmpipe")
    set_auto_parallel_context(pipeline_planner=value)
    assert get_auto_parallel_context("pipeline_planner") is None


@pytest.mark.parametrize("value", ["BMPipe", "sapp", 1, True, ["bmpipe"]])
def test_other_values_are_refused_and_change_nothing(calls: Calls, value: Any) -> None:
    set_auto_parallel_context(pipeline_planner="bmpipe")
    with pytest.raises(ValueError, match=r"'pipeline_planner' only support 'bmpipe', None and ''"):
        set_auto_parallel_context(pipeline_planner=value)
    assert get_auto_parallel_context("pipeline_planner") == "bmpipe"


def test_registering_again_keeps_the_value(calls: Calls) -> None:
    set_auto_parallel_context(pipeline_planner="bmpipe")
    compile_function = nn.Cell.compile
    context_key.register()
    assert get_auto_parallel_context("pipeline_planner") == "bmpipe"
    assert nn.Cell.compile.__qualname__ == compile_function.__qualname__
    context_key.set_planner(None)
    assert nn.Cell.compile.__module__ == "mindspore.nn.cell"


def test_mindspores_own_save_and_recover_keep_the_value(calls: Calls) -> None:
    from mindspore.parallel._auto_parallel_context import _get_all_auto_parallel_context, _recover_auto_parallel_context

    set_auto_parallel_context(pipeline_planner="bmpipe")
    saved = _get_all_auto_parallel_context()
    reset_auto_parallel_context()
    _recover_auto_parallel_context(*saved)
    assert get_auto_parallel_context("pipeline_planner") == "bmpipe"


def test_unset_means_mindspores_own_functions(calls: Calls) -> None:
    own = nn.Cell.compile, _JitExecutor.compile, nn.Cell.__call__, nn.Cell.compile_and_run
    assert all(function.__module__.startswith("mindspore.") for function in own)
    turn_on()
    assert nn.Cell.compile is not own[0]
    reset_auto_parallel_context()
    assert (nn.Cell.compile, _JitExecutor.compile, nn.Cell.__call__, nn.Cell.compile_and_run) == own

    network = Network()
    attributes = {path: set(vars(cell)) for path, cell in network.cells_and_names()}
    mindspore.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=2, device_num=2)
    with pytest.raises(CompileStarts):
        train_cell(nn.PipelineCell(network, MICRO_BATCHES))(*batch())
    assert not calls.requests
    assert {path: set(vars(cell)) for path, cell in network.cells_and_names()} == attributes


def test_unregistering_leaves_mindspore_as_it_was(calls: Calls) -> None:
    turn_on()
    context_key.unregister()
    assert mindspore.context._reset_auto_parallel_context.__module__ == "mindspore.parallel._auto_parallel_context"
    assert nn.Cell.compile.__module__ == "mindspore.nn.cell"
    with pytest.raises(ValueError, match="pipeline_planner is not recognized"):
        set_auto_parallel_context(pipeline_planner="bmpipe")


def test_a_wrapper_put_around_ours_survives(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    turn_on()
    ours = nn.Cell.compile

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    monkeypatch.setattr(nn.Cell, "compile", theirs)
    reset_auto_parallel_context()
    assert nn.Cell.compile is theirs
    with pytest.raises(CompileStarts):
        train_cell(nn.PipelineCell(Network(), MICRO_BATCHES))(*batch())
    assert not calls.requests


# --- ways to compile -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [nn.PipelineCell, parallel_nn.PipelineCell, parallel_nn.Pipeline])
@pytest.mark.parametrize("way", ["call", "compile"])
def test_calls_and_compiles_of_train_cells(calls: Calls, pipeline: Any, way: str) -> None:
    turn_on()
    network = Network()
    cell = train_cell(pipeline(network, MICRO_BATCHES))
    with pytest.raises(CompileStarts):
        (cell if way == "call" else cell.compile)(*batch())
    check_planned(calls, network)


def test_keyword_inputs(calls: Calls) -> None:
    class Step(nn.TrainOneStepCell):
        def construct(self, x, y):
            return super().construct(x, y)

    turn_on()
    network = Network()
    pipeline = nn.PipelineCell(network, MICRO_BATCHES)
    x, y = batch()
    with pytest.raises(CompileStarts):
        Step(pipeline, nn.SGD(pipeline.trainable_params(), 0.1)).compile(y=y, x=x)
    check_planned(calls, network)


@pytest.mark.parametrize("pipeline", [nn.PipelineCell, parallel_nn.Pipeline])
def test_model_train(calls: Calls, pipeline: Any, capsys: pytest.CaptureFixture[str]) -> None:
    turn_on()
    network = Network()
    cell = pipeline(network, MICRO_BATCHES)
    with pytest.raises(CompileStarts):
        mindspore.Model(cell, optimizer=nn.SGD(cell.trainable_params(), 0.1)).train(
            1, dataset(), dataset_sink_mode=False
        )
    check_planned(calls, network)
    streams = capsys.readouterr()
    assert "[plan] of Network" in streams.err
    assert "[plan]" not in streams.out


def test_model_train_with_auto_parallel(calls: Calls) -> None:
    mindspore.set_auto_parallel_context(pipeline_planner="bmpipe")
    network = Network()
    cell = parallel_nn.Pipeline(network, MICRO_BATCHES)
    parallel = AutoParallel(cell)
    parallel.pipeline(stages=2)
    with pytest.raises(CompileStarts):
        mindspore.Model(parallel, optimizer=nn.SGD(cell.trainable_params(), 0.1)).train(
            1, dataset(), dataset_sink_mode=False
        )
    check_planned(calls, network, all_to_all=True)


def test_a_cell_that_sinks_its_data(calls: Calls) -> None:
    """What `Model.build` and `Model.train` compile on Ascend: a cell without inputs around the train cell."""
    turn_on()
    network = Network()
    cell = train_cell(nn.PipelineCell(network, MICRO_BATCHES))
    sinking = _generate_dataset_sink_mode_net(
        cell, [[8, WIDTH], [8, 1]], [mindspore.float32, mindspore.float32], "queue"
    )
    with pytest.raises(CompileStarts):
        sinking.compile()
    check_planned(calls, network)


def test_data_of_unknown_shape_is_refused(calls: Calls) -> None:
    turn_on()
    cell = train_cell(nn.PipelineCell(Network(), MICRO_BATCHES))
    sinking = _generate_dataset_sink_mode_net(
        cell, [[-1, WIDTH], [8, 1]], [mindspore.float32, mindspore.float32], "queue"
    )
    with pytest.raises(InputError, match=r"unknown shape \(-1, 8\)"):
        sinking.compile()


def test_auto_parallel_around_a_train_cell(calls: Calls) -> None:
    mindspore.set_auto_parallel_context(pipeline_planner="bmpipe")
    network = Network()
    parallel = AutoParallel(train_cell(parallel_nn.Pipeline(network, MICRO_BATCHES)))
    parallel.pipeline(stages=2)
    with pytest.raises(CompileStarts):
        parallel(*batch())
    check_planned(calls, network, all_to_all=True)


def test_resets_that_auto_parallel_makes_do_not_unset_the_key(calls: Calls) -> None:
    from mindspore.parallel._utils import _clear_auto_parallel_context

    mindspore.set_auto_parallel_context(pipeline_planner="bmpipe")
    _clear_auto_parallel_context(AutoParallel(Network()))
    assert mindspore.get_auto_parallel_context("pipeline_planner") == "bmpipe"


def functional_step(network: nn.Cell) -> Any:
    pipeline = parallel_nn.Pipeline(network, MICRO_BATCHES)
    optimizer = nn.SGD(pipeline.trainable_params(), 0.1)

    def forward(x, y):
        return pipeline(x, y)

    gradient = mindspore.value_and_grad(forward, None, pipeline.trainable_params())

    def step(x, y):
        loss, gradients = gradient(x, y)
        optimizer(gradients)
        return loss

    return step


def test_auto_parallel_around_a_function(calls: Calls) -> None:
    mindspore.set_auto_parallel_context(pipeline_planner="bmpipe")
    network = Network()
    parallel = AutoParallel(functional_step(network))
    parallel.pipeline(stages=2)
    with pytest.raises(CompileStarts):
        parallel(*batch())
    check_planned(calls, network, all_to_all=True)


def test_a_function_under_jit(calls: Calls) -> None:
    turn_on()
    network = Network()
    with pytest.raises(CompileStarts):
        mindspore.jit(functional_step(network))(*batch())
    check_planned(calls, network)


PIPELINE: Any = None


def step_on_globals(x, y):
    return mindspore.value_and_grad(PIPELINE, None, PIPELINE.trainable_params())(x, y)


def test_a_function_that_uses_a_global_pipeline(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    turn_on()
    network = Network()
    monkeypatch.setitem(globals(), "PIPELINE", nn.PipelineCell(network, MICRO_BATCHES))
    with pytest.raises(CompileStarts):
        mindspore.jit(step_on_globals)(*batch())
    check_planned(calls, network)


class Trainer:
    """A step as a method of an object that is no cell."""

    def __init__(self, network: nn.Cell) -> None:
        self.network = nn.PipelineCell(network, MICRO_BATCHES)
        self.step_function = functional_step(network)

    def step(self, x, y):
        return self.step_function(x, y)

    def evaluate(self, x, y):
        return self.network(x, y)


def test_a_method_under_jit(calls: Calls) -> None:
    turn_on()
    network = Network()
    trainer = Trainer(network)
    with pytest.raises(CompileStarts):
        mindspore.jit(trainer.evaluate)(*batch())
    assert not calls.requests
    for _ in range(2):
        with pytest.raises(CompileStarts):
            mindspore.jit(trainer.step)(*batch())
    check_planned_once(calls, network)


class OwnTrainCell(nn.Cell):
    """A train cell that calls MindSpore's gradient function by itself."""

    def __init__(self, pipeline: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.pipeline = pipeline
        self.weights = mindspore.ParameterTuple(pipeline.trainable_params())

    def construct(self, *inputs):
        return mindspore.value_and_grad(self.pipeline, None, self.weights)(*inputs)


def test_a_train_cell_without_optimizer(calls: Calls) -> None:
    turn_on()
    network = Network()
    with pytest.raises(CompileStarts):
        OwnTrainCell(nn.PipelineCell(network, MICRO_BATCHES))(*batch())
    check_planned(calls, network)


class ForeignPipeline(nn.Cell):
    """A pipeline cell of another library: the compiler knows it by the mark on its additions."""

    def __init__(self, network: nn.Cell, micro_size: int) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.micro_size = micro_size
        self.add_list = [ops.Add().add_prim_attr("pipeline_end", index) for index in range(micro_size)]

    def construct(self, x, y):
        return self.network(x, y)


def test_a_pipeline_cell_of_another_library(calls: Calls) -> None:
    turn_on()
    network = Network()
    with pytest.raises(CompileStarts):
        train_cell(ForeignPipeline(network, MICRO_BATCHES))(*batch())
    check_planned(calls, network)


def test_interleaving_around_the_pipeline_cuts_the_batch_too(calls: Calls) -> None:
    turn_on()
    network = Network()
    with pytest.raises(CompileStarts):
        train_cell(nn.MicroBatchInterleaved(nn.PipelineCell(network, MICRO_BATCHES), 2))(*batch(16))
    check_planned(calls, network)


def test_interleaving_inside_the_pipeline_is_part_of_the_network(calls: Calls, monkeypatch: Any) -> None:
    requests = []

    def plan(network: Any, *inputs: Any, **_: Any) -> Any:
        requests.append((network, [item.shape for item in inputs]))
        raise InfeasibleError("stop here")

    monkeypatch.setattr(mindspore_bmpipe, "plan", plan)
    turn_on()
    inner = nn.MicroBatchInterleaved(Network(), 2)
    with pytest.raises(InfeasibleError):
        train_cell(nn.PipelineCell(inner, MICRO_BATCHES))(*batch(16))
    assert requests == [(inner, [(4, WIDTH), (4, 1)])]


@pytest.mark.parametrize("given", [True, False])
def test_the_exchange_that_mindspore_compiles_is_planned(calls: Calls, given: bool) -> None:
    """The planner's own setting may only repeat MindSpore's."""
    turn_on(enable_alltoall=not given)
    network = Network()
    mindspore_bmpipe.configure(all_to_all=given)
    try:
        message = f"all_to_all: {given} is set for the planner.*enable_alltoall={not given}; leave all_to_all out.*"
        with pytest.raises(InputError, match=message + f"or set enable_alltoall={given}"):
            train_cell(nn.PipelineCell(network, MICRO_BATCHES))(*batch())
        assert not calls.requests
        mindspore.set_auto_parallel_context(enable_alltoall=given)
        with pytest.raises(CompileStarts):
            train_cell(nn.PipelineCell(network, MICRO_BATCHES))(*batch())
    finally:
        mindspore_bmpipe.configure(all_to_all=None)
    check_planned(calls, network, **({"all_to_all": True} if given else {}))


def test_auto_parallel_always_exchanges(calls: Calls) -> None:
    mindspore.set_auto_parallel_context(pipeline_planner="bmpipe")
    parallel = AutoParallel(train_cell(parallel_nn.Pipeline(Network(), MICRO_BATCHES)))
    parallel.pipeline(stages=2)
    mindspore_bmpipe.configure(all_to_all=False)
    try:
        with pytest.raises(
            InputError, match=r"enable_alltoall=True; leave all_to_all out of the settings, and .* taken$"
        ):
            parallel(*batch())
    finally:
        mindspore_bmpipe.configure(all_to_all=None)
    assert not calls.requests


# --- when not to plan ------------------------------------------------------------------------------------------------


def test_forward_only_compiles_do_not_plan(calls: Calls) -> None:
    turn_on()
    network = Network()
    pipeline = nn.PipelineCell(network, MICRO_BATCHES)
    network.set_train()
    for cell in (pipeline, nn.WithEvalCell(pipeline, nn.MSELoss()), AutoParallel(pipeline)):
        with pytest.raises(CompileStarts):
            cell.compile(*batch())
    trainer = train_cell(pipeline)
    for phase in ("predict", "eval", "export.mindir"):
        trainer.phase = phase
        with pytest.raises(CompileStarts):
            trainer.compile(*batch())
    assert not calls.requests
    assert written(network) == {}


def test_export_does_not_plan(calls: Calls, tmp_path: Any) -> None:
    turn_on(parallel_mode="stand_alone")
    network = Network()
    with pytest.raises(CompileStarts):
        mindspore.export(
            train_cell(nn.PipelineCell(network, 4)), *batch(), file_name=str(tmp_path / "n"), file_format="MINDIR"
        )
    assert not calls.requests


def test_networks_without_a_pipeline_are_compiled_as_ever(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    turn_on()
    cell = train_cell(Network())
    for _ in range(2):
        with pytest.raises(CompileStarts):
            cell(*batch())
    assert not calls.requests
    assert capsys.readouterr().err.count("holds no PipelineCell") == 1


def test_compiled_cells_are_not_kept_alive(calls: Calls) -> None:
    turn_on()
    parallel = AutoParallel(train_cell(parallel_nn.Pipeline(Network(), MICRO_BATCHES)))
    parallel.pipeline(stages=2)
    with pytest.raises(CompileStarts):
        parallel(*batch())
    gone = weakref.ref(parallel)
    del parallel
    gc.collect()
    assert gone() is None


def test_a_second_compile_keeps_the_plan_and_says_so(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    turn_on()
    network = Network()
    cell = train_cell(nn.PipelineCell(network, MICRO_BATCHES))
    for size in (8, 8, 16, 16):
        with pytest.raises(CompileStarts):
            cell(*batch(size))
    assert len(calls.requests) == 1
    assert capsys.readouterr().err.count("keeps the plan") == 1
    with pytest.raises(CompileStarts):
        train_cell(nn.PipelineCell(network, MICRO_BATCHES))(*batch())
    assert len(calls.requests) == 1
    assert capsys.readouterr().err.count("keeps the plan") == 1


def test_each_network_gets_its_own_plan(calls: Calls) -> None:
    turn_on()
    networks = Network(), Network()
    for network in networks:
        with pytest.raises(CompileStarts):
            train_cell(nn.PipelineCell(network, MICRO_BATCHES))(*batch())
    assert [request[0] for request in calls.requests] == list(networks)
    assert calls.at_compile == [EXPECTED, EXPECTED]


def test_a_plan_written_by_hand_is_kept(calls: Calls) -> None:
    turn_on()
    network = Network()
    context.apply(network, make_plan(network, (0, 1, 1, 1, 1, 1)))
    with pytest.raises(CompileStarts):
        train_cell(nn.PipelineCell(network, MICRO_BATCHES))(*batch())
    assert not calls.requests
    assert network.blocks[0].pipeline_stage == 1


def test_compiles_made_for_planning_are_not_planned(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    turn_on()
    outer, other = Network(), Network()
    asked = []

    def plan(network: Any, *_: Any, **__: Any) -> Any:
        asked.append(network)
        with pytest.raises(CompileStarts):
            train_cell(nn.PipelineCell(other, MICRO_BATCHES))(*batch())
        return make_plan(network)

    monkeypatch.setattr(mindspore_bmpipe, "plan", plan)
    with pytest.raises(CompileStarts):
        train_cell(nn.PipelineCell(outer, MICRO_BATCHES))(*batch())
    assert asked == [outer]


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_failed_plan_stops_the_compile_and_writes_nothing(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    turn_on()
    network = Network()
    cell = train_cell(nn.PipelineCell(network, MICRO_BATCHES))
    works = mindspore_bmpipe.plan

    def plan(*_: Any, **__: Any) -> Any:
        raise InfeasibleError("needs 70 GB")

    monkeypatch.setattr(mindspore_bmpipe, "plan", plan)
    with pytest.raises(InfeasibleError, match="needs 70 GB"):
        cell(*batch())
    assert written(network) == {}
    monkeypatch.setattr(mindspore_bmpipe, "plan", works)
    with pytest.raises(CompileStarts):
        cell(*batch())
    check_planned(calls, network)


def test_one_stage_is_refused(calls: Calls) -> None:
    turn_on(pipeline_stages=1)
    with pytest.raises(InputError, match="needs pipeline_stages of at least 2, and it is 1"):
        train_cell(nn.PipelineCell(Network(), MICRO_BATCHES))(*batch())
    assert not calls.requests


def test_stages_set_by_the_user_are_refused(calls: Calls) -> None:
    turn_on()
    network = Network()
    pipeline = parallel_nn.Pipeline(network, MICRO_BATCHES, stage_config={"embedding": 0, "blocks.3": 0, "head": 1})
    with pytest.raises(InputError, match=r"'blocks.3' already has pipeline_stage 0") as caught:
        train_cell(pipeline)(*batch())
    assert "stage_config" in str(caught.value)
    assert not calls.at_compile


def test_a_batch_that_does_not_divide_is_refused(calls: Calls) -> None:
    turn_on()
    with pytest.raises(InputError, match="axis 0 of input 0 is 10, which 4 micro-batches do not divide"):
        train_cell(nn.PipelineCell(Network(), MICRO_BATCHES))(*batch(10))


def test_a_step_with_other_inputs_than_the_network_is_refused(calls: Calls) -> None:
    turn_on()
    with pytest.raises(InputError, match=r"takes 3 inputs and the network in the pipeline \(Network\) 2"):
        train_cell(nn.PipelineCell(Network(), MICRO_BATCHES)).compile(*batch(), Tensor(1.0))


def test_two_pipelines_in_one_step_are_refused(calls: Calls) -> None:
    class Both(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.PipelineCell(Network(), 2)
            self.second = nn.PipelineCell(Network(), 2)

        def construct(self, x, y):
            return self.first(x, y) + self.second(x, y)

    turn_on()
    with pytest.raises(InputError, match="holds 2 pipelines"):
        train_cell(Both())(*batch())


def test_values_other_than_tensors_pass_and_types_are_kept(calls: Calls) -> None:
    class Flexible(Network):
        def construct(self, x, y, scale=1.0, mask=None):
            return super().construct(x, y) * scale

    turn_on()
    x, y = batch()
    cell = train_cell(nn.PipelineCell(Flexible(), MICRO_BATCHES))
    with pytest.raises(CompileStarts):
        cell.compile(x.astype(mindspore.bfloat16), y.astype(mindspore.int32), 0.5, None)
    inputs = calls.requests[0][1]
    assert [item.dtype for item in inputs[:2]] == [mindspore.bfloat16, mindspore.int32]
    assert inputs[2:] == [0.5, None]


@pytest.mark.parametrize(
    ("schedule", "config", "fits"),
    [
        ("1f1b", None, True),
        ("gpipe", None, False),
        ("interleaved", None, False),
        ("gpipe", {"pipeline_interleave": True, "pipeline_scheduler": "gpipe"}, True),
        ("1f1b", {"pipeline_interleave": True, "pipeline_scheduler": "gpipe"}, False),
        ("interleaved", {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"}, True),
        ("zero_bubble_v", {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}, True),
    ],
)
def test_the_plan_must_be_for_the_schedule_that_is_compiled(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, schedule: str, config: Any, fits: bool
) -> None:
    turn_on(**({} if config is None else {"pipeline_config": config}))
    monkeypatch.setattr(mindspore_bmpipe, "plan", lambda network, *_, **__: make_plan(network, schedule=schedule))
    network = Network()
    with pytest.raises(CompileStarts if fits else InputError) as caught:
        train_cell(nn.PipelineCell(network, MICRO_BATCHES))(*batch())
    if not fits:
        assert f"made for the schedule {schedule!r}" in str(caught.value)
        assert written(network) == {}


def test_with_the_real_planner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing stands in for the planner: the plan is the one `plan` gives for the same request, and it is written."""
    mindspore.reset_auto_parallel_context()
    context_key.register()
    own_compile = _CellGraphExecutor.compile

    def stop_unless_tracing(self: Any, cell: Any, *args: Any, phase: str = "predict", **options: Any) -> Any:
        if phase.startswith("export"):
            return own_compile(self, cell, *args, phase=phase, **options)
        raise CompileStarts

    monkeypatch.setattr(_CellGraphExecutor, "compile", stop_unless_tracing)
    turn_on()
    network, other = Network(), Network()
    try:
        with pytest.raises(CompileStarts):
            train_cell(nn.PipelineCell(network, MICRO_BATCHES))(*batch())
        assert mindspore.get_auto_parallel_context("pipeline_stages") == 2
    finally:
        mindspore.reset_auto_parallel_context()
    plan = mindspore_bmpipe.plan(other, *batch(2), stages=2, micro_batches=MICRO_BATCHES)
    context.apply(other, plan)
    assert {unit.stage for unit in plan.units} == {0, 1}
    assert written(network) == written(other)
    assert "bmpipe plan of Network: 2 stages, 4 micro-batches" in capsys.readouterr().err


SCRIPT = """
import mindspore, sys
import numpy as np
from apply_networks import RECOMPUTE, Network, batch, make_plan, written
import mindspore_bmpipe
from mindspore_bmpipe import context, context_key
from mindspore_bmpipe.graph.preserve import preserved_state

def plan(network, *inputs, **_):
    # Compiles the network as a trace does, in the middle of MindSpore's own way to its compile.
    with preserved_state(network):
        mindspore.export(network, *inputs, file_name=sys.argv[1], file_format="MINDIR")
    return make_plan(network, changes=RECOMPUTE)

mindspore_bmpipe.plan = plan
context.tables.render_plan = lambda plan: "the table"
mindspore.set_context(mode=mindspore.GRAPH_MODE)
mindspore.set_auto_parallel_context(
    parallel_mode="semi_auto_parallel", pipeline_stages=2, device_num=2, pipeline_planner="bmpipe"
)
network = Network()
pipeline = mindspore.nn.PipelineCell(network, 4)
optimizer = mindspore.nn.SGD(pipeline.trainable_params(), 0.1)
data = mindspore.dataset.NumpySlicesDataset(tuple(item.asnumpy() for item in batch())).batch(8)
try:
    mindspore.Model(pipeline, optimizer=optimizer).train(1, data, dataset_sink_mode=False)
except RuntimeError as error:
    print("stopped by:", str(error).splitlines()[0])
print(sorted(written(network).items()))
print([mindspore.get_auto_parallel_context(key) for key in ("parallel_mode", "pipeline_stages", "device_num")])
"""


def test_the_whole_way_to_mindspores_own_refusal_of_pipelines_on_the_processor(tmp_path: Path) -> None:
    """No stop in between: the plan is written, and what ends the script is MindSpore's compiler, which needs Ascend."""
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "network")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tests), str(tests.parent))), "GLOG_v": "4"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert "stopped by: " in done.stdout, done.stderr
    assert "backend: CPU" in done.stdout
    assert str(sorted(EXPECTED.items())) in done.stdout
    assert "['semi_auto_parallel', 2, 2]" in done.stdout
    assert (tmp_path / "network.mindir").stat().st_size > 1000
    assert "the table" in done.stderr
