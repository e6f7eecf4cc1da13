"""Registering the context key with MindSpore without importing MindSpore for those who do not use it.

This module must not import MindSpore, directly or indirectly: the command line reads layer tables without it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types
import warnings
from collections.abc import Sequence
from typing import Any

_TARGET = "mindspore"
_CONTEXT = "mindspore_bmpipe.context_key"
_MARK = "_bmpipe_registers_context"

_lock = threading.Lock()


def install() -> None:
    """Register the context key now if MindSpore is imported, otherwise as soon as it is.

    May be called any number of times. When a later `import mindspore` fails, its error passes unchanged and the next
    successful import registers.

    Raises:
        ImportError: MindSpore is imported already and lacks a name that the registration needs.
    """
    with _lock:
        if _TARGET not in sys.modules and not any(getattr(finder, _MARK, False) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    # Looked at once more: another thread may have begun the import before our finder was in place.
    if _TARGET not in sys.modules:
        return
    # Waits while another thread is still importing it.
    importlib.import_module(_TARGET)
    _register()


def _register() -> None:
    importlib.import_module(_CONTEXT).register()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds MindSpore the usual way and has its loader register the key at the end."""

    def __init__(self) -> None:
        setattr(self, _MARK, True)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Spec of `mindspore` with our loader around the usual one; `None` for everything else."""
        if fullname != _TARGET:
            return None
        spec = _find_spec_elsewhere(fullname, path, target, self)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)
        return spec


def _find_spec_elsewhere(
    fullname: str, path: Sequence[str] | None, target: types.ModuleType | None, asking: _Finder
) -> importlib.machinery.ModuleSpec | None:
    for finder in tuple(sys.meta_path):
        find_spec = getattr(finder, "find_spec", None)
        spec = None if finder is asking or find_spec is None else find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None


class _Loader(importlib.abc.Loader):
    """The usual loader in all respects, except that the key is registered after the module has run."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """What the usual loader creates."""
        created: types.ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module, then register. A failed registration warns: it must not make MindSpore unusable."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        try:
            _register()
        except Exception as error:
            warnings.warn(
                f"mindspore_bmpipe could not register its context key 'pipeline_planner' ({type(error).__name__}: "
                f"{error}); MindSpore works without it",
                RuntimeWarning,
                stacklevel=2,
            )
