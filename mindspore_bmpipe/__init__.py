"""Plans pipeline stages and activation recomputation of MindSpore networks together.

    import mindspore as ms, mindspore_bmpipe as bmpipe
    ms.set_auto_parallel_context(pipeline_stages=8, pipeline_planner="bmpipe")

Names are loaded on first use, so that planning a layer table does not wait for MindSpore.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Imported before the functions of the same names are defined: importing a submodule later would replace them.
import mindspore_bmpipe.apply
import mindspore_bmpipe.plan  # noqa: F401
from mindspore_bmpipe import context_registration
from mindspore_bmpipe.errors import (
    BmpipeError,
    InfeasibleError,
    InputError,
    NoPlanFoundError,
    UnknownPrimitiveError,
)
from mindspore_bmpipe.plan import Plan, load_plan

if TYPE_CHECKING:
    from mindspore_bmpipe.graph.cell_graph import CellGraph

__all__ = [
    "BmpipeError", "InfeasibleError", "InputError", "NoPlanFoundError", "Plan", "UnknownPrimitiveError", "apply",
    "configure", "load_plan", "plan", "trace",
]  # fmt: skip


def plan(network: Any, *inputs: Any, **options: Any) -> Plan:
    """Plan a live network; see :func:`mindspore_bmpipe.api.plan` for all arguments and errors."""
    result: Plan = _load("api").plan(network, *inputs, **options)
    return result


def apply(network: Any, plan: Plan) -> None:
    """Write a plan onto the cells of a network; see :func:`mindspore_bmpipe.apply.cells.apply`."""
    _load("apply.cells").apply(network, plan)


def configure(**options: Any) -> None:
    """Set defaults of every later plan of this process; see :func:`mindspore_bmpipe.api.configure`."""
    _load("api").configure(**options)


def trace(network: Any, *inputs: Any, **options: Any) -> CellGraph:
    """Trace loss and gradients of a network; see :func:`mindspore_bmpipe.graph.trace.trace`."""
    result: CellGraph = _load("graph.trace").trace(network, *inputs, **options)
    return result


def _load(module: str) -> Any:
    """Modules that need MindSpore are imported on first use, so that layer tables are planned without it."""
    return importlib.import_module(f"{__name__}.{module}")


context_registration.install()
