"""The pass behind the context key `pipeline_planner`: plans a network just before its first training compile."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn
from rich.console import Console

import mindspore_bmpipe
from mindspore_bmpipe import context_hooks as hooks
from mindspore_bmpipe.api import effective_config
from mindspore_bmpipe.apply.cells import applied_plan, apply
from mindspore_bmpipe.context_key import CONTEXT_KEY, PLANNER, get_planner
from mindspore_bmpipe.context_search import Pipeline, Search, search
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.report import tables

_FORWARD_PHASES = ("predict", "eval", "export", "prefill", "increment")
"""Starts of the phases in which MindSpore compiles a network without its gradients."""

_INTERLEAVED = ("interleaved", "interleaved_less_memory", "1f1b")
"""Schedules a plan may be made for when MindSpore compiles its 1f1b scheduler with interleave."""


@dataclass
class _Seen:
    """What is known about a compiled cell or function."""

    search: Search
    """What it holds."""
    inputs: set[tuple[Any, ...]] = field(default_factory=set)
    """Shapes and types of the inputs it has been compiled for since it was planned."""


class _Pass(threading.local):
    """Whether this thread is planning right now; compiles made for planning are not planned themselves."""

    running = False


_pass = _Pass()
_lock = threading.RLock()
_seen: weakref.WeakKeyDictionary[Any, dict[str, _Seen]] = weakref.WeakKeyDictionary()


def forget_networks() -> None:
    """Forget which networks were planned; the key was unset."""
    _seen.clear()


def before_compile(root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Plan the network in the pipeline of `root`, if this is a training compile and it has no plan yet."""
    if get_planner() is None or _pass.running or _is_forward_phase(root):
        return
    seen = _look_up(root)
    pipeline = seen.search.pipeline
    if not seen.search.trains:
        return
    if pipeline is None:
        _warn_without_pipeline(root, seen)
        return
    inputs = _step_inputs(root, args, kwargs)
    signature = tuple(_describe(value) for value in inputs)
    if signature in seen.inputs:
        return
    # Two threads that train one network must not both plan it.
    with _lock:
        if applied_plan(pipeline.network) is None:
            plan = _plan(pipeline, inputs)
            _check_schedule(pipeline, plan)
            text = tables.render_plan(plan)
            apply(pipeline.network, plan)
        else:
            text = f"bmpipe: {type(pipeline.network).__name__} is compiled again and keeps the plan written before"
    seen.inputs.add(signature)
    _say(text)


def _look_up(root: Any) -> _Seen:
    """What is known about the compiled cell or function; the search is made once for each."""
    # A bound method is a new object at every access; what it is bound to stays.
    owner, name = (root.__self__, root.__qualname__) if isinstance(root, types.MethodType) else (root, "")
    try:
        known = _seen.setdefault(owner, {})
    except TypeError:
        return _Seen(search(root))  # neither hashable nor weakly referable: searched at every compile
    if name not in known:
        known[name] = _Seen(search(root))
    return known[name]


def _plan(pipeline: Pipeline, inputs: list[Any]) -> Plan:
    """Ask the planner for a plan of the pipeline's network, on the inputs of one micro-batch."""
    stages, _, _ = _settings(pipeline)
    if stages <= 1:
        raise InputError(
            f"{CONTEXT_KEY}={PLANNER!r} needs pipeline_stages of at least 2, and it is {stages}; set pipeline_stages "
            "in set_auto_parallel_context, or stages in AutoParallel.pipeline, to the number of pipeline stages"
        )
    exchanges = _exchanges(pipeline)
    micro_batch = _micro_batch(pipeline, inputs)
    with _planning():
        return mindspore_bmpipe.plan(
            pipeline.network,
            *micro_batch,
            stages=stages,
            micro_batches=pipeline.micro_batches,
            **({"all_to_all": True} if exchanges else {}),
        )


def _exchanges(pipeline: Pipeline) -> bool:
    """Whether MindSpore changes layouts by `AlltoAll` where that does.

    Raises:
        InputError: the settings of the planner say otherwise.
    """
    compiled, planned = hooks.all_to_all(_holder(pipeline)), effective_config().all_to_all
    if planned is not None and planned != compiled:
        is_fixed = pipeline.auto_parallel is not None
        other = "" if is_fixed else f", or set enable_alltoall={planned} in set_auto_parallel_context"
        raise InputError(
            f"all_to_all: {planned} is set for the planner, and MindSpore is set to compile with enable_alltoall="
            f"{compiled}; leave all_to_all out of the settings, and MindSpore's own is taken{other}"
        )
    return compiled


def _settings(pipeline: Pipeline) -> tuple[int, bool, str]:
    """Stages, interleave and scheduler that MindSpore will compile the pipeline with."""
    return hooks.pipeline_settings(_holder(pipeline))


