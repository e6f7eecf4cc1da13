"""Predicted against dry-run peaks of LLaMA-175B on 16 stages, as the table of docs/costs.md.

    python tools/dryrun_table.py                 # compiles a graph of two layers, about two minutes
    python tools/dryrun_table.py --keep FILE     # keeps that graph, and does not compile it again

The peaks are those of the readme of the SAPP pipeline-balancing tool (`tests/data/dryrun_175b.json`). All the rest is
ours: the graph of one of eight tensor-parallel ranks, its kept tensors and working sets, static memory, the schedule.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from mindspore_bmpipe.costs.network import NetworkCosts, network_costs, unit_static_bytes
from mindspore_bmpipe.costs.recompute import RecomputeModel, evaluate_rows
from mindspore_bmpipe.costs.static_memory import StaticSettings
from mindspore_bmpipe.costs.unit_model import UnitModel
from mindspore_bmpipe.graph.cell_graph import Phase, Sharding
from mindspore_bmpipe.graph.recorded import graph_of
from mindspore_bmpipe.problem import Decision, Option, Problem, Run, stage_memory
from mindspore_bmpipe.sources import load_graph
from mindspore_bmpipe.verify.sharded import record_sharded

PUBLISHED = Path(__file__).resolve().parent.parent / "tests" / "data" / "dryrun_175b.json"
FACTORY = "tools.examples.llama_tokens_sharded:factory"
MIB = 1 << 20
TENSOR_PARALLEL = 8
"""Not published; the ranks of one server, as in every LLaMA configuration of that size in MindFormers."""
DEVICES = 16384
LAYERS = 96
TOKENS = 8192
"""Tokens of a sample. The mask is an input of every layer: a byte for each pair of them."""
MICRO_BATCHES = 16
"""Not published for the dry-run; any number from the number of stages on gives the same peaks."""
RECIPES: Mapping[str, tuple[str, ...]] = {
    "none": (), "select": ("select",), "comm": ("comm",), "both": ("select", "comm")
}  # fmt: skip


def published() -> dict[str, Any]:
    """The dry-run."""
    found: dict[str, Any] = json.loads(PUBLISHED.read_text("utf-8"))
    return found


def traced(keep: Path | None = None) -> NetworkCosts:
    """Costs of one rank of the network with two layers."""
    if keep is not None and keep.is_file():
        return network_costs(load_graph(str(keep)))
    recorded, data = record_sharded(FACTORY, {"size": "175b", "layers": 2}, Sharding(1, TENSOR_PARALLEL))
    if keep is not None:
        keep.write_bytes(data)
    return network_costs(graph_of(recorded))


def as_in_a_pipeline(model: UnitModel) -> UnitModel:
    """What MindSpore makes of a unit in a training step with a sharded optimizer, where cells are not functions apart.

    Gathers of one tensor by several products become one. Weights are cast before they are gathered, once a step for all
    micro-batches, so their casts are no part of a unit.
    """
    kept, merged, gone = [], {}, 0
    gathered: dict[int, int] = {}
    for number, operation in enumerate(model.operations):
        if operation.primitive == "AllGather" and operation.phase is Phase.FORWARD:
            first = gathered.setdefault(operation.reads, operation.writes)
            if first != operation.writes:
                merged[operation.writes] = first
                continue
        if operation.primitive == "Cast" and operation.phase is Phase.FORWARD and not operation.reads:
            gone |= operation.writes
            continue
        kept.append(number)

    def reads(mask: int) -> int:
        mask &= ~gone
        for old, new in merged.items():
            if mask & old:
                mask = mask & ~old | new
        return mask

    return replace(
        model,
        operations=tuple(replace(model.operations[n], reads=reads(model.operations[n].reads)) for n in kept),
        forward_count=sum(n < model.forward_count for n in kept),
        flops=model.flops[kept],
        bytes_moved=model.bytes_moved[kept],
        sent_bytes=model.sent_bytes[kept],
    )


class Recipes(RecomputeModel):
    """MindFormers' default recipes: which operations of a layer run again.

    `select` names the product and the activation of the MLP (`feed_forward.mul`, `feed_forward.w1.activation.silu`),
    `comm` the gathers behind the norms (`recompute_comm_op` on `.*.norm`). The cast of a norm to float32 always does
    (`LlamaRMSNorm.cast.recompute()`).
    """

    def __init__(self, model: UnitModel) -> None:
        super().__init__(model)
        forward = model.operations[: model.forward_count]
        chosen = {
            "select": [o.cell.endswith("feed_forward") and o.primitive in ("SiLU", "Mul") for o in forward],
            "comm": [o.primitive == "AllGather" for o in forward],
            "cast": [o.primitive == "Cast" and o.cell.endswith("_norm") and o.dtype == "float32" for o in forward],
        }
        for name, again in chosen.items():
            self._dropped[name] = tuple((n, forward[n].writes & ~model.results) for n in np.flatnonzero(again).tolist())


@dataclass(frozen=True)
class Stage:
    """One stage; bytes of one device."""

    static_bytes: int
    """Weights, gradients, optimizer state."""
    peak_bytes: int
    """Predicted peak."""
    dry_run_bytes: int
    """Published peak."""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.peak_bytes / self.dry_run_bytes - 1


def stages(costs: NetworkCosts, data: Mapping[str, Any], gathered_bytes: int = 4) -> tuple[Stage, ...]:
    """Predicted and published memory of every stage.

    Args:
        costs: of :func:`traced`.
        data: of :func:`published`.
        gathered_bytes: bytes of an element of a gathered weight, 4 or 2.
    """
    count = len(data["peak_mb"])
    layers = [LAYERS // count + offset for offset in data["offset"]]
    runs = layer_runs(costs, count, gathered_bytes)
    placed = []
    for stage, number in enumerate(layers):
        select, comm = data["select_recompute"][stage], data["select_comm_recompute"][stage]
        both = min(select, comm)
        placed.append((number - max(select, comm), select - both, comm - both, both))
    first, last = ((1,),) + ((0,),) * (count - 1), ((0,),) * (count - 1) + ((1,),)
    decision = Decision((first, tuple(placed), *([last] * (len(runs) - 2))))
    problem = Problem(
        runs=runs, schedule="1f1b", stages=count, chunks=1, micro_batches=MICRO_BATCHES,
        memory_limit_bytes=(1 << 50,) * count, shared_saved_bytes=TOKENS**2,
    )  # fmt: skip
    memory = stage_memory(problem, decision)
    return tuple(
        Stage(static, peak, megabytes * MIB) for (static, peak), megabytes in zip(memory, data["peak_mb"], strict=True)
    )


def layer_runs(costs: NetworkCosts, stage_count: int, gathered_bytes: int = 4) -> tuple[Run, ...]:
    """What the network is made of, with recipes as options of its layers; times are placeholders."""
    settings = StaticSettings(
        Sharding(DEVICES // stage_count // TENSOR_PARALLEL, TENSOR_PARALLEL), optimizer_shard_level=1
    )
    known = costs.graph.parameters
    found = []
    for number, (unit, model) in enumerate(zip(costs.split.units, costs.models, strict=True)):
        if unit.name.startswith("blocks.") and unit.name != "blocks.1":
            continue
        static, update = unit_static_bytes(costs, number, settings)
        static -= (4 - gathered_bytes) * sum(
            math.prod(known[name].type.shape) // known[name].shares for name in unit.parameters
        )
        is_layer = unit.name.startswith("blocks.")
        options = _options(as_in_a_pipeline(model), RECIPES if is_layer else {"none": ()})
        found.append(Run(unit.name, LAYERS if is_layer else 1, 1.0, 2.0, static, options, update_bytes=update))
    return tuple(found)


def _options(model: UnitModel, recipes: Mapping[str, Sequence[str]]) -> tuple[Option, ...]:
    recompute, values = Recipes(model), model.basis.values({"b": 1})
    found = []
    for name, places in recipes.items():
        option = recompute.option((*places, "cast"))
        saved, working = float(option.saved @ values), evaluate_rows(option.working_set, values)
        found.append(Option(name, int(saved), 0.0, max(0, int(working))))
    return tuple(found)


def main() -> None:
    """Compile, unless kept, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", metavar="FILE", type=Path)
    options = parser.parse_args()
    data, costs = published(), traced(options.keep)
    found = stages(costs, data)
    print("| per layer, MiB | ours | fitted to the dry-run by the tool |")
    print("|---|---|---|")
    layer = next(run for run in layer_runs(costs, len(found)) if run.count > 1)
    fit = data["linear_fit_mb"]
    print(f"| static | {layer.static_bytes / MIB:.0f} | {fit['parameter']:.0f} |")
    for option in layer.options:
        print(f"| kept, {option.name} | {option.saved_bytes / MIB:.0f} | {fit[option.name]:.0f} |")
        print(f"| working set, {option.name} | {option.working_set_bytes / MIB:.0f} | |")
    print("\n| stage | layers | select | comm | dry-run MiB | predicted | static of it | error |")
    print("|---|---|---|---|---|---|---|---|")
    for number, stage in enumerate(found):
        print(
            f"| {number} | {LAYERS // len(found) + data['offset'][number]} | {data['select_recompute'][number]} | "
            f"{data['select_comm_recompute'][number]} | {stage.dry_run_bytes // MIB} | {stage.peak_bytes / MIB:.0f} | "
            f"{stage.static_bytes / MIB:.0f} | {stage.error:+.1%} |"
        )
    print()
    for label, tried in (("as counted", found), ("gathered weights of 2 bytes", stages(costs, data, gathered_bytes=2))):
        errors = [stage.error for stage in tried]
        mean = np.mean(np.abs(errors))
        print(f"{label}: mean error {mean:.2%}, lowest {min(errors):+.1%}, highest {max(errors):+.1%}")


if __name__ == "__main__":
    main()
