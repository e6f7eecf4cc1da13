"""The Python interface: ``plan``, ``apply``, ``load_plan``, ``configure``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mindspore_bmpipe.config import Config, load_config, parse_config
from mindspore_bmpipe.costs.logical import graph_of_one_rank
from mindspore_bmpipe.costs.network import network_costs
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.trace import Axes, trace
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.planning import make_plan
from mindspore_bmpipe.subjects import subject_of_network

CONFIG_VARIABLE = "BMPIPE_CONFIG"
"""Environment variable that names a CONFIG file with defaults."""

_configured: dict[str, Any] = {}


def configure(**options: Any) -> None:
    """Set defaults for every later plan of this process, the context's included.

    Args:
        options: CONFIG keys (``hardware``, ``memory_limit``, ``recompute_options``, ``time_limit``, ...). A value of
            ``None`` removes the default. They win over the file named by ``BMPIPE_CONFIG`` and lose to arguments.

    Raises:
        InputError: an unknown key or a wrong value; nothing is changed then.
    """
    changed = {**_configured, **options}
    parse_config({key: value for key, value in changed.items() if value is not None}, "configure")
    unknown = [key for key in options if key not in {field.name for field in fields(Config)}]
    if unknown:
        parse_config(dict.fromkeys(unknown, 0), "configure")
    _configured.clear()
    _configured.update({key: value for key, value in changed.items() if value is not None})


def effective_config(**options: Any) -> Config:
    """The settings in force: arguments over :func:`configure` over the file named by ``BMPIPE_CONFIG``.

    Raises:
        InputError: the file cannot be read, or a key or value is wrong.
    """
    given = {**_configured, **{key: value for key, value in options.items() if value is not None}}
    config = parse_config(given, "plan")
    path = os.environ.get(CONFIG_VARIABLE)
    if path:
        base = load_config(path)
        merged = {name: getattr(base, name) for name in (field.name for field in fields(Config))}
        merged.update({name: getattr(config, name) for name in given})
        config = Config(**merged)
    return config


def plan(
    network: Any,
    *inputs: Any,
    stages: int | None = None,
    micro_batches: int | None = None,
    hardware: str | None = None,
    units: Sequence[str] | None = None,
    symbols: Axes | None = None,
    assume_elementwise: bool = False,
    planner: str = "bmpipe",
    **options: Any,
) -> Plan:
    """Plan pipeline stages and recomputation of a live network. The network is not changed.

    Args:
        network: cell whose call returns the loss.
        inputs: tensors of one micro-batch, all data-parallel ranks together.
        stages: pipeline stages.
        micro_batches: micro-batches per step.
        hardware: name of a machine under ``configs/hardware`` or path to a YAML file.
        units: paths of cells to use as units instead of those found.
        symbols: axes that vary; see :func:`mindspore_bmpipe.graph.trace.trace`.
        assume_elementwise: price primitives without a cost rule as element-wise instead of refusing them.
        planner: name of a registered planner.
        options: further CONFIG keys.

    Raises:
        InputError: the network or a setting cannot be used.
        InfeasibleError: no plan fits in memory; the message says per stage what would.
        NoPlanFoundError: the time limit ended before any plan was found.
    """
    config = effective_config(stages=stages, micro_batches=micro_batches, hardware=hardware, **options)
    missing = [name for name in ("stages", "micro_batches") if getattr(config, name) is None]
    if missing:
        raise InputError(f"plan: {', '.join(missing)} is missing; give it as an argument or with configure()")
    graph = graph_of_one_rank(trace(network, *inputs, symbols=symbols), config, assume_elementwise)
    costs = network_costs(graph, units, assume_elementwise)
    return make_plan(subject_of_network(costs, config), planner)
