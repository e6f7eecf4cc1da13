"""Plans of layer tables made by hand, for tests of launchers' formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.layer_table import parse_layer_table
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.planner import Solution, Status
from mindspore_bmpipe.planning import plan_of, pose
from mindspore_bmpipe.problem import Decision, evaluate
from mindspore_bmpipe.subjects import subject_of_layers

LayerRow = Mapping[str, int]
"""Option -> layers of one virtual stage that have it."""

OPTIONS = ("none", "select", "comm", "both", "full", "odd")


def table_plan(
    rows: Sequence[LayerRow],
    stages: int | None = None,
    chunks: int = 1,
    schedule: str = "1f1b",
    micro_batches: int | None = None,
    apart: bool = False,
) -> Plan:
    """A plan with these layers on each virtual stage, between the units `words`, `table` and `head`.

    Args:
        rows: layers of each virtual stage.
        stages: pipeline stages; by default one for each row.
        chunks: chunks per stage.
        schedule: schedule.
        micro_batches: micro-batches a step; by default four for each stage.
        apart: put `table` on the second virtual stage.
    """
    stages = stages or len(rows)
    options = [
        {"name": name, "saved_bytes": 10 - place, "extra_backward_ms": place} for place, name in enumerate(OPTIONS)
    ]
    unit = {"forward_ms": 1.0, "backward_ms": 2.0, "static_bytes": 1}
    table = parse_layer_table(
        {
            "format": "bmpipe-layers/1",
            "units": [
                {"name": "words", "count": 1, **unit, "options": options[:1]},
                {"name": "table", "count": 1, **unit, "options": options[:1]},
                {"name": "body", "count": sum(sum(row.values()) for row in rows), **unit, "options": options},
                {"name": "head", "count": 1, **unit, "options": options[:1]},
            ],
        }
    )
    config = parse_config(
        {
            "stages": stages, "chunks": chunks, "schedule": schedule, "memory_limit": "1GB",
            "micro_batches": micro_batches or 4 * stages,
        }
    )  # fmt: skip
    subject = subject_of_layers(table, "by hand", config)
    problem = pose(subject)
    last = len(rows) - 1
    single = [tuple((int(virtual == place),) for virtual in range(len(rows))) for place in (0, int(apart), last)]
    body = tuple(tuple(row.get(name, 0) for name in OPTIONS) for row in rows)
    decision = Decision((single[0], single[1], body, single[2]))
    solution = Solution(
        planner="hand", status=Status.FEASIBLE, decision=decision,
        step_time_ms=evaluate(problem, decision).step_time_ms, bound_ms=None, gap=None, solve_seconds=0.0,
        needed_bytes=None, message="",
    )  # fmt: skip
    return plan_of(subject, problem, solution)
