"""``bmpipe export``: its arguments and what it prints."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from mindspore_bmpipe.apply.formats import FORMATS
from mindspore_bmpipe.plan import load_plan, write_text_atomically

HELP = "write a plan in a launcher's own format"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments."""
    parser.add_argument("plan", metavar="PLAN", help="plan file written by 'bmpipe plan -o'")
    parser.add_argument("--to", required=True, choices=tuple(FORMATS), help="the format")
    parser.add_argument("-o", "--output", metavar="FILE", help="write to this file instead of stdout")
    parser.add_argument(
        "--round-up", action="store_true",
        help="where the format cannot say what the plan recomputes, recompute more: slower than planned, and no layer "
        "keeps more than planned",
    )  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> int:
    """Write the plan.

    Raises:
        InputError: the plan file cannot be read, or the format cannot say what the plan does.
    """
    text = FORMATS[options.to](load_plan(options.plan), options.round_up)
    if options.output:
        write_text_atomically(options.output, text)
        console.print(f"wrote {options.output}", markup=False, highlight=False)
    else:
        sys.stdout.write(text)
    return 0
