"""Predicted against compiled peak memory of every stage, as the table of docs/verification.md.

python tools/verified_memory.py                  # all networks; about twenty minutes on two cores
python tools/verified_memory.py gpt bert
python tools/verified_memory.py --keep FOLDER    # keeps what it compiled, and does not compile it again
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent.parent / "tests")]

from verify_plans import Choose, hand_plan, keep_all, mixed  # noqa: E402 -- found through the path set above

from mindspore_bmpipe.costs.network import NetworkCosts  # noqa: E402
from mindspore_bmpipe.plan import Plan, load_plan  # noqa: E402
from mindspore_bmpipe.sources import load_costs  # noqa: E402
from mindspore_bmpipe.verify.children import Rank, compile_ranks  # noqa: E402
from mindspore_bmpipe.verify.expected import expect  # noqa: E402
from mindspore_bmpipe.verify.jobs import Answer, Compile, read_answer  # noqa: E402
from mindspore_bmpipe.verify.run import StageMemory, compare  # noqa: E402
from mindspore_bmpipe.verify.stand_in import stand_in  # noqa: E402

MIB = 1 << 20
MICRO_BATCHES = 6


class Network(NamedTuple):
    """One network, cut in one way."""

    factory: str
    settings: dict[str, Any]
    cuts: dict[str, tuple[int, ...]]
    """First units of all virtual stages but the first, by recompute option."""
    config: dict[str, Any]


def _recompute_all(unit: int, names: list[str]) -> str:
    del unit
    return names[-1]


_LLAMA = {"layers": 6, "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 2816, "vocab": 8000, "sequence": 1024}
_GQA = {"layers": 6, "hidden": 768, "heads": 12, "kv_heads": 4, "ffn": 2048, "vocab": 32000, "sequence": 512}
_GPT = {"layers": 6, "hidden": 1024, "heads": 16, "sequence": 512, "vocab": 8000}
_BERT = {"layers": 4, "hidden": 1024, "heads": 16, "sequence": 512, "vocab": 8000}
_VISION = {
    "image": 224, "patch": 14, "vision_layers": 4, "vision_hidden": 512, "vision_heads": 8, "vision_ffn": 2048,
    "layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 2816, "vocab": 8000, "sequence": 512,
}  # fmt: skip
_TWO_CHUNKS = {"schedule": "interleaved", "stages": 4, "chunks": 2}
CHOICES: dict[str, Choose] = {"none": keep_all, "mixed": mixed, "full": _recompute_all}
NETWORKS = {
    "llama": Network("llama", _LLAMA, dict.fromkeys(CHOICES, (3, 5, 7)), {}),
    "llama_bf16_flash": Network(
        "llama", {**_LLAMA, "dtype": "bfloat16", "flash": True}, dict.fromkeys(CHOICES, (2, 4, 6)), {}
    ),
    "llama_gqa": Network("llama", _GQA, dict.fromkeys(CHOICES, (3, 5, 7)), {}),
    "llama_2_chunks": Network(
        "llama", {**_LLAMA, "layers": 8, "sequence": 512}, {"mixed": (2, 3, 4, 5, 6, 7, 8)}, _TWO_CHUNKS
    ),
    "gpt": Network("gpt", _GPT, {"none": (3, 5, 7), "mixed": (2, 4, 6), "full": (2, 4, 6)}, {}),
    "bert": Network("bert", _BERT, dict.fromkeys(CHOICES, (3, 4, 5)), {}),
    "vision_language": Network("vision_language", _VISION, dict.fromkeys(CHOICES, (4, 7, 9)), {}),
}


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--keep", metavar="FOLDER", type=Path)
    options = parser.parse_args()
    unknown = sorted(set(options.networks) - set(NETWORKS))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; choose from {', '.join(NETWORKS)}")
    print("| network | options | stage | weights | activations | predicted | planned | update | predicted | error |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    found: list[StageMemory] = []
    with tempfile.TemporaryDirectory(prefix="bmpipe-") as scratch:
        for name in options.networks or NETWORKS:
            for option in NETWORKS[name].cuts:
                folder = (options.keep or Path(scratch)) / f"{name}-{option}"
                for stage, memory in memories(NETWORKS[name], option, folder):
                    found.append(memory)
                    print(f"| {name} | {option} | {stage} | {_numbers(memory)} |", flush=True)
    print(f"\n{len(found)} stages")
    print(_errors("predicted peak", [memory.error for memory in found]))
    planned = [memory.predicted.planned_peak / memory.compiled_peak - 1 for memory in found]
    print(_errors("planned peak", planned))
    of_activations = [memory.predicted.activations / memory.peak.activation_bytes - 1 for memory in found]
    print(_errors("predicted activations alone", of_activations))


def _numbers(memory: StageMemory) -> str:
    peak, predicted = memory.peak, memory.predicted
    sizes = (
        memory.weights, peak.activation_bytes, predicted.activations, predicted.planned_activations,
        peak.update_bytes, predicted.update,
    )  # fmt: skip
    return " | ".join(f"{size / MIB:.1f}" for size in sizes) + f" | {memory.error:+.1%}"


def _errors(label: str, errors: Sequence[float]) -> str:
    mean = sum(map(abs, errors)) / len(errors)
    return f"{label}: mean error {mean:.2%}, lowest {min(errors):+.1%}, highest {max(errors):+.1%}"


@cache
def _costs(source: str, settings: tuple[tuple[str, Any], ...]) -> NetworkCosts:
    return load_costs(source, dict(settings))


def memories(network: Network, option: str, folder: Path) -> list[tuple[int, StageMemory]]:
    """Memory of every stage of a network with one recompute option, compiled into a folder unless it is there."""
    source = f"tools.examples.{network.factory}:factory"
    costs = _costs(source, tuple(network.settings.items()))
    plan = hand_plan(costs, network.cuts[option], CHOICES[option], **{"micro_batches": MICRO_BATCHES, **network.config})
    answers = _kept(folder, plan)
    if answers is None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "plan.json"
        plan.save(path)
        stages = len(plan.stages)
        kind = str(plan.settings["schedule"])
        ranks = [
            Rank(stage, stages, (
                Compile(f"stage_{stage}", source, network.settings, kind, stages, MICRO_BATCHES, str(path.resolve())),
            ))
            for stage in range(stages)
        ]  # fmt: skip
        answers = compile_ranks(ranks, stand_in(), folder)
    result = compare(expect(costs, plan), range(len(plan.stages)), len(plan.stages), answers)
    for finding in result.findings:
        print(f"{folder.name}: {finding}", file=sys.stderr)
    return [(stage.stage, stage.memory) for stage in result.stages if stage.memory is not None]


def _kept(folder: Path, plan: Plan) -> dict[str, Answer] | None:
    """What was compiled before for the same plan; `None` if anything is missing or another plan was compiled."""
    if not (folder / "plan.json").is_file():
        return None
    before = load_plan(str(folder / "plan.json"))
    if [asdict(unit) for unit in before.units] != [asdict(unit) for unit in plan.units]:
        return None
    names = [f"stage_{stage}" for stage in range(len(plan.stages))]
    answers = {name: read_answer(folder, name) for name in names}
    return {name: answer for name, answer in answers.items() if answer} if all(answers.values()) else None


if __name__ == "__main__":
    main()
