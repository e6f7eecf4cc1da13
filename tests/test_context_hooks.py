"""Every private MindSpore name that the context key, the pass, and writing back depend on, checked on this version."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import mindspore
import pytest
from mindspore import nn, ops

VERSION = f"MindSpore {mindspore.__version__} has changed what mindspore_bmpipe builds on: "

SIGNATURES = {
    "mindspore.parallel._auto_parallel_context:_reset_auto_parallel_context": "()",
    "mindspore.context:reset_auto_parallel_context": "()",
    "mindspore.nn.cell:Cell.compile": "(self, *args, **kwargs)",
    "mindspore.nn.cell:Cell.compile_and_run": "(self, *args, **kwargs)",
    "mindspore.nn.cell:Cell.cells_and_names": "(self, cells=None, name_prefix='')",
    "mindspore.nn.cell:Cell.parameters_and_names": "(self, name_prefix='', expand=True)",
    "mindspore.graph.api:_JitExecutor.compile": "(self, method_name, *args, phase='', **kwargs)",
    "mindspore.train.dataset_helper:_generate_dataset_sink_mode_net": (
        "(network, dataset_shapes, dataset_types, queue_name)"
    ),
    "mindspore.ops.primitive:Primitive.recompute": "(self, mode=True)",
}


def find(name: str) -> Any:
    module, _, path = name.partition(":")
    value = importlib.import_module(module)
    for part in path.split("."):
        assert hasattr(value, part), f"{VERSION}{module} has no {path}"
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    found = str(inspect.signature(find(name)))
    assert found == SIGNATURES[name], f"{VERSION}{name} takes {found}, expected {SIGNATURES[name]}"


def test_context_functions_look_keys_up_in_the_shared_tables() -> None:
    module = importlib.import_module("mindspore.parallel._auto_parallel_context")
    for verb in ("set", "get"):
        table = getattr(module, f"_{verb}_auto_parallel_context_func_map", None)
        assert isinstance(table, dict), f"{VERSION}the table of '{verb}' keys is gone"
        assert callable(table["pipeline_stages"]), f"{VERSION}the '{verb}' table does not hold functions"
        function = getattr(module, f"_{verb}_auto_parallel_context")
        names = inspect.unwrap(function).__code__.co_names
        assert f"_{verb}_auto_parallel_context_func_map" in names, f"{VERSION}'{verb}' does not use its table"


def test_the_documented_reset_looks_its_private_twin_up_when_called() -> None:
    reset = find("mindspore.context:reset_auto_parallel_context")
    assert "_reset_auto_parallel_context" in reset.__code__.co_names, f"{VERSION}reset no longer calls its twin"
    internal = find("mindspore.parallel._utils:_clear_auto_parallel_context")
    assert internal.__globals__ is not reset.__globals__, f"{VERSION}AutoParallel resets through mindspore.context"


def test_calls_of_cells_compile_through_cell_compile() -> None:
    names = find("mindspore.nn.cell:Cell.compile_and_run").__code__.co_names
    assert "compile" in names, f"{VERSION}Cell.compile_and_run does not call Cell.compile"
    assert "compile_and_run" in nn.Cell.__call__.__code__.co_names, f"{VERSION}Cell.__call__ compiles another way"


def test_auto_parallel_keeps_its_pipeline_settings_where_they_are_read() -> None:
    kind = find("mindspore.parallel.auto_parallel:AutoParallel")
    cell = kind(nn.Dense(1, 1))
    cell.pipeline(stages=3, interleave=True, scheduler="gpipe")
    found = cell.get_pipeline_stages(), cell._pipeline_interleave, cell._pipeline_scheduler
    assert found == (3, True, "gpipe"), f"{VERSION}AutoParallel.pipeline stores {found}"


def test_pipeline_cells_mark_their_additions() -> None:
    from mindspore.parallel.nn import Pipeline

    for kind in (nn.PipelineCell, Pipeline):
        cell = kind(nn.Dense(1, 1), 2)
        marks = [addition.attrs.get("pipeline_end") for addition in cell.add_list]
        assert marks == [0, 1], f"{VERSION}{kind.__name__} marks its additions {marks}"
        assert (cell.micro_size, type(cell.network)) == (2, nn.Dense), f"{VERSION}{kind.__name__} has other attributes"


def test_splitting_cells_say_how_often_they_split() -> None:
    from mindspore_bmpipe import context_hooks

    for kind, name in context_hooks.SPLITTING_CELLS:
        assert getattr(kind(nn.Dense(1, 1), 3), name, None) == 3, f"{VERSION}{kind.__name__} has no {name}"


def test_sinking_cells_hold_the_shapes_and_types_of_their_data() -> None:
    make = find("mindspore.train.dataset_helper:_generate_dataset_sink_mode_net")
    attributes = make(nn.Dense(1, 1), [[4, 1]], [mindspore.float32], "queue").get_next.attrs
    found = [tuple(shape) for shape in attributes["shapes"]], list(attributes["types"])
    assert found == ([(4, 1)], [mindspore.float32]), f"{VERSION}GetNext holds {found}"


def test_gradient_functions_hold_gradient_objects() -> None:
    from mindspore_bmpipe import context_search

    for make in (mindspore.grad, mindspore.value_and_grad):
        assert context_search.search(make(nn.Dense(1, 1))).trains, f"{VERSION}{make.__name__} hides what it does"
    assert context_search.search(nn.ForwardValueAndGrad(nn.Dense(1, 1))).trains, f"{VERSION}GradOperation has changed"


def test_cells_record_stages_and_recompute_where_they_are_read() -> None:
    cell = nn.Dense(1, 1, activation="tanh")
    assert "_pipeline_stage" not in vars(cell), f"{VERSION}an unset pipeline_stage is stored"
    cell.pipeline_stage, cell.pipeline_segment = 2, 1
    found = vars(cell).get("_pipeline_stage"), vars(cell).get("_pipeline_segment")
    assert found == (2, 1), f"{VERSION}stage and segment are stored as {found}"
    assert vars(cell).get("_has_config_recompute") is False, f"{VERSION}the recompute flag has changed"
    cell.recompute()
    flags = [vars(item).get("_has_config_recompute") for item in (cell, cell.activation)]
    assert flags == [True, True], f"{VERSION}recompute() flags the cell and its child {flags}"
    assert cell.get_flags().get("output_recompute") is False, f"{VERSION}recompute() sets other flags"
    assert "output_recompute" not in cell.activation.get_flags(), f"{VERSION}recompute() sets flags on children"
    names = dict(cell.cells_and_names())
    assert "_recompute_cell" in names, f"{VERSION}the cell that recompute() adds has another name"


def test_primitives_record_recompute_where_it_is_read() -> None:
    primitive = ops.Softmax()
    assert "recompute" not in primitive.attrs, f"{VERSION}an unset primitive recompute is stored"
    primitive.recompute(True)
    assert primitive.attrs["recompute"] is True, f"{VERSION}Primitive.recompute stores something else"
    with pytest.raises(TypeError):
        primitive.recompute(True)
