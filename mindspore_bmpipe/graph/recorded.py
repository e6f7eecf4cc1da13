"""What one tracing of a network gave, as data and as a ``.mindir`` file.

The file is an ordinary MindIR model of the joint graph at one size. The cell tree, the weights and the graphs at other
sizes, from which symbols are solved, travel in it as text that MindSpore ignores.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import CellGraph, CellInfo, ParameterInfo, Sharding
from mindspore_bmpipe.graph.inline import FlatModule, build_cell_graph, inline_module
from mindspore_bmpipe.graph.mindir import Module, TensorType, decode_module, is_fixed, with_metadata
from mindspore_bmpipe.graph.sharded import (
    gradient_groups,
    sharded_parameters,
    synchronisation_note,
    without_synchronisation,
)
from mindspore_bmpipe.graph.symbols import Mismatch, symbolic_module

TRACE_FORMAT = "bmpipe-trace/1"


@dataclass(frozen=True)
class Trace:
    """Everything one tracing of a network gave; what a traced file stores."""

    name: str
    """Class of the network."""
    graphs: tuple[bytes, ...]
    """MindIR of the joint graph at each of :attr:`sizes`."""
    sizes: tuple[Mapping[str, int], ...]
    """Value of each symbol in each graph; one empty mapping when nothing varies."""
    base: Mapping[str, int]
    """Value of each symbol in the inputs the user gave."""
    cells: tuple[CellInfo, ...]
    """Cell tree."""
    parameters: Mapping[str, ParameterInfo]
    """Weights."""
    notes: tuple[str, ...]
    """What a reader should know."""
    module: Module
    """The graphs decoded and solved for the symbols."""
    sharding: Sharding | None = None
    """Ranks that the graphs were compiled for; ``None`` if for one device that runs everything."""


def solved_module(modules: Sequence[Module], sizes: Sequence[Mapping[str, int]]) -> Module:
    """The module of a trace, in symbols where it was traced at several sizes.

    Raises:
        Mismatch: the sizes do not explain how the traces differ.
    """
    return symbolic_module(modules, sizes) if len(modules) > 1 else modules[0]


def graph_of(recorded: Trace) -> CellGraph:
    """Build the graph of a recorded trace.

    Raises:
        InputError: data-dependent control flow, or a size that depends on values.
    """
    flat = inline_module(recorded.module, recorded.cells)
    _require_fixed_sizes(flat)
    symbols = dict(recorded.base) if len(recorded.graphs) > 1 else {}
    parameters = dict(recorded.parameters)
    if recorded.sharding is None:
        return build_cell_graph(recorded.name, flat, recorded.cells, parameters, symbols, recorded.notes)
    groups = gradient_groups(flat, parameters)
    flat, synchronised = without_synchronisation(flat)
    parameters = sharded_parameters(parameters, recorded.module.parameters, groups, recorded.sharding)
    notes = (*recorded.notes, *synchronisation_note(flat, synchronised))
    graph = build_cell_graph(recorded.name, flat, recorded.cells, parameters, symbols, notes)
    return replace(graph, sharding=recorded.sharding)


def _require_fixed_sizes(flat: FlatModule) -> None:
    for operation in flat.operations:
        if not all(is_fixed(flat.tensors[output].type) for output in operation.outputs):
            raise InputError(
                f"{operation.scope} ({operation.primitive}): a size that depends on values, so its cost differs from "
                "step to step; make the size a Python value, or keep that cell out of the planned network"
            )


def traced_file(recorded: Trace) -> bytes:
    """Bytes of a ``.mindir`` file that holds a trace."""
    document = {
        "format": TRACE_FORMAT,
        "name": recorded.name,
        "sizes": [dict(size) for size in recorded.sizes],
        "base": dict(recorded.base),
        "cells": [[cell.path, cell.class_name, list(cell.parameters), cell.is_container] for cell in recorded.cells],
        "parameters": [
            [info.name, list(info.type.shape), info.type.dtype, info.trainable] for info in recorded.parameters.values()
        ],
        "notes": list(recorded.notes),
        "sharding": None if recorded.sharding is None else astuple(recorded.sharding),
        "graphs": [base64.b64encode(zlib.compress(data)).decode() for data in recorded.graphs[1:]],
    }
    return with_metadata(recorded.graphs[0], json.dumps(document))


def recorded_trace(data: bytes, module: Module, where: str) -> Trace:
    """The trace in a file written by :func:`traced_file`; ``module`` is what the file decodes to.

    Raises:
        InputError: the text is damaged or of another version.
    """
    remedy = "write the file again with 'bmpipe trace'"
    try:
        document = json.loads(module.metadata or "")
        if document["format"] != TRACE_FORMAT:
            raise InputError(
                f"{where}: its trace is {document['format']!r}, this version reads {TRACE_FORMAT!r}; {remedy}"
            )
        others = [zlib.decompress(base64.b64decode(text)) for text in document["graphs"]]
        sizes = tuple(document["sizes"])
        return Trace(
            name=document["name"],
            graphs=(data, *others),
            sizes=sizes,
            module=solved_module([module, *(decode_module(other, where) for other in others)], sizes),
            base=document["base"],
            cells=tuple(CellInfo(path, kind, tuple(names), lists) for path, kind, names, lists in document["cells"]),
            parameters={
                name: ParameterInfo(name, TensorType(tuple(shape), dtype), trainable)
                for name, shape, dtype, trainable in document["parameters"]
            },
            notes=tuple(document["notes"]),
            sharding=Sharding(*document["sharding"]) if document.get("sharding") else None,
        )
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error, Mismatch) as error:
        raise InputError(f"{where}: the trace stored in it is damaged ({error!r}); {remedy}") from error
