"""Writing a plan back to where training reads it: cells here, launchers' own formats in the writers.

The two functions for cells are loaded on first use: the writers, and whoever only plans, do without MindSpore.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["applied_plan", "apply"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("mindspore_bmpipe.apply.cells"), name)
