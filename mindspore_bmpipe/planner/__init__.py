"""Planners: from a `Problem` to a `Solution`."""

from mindspore_bmpipe.planner.base import Planner, Solution, SolveLimits, Status, StoppedBy
from mindspore_bmpipe.planner.registry import lookup, register, registered, solve

__all__ = ["Planner", "Solution", "SolveLimits", "Status", "StoppedBy", "lookup", "register", "registered", "solve"]
