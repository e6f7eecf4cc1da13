"""Planning problems by name: published ones, and families of random ones by seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from mindspore_bmpipe.config import load_config
from mindspore_bmpipe.layer_table import load_layer_table
from mindspore_bmpipe.problem import Option, Problem, Run
from mindspore_bmpipe.problem_config import problem_from_config
from mindspore_bmpipe.schedule import in_flight_rows, make_schedule

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"

BODY = (("none", 852, 0.0), ("select", 767, 0.08), ("comm", 535, 0.25), ("both", 300, 0.5))
"""Options of a unit: name, saved megabytes, extra backward as a share of the forward."""


def published(name: str) -> Problem:
    """A case under `tests/data`."""
    table = load_layer_table(DATA / f"{name}.layers.json")
    config = load_config(DATA / f"{name}.pipeline.yaml")
    return problem_from_config(table.runs, config, table.stage_constant_bytes, table.transfer_ms)


def family(
    schedule: str, stages: int, chunks: int, micro_batches: int, units: int, kinds: int, room: float, seed: int = 0
) -> Problem:
    """Units of several kinds in order, between an embedding and a head.

    Args:
        schedule: name of the schedule.
        stages: stages.
        chunks: chunks per stage.
        micro_batches: micro-batches.
        units: units in all.
        kinds: kinds of units between the ends.
        room: memory of a stage between that of recomputing most (0) and nothing (1) in an even split.
        seed: seed of the kinds.
    """
    rng = random.Random(seed)
    left = units - 2
    counts = [left // kinds + (number < left % kinds) for number in range(kinds)]
    runs = [Run("embedding", 1, 10.0, 20.0, 2 * 10**9, (Option("none", 0, 0.0),))]
    for number, count in enumerate(counts):
        scale = 1.0 if number == 0 else rng.uniform(0.6, 1.6)
        forward = round(30 * scale, 1)
        options = tuple(Option(name, int(saved * 10**6 * scale), extra * forward) for name, saved, extra in BODY)
        runs.append(Run(f"kind{number}", count, forward, 2 * forward, int(10**9 * scale), options))
    runs.append(Run("head", 1, 60.0, 120.0, 10**9, (Option("none", 0, 0.0),)))
    rows = in_flight_rows(make_schedule(schedule, stages, chunks, micro_batches))
    in_flight = max(max(map(sum, stage_rows)) for stage_rows in rows)
    per_chunk = sum(run.count * run.options[0].saved_bytes for run in runs) / (stages * chunks)
    least_share = BODY[-1][1] / BODY[0][1]
    static = sum(run.count * run.static_bytes for run in runs) / stages
    limit = int(1.15 * static + 2 * 10**9 + in_flight * per_chunk * (1.1 * least_share + room * (1 - least_share)))
    return Problem(tuple(runs), schedule, stages, chunks, micro_batches, (limit,) * stages)


_FAMILY = re.compile(r"(\w+)-p(\d+)(?:-v(\d+))?-m(\d+)-u(\d+)-k(\d+)(?:-r(\d+))?(?:-s(\d+))?")
FAMILY_FORM = "SCHEDULE-pSTAGES[-vCHUNKS]-mMICROBATCHES-uUNITS-kKINDS[-rROOM_PERCENT][-sSEED]"


def instance(name: str) -> Problem | None:
    """The problem of a name: one of `INSTANCES`, or any member of the family written out; `None` for other names."""
    if name in INSTANCES:
        return INSTANCES[name]()
    match = _FAMILY.fullmatch(name)
    if match is None:
        return None
    stages, chunks, micro_batches, units, kinds, room, seed = (
        int(value or default) for value, default in zip(match.groups()[1:], ("", 1, "", "", "", 40, 0), strict=True)
    )
    return family(match[1], stages, chunks, micro_batches, units, kinds, room / 100, seed)


INSTANCES: dict[str, Callable[[], Problem]] = {
    "case_a_v1": lambda: published("case_a_v1"),
    "case_b": lambda: published("case_b"),
    "1f1b-p8-m32-u64-k2": lambda: family("1f1b", 8, 1, 32, 64, 2, 0.4),
    "1f1b-p64-m1024-u256-k3": lambda: family("1f1b", 64, 1, 1024, 256, 3, 0.2),
    "interleaved-p4-v2-m8-u24-k3": lambda: family("interleaved", 4, 2, 8, 24, 3, 0.4),
    "interleaved-p8-v3-m32-u96-k1": lambda: family("interleaved", 8, 3, 32, 96, 1, 0.4),
    "interleaved-p8-v3-m32-u96-k4": lambda: family("interleaved", 8, 3, 32, 96, 4, 0.4),
    "interleaved-p16-v4-m128-u128-k1": lambda: family("interleaved", 16, 4, 128, 128, 1, 0.4),
    "interleaved-p8-v6-m64-u120-k2": lambda: family("interleaved", 8, 6, 64, 120, 2, 0.4),
    "seqsmartvpp-p8-v2-m24-u64-k2": lambda: family("seqsmartvpp", 8, 2, 24, 64, 2, 0.3),
    "zero_bubble_v-p8-v2-m32-u64-k1": lambda: family("zero_bubble_v", 8, 2, 32, 64, 1, 0.3),
    "gpipe-p4-v2-m16-u32-k2": lambda: family("gpipe", 4, 2, 16, 32, 2, 0.3),
}
"""Every instance of the benchmark."""
