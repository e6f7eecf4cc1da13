"""SOURCE arguments: what the command line and the interface accept as the thing to plan."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspore_bmpipe.config import Config
from mindspore_bmpipe.costs.differentiate import differentiate
from mindspore_bmpipe.costs.logical import graph_of_one_rank, sharding_of
from mindspore_bmpipe.costs.network import NetworkCosts, network_costs
from mindspore_bmpipe.errors import BmpipeError, InputError
from mindspore_bmpipe.graph.cell_graph import CellGraph, Sharding
from mindspore_bmpipe.graph.exported import exported_graph
from mindspore_bmpipe.graph.mindir import load_module
from mindspore_bmpipe.graph.recorded import Trace, graph_of, recorded_trace
from mindspore_bmpipe.layer_table import load_layer_table
from mindspore_bmpipe.subjects import Subject, subject_of_layers, subject_of_network

_DEGREES = ("data_parallel", "tensor_parallel", "context_parallel", "expert_parallel")

SOURCE_HELP = (
    "a .mindir file (from 'bmpipe trace' or mindspore.export), a layer table (.json), or pkg.module:factory, a "
    "function that returns (network, inputs)"
)
"""What SOURCE may be, for help texts and errors."""


def is_factory(source: str) -> bool:
    """Whether a source names a Python function."""
    module, separator, function = source.partition(":")
    return bool(separator) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_subject(
    source: str,
    config: Config,
    settings: Mapping[str, Any] | None = None,
    units: Sequence[str] | None = None,
    assume_elementwise: bool = False,
) -> Subject:
    """What ``source`` asks to plan, with costs evaluated for ``config``.

    Raises:
        InputError: the source cannot be read or does not fit the settings.
    """
    if not is_factory(source) and source.endswith(".json"):
        if settings or units:
            raise InputError(
                f"{source}: --set and --units need a network; a layer table has neither settings nor cells"
            )
        return subject_of_layers(load_layer_table(source), Path(source).name, config)
    return subject_of_network(load_costs(source, settings, units, assume_elementwise, config), config)


def load_costs(
    source: str,
    settings: Mapping[str, Any] | None = None,
    units: Sequence[str] | None = None,
    assume_elementwise: bool = False,
    config: Config | None = None,
) -> NetworkCosts:
    """Costs of the network that ``source`` names; see :func:`load_graph`."""
    return network_costs(load_graph(source, settings, assume_elementwise, config), units, assume_elementwise)


def load_graph(
    source: str,
    settings: Mapping[str, Any] | None = None,
    assume_elementwise: bool = False,
    config: Config | None = None,
) -> CellGraph:
    """Forward and backward graph of a ``.mindir`` file or a factory's network.

    Args:
        source: the file or function.
        settings: settings for the function.
        assume_elementwise: take primitives without a derivative rule as element-wise.
        config: settings whose parallel degrees ask for the graph of one rank; a function that has parameters of their
            names (`tensor_parallel` and so on) gets them. By default the graph is that of the source itself.

    Raises:
        InputError: no such file or function, a damaged file, a network that does not compile, or strategies that do
            not fit the settings.
        UnknownPrimitiveError: an exported file, or a network that ranks share, holds primitives without a derivative
            rule.
    """
    if config is not None and is_factory(source) and (sharding := sharding_of(config)).is_shared:
        settings = with_degrees(source, settings or {}, sharding)
    graph = _read_graph(source, settings, assume_elementwise)
    return graph if config is None else graph_of_one_rank(graph, config, assume_elementwise)


def _read_graph(source: str, settings: Mapping[str, Any] | None, assume_elementwise: bool) -> CellGraph:
    if is_factory(source):
        return graph_of(record_factory(source, settings or {}))
    if settings:
        raise InputError(f"{source}: --set needs pkg.module:factory; the sizes of a file are fixed")
    if source.endswith((".yaml", ".yml")):
        raise InputError(f"{source}: training YAMLs cannot be read by this version; give {SOURCE_HELP}")
    if source.endswith(".json"):
        raise InputError(f"{source}: a layer table has no graph, its costs are the numbers in it; give a network")
    if not source.endswith(".mindir"):
        raise InputError(f"{source}: not a source; give {SOURCE_HELP}")
    module = load_module(source)
    if module.metadata is not None:
        return graph_of(recorded_trace(Path(source).read_bytes(), module, source))
    return differentiate(exported_graph(module, Path(source).name), assume_elementwise=assume_elementwise)


def record_factory(source: str, settings: Mapping[str, Any]) -> Trace:
    """Build the network of ``pkg.module:factory`` without allocating weights and trace it.

    Raises:
        InputError: the module or function does not exist, fails, or returns something else.
    """
    network, inputs = build_factory(source, settings)
    # MindSpore is imported only where a network is built: layer tables are planned without it.
    trace = importlib.import_module("mindspore_bmpipe.graph.trace")
    with importing_from_here():
        recorded: Trace = trace.record(network, *inputs)
        return recorded


def with_degrees(source: str, settings: Mapping[str, Any], sharding: Sharding) -> dict[str, Any]:
    """Settings for a factory, with the degrees of parallelism that it has parameters for.

    Raises:
        InputError: the settings say other degrees.
    """
    taken = _parameters(source)
    given = dict(settings)
    for name in _DEGREES:
        degree = getattr(sharding, name)
        if given.get(name, degree) != degree:
            raise InputError(
                f"--set {name}={given[name]} contradicts the {name} of {degree} that is traced or planned for; leave "
                "it out, or trace for that"
            )
        if name in taken:
            given[name] = degree
    return given


def _parameters(source: str) -> set[str]:
    """Names of the parameters of a factory; none if it does not exist, which whoever builds it reports."""
    module, _, function = source.partition(":")
    with importing_from_here():
        try:
            return set(inspect.signature(getattr(importlib.import_module(module), function)).parameters)
        except (ImportError, AttributeError, TypeError, ValueError):
            return set()


def build_factory(source: str, settings: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Network and inputs of ``pkg.module:factory``, without allocated weights.

    Raises:
        InputError: the module or function does not exist, fails, or returns something else.
    """
    module_name, _, function_name = source.partition(":")
    with importing_from_here():
        try:
            factory = getattr(importlib.import_module(module_name), function_name)
        except ImportError as error:
            raise InputError(
                f"{source}: cannot import {module_name} ({error}); run from the folder that holds it"
            ) from error
        except AttributeError as error:
            raise InputError(f"{source}: module {module_name} has no function {function_name}") from error
        no_weights = importlib.import_module("mindspore.nn.utils").no_init_parameters
        try:
            with no_weights():
                built = factory(**settings)
        except BmpipeError:
            raise
        except Exception as error:
            raise InputError(
                f"{source}: building the network failed with {type(error).__name__}: {error}; settings were "
                f"{dict(settings)}"
            ) from error
        if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], (tuple, list))):
            raise InputError(f"{source}: must return (network, inputs) with inputs a tuple, got {type(built).__name__}")
        return built[0], tuple(built[1])


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings of ``--set key=value``; numbers, ``true``, ``false`` and JSON lists are read as such, the rest as text.

    Raises:
        InputError: no ``=``, an empty name, or a name given twice.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name.isidentifier():
            raise InputError(f"--set {pair}: write name=value, for example --set layers=32")
        if name in settings:
            raise InputError(f"--set {pair}: {name} is given twice")
        try:
            settings[name] = json.loads(text)
        except json.JSONDecodeError:
            settings[name] = {"True": True, "False": False, "None": None}.get(text, text)
    return settings


@contextlib.contextmanager
def importing_from_here() -> Iterator[None]:
    """Factories are found in the working folder, as ``python -m`` finds modules."""
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added:
            sys.path.remove(here)
