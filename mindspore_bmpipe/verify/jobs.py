"""What a child process is asked to compile, and what it answers; as data and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspore_bmpipe.graph.cell_graph import Sharding


@dataclass(frozen=True)
class Scheduler:
    """How MindSpore is told to compile a schedule."""

    interleave: bool
    """`pipeline_interleave` of `pipeline_config`."""
    name: str
    """`pipeline_scheduler` of `pipeline_config`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the compiler reads."""


SCHEDULERS: Mapping[str, Scheduler] = {
    "1f1b": Scheduler(False, "1f1b"),
    "gpipe": Scheduler(True, "gpipe"),
    "interleaved": Scheduler(True, "1f1b"),
    "interleaved_less_memory": Scheduler(True, "1f1b", {"ENABLE_LESS_MEM_VPP": "1"}),
    "seqpipe": Scheduler(True, "seqpipe"),
    "seqvpp": Scheduler(True, "seqvpp"),
    "seqsmartvpp": Scheduler(True, "seqsmartvpp"),
    "zero_bubble_v": Scheduler(True, "zero_bubble_v"),
}
"""Every schedule of :data:`mindspore_bmpipe.config.MINDSPORE_SCHEDULES`."""


_ONE_RANK = Sharding(1, 1)


@dataclass(frozen=True)
class Compile:
    """One training step to compile, as one rank of a cluster."""

    name: str
    """Name of the result: `<name>.mindir` holds the graph, `<name>.json` the answer."""
    source: str
    """`pkg.module:factory` of the network."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings for the factory."""
    schedule: str = "1f1b"
    """Key of :data:`SCHEDULERS`; without meaning for one stage."""
    stages: int = 1
    """Pipeline stages."""
    micro_batches: int = 1
    """Micro-batches a step."""
    plan: str | None = None
    """Plan file to apply; `None` to place cells by `cells`."""
    cells: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Cell path -> stage and segment, where there is no plan."""
    batch_factor: int = 1
    """How many times the factory's batch a micro-batch is, so that ranks added to fill a cluster get one each."""
    sharding: Sharding = _ONE_RANK
    """Ranks of one stage, as far as the compile depends on them."""
    records: bool = False
    """Whether to record the joint graph of a stage instead of compiling the training step."""
    optimizer_shard_level: int = 0
    """Level of `parallel_optimizer` for the training step, 1 to 3; 0 for none."""
    varies: bool = True
    """Whether a joint graph is recorded at several sizes of the inputs; otherwise at theirs only."""


def cluster_size(stages: int, ranks_per_stage: int = 1) -> int:
    """Smallest number of ranks MindSpore accepts (1, 2, 4, or a multiple of 8) with these stages.

    Args:
        stages: pipeline stages.
        ranks_per_stage: ranks of a stage, a multiple of which is looked for.
    """
    ranks = stages * ranks_per_stage
    return ranks if ranks in (1, 2, 4) else math.lcm(ranks, 8)


@dataclass(frozen=True)
class Answer:
    """What became of one :class:`Compile`."""

    name: str
    """Name of the request."""
    graph: Path | None
    """File with the compiled graph; `None` if compiling failed."""
    seconds: float
    """Time to build the network and compile."""
    peak_bytes: int
    """Largest resident memory of the child so far."""
    error: str
    """What MindSpore or the factory said; empty if all went well."""


def write_compiles(path: Path, compiles: tuple[Compile, ...]) -> None:
    """Write requests for a child."""
    path.write_text(json.dumps([dataclasses.asdict(item) for item in compiles]), encoding="utf-8")


def read_compiles(path: Path) -> tuple[Compile, ...]:
    """Read what :func:`write_compiles` wrote."""
    documents = json.loads(path.read_text(encoding="utf-8"))
    return tuple(
        Compile(
            **{
                **document,
                "cells": {name: tuple(place) for name, place in document["cells"].items()},
                "sharding": Sharding(**document["sharding"]),
            }
        )
        for document in documents
    )


def write_answer(folder: Path, answer: Answer) -> None:
    """Write an answer beside its graph."""
    document = {**dataclasses.asdict(answer), "graph": None if answer.graph is None else answer.graph.name}
    (folder / f"{answer.name}.json").write_text(json.dumps(document), encoding="utf-8")


def read_answer(folder: Path, name: str) -> Answer | None:
    """Read the answer to a request; `None` if there is none yet."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    return Answer(**{**document, "graph": None if document["graph"] is None else folder / document["graph"]})
