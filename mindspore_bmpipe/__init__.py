"""Plans pipeline stages and activation recomputation of MindSpore networks together.

    import mindspore as ms, mindspore_bmpipe as bmpipe
    ms.set_auto_parallel_context(pipeline_stages=8, pipeline_planner="bmpipe")

Names are loaded on first use, so that planning a layer table does not wait for MindSpore.
"""

from __future__ import annotations

import importlib
from typing import Any

from mindspore_bmpipe import context_registration

_EXPORTS = {
    "plan": "mindspore_bmpipe.api",
    "configure": "mindspore_bmpipe.api",
    "apply": "mindspore_bmpipe.apply",
    "load_plan": "mindspore_bmpipe.plan",
    "Plan": "mindspore_bmpipe.plan",
    "trace": "mindspore_bmpipe.graph.trace",
    "BmpipeError": "mindspore_bmpipe.errors",
    "InputError": "mindspore_bmpipe.errors",
    "InfeasibleError": "mindspore_bmpipe.errors",
    "NoPlanFoundError": "mindspore_bmpipe.errors",
    "UnknownPrimitiveError": "mindspore_bmpipe.errors",
}

__all__ = sorted(_EXPORTS)

context_registration.install()


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
