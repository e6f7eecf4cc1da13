"""What python-mip does not offer of its solvers: options by name, and what a call did. Its private names stay here."""

from __future__ import annotations

from collections.abc import Callable

import mip

_WITHOUT_COUNT = 100
"""Iterations that a call of a solver that does not tell them counts as."""


def set_seed(model: mip.Model, seed: int) -> None:
    """Seed the solver's random numbers; python-mip hands its own setting on to CBC only."""
    set_option = _method(model, "_set_int_option_value")
    if set_option is None:
        model.seed = seed
    else:
        set_option("random_seed", seed)


def skip_heuristics(model: mip.Model) -> None:
    """Spend no time on looking for solutions, where most likely there are none. A hint: not every solver takes it."""
    set_option = _method(model, "_set_double_option_value")
    if set_option is not None:
        set_option("mip_heuristic_effort", 0.0)


def iterations(model: mip.Model) -> int:
    """Iterations of the simplex method in the last call, or a fixed number where the solver does not tell."""
    count = _method(model, "_get_int_info_value")
    return _WITHOUT_COUNT if count is None else max(0, count("simplex_iteration_count"))


def nodes_visited(model: mip.Model) -> int:
    """Branch-and-bound nodes of the last call; 0 where the solver does not tell."""
    library = getattr(model.solver, "_lib", None)
    count = getattr(library, "Highs_getInt64InfoValue", None)
    if count is None:
        return 0
    value = mip.highs.ffi.new("int64_t*")
    failed = count(model.solver._model, b"mip_node_count", value)
    return 0 if failed else max(0, int(value[0]))


def _method(model: mip.Model, name: str) -> Callable[..., int] | None:
    return getattr(model.solver, name, None)
