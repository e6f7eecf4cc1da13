"""Predicted against compiled peak memory of every stage, as the table of docs/verification.md.

python tools/verified_memory.py            # all networks; about ten minutes on two cores
python tools/verified_memory.py llama gpt
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent.parent / "tests")]

from verify_plans import Choose, hand_plan, keep_all, mixed  # noqa: E402 -- found through the path set above

from mindspore_bmpipe.sources import load_costs  # noqa: E402
from mindspore_bmpipe.verify.run import StageMemory, verify  # noqa: E402

MIB = 1 << 20


class Case(NamedTuple):
    """One plan to compile."""

    network: str
    settings: dict[str, Any]
    cuts: tuple[int, ...]
    option: str


_LLAMA = {"layers": 6, "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 2816, "vocab": 8000, "sequence": 1024}
_GPT = {"layers": 6, "hidden": 1024, "heads": 16, "sequence": 512, "vocab": 8000}
_BERT = {"layers": 4, "hidden": 1024, "heads": 16, "sequence": 512, "vocab": 8000}
_VISION = {
    "image": 224, "patch": 14, "vision_layers": 4, "vision_hidden": 512, "vision_heads": 8, "vision_ffn": 2048,
    "layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 2816, "vocab": 8000, "sequence": 512,
}  # fmt: skip
CASES = (
    Case("llama", _LLAMA, (3, 5, 7), "none"),
    Case("llama", _LLAMA, (3, 5, 7), "mixed"),
    Case("llama", {**_LLAMA, "dtype": "bfloat16", "flash": True}, (2, 4, 6), "mixed"),
    Case("gpt", _GPT, (3, 5, 7), "none"),
    Case("gpt", _GPT, (2, 4, 6), "mixed"),
    Case("bert", _BERT, (3, 4, 5), "none"),
    Case("bert", _BERT, (3, 4, 5), "mixed"),
    Case("vision_language", _VISION, (4, 7, 9), "none"),
    Case("vision_language", _VISION, (4, 7, 9), "mixed"),
)
CHOICES: dict[str, Choose] = {"none": keep_all, "mixed": mixed}
MICRO_BATCHES = 6


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*")
    wanted = parser.parse_args().networks
    print("| network | options | stage | weights | activations | predicted | error of the whole |")
    print("|---|---|---|---|---|---|---|", flush=True)
    errors: list[float] = []
    for case in CASES:
        if not wanted or case.network in wanted:
            for stage, memory in memories(case):
                errors.append(memory.error)
                label = f"{case.network}, {case.settings.get('dtype', 'float32')}"
                sizes = (memory.weights, memory.activations, memory.predicted_activations)
                numbers = " | ".join(f"{size / MIB:.1f}" for size in sizes)
                print(f"| {label} | {case.option} | {stage} | {numbers} | {memory.error:+.1%} |", flush=True)
    wrong = [abs(error) for error in errors]
    print(f"\n{len(wrong)} stages, mean error {sum(wrong) / len(wrong):.1%}, largest {max(wrong):.1%}")


def memories(case: Case) -> list[tuple[int, StageMemory]]:
    """Memory of every stage of a case."""
    source = f"tools.examples.{case.network}:factory"
    plan = hand_plan(load_costs(source, case.settings), case.cuts, CHOICES[case.option], micro_batches=MICRO_BATCHES)
    with tempfile.TemporaryDirectory(prefix="bmpipe-") as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        result = verify(plan, str(path), source, case.settings)
    for finding in result.findings:
        print(f"{case.network}: {finding}", file=sys.stderr)
    return [(stage.stage, stage.memory) for stage in result.stages if stage.memory is not None]


if __name__ == "__main__":
    main()
