"""``bmpipe compare``: its arguments and what it prints."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from mindspore_bmpipe.comparison import LEFT_OUT, compare, default_planners, require_any_plan
from mindspore_bmpipe.planner import registered
from mindspore_bmpipe.report.comparison import comparison_csv, comparison_summary, render_comparison
from mindspore_bmpipe.subjects import Subject

HELP = "plan with every planner and show all plans in one table"

_EPILOG = """\
how to read the table:
  step ms       time of one training step, by the same exact simulation for all planners
  / bmpipe      that time over bmpipe's: how many times faster bmpipe's plan is
  bubble        time above the ideal step, in per cent of it; preparation (warm-up and cool-down of an even pipeline)
                + imbalance + recomputation + communication
  memory        peak over limit, mean of the stages and largest
  units rec.    share of units that recompute anything
Planners without a plan are listed below with the reason: infeasible (which stage needs how much more), or not
applicable (such as a method published for one chunk per stage). docs/comparison.md says what each planner is.

example:
  bmpipe compare net.json -c net.yaml --planner megatron_manual sapp --time-limit 30
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments beside SOURCE and CONFIG."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of the table")
    output.add_argument("--csv", action="store_true", help="print comma-separated values on stdout instead")
    parser.add_argument(
        "--planner", nargs="+", action="extend", choices=registered(), metavar="NAME",
        help=f"planners to compare bmpipe with, of {', '.join(registered())} (default: all but {', '.join(LEFT_OUT)})",
    )  # fmt: skip
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds each planner may take (default 60)")


def run(subject: Subject, options: argparse.Namespace, console: Console) -> int:
    """Compare and print.

    Raises:
        InfeasibleError, NoPlanFoundError: nobody found a plan; what was found is printed first.
    """
    planners = options.planner or default_planners()
    with console.status(f"planning {len(subject.units)} units on {subject.config.stages} stages") as status:
        entries = compare(
            subject, planners, lambda name, done, total: status.update(f"planning with {name} ({done + 1} of {total})")
        )
    document = comparison_summary(subject.source, entries, subject.notes)
    if options.json:
        json.dump(document, sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif options.csv:
        sys.stdout.write(comparison_csv(document))
    else:
        print(render_comparison(document))
    require_any_plan(entries)
    return 0
