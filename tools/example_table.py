"""Prints what reading each example network takes: `bmpipe trace`, then `bmpipe explain` of the file it wrote.

    python tools/example_table.py [NAME ...]

Seconds are those of the processor, so that other work on the machine does not count; memory is the largest resident set
of the two commands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NETWORKS: dict[str, tuple[str, dict[str, str]]] = {
    "LLaMA 7B": ("llama", {"size": "7b"}),
    "Qwen2.5 7B": ("llama", {"size": "qwen2.5_7b"}),
    "BLOOM 176B": ("gpt", {"size": "bloom_176b"}),
    "MT-NLG 530B": ("gpt", {"size": "mt_nlg_530b"}),
    "PaLM 540B": ("palm", {"size": "540b"}),
    "PanGu-alpha 200B": ("pangu_alpha", {"size": "200b"}),
    "BERT large": ("bert", {"size": "large"}),
    "ViT H/14": ("vit", {"size": "h14"}),
    "Swin B": ("swin", {"size": "b"}),
    "LLaVA 7B": ("vision_language", {"size": "llava_7b"}),
    "BLIP-2, OPT 2.7B": ("blip2", {"size": "opt_2.7b"}),
    "DeepSeek-V3, capacity": ("deepseek", {"size": "671b"}),
    "DeepSeek-V3, dropless": ("deepseek", {"size": "671b", "dropless": "true"}),
}
"""Module of `tools.examples` and settings, by name in the table."""


def run(arguments: list[str], output: Path) -> tuple[float, int]:
    """Run the command line with stdout to a file; returns processor seconds and the largest resident set in MiB."""
    command = [sys.executable, "-m", "mindspore_bmpipe.cli", *arguments]
    with output.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss // 1024


def row(name: str) -> str:
    """One row of the table."""
    module, settings = NETWORKS[name]
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        file, printed = Path(folder) / "network.mindir", Path(folder) / "printed.json"
        traced = run(["trace", "-q", f"tools.examples.{module}:factory", *given, "-o", str(file)], printed)
        explained = run(["explain", "-q", str(file), "--json"], printed)
        document = json.loads(printed.read_text())
    if document["unknown_primitives"]:
        raise SystemExit(f"{name}: no cost rule for {', '.join(document['unknown_primitives'])}")
    units = sum(unit["count"] for unit in document["units"])
    call = " ".join([module, *(f"{key}={value}" for key, value in settings.items())])
    memory = max(traced[1], explained[1])
    return f"| {name} | `{call}` | {units} | {traced[0]:.0f} | {explained[0]:.0f} | {memory} |"


def main() -> None:
    """Print the rows of the networks named, or of all."""
    names = sys.argv[1:] or list(NETWORKS)
    unknown = [name for name in names if name not in NETWORKS]
    if unknown:
        raise SystemExit(f"no network named {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    print("| network | factory and settings | units | trace s | explain s | peak MiB |")
    print("|---|---|---|---|---|---|")
    for name in names:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
