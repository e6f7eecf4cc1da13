"""The planners by name."""

from __future__ import annotations

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner import (
    adapipe,
    autopipe,
    bmpipe,
    dapple,
    even,
    exhaustive,
    galvatron_even,
    megatron_even_full,
    megatron_even_selective,
    megatron_manual,
    merak,
    pipedream,
    sapp,
)
from mindspore_bmpipe.planner.base import Planner, Solution, SolveLimits
from mindspore_bmpipe.problem import Problem

_REGISTRY: dict[str, Planner] = {}


def normalise(name: str) -> str:
    """The spelling under which a name is stored: lower case, underscores."""
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def register(name: str, planner: Planner) -> None:
    """Add a planner under its normalised name.

    Raises:
        InputError: the name is taken.
    """
    key = normalise(name)
    if key in _REGISTRY:
        raise InputError(f"planner {key} is already registered; choose another name")
    _REGISTRY[key] = planner


def registered() -> tuple[str, ...]:
    """Names of all planners, sorted."""
    return tuple(sorted(_REGISTRY))


def lookup(name: str) -> Planner:
    """The planner of a name in any spelling.

    Raises:
        InputError: there is none; the message lists those that exist.
    """
    planner = _REGISTRY.get(normalise(name))
    if planner is None:
        raise InputError(f"planner: unknown planner {name!r}; there are {', '.join(registered())}")
    return planner


def solve(problem: Problem, planner: str = "bmpipe", limits: SolveLimits | None = None) -> Solution:
    """Plan a problem.

    Args:
        problem: what to plan.
        planner: registered name, in any spelling.
        limits: how much work to do; the defaults of `SolveLimits` if `None`.

    Raises:
        InputError: unknown planner, or a problem the planner does not take.
    """
    return lookup(planner)(problem, limits or SolveLimits())


for _module in (
    adapipe,
    autopipe,
    bmpipe,
    dapple,
    even,
    exhaustive,
    galvatron_even,
    megatron_even_full,
    megatron_even_selective,
    megatron_manual,
    merak,
    pipedream,
    sapp,
):
    register(_module.NAME, _module.plan)
