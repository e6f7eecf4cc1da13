"""Orders of every schedule against what MindSpore compiles (`tools/compiled_order.py` writes the stored files)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspore_bmpipe.config import MINDSPORE_SCHEDULES
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.schedule import dependency_graph, format_schedule, make_schedule

FILES = sorted((Path(__file__).parent / "data" / "compiled_orders").glob("*.txt"))
NAME = re.compile(r"(\w+)_p(\d+)_v(\d+)_m(\d+)(?:_k(\d+))?")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_order_is_the_compiled_one(path: Path) -> None:
    match = NAME.fullmatch(path.stem)
    assert match is not None
    kind, (stages, chunks, micro_batches, parts) = match.group(1), map(int, match.groups("1")[1:])
    compiled = "\n".join(path.read_text(encoding="utf-8").splitlines()[1:])
    if "refused" not in compiled:
        schedule = make_schedule(kind, stages, chunks, micro_batches, parts)
        assert format_schedule(schedule) == compiled
        assert dependency_graph(schedule).size > 0
    elif micro_batches > 1:
        # One micro-batch is refused for every pipeline, by `PipelineCell` and not by the schedule.
        with pytest.raises(InputError, match=r"micro_batches|sequence_parts"):
            make_schedule(kind, stages, chunks, micro_batches, parts)


def test_every_schedule_has_stored_orders() -> None:
    assert {match.group(1) for path in FILES if (match := NAME.fullmatch(path.stem))} == set(MINDSPORE_SCHEDULES)
