"""The check that a private MindSpore name is still what the project takes it for."""

from __future__ import annotations

import importlib
import inspect


def require_name(module: str, name: str, parameters: set[str] | None, where: str) -> None:
    """Fail unless ``module`` has ``name``, taking at least ``parameters`` where these are given."""
    value = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
        assert value is not None, f"{module}.{name} is gone; {where}"
    if parameters is not None:
        taken = set(inspect.signature(value).parameters)
        assert parameters <= taken, f"{module}.{name} takes {taken}; {where}"
