"""Peak memory of a training step on a CPU with each recompute option, as the table of docs/verification.md.

python tools/peak_memory.py              # all networks; some five minutes on two idle cores
python tools/peak_memory.py gpt vit

All repeated units of a network get the same option. Every option that the planner offers has its turn, in a process of
its own that writes it to the network with `apply` and runs one step. Measured is what MindSpore's memory pool had in
use at most, which it prints in whole MiB as the process ends (`memory_statistics` of `MS_DEV_RUNTIME_CONF`). Predicted
is the peak of one stage with one micro-batch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from verify_plans import hand_plan  # noqa: E402 -- found through the path set above

from mindspore_bmpipe.apply.cells import apply  # noqa: E402
from mindspore_bmpipe.config import parse_config  # noqa: E402
from mindspore_bmpipe.costs.network import NetworkCosts, UnitCost  # noqa: E402
from mindspore_bmpipe.plan import Plan, load_plan  # noqa: E402
from mindspore_bmpipe.sources import load_costs  # noqa: E402
from mindspore_bmpipe.subjects import settle  # noqa: E402
from mindspore_bmpipe.verify.prediction import predicted_memory  # noqa: E402
from tools.cpu_order import as_cpu_runs  # noqa: E402

MIB = 1 << 20
ONE_STAGE = {"stages": 1, "micro_batches": 1, "schedule": "1f1b", "hardware": "ascend910b", "memory_limit": "60GB"}
_PRINTED = re.compile(r"The dynamic memory pool .*? peak used mem:(\d+)M")
_SHOWN_OF_LOG = 2000


class Network(NamedTuple):
    """A network whose activations are far larger than its weights, so that gradients do not blur the differences."""

    factory: str
    settings: dict[str, Any]

    @property
    def source(self) -> str:
        """The network as sources are named."""
        return f"tools.examples.{self.factory}:factory"


NETWORKS = {
    "gpt": Network(
        "gpt", {"layers": 4, "hidden": 256, "heads": 8, "ffn": 1024, "vocab": 512, "sequence": 128, "batch": 32}
    ),
    "bert": Network(
        "bert", {"layers": 4, "hidden": 256, "heads": 8, "ffn": 1024, "vocab": 512, "sequence": 64, "batch": 64}
    ),
    "vit": Network("vit", {"image": 64, "layers": 4, "hidden": 256, "heads": 8, "ffn": 1024, "batch": 64}),
    "llama": Network(
        "llama",
        {
            "layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 1024, "vocab": 512, "sequence": 16,
            "batch": 128,
        },
    ),
}  # fmt: skip


class Peaks(NamedTuple):
    """One option of the repeated unit; bytes."""

    option: str
    saved_of_unit: int
    """What one unit keeps."""
    predicted: int
    """Peak as predicted, weights left out."""
    on_cpu: int
    """The same in the order in which a CPU runs the step (:mod:`tools.cpu_order`)."""
    measured: int
    """Peak of the memory pool, weights left out: they are the tensors that Python holds."""


def main() -> None:
    """Run all options and print, or run one step in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--step", metavar="REQUEST", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        run_step(json.loads(Path(arguments.step).read_text(encoding="utf-8")))
        return
    unknown = sorted(set(arguments.networks) - set(NETWORKS))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; choose from {', '.join(NETWORKS)}")
    print("| network | option | saved of a unit | predicted | on CPU | measured | less than none: predicted | on CPU "
          "| measured | measured / on CPU |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in arguments.networks or NETWORKS:
        first: Peaks | None = None
        for peaks in option_peaks(NETWORKS[name]):
            first = first or peaks
            print(f"| {name} | {_row(peaks, first)} |", flush=True)


def _row(peaks: Peaks, none: Peaks) -> str:
    less = (none.predicted - peaks.predicted, none.on_cpu - peaks.on_cpu, none.measured - peaks.measured)
    sizes = (peaks.saved_of_unit, peaks.predicted, peaks.on_cpu, peaks.measured, *less)
    ratio = f"{less[2] / less[1]:.3f}" if less[1] else ""
    return " | ".join((peaks.option, *(f"{size / MIB:.1f}" for size in sizes), ratio))


def option_peaks(network: Network, wanted: Sequence[str] = ()) -> Iterator[Peaks]:
    """Predict and measure the options of a network's repeated unit, `none` first.

    Args:
        network: the network.
        wanted: names of options; all that the planner offers if empty.
    """
    costs = load_costs(network.source, network.settings)
    options = next(iter(repeated_units(costs).values())).options
    for option in options:
        if option.equals or (wanted and option.name not in wanted):
            continue
        plan = plan_with(costs, option.name)
        yield Peaks(
            option=option.name,
            saved_of_unit=option.saved_bytes,
            predicted=predicted_memory(costs, plan, 0).activations,
            on_cpu=predicted_memory(as_cpu_runs(costs, plan), plan, 0).activations,
            measured=measured_peak(network, plan),
        )


def repeated_units(costs: NetworkCosts) -> dict[int, UnitCost]:
    """The units of the kind that is there most often, by their number."""
    units = settle(costs, parse_config(ONE_STAGE)).evaluated.units
    kinds = [unit.kind for unit in units]
    kind = max(kinds, key=kinds.count)
    return {number: unit for number, unit in enumerate(units) if unit.kind == kind}


def plan_with(costs: NetworkCosts, option: str) -> Plan:
    """Everything on one stage, the repeated units with an option and all others without recomputation."""
    repeated = repeated_units(costs)
    return hand_plan(costs, (), lambda unit, names: option if unit in repeated else "none", **ONE_STAGE)


def measured_peak(network: Network, plan: Plan) -> int:
    """Bytes that MindSpore's memory pool has in use at most while a process of its own runs one step of a plan.

    Raises:
        RuntimeError: the process failed or printed no statistics; the message ends with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="bmpipe-") as folder:
        path, request = Path(folder) / "plan.json", Path(folder) / "request.json"
        plan.save(path)
        wanted = {"factory": network.factory, "settings": network.settings, "plan": str(path)}
        request.write_text(json.dumps(wanted), encoding="utf-8")
        environment = {**os.environ, "MS_DEV_RUNTIME_CONF": "memory_statistics:True", "GLOG_v": "3"}
        # In a folder of its own, because MindSpore writes where it runs.
        done = subprocess.run(
            [sys.executable, __file__, "--step", str(request)],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    printed = _PRINTED.search(done.stdout)
    if done.returncode or printed is None:
        raise RuntimeError(f"the step ended with {done.returncode}: {done.stdout[-_SHOWN_OF_LOG:]}")
    return int(printed[1]) * MIB


def run_step(request: dict[str, Any]) -> None:
    """Write a plan to a network and run one step of it."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    network, inputs = importlib.import_module(f"tools.examples.{request['factory']}").factory(**request["settings"])
    apply(network, load_plan(request["plan"]))
    loss = Step(network)(*inputs)
    assert np.isfinite(loss.asnumpy())


class Step(nn.Cell):
    """A step of stochastic gradient descent, whose update needs nothing but the gradient."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__()
        self.network = network
        self.weights = ms.ParameterTuple(network.trainable_params())
        self.gradient = ops.GradOperation(get_by_list=True)
        self.optimizer = nn.SGD(self.weights, learning_rate=1e-4)
        self.set_train()

    def construct(self, *inputs: Tensor) -> Tensor:
        """Return the loss."""
        loss = self.network(*inputs)
        return ops.depend(loss, self.optimizer(self.gradient(self.network, self.weights)(*inputs)))


if __name__ == "__main__":
    main()
