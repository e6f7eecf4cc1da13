"""Prints the order in which MindSpore compiles a schedule, one line per stage.

python tools/compiled_order.py zero_bubble_v --stages 4 --chunks 2 --micro-batches 8
python tools/compiled_order.py seqpipe --stages 2 --micro-batches 4 --sequence-parts 2
python tools/compiled_order.py --golden tests/data/compiled_orders      # writes the stored orders again

`F3/1` is the forward of micro-batch 3 through chunk 1 of the stage, `B` a backward; with split backwards, `B` makes the
gradients of inputs, `W` those of weights, and `BW` both in one call. Chunk 0 is not written. With k sequence parts the
number counts parts, k for each micro-batch: of two, `F6` and `F7` are those of micro-batch 3.
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
from mindspore_bmpipe.schedule.actions import Action, format_order
from mindspore_bmpipe.verify.children import Rank, compile_ranks
from mindspore_bmpipe.verify.jobs import SCHEDULERS, Compile, cluster_size
from mindspore_bmpipe.verify.rank_graph import RankGraph, read_rank_graph
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
    sequence_parts: int = 1

    @property
    def name(self) -> str:
        """Name of its golden file."""
        parts = f"_k{self.sequence_parts}" if self.sequence_parts > 1 else ""
        return f"{self.schedule}_p{self.stages}_v{self.chunks}_m{self.micro_batches}{parts}"


_FLAT = ((2, 1, 4), (3, 1, 5), (4, 1, 8), (4, 1, 6), (4, 1, 2), (4, 1, 4))
_LOOPED = ((2, 2, 4), (2, 2, 5), (2, 3, 6), (3, 2, 5), (3, 2, 2), (4, 2, 8), (4, 2, 6))
_V = ((2, 2, 4), (2, 2, 5), (2, 2, 8), (2, 2, 2), (3, 2, 6), (3, 2, 7), (3, 2, 2), (4, 2, 8), (4, 2, 10))
_GROUPS = (3, 2, 8)
"""A remainder of two and two groups, which tells one larger group from two."""
_PARTS = ((2, 1, 4, 2), (2, 2, 5, 2), (4, 2, 6, 2), (3, 2, 5, 3))
_ONE_MICRO_BATCH = ("1f1b", "interleaved", "zero_bubble_v")
GOLDEN: tuple[Setting, ...] = (
    *(Setting(schedule, *numbers) for schedule in ("1f1b", "gpipe") for numbers in _FLAT),
    *(
        Setting(schedule, *numbers)
        for schedule in ("gpipe", "interleaved", "interleaved_less_memory", "seqpipe", "seqvpp", "seqsmartvpp")
        for numbers in _LOOPED
    ),
    *(Setting(schedule, *_GROUPS) for schedule in ("interleaved", "seqpipe", "seqvpp", "seqsmartvpp")),
    *(Setting(schedule, *numbers) for schedule in ("seqpipe", "seqvpp", "seqsmartvpp") for numbers in _PARTS),
    Setting("seqpipe", 4, 1, 3, 2),
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


class SequencePart(nn.Cell):
    """One part of a sequence, cut out so that the compiler knows it for one."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__()
        self.part, self.parts = part, parts
        self.cut = ops.StridedSlice()
        self.cut.add_prim_attr("strided_slice_flag", True)
        self.cut.add_prim_attr("seq_split_slice", True)
        self.cut.add_prim_attr("split_num", parts)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, WIDTH) to (b, s / parts, WIDTH)."""
        batch, length, width = states.shape
        size = length // self.parts
        start, end = self.part * size, (self.part + 1) * size
        return self.cut(states, (0, start, 0), (batch, end, width), (1, 1, 1))


class InSequenceParts(nn.Cell):
    """A network that is called once for each part of the sequence, as its owner has to write it.

    The compiler finds the parts by the attributes of the slices, and their sum by that of the addition.
    """

    def __init__(self, network: nn.Cell, parts: int) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.parts = nn.CellList([SequencePart(part, parts) for part in range(parts)])
        self.add = ops.Add().add_prim_attr("seq_split_add", True)

    def __setattr__(self, name: str, value: Any) -> None:
        # The function that is called for each part is the network, so that is what stays a function.
        super().__setattr__(name, value) if name != "cell_init_args" else setattr(self.network, name, value)

    def construct(self, states: Tensor) -> Tensor:
        """Map (b, s, WIDTH) to a scalar."""
        loss = 0.0
        for part in self.parts:
            loss = self.add(loss, self.network(part(states)))
        return loss


def factory(layers: int, sequence_parts: int = 1) -> tuple[nn.Cell, tuple[Tensor, ...]]:
    """The network that orders are read from."""
    if sequence_parts == 1:
        return Layers(layers), (Tensor(np.zeros((4, WIDTH)), mindspore.float32),)
    inputs = Tensor(np.zeros((4, sequence_parts, WIDTH)), mindspore.float32)
    return InSequenceParts(Layers(layers), sequence_parts), (inputs,)


def placement(setting: Setting) -> dict[str, tuple[int, int]]:
    """Cell -> stage and segment."""
    places: dict[str, tuple[int, int]] = {}
    for virtual in range(setting.stages * setting.chunks):
        chunk, stage = divmod(virtual, setting.stages)
        if setting.schedule in V_SHAPED and chunk % 2:
            stage = setting.stages - 1 - stage
        prefix = "network." if setting.sequence_parts > 1 else ""
        places[f"{prefix}layers.{virtual}"] = stage, chunk
    return places


def orders(settings: Iterable[Setting], at_once: int | None = None, transfers: bool = False) -> dict[Setting, str]:
    """Text of each setting: one line per stage, or :data:`REFUSED` and the compiler's reason.

    Args:
        settings: what to compile.
        at_once: compilers at the same time.
        transfers: whether to write Sends and Receives too.
    """
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
        return {setting: _text(setting, answers, transfers) for setting in wanted}


def header(setting: Setting) -> str:
    """First line of a golden file."""
    parts = f" k={setting.sequence_parts}" if setting.sequence_parts > 1 else ""
    return f"# MindSpore {mindspore.__version__}, {setting.schedule}, p={setting.stages} v={setting.chunks} " + (
        f"m={setting.micro_batches}{parts}\n"
    )


def _compile(setting: Setting, stage: int) -> Compile:
    return Compile(
        name=f"{setting.name}_{stage}",
        source="tools.compiled_order:factory",
        settings={"layers": setting.stages * setting.chunks, "sequence_parts": setting.sequence_parts},
        schedule=setting.schedule,
        stages=setting.stages,
        micro_batches=setting.micro_batches,
        cells=placement(setting),
        batch_factor=cluster_size(setting.stages) // setting.stages,
    )


def _text(setting: Setting, answers: Any, transfers: bool) -> str:
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
        pieces = _pieces(graph, setting.sequence_parts)
        lines.append(_with_transfers(graph, pieces) if transfers else format_order(pieces))
    return "\n".join(lines) + "\n"


def _pieces(graph: RankGraph, parts: int) -> list[Action]:
    """Actions in order, numbered by parts of micro-batches."""
    return [
        call.action._replace(micro_batch=call.action.micro_batch * parts + call.sequence_chunk) for call in graph.calls
    ]


def _with_transfers(graph: RankGraph, pieces: Sequence[Action]) -> str:
    """Actions, Sends of what an action made (`F0>`) and Receives of what one reads (`>F0`), in the graph's order."""
    number = {call.node: piece for call, piece in zip(graph.calls, pieces, strict=True)}
    entries = [(node, str(piece)) for node, piece in number.items()]
    entries += [(item.node, f"{item.action}>" if item.sends else f">{item.action}") for item in graph.transfers]
    return " ".join(text for _, text in sorted(entries))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one order, or write all golden files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", nargs="?", choices=sorted(SCHEDULERS))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument(
        "--sequence-parts", type=int, default=1, help="parts of each sequence (seqpipe, seqvpp, seqsmartvpp)"
    )
    parser.add_argument("--transfers", action="store_true", help="show Sends (F0>) and Receives (>F0) in the order")
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
        setting = Setting(
            options.schedule, options.stages, options.chunks, options.micro_batches, options.sequence_parts
        )
        sys.stdout.write(orders([setting], options.at_once, options.transfers)[setting])
    except BmpipeError as error:
        sys.stderr.write(f"compiled_order: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
