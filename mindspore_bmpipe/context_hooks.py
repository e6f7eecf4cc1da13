"""The private MindSpore names through which `pipeline_planner` enters MindSpore, and nothing else.

Every name of MindSpore that is not documented and that :mod:`mindspore_bmpipe.context` depends on is used here only.
`tests/test_context_hooks.py` checks each of them against the installed version.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import mindspore
from mindspore import context as mindspore_context
from mindspore import nn
from mindspore._c_expression import GradOperation_
from mindspore.graph.api import _JitExecutor
from mindspore.parallel import _auto_parallel_context as parallel_context
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import GradAccumulation, MicroBatchInterleaved, PipelineCell
from mindspore.train.dataset_helper import _DataWrapper

Compile = Callable[..., Any]
"""A compile method: takes the cell or executor, then the arguments of the compiled call."""
Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""What runs before a compile: takes the cell or compiled function, positional and keyword arguments."""

PIPELINE_CELLS: tuple[type, ...] = (nn.PipelineCell, PipelineCell)
"""MindSpore's pipeline cells; `mindspore.parallel.nn.Pipeline` is a subclass of the second."""
PIPELINE_MARK = "pipeline_end"
"""Attribute of the additions in a pipeline cell; the compiler recognises pipelines by it, whatever the class."""
SPLITTING_CELLS: tuple[tuple[type, str], ...] = (
    (nn.MicroBatchInterleaved, "interleave_num"),
    (MicroBatchInterleaved, "interleave_num"),
    (nn.GradAccumulationCell, "micro_size"),
    (GradAccumulation, "micro_size"),
)
"""Cells that cut the batch before calling their network, with the attribute that says into how many parts."""
OPTIMIZER_CELLS: tuple[type, ...] = (nn.Optimizer, nn.TrainOneStepCell)
"""Cells that only training networks hold."""

_ORIGINAL = "_bmpipe_original"


def add_context_key(key: str, setter: Callable[[Any], None], getter: Callable[[], Any]) -> None:
    """Make `key` known to `set_auto_parallel_context` and `get_auto_parallel_context`.

    The tables are shared by all copies of these functions, so earlier `from mindspore.context import ...` see the key.
    """
    parallel_context._set_auto_parallel_context_func_map[key] = setter
    parallel_context._get_auto_parallel_context_func_map[key] = getter


def remove_context_key(key: str) -> None:
    """Undo :func:`add_context_key`."""
    parallel_context._set_auto_parallel_context_func_map.pop(key, None)
    parallel_context._get_auto_parallel_context_func_map.pop(key, None)


def context_value(key: str) -> Any:
    """What the getter of a context key gives; `None` when the key is unknown."""
    getter = parallel_context._get_auto_parallel_context_func_map.get(key)
    return None if getter is None else getter()


def call_after_reset(action: Callable[[], None]) -> None:
    """Run `action` after each `reset_auto_parallel_context()` of the user.

    `AutoParallel` resets the context after each of its own compiles by another reference to the same function; only the
    name that the documented function looks up is replaced, so those resets do not count.
    """
    original = _unwrapped(mindspore_context._reset_auto_parallel_context)

    def reset() -> None:
        original()
        action()

    setattr(reset, _ORIGINAL, (reset, original))
    mindspore_context._reset_auto_parallel_context = reset


def forget_reset_action() -> None:
    """Undo :func:`call_after_reset`."""
    mindspore_context._reset_auto_parallel_context = _unwrapped(mindspore_context._reset_auto_parallel_context)


