"""Finding the pipeline inside what is being compiled, and whether that is a training step."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspore import nn

from mindspore_bmpipe import context_hooks as hooks
from mindspore_bmpipe.errors import InputError

_MOST_OBJECTS = 20_000
"""The search gives up after so many objects outside the pipeline; train cells and step functions hold a few dozen."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline found in a compiled cell or function."""

    cell: nn.Cell
    """The pipeline cell."""
    network: nn.Cell
    """The network it runs once per micro-batch."""
    micro_batches: int
    """Micro-batches per step."""
    splits: int
    """Into how many parts cells outside the pipeline cut the batch before it arrives, at least 1."""
    auto_parallel: weakref.ref[nn.Cell] | None
    """The `AutoParallel` cell that holds the pipeline's settings; `None` when the context holds them. It may be the
    very cell under which the search is remembered, and must not be kept alive by that.
    """


@dataclass(frozen=True)
class Search:
    """What a compiled cell or function holds."""

    pipeline: Pipeline | None
    """The pipeline; `None` without one."""
    trains: bool
    """Whether gradients or an optimizer are seen outside the pipeline."""


def search(root: Any) -> Search:
    """Look through a cell or function, and what it can call, for a pipeline and for signs of training.

    The network inside a pipeline cell is not looked into.

    Raises:
        InputError: two pipelines with different networks.
    """
    pipelines: dict[int, Pipeline] = {}
    trains = False
    seen: set[int] = set()
    queue: deque[tuple[Any, int, Any]] = deque([(root, 1, None)])
    while queue and len(seen) < _MOST_OBJECTS:
        item, splits, auto_parallel = queue.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        trains = trains or hooks.is_gradient(item) or isinstance(item, hooks.OPTIMIZER_CELLS) or _uses_gradients(item)
        if isinstance(item, nn.Cell) and hooks.is_pipeline(item):
            network, micro_batches = item.network, int(item.micro_size)
            pipelines.setdefault(id(network), Pipeline(item, network, micro_batches, splits, auto_parallel))
            continue
        if isinstance(item, nn.Cell):
            splits *= hooks.splits(item)
            auto_parallel = weakref.ref(item) if hooks.is_auto_parallel(item) else auto_parallel
        queue.extend((inner, splits, auto_parallel) for inner in _called(item))
    if len(pipelines) > 1:
        names = ", ".join(type(pipeline.network).__name__ for pipeline in pipelines.values())
        raise InputError(
            f"pipeline_planner: {_name(root)} holds {len(pipelines)} pipelines, around {names}; one plan covers one "
            "pipeline, so plan each with mindspore_bmpipe.plan and write it with mindspore_bmpipe.apply"
        )
    return Search(next(iter(pipelines.values()), None), trains)


def _called(item: Any) -> Iterator[Any]:
    """What the item may call and is worth looking into."""
    if isinstance(item, nn.Cell):
        yield from (value for value in hooks.held_values(item) if _is_searched(value))
        if not _is_mindspores(type(item)):
            yield from _called(getattr(type(item), "construct", None))
    elif isinstance(item, functools.partial):
        yield from (value for value in (item.func, *item.args, *item.keywords.values()) if _is_searched(value))
    elif isinstance(item, types.MethodType):
        yield item.__func__
        yield from (value for value in _used_of_self(item) if _is_searched(value))
    elif isinstance(item, types.FunctionType):
        contents = []
        for cell in item.__closure__ or ():
            try:
                contents.append(cell.cell_contents)
            except ValueError:
                continue  # a variable that has no value yet
        if not _is_mindspores(item):
            contents.extend(item.__globals__[name] for name in _names(item.__code__) if name in item.__globals__)
        for value in contents:
            yield from (part for part in _parts(value) if _is_searched(part))


def _used_of_self(method: types.MethodType) -> Iterator[Any]:
    """What a bound method may use of the object it belongs to: an evaluation method leaves the optimizer alone."""
    owner, function = method.__self__, inspect.unwrap(method.__func__)
    if not isinstance(function, types.FunctionType):
        return
    held = {**getattr(owner, "__dict__", {}), **(owner.name_cells() if isinstance(owner, nn.Cell) else {})}
    for name in _names(function.__code__):
        if name in held:
            yield from _parts(held[name])
        elif isinstance(defined := getattr(type(owner), name, None), types.FunctionType):
            yield types.MethodType(defined, owner)


def _parts(value: Any) -> Iterator[Any]:
    """The value, or its items when it is a short sequence of callables."""
    if isinstance(value, (list, tuple)):
        yield from value
    else:
        yield value


def _is_searched(value: Any) -> bool:
    return isinstance(value, (nn.Cell, functools.partial, types.MethodType, types.FunctionType)) or hooks.is_gradient(
        value
    )


def _is_mindspores(item: Any) -> bool:
    return str(getattr(item, "__module__", "")).split(".")[0] == "mindspore"


def _names(code: types.CodeType) -> Iterator[str]:
    """Global and attribute names that a function and the functions defined in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _uses_gradients(item: Any) -> bool:
    """Whether a function of the user, or a cell's `construct`, calls MindSpore's gradient functions by name."""
    function = getattr(type(item), "construct", None) if isinstance(item, nn.Cell) else item
    if not isinstance(function, types.FunctionType) or _is_mindspores(function):
        return False
    wanted = hooks.gradient_functions()
    names = set(_names(function.__code__))
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [value for value in values if isinstance(value, types.ModuleType) and _is_mindspore_module(value)]
    attributes = [getattr(module, name, None) for module in modules for name in names]
    return any(value is target for value in (*values, *attributes) for target in wanted)


def _is_mindspore_module(module: types.ModuleType) -> bool:
    return module.__name__.split(".")[0] == "mindspore"


def _name(root: Any) -> str:
    return type(root).__name__ if isinstance(root, nn.Cell) else str(getattr(root, "__qualname__", root))
