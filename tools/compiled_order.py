"""Prints the order in which MindSpore compiles a schedule, one line per stage.

python tools/compiled_order.py zero_bubble_v --stages 4 --chunks 2 --micro-batches 8
python tools/compiled_order.py --golden tests/data/compiled_orders      # writes the stored orders again

`F3/1` is the forward of micro-batch 3 through chunk 1 of the stage, `B` a backward; with split backwards, `B` makes the
gradients of inputs, `W` those of weights, and `BW` both in one call. Chunk 0 is not written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindspore_bmpipe.errors import BmpipeError
from mindspore_bmpipe.graph.mindir import load_module
from mindspore_bmpipe.schedule.actions import format_order
from mindspore_bmpipe.verify.children import Rank, compile_ranks
from mindspore_bmpipe.verify.jobs import SCHEDULERS, Compile, cluster_size
from mindspore_bmpipe.verify.rank_graph import compiled_order, read_rank_graph
from mindspore_bmpipe.verify.stand_in import stand_in

WIDTH = 8
V_SHAPED = ("zero_bubble_v",)
"""Schedules whose second chunk runs through the stages backwards."""
REFUSED = "refused"
"""Line for a setting that the compiler does not accept, before what it says."""


class Setting(NamedTuple):
    """One schedule to compile."""

    schedule: str
    stages: int
    chunks: int
    micro_batches: int

    @property
    def name(self) -> str:
        """Name of its golden file."""
        return f"{self.schedule}_p{self.stages}_v{self.chunks}_m{self.micro_batches}"


_FLAT = ((2, 1, 4), (3, 1, 5), (4, 1, 8), (4, 1, 6), (4, 1, 2), (4, 1, 4))
_LOOPED = ((2, 2, 4), (2, 2, 5), (2, 3, 6), (3, 2, 5), (3, 2, 2), (4, 2, 8), (4, 2, 6))
_V = ((2, 2, 4), (2, 2, 5), (2, 2, 8), (2, 2, 2), (3, 2, 6), (3, 2, 7), (3, 2, 2), (4, 2, 8), (4, 2, 10))
_ONE_MICRO_BATCH = ("1f1b", "interleaved", "zero_bubble_v")
GOLDEN: tuple[Setting, ...] = (
    *(Setting(schedule, *numbers) for schedule in ("1f1b", "gpipe") for numbers in _FLAT),
    *(
        Setting(schedule, *numbers)
        for schedule in ("gpipe", "interleaved", "interleaved_less_memory", "seqpipe", "seqvpp", "seqsmartvpp")
        for numbers in _LOOPED
    ),
    *(Setting(schedule, 3, 1, 5) for schedule in ("interleaved", "seqpipe", "seqvpp", "seqsmartvpp")),
    *(Setting("zero_bubble_v", *numbers) for numbers in _V),
    *(Setting(schedule, 2, 2 if schedule != "1f1b" else 1, 1) for schedule in _ONE_MICRO_BATCH),
)
"""What `tests/data/compiled_orders` holds: for every schedule, m above, equal to and below p, and no multiple of it."""


class Layers(nn.Cell):
    """One weight for each virtual stage."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.CellList([nn.Dense(WIDTH, WIDTH, has_bias=False) for _ in range(layers)])
        self.mean = ops.ReduceMean()

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, WIDTH) to a scalar."""
        for layer in self.layers:
            states = layer(states)
        return self.mean(states)


def factory(layers: int) -> tuple[Layers, tuple[Tensor, ...]]:
    """The network that orders are read from."""
    return Layers(layers), (Tensor(np.zeros((4, WIDTH)), mindspore.float32),)


def placement(setting: Setting) -> dict[str, tuple[int, int]]:
    """Cell -> stage and segment."""
    places: dict[str, tuple[int, int]] = {}
    for virtual in range(setting.stages * setting.chunks):
        chunk, stage = divmod(virtual, setting.stages)
        if setting.schedule in V_SHAPED and chunk % 2:
            stage = setting.stages - 1 - stage
        places[f"layers.{virtual}"] = stage, chunk
    return places


def orders(settings: Iterable[Setting], at_once: int | None = None) -> dict[Setting, str]:
    """Text of each setting: one line per stage, or :data:`REFUSED` and the compiler's reason."""
    wanted = tuple(settings)
    ranks = [
        Rank(
            stage * cluster_size(stages) // stages, cluster_size(stages),
            tuple(_compile(setting, stage) for setting in wanted if setting.stages == stages),
        )
        for stages in sorted({setting.stages for setting in wanted})
        for stage in range(stages)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bmpipe-") as folder:
        answers = compile_ranks(ranks, stand_in(), Path(folder), at_once=at_once)
        return {setting: _text(setting, answers) for setting in wanted}


def header(setting: Setting) -> str:
    """First line of a golden file."""
    return f"# MindSpore {mindspore.__version__}, {setting.schedule}, p={setting.stages} v={setting.chunks} " + (
        f"m={setting.micro_batches}\n"
    )


def _compile(setting: Setting, stage: int) -> Compile:
    return Compile(
        name=f"{setting.name}_{stage}",
        source="tools.compiled_order:factory",
        settings={"layers": setting.stages * setting.chunks},
        schedule=setting.schedule,
        stages=setting.stages,
        micro_batches=setting.micro_batches,
        cells=placement(setting),
        batch_factor=cluster_size(setting.stages) // setting.stages,
    )


def _text(setting: Setting, answers: Any) -> str:
    lines: list[str] = []
    for stage in range(setting.stages):
        answer = answers[f"{setting.name}_{stage}"]
        if answer.graph is None:
            reason = next((line.strip() for line in answer.error.splitlines() if line.strip()), "")
            lines.append(f"{REFUSED}: {reason}")
            continue
        graph = read_rank_graph(load_module(answer.graph))
        if not graph.is_ordered:
            raise BmpipeError(f"{setting.name}: stage {stage}: its actions are not fully ordered")
        lines.append(format_order(compiled_order(graph)))
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one order, or write all golden files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", nargs="?", choices=sorted(SCHEDULERS))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--at-once", type=int, help="compilers at the same time (default: one for each core)")
    parser.add_argument("--golden", type=Path, metavar="FOLDER", help="write the stored orders again")
    options = parser.parse_args(arguments)
    try:
        if options.golden is not None:
            chosen = [item for item in GOLDEN if options.schedule in (None, item.schedule)]
            options.golden.mkdir(parents=True, exist_ok=True)
            for setting, text in orders(chosen, options.at_once).items():
                (options.golden / f"{setting.name}.txt").write_text(header(setting) + text, encoding="utf-8")
            return 0
        if options.schedule is None:
            parser.error("name a schedule, or give --golden")
        setting = Setting(options.schedule, options.stages, options.chunks, options.micro_batches)
        sys.stdout.write(orders([setting], options.at_once)[setting])
    except BmpipeError as error:
        sys.stderr.write(f"compiled_order: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