def call_before_compile(before: Before) -> None:
    """Run `before` ahead of each compile of a cell or of a function under `mindspore.jit`.

    `Cell.compile` is the last place that `Model`, calls of cells, and `.compile(...)` share before MindSpore stores the
    arguments in its executor and switches the context to what `AutoParallel` holds; `export` does not pass it.
    Functions under `jit` share `_JitExecutor.compile` in the same way.
    """
    forget_compile_action()
    cell_compile: Compile = nn.Cell.compile
    jit_compile: Compile = _JitExecutor.compile

    def compile_cell(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        before(self, args, kwargs)
        return cell_compile(self, *args, **kwargs)

    def compile_function(self: Any, method_name: str, *args: Any, phase: str = "", **kwargs: Any) -> Any:
        # Only exports of functions name a phase.
        if not phase:
            before(_compiled_by(self), args, kwargs)
        return jit_compile(self, method_name, *args, phase=phase, **kwargs)

    for replacement, original in ((compile_cell, cell_compile), (compile_function, jit_compile)):
        replacement.__doc__ = original.__doc__
        setattr(replacement, _ORIGINAL, (replacement, original))
    nn.Cell.compile = compile_cell
    _JitExecutor.compile = compile_function


def forget_compile_action() -> None:
    """Undo :func:`call_before_compile`: MindSpore's own functions are back, unless someone has wrapped ours."""
    nn.Cell.compile = _unwrapped(nn.Cell.compile)
    _JitExecutor.compile = _unwrapped(_JitExecutor.compile)


def is_gradient(value: Any) -> bool:
    """Whether the object makes gradient functions: `GradOperation` and what `grad` and `value_and_grad` hold."""
    return isinstance(value, GradOperation_)


def gradient_functions() -> tuple[Any, ...]:
    """Public functions and classes whose use inside a function makes it differentiate."""
    return (mindspore.grad, mindspore.value_and_grad, mindspore.ops.GradOperation)


def is_pipeline(cell: nn.Cell) -> bool:
    """Whether the cell runs its `network` once per micro-batch in a pipeline."""
    if isinstance(cell, PIPELINE_CELLS):
        return True
    additions = vars(cell).get("add_list") or ()
    return (
        isinstance(vars(cell).get("micro_size"), int)
        and isinstance(cell.name_cells().get("network"), nn.Cell)
        and any(PIPELINE_MARK in getattr(addition, "attrs", ()) for addition in additions)
    )


def splits(cell: nn.Cell) -> int:
    """Into how many parts the cell cuts the batch before it calls its network; 1 for ordinary cells."""
    return next((int(getattr(cell, name)) for kind, name in SPLITTING_CELLS if isinstance(cell, kind)), 1)


def pipeline_settings(holder: AutoParallel | None) -> tuple[int, bool, str]:
    """Stages, interleave and scheduler in force: those of the `AutoParallel` cell, or of the context without one."""
    if holder is not None:
        return holder.get_pipeline_stages(), holder._pipeline_interleave, holder._pipeline_scheduler
    return (
        mindspore.get_auto_parallel_context("pipeline_stages"),
        mindspore.get_auto_parallel_context("pipeline_interleave"),
        mindspore.get_auto_parallel_context("pipeline_scheduler"),
    )


def all_to_all(holder: AutoParallel | None) -> bool:
    """Whether MindSpore changes layouts by `AlltoAll`, by the `AutoParallel` cell, or by the context without one."""
    if holder is not None:
        return bool(holder._enable_alltoall)
    return bool(mindspore.get_auto_parallel_context("enable_alltoall"))


def sunk_inputs(cell: nn.Cell) -> list[tuple[tuple[int, ...], Any]] | None:
    """Shapes and types of the inputs a data-sinking cell fetches by itself; `None` for cells that take arguments."""
    if not isinstance(cell, _DataWrapper):
        return None
    attributes = cell.get_next.attrs
    return [(tuple(shape), dtype) for shape, dtype in zip(attributes["shapes"], attributes["types"], strict=True)]


def is_auto_parallel(cell: nn.Cell) -> bool:
    """Whether the cell is an `AutoParallel`, whose `network` may also be a function."""
    return isinstance(cell, AutoParallel)


def held_values(cell: nn.Cell) -> Iterator[Any]:
    """Everything a cell may call: its attributes and children."""
    yield from vars(cell).values()
    yield from cell.name_cells().values()


def _compiled_by(executor: _JitExecutor) -> Any:
    """The cell whose `construct`, or else the function or bound method, that the executor compiles."""
    owner, function = executor.obj, executor.fn
    if owner is None:
        return function
    if isinstance(owner, nn.Cell) and function.__name__ == "construct":
        return owner
    return types.MethodType(function, owner)


def _unwrapped(function: Any) -> Any:
    # functools.wraps copies attributes, so a wrapper that someone put around ours carries the mark as well.
    replacement, original = getattr(function, _ORIGINAL, (None, function))
    return original if replacement is function else function
