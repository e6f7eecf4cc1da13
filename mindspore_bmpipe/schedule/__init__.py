"""Pipeline schedules: orders of actions as data, their exact times, and their activations in flight."""

from mindspore_bmpipe.schedule.actions import BACKWARD, FORWARD, KINDS, WEIGHT, WHOLE, Action, format_order, parse_order
from mindspore_bmpipe.schedule.graph import DependencyGraph, dependency_graph
from mindspore_bmpipe.schedule.memory import Row, extreme_rows, in_flight_rows, pareto_maximal
from mindspore_bmpipe.schedule.registry import ScheduleKind, lookup, make_schedule, register, registered
from mindspore_bmpipe.schedule.schedule import (
    Schedule,
    format_schedule,
    looped_placement,
    parse_schedule,
    releasing_kinds,
    splits_backward,
    validate_schedule,
)
from mindspore_bmpipe.schedule.simulate import (
    PathCounts,
    TimedAction,
    critical_actions,
    critical_paths,
    step_times,
    step_with_ends,
    timeline,
)
from mindspore_bmpipe.schedule.usage import MemoryPoint, StageIdle, memory_curve, stage_idle

__all__ = [
    "BACKWARD",
    "FORWARD",
    "KINDS",
    "WEIGHT",
    "WHOLE",
    "Action",
    "DependencyGraph",
    "MemoryPoint",
    "PathCounts",
    "Row",
    "Schedule",
    "ScheduleKind",
    "StageIdle",
    "TimedAction",
    "critical_actions",
    "critical_paths",
    "dependency_graph",
    "extreme_rows",
    "format_order",
    "format_schedule",
    "in_flight_rows",
    "lookup",
    "looped_placement",
    "make_schedule",
    "memory_curve",
    "pareto_maximal",
    "parse_order",
    "parse_schedule",
    "register",
    "registered",
    "releasing_kinds",
    "splits_backward",
    "stage_idle",
    "step_times",
    "step_with_ends",
    "timeline",
    "validate_schedule",
]
