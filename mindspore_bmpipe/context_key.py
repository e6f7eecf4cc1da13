"""The context key `pipeline_planner` itself: known to MindSpore from import on, the pass behind it loaded when set.

Registering happens at the end of `import mindspore`, possibly in the middle of the import of any of our modules. It
must therefore need none of them but the hooks.
"""

from __future__ import annotations

import importlib
import threading

from mindspore_bmpipe import context_hooks as hooks

CONTEXT_KEY = "pipeline_planner"
"""Key of `mindspore.set_auto_parallel_context`."""
PLANNER = "bmpipe"
"""The value that switches the planner on."""

_PASS = "mindspore_bmpipe.context"

_planner: str | None = None
_lock = threading.RLock()


def register() -> None:
    """Make `pipeline_planner` a key of `mindspore.set_auto_parallel_context` and of its `get_` and `reset_` twins.

    Until the key is set MindSpore compiles through its own unchanged functions. Calling this again changes nothing.
    """
    before = hooks.context_value(CONTEXT_KEY)
    hooks.add_context_key(CONTEXT_KEY, set_planner, get_planner)
    hooks.call_after_reset(lambda: set_planner(None))
    set_planner(before)


def unregister() -> None:
    """Take the key away again and leave MindSpore as it was."""
    set_planner(None)
    hooks.forget_reset_action()
    hooks.remove_context_key(CONTEXT_KEY)


def set_planner(value: str | None) -> None:
    """Set the context key: `"bmpipe"` plans networks before their first training compile, `None` or `""` does not.

    Raises:
        ValueError: any other value.
    """
    global _planner  # noqa: PLW0603 -- MindSpore's context is one per process too
    if value not in (PLANNER, None, ""):
        raise ValueError(
            f"The context configuration parameter '{CONTEXT_KEY}' only support '{PLANNER}', None and '', "
            f"but got the value : {value!r}."
        )
    with _lock:
        was_set = _planner is not None
        _planner = value or None
        if _planner is not None:
            hooks.call_before_compile(importlib.import_module(_PASS).before_compile)
            return
        hooks.forget_compile_action()
        if was_set:
            importlib.import_module(_PASS).forget_networks()


def get_planner() -> str | None:
    """Value of the context key: `"bmpipe"`, or `None` when unset."""
    return _planner
