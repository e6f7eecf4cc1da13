"""Tracing without leaving a mark: what a compile for reading graphs changes in MindSpore is put back.

The private MindSpore names used for that are used in this module only; `tests/test_context_preserve.py` checks them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, nn
from mindspore.graph.api import _cell_graph_executor, cells_compile_cache
from mindspore.parallel import _auto_parallel_context as parallel_context

# `mindspore.common.seed` as an attribute is a function of the same name.
_seed_module: Any = importlib.import_module("mindspore.common.seed")

_STAND_ALONE = {"parallel_mode": "stand_alone", "pipeline_stages": 1, "parameter_broadcast": False}
"""Context in which a network is compiled with global shapes and without collectives."""

_PIPELINE_CONFIG = ("pipeline_interleave", "pipeline_scheduler")
"""Keys that are read one by one and set together as `pipeline_config`."""

_BATCH_KEYS = ("dataset_strategy", "full_batch")
"""Keys of which each changes the other; the second is the finer one."""

_NOT_SAVED = ("auto_parallel_search_mode", "full_batch_is_set", "pipeline_planner")
"""Context keys left alone: an old name of `search_mode` that warns when read, a flag nobody can set, our own key."""


@dataclass(frozen=True)
class _CellState:
    """Attributes of one cell."""

    cell: nn.Cell
    """The cell."""
    attributes: dict[str, Any]
    """Name -> value, for every attribute in the cell's dictionary."""
    contents: dict[str, Any]
    """Name -> copy, for the attributes that are dictionaries, lists or sets."""


@contextlib.contextmanager
def preserved_state(*networks: nn.Cell) -> Iterator[None]:
    """Switch MindSpore to stand-alone mode for compiling `networks`, and put everything back at the end.

    Put back, also after an error: the auto-parallel context, the execution mode, the seeds of MindSpore, its operators,
    numpy and Python, and every attribute of every cell and the names of the parameters of `networks`. Graphs compiled
    meanwhile are released. Not put back: values of weights, which a compile does not change.

    Within the context the networks may be wrapped, but not run.
    """
    parallel = _parallel_settings()
    mode = mindspore.get_context("mode")
    seeds = _seed_module._GLOBAL_SEED, dict(_seed_module._KERNEL_SEED)
    numpy_state, python_state = np.random.get_state(), random.getstate()
    cells = [_cell_state(cell) for cell in _distinct_cells(networks)]
    names = [(parameter, parameter.name) for network in networks for parameter in network.get_parameters()]
    compiled = {key: set(phases) for key, phases in cells_compile_cache.items() if phases}
    try:
        _switch_to_stand_alone(parallel)
        yield
    finally:
        _release_graphs(compiled)
        for state in cells:
            _restore_cell(state)
        for parameter, name in names:
            _restore_name(parameter, name)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        _seed_module._GLOBAL_SEED = seeds[0]
        _seed_module._KERNEL_SEED.clear()
        _seed_module._KERNEL_SEED.update(seeds[1])
        if mindspore.get_context("mode") != mode:
            mindspore.set_context(mode=mode)
        _restore_parallel_settings(parallel)


def _parallel_settings() -> dict[str, Any]:
    getters = parallel_context._get_auto_parallel_context_func_map
    settings = {key: copy.deepcopy(getter()) for key, getter in getters.items() if key not in _NOT_SAVED}
    settings["pipeline_segments"] = parallel_context.auto_parallel_context().get_pipeline_segments()
    return settings


def _switch_to_stand_alone(saved: dict[str, Any]) -> None:
    """Change only what differs: setting a key, even to the same value, marks it as set by the user."""
    setters = parallel_context._set_auto_parallel_context_func_map
    for key, value in _STAND_ALONE.items():
        if saved[key] != value:
            setters[key](value)
    # Set by a dataset strategy as well; MindSpore refuses it in stand-alone mode.
    if mindspore.get_auto_parallel_context("full_batch"):
        setters["full_batch"](False)


def _restore_parallel_settings(saved: dict[str, Any]) -> None:
    setters = parallel_context._set_auto_parallel_context_func_map
    found = _parallel_settings()
    changed = [key for key, value in saved.items() if found.get(key) != value]
    if any(key in _PIPELINE_CONFIG for key in changed):
        setters["pipeline_config"]({key: saved[key] for key in _PIPELINE_CONFIG})
    if any(key in _BATCH_KEYS for key in changed):
        for key in _BATCH_KEYS:
            if mindspore.get_auto_parallel_context(key) != saved[key]:
                setters[key](saved[key])
    for key in changed:
        # MindSpore cannot be told to forget its fusion list, and an empty list is never what a compile sets.
        if key not in (*_PIPELINE_CONFIG, *_BATCH_KEYS) and saved[key] != []:
            setters[key](saved[key])


def _distinct_cells(networks: tuple[nn.Cell, ...]) -> list[nn.Cell]:
    return list({id(cell): cell for network in networks for _, cell in network.cells_and_names()}.values())


def _cell_state(cell: nn.Cell) -> _CellState:
    attributes = dict(vars(cell))
    containers = {name: value for name, value in attributes.items() if isinstance(value, (dict, list, set))}
    return _CellState(cell, attributes, {name: copy.copy(value) for name, value in containers.items()})


def _restore_cell(state: _CellState) -> None:
    # Assignments through the cell would register parameters and children again.
    attributes = vars(state.cell)
    for name in [name for name in attributes if name not in state.attributes]:
        del attributes[name]
    attributes.update(state.attributes)
    for name, content in state.contents.items():
        container = attributes[name]
        if isinstance(container, list):
            container[:] = content
        else:
            container.clear()
            container.update(content)


def _restore_name(parameter: Parameter, name: str) -> None:
    if parameter.name != name:
        parameter.name = name


def _release_graphs(before: dict[int, set[str]]) -> None:
    """Release what has been compiled since; the graph of a large network holds memory that training needs."""
    for key, phases in list(cells_compile_cache.items()):
        since = set(phases or ()) - before.get(key, set())
        if since:
            _cell_graph_executor._graph_executor.del_net_res(None, since)
            phases.difference_update(since)