def _holder(pipeline: Pipeline) -> Any:
    """The `AutoParallel` cell that holds the pipeline's settings, if there is one."""
    return None if pipeline.auto_parallel is None else pipeline.auto_parallel()


@contextlib.contextmanager
def _planning() -> Iterator[None]:
    _pass.running = True
    try:
        yield
    finally:
        _pass.running = False


def _is_forward_phase(root: Any) -> bool:
    cell = root.__self__ if isinstance(root, types.MethodType) else root
    return isinstance(cell, nn.Cell) and str(cell.phase).startswith(_FORWARD_PHASES)


def _step_inputs(root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The inputs of the compiled step in order; for a cell that fetches its data, tensors of that shape and type."""
    sunk = hooks.sunk_inputs(root) if isinstance(root, nn.Cell) else None
    if sunk is not None:
        unknown = [shape for shape, _ in sunk if any(size < 0 for size in shape)]
        if unknown:
            raise InputError(
                f"{CONTEXT_KEY}: the dataset gives inputs of unknown shape {unknown[0]}; batch it to fixed shapes "
                "(drop_remainder=True)"
            )
        return [_empty(shape, dtype) for shape, dtype in sunk]
    if not kwargs:
        return list(args)
    function = root.construct if isinstance(root, nn.Cell) else root
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return [*bound.args, *bound.kwargs.values()]


def _micro_batch(pipeline: Pipeline, inputs: list[Any]) -> list[Any]:
    """What the network gets for one micro-batch: every tensor cut along its first axis, other values as they are.

    The pipeline cell slices the logical inputs in just this way. Values do not matter to a graph compile.

    Raises:
        InputError: the step takes other inputs than the network, or the batch does not divide.
    """
    positional = [
        parameter
        for parameter in inspect.signature(pipeline.network.construct).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    is_open = any(
        parameter.kind is parameter.VAR_POSITIONAL
        for parameter in inspect.signature(pipeline.network.construct).parameters.values()
    )
    needed = sum(parameter.default is parameter.empty for parameter in positional)
    if len(inputs) < needed or (len(inputs) > len(positional) and not is_open):
        takes = f"{needed}" if needed == len(positional) else f"{needed} to {len(positional)}"
        raise InputError(
            f"{CONTEXT_KEY}: the compiled step takes {len(inputs)} inputs and the network in the pipeline "
            f"({type(pipeline.network).__name__}) {takes}, so which ones it gets is unknown; plan it yourself with "
            "mindspore_bmpipe.plan, write the plan with mindspore_bmpipe.apply, and the compile keeps it"
        )
    parts = pipeline.micro_batches * pipeline.splits
    return [_slice(value, index, parts) for index, value in enumerate(inputs)]


def _slice(value: Any, index: int, parts: int) -> Any:
    if not isinstance(value, Tensor) or not value.shape:
        return value
    batch, *rest = value.shape
    if batch % parts:
        raise InputError(
            f"{CONTEXT_KEY}: axis 0 of input {index} is {batch}, which {parts} micro-batches do not divide; change the "
            "batch size or micro_size"
        )
    return _empty((batch // parts, *rest), value.dtype)


def _empty(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A tensor on the host; making it runs nothing on the device."""
    return Tensor(np.zeros(shape, np.float32), dtype=dtype)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    return type(value).__name__


def _check_schedule(pipeline: Pipeline, plan: Plan) -> None:
    """Refuse a plan made for another schedule than the one MindSpore is set to compile.

    Raises:
        InputError: the schedules differ.
    """
    _, interleave, scheduler = _settings(pipeline)
    planned = plan.settings.get("schedule")
    if planned is None:
        return
    # The other schedulers have the same names here and there.
    compiled = _INTERLEAVED if interleave and scheduler == "1f1b" else (scheduler,)
    if planned not in compiled:
        raise InputError(
            f"the plan is made for the schedule {planned!r}, and MindSpore is set to compile {compiled[0]!r} "
            f"(pipeline_interleave={interleave}, pipeline_scheduler={scheduler!r}); set schedule with "
            "mindspore_bmpipe.configure, or pipeline_config in set_auto_parallel_context (or AutoParallel.pipeline), "
            "so that both agree"
        )


def _warn_without_pipeline(root: Any, seen: _Seen) -> None:
    """Say once that a training step of several stages has nothing to plan."""
    if seen.inputs or mindspore.get_auto_parallel_context("pipeline_stages") <= 1:
        return
    seen.inputs.add(())
    _say(
        f"bmpipe: {type(root).__name__} holds no PipelineCell, so it is compiled without a plan; wrap the network in "
        "mindspore.nn.PipelineCell or mindspore.parallel.nn.Pipeline"
    )


def _say(text: str) -> None:
    Console(file=sys.stderr).print(text, markup=False, highlight=False, soft_wrap=True)
