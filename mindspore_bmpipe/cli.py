"""The command line: ``bmpipe trace | plan | compare | explain | simulate | check | verify | export``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from mindspore_bmpipe import compare_command, export_command, trace_sharded
from mindspore_bmpipe.config import Config, load_config
from mindspore_bmpipe.costs.network import network_costs
from mindspore_bmpipe.errors import BmpipeError, CheckFailedError, InputError
from mindspore_bmpipe.graph.recorded import traced_file
from mindspore_bmpipe.plan import load_plan, write_bytes_atomically, write_text_atomically
from mindspore_bmpipe.planner import registered
from mindspore_bmpipe.planning import check_plan, no_plan_error, plan_of, solve_subject
from mindspore_bmpipe.report.explain import explain, render_explanation
from mindspore_bmpipe.report.memory import render_unit_memory, unit_memory
from mindspore_bmpipe.report.simulation import render_simulation, simulate_plan, simulation_summary
from mindspore_bmpipe.report.summary import no_plan_summary, plan_summary
from mindspore_bmpipe.report.tables import render_plan
from mindspore_bmpipe.report.timeline import step_page, step_svg, trace_events
from mindspore_bmpipe.sources import SOURCE_HELP, is_factory, load_graph, load_subject, parse_settings, record_factory
from mindspore_bmpipe.subjects import Subject, settle
from mindspore_bmpipe.verify.children import Rank
from mindspore_bmpipe.verify.report import render_verification, verification_summary
from mindspore_bmpipe.verify.run import verify
from mindspore_bmpipe.verify.sharded import record_sharded

_EPILOG = """\
examples:
  bmpipe trace tools.examples.llama:factory --set size=7b -o llama.mindir
  bmpipe trace tools.examples.llama_sharded:factory --set size=7b --sharded --tensor-parallel 8 -o llama_tp8.mindir
  bmpipe explain llama.mindir -c configs/pipelines/llama_7b_910b.yaml
  bmpipe plan llama.mindir -c configs/pipelines/llama_7b_910b.yaml -o plan.json
  bmpipe simulate plan.json --trace step.trace.json --html step.html
  bmpipe compare llama.mindir -c configs/pipelines/llama_7b_910b.yaml
  bmpipe check plan.json llama.mindir -c configs/pipelines/llama_7b_910b.yaml
  bmpipe verify plan.json tools.examples.llama:factory --set size=7b --stage 0
  bmpipe export plan.json --to mindformers -o pipeline.yaml

exit codes: 0 done, 1 infeasible or check failed, 2 usage or bad input, 3 no plan within the time limit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    # MindSpore's compiler logs warnings about private details of every trace; errors still come through.
    os.environ.setdefault("GLOG_v", "3")
    options = _parser().parse_args(arguments)
    console = Console(stderr=True, quiet=options.quiet)
    try:
        return int(options.run(options, console))
    except BmpipeError as error:
        sys.stderr.write(f"bmpipe {options.command}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(f"bmpipe {options.command}: interrupted, nothing was written\n")
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain again while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bmpipe",
        description="Plans pipeline stages and activation recomputation of MindSpore networks as one integer program "
        "whose objective is the exact step time of the pipeline schedule.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    trace = _command(commands, "trace", _run_trace, "write the joint forward and backward graph of a network to a file")
    trace.add_argument("factory", metavar="pkg.module:factory", help="function that returns (network, inputs)")
    trace.add_argument("--set", dest="settings", action="append", default=[], metavar="NAME=VALUE", help=_SET_HELP)
    trace.add_argument("-o", "--output", required=True, metavar="FILE", help="the .mindir file to write")
    trace_sharded.add_arguments(trace)

    plan = _command(commands, "plan", _run_plan, "find the fastest plan that fits in memory")
    _source_arguments(plan, config_required=True)
    plan.add_argument("-o", "--output", metavar="FILE", help="write the plan file here")
    plan.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of the table")
    plan.add_argument("--time-limit", type=float, metavar="S", help="seconds the planner may take (default 60)")
    plan.add_argument("--planner", default="bmpipe", choices=registered(), help="which planner (default bmpipe)")

    compare = _command(commands, "compare", _run_compare, compare_command.HELP)
    _source_arguments(compare, config_required=True)
    compare_command.add_arguments(compare)

    explain_command = _command(commands, "explain", _run_explain, "show costs of every unit, symbolic and in numbers")
    _source_arguments(explain_command, config_required=False)
    explain_command.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    explain_command.add_argument(
        "--memory", metavar="UNIT", help="show what one unit keeps for its backward, tensor by tensor, largest first"
    )

    simulate = _command(
        commands, "simulate", _run_simulate, "simulate one step of a plan: idle time, memory, longest path"
    )
    simulate.add_argument("plan", metavar="PLAN", help="plan file written by 'bmpipe plan -o'")
    simulate.add_argument("--html", metavar="FILE", help="write one page with the table, all actions and the memory")
    simulate.add_argument("--svg", metavar="FILE", help="write a picture of all actions")
    simulate.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    simulate.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of the table")

    check = _command(commands, "check", _run_check, "check a plan file against a network and settings, independently")
    check.add_argument("plan", metavar="PLAN", help="plan file written by 'bmpipe plan -o'")
    _source_arguments(check, config_required=True)

    verify_command = _command(
        commands,
        "verify",
        _run_verify,
        "compile a plan with MindSpore's Ascend front end and compare the result with it",
    )
    verify_command.add_argument("plan", metavar="PLAN", help="plan file written by 'bmpipe plan -o'")
    verify_command.add_argument("factory", metavar="pkg.module:factory", help="function that returns (network, inputs)")
    verify_command.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="NAME=VALUE", help=_SET_HELP
    )
    verify_command.add_argument("--stage", default="all", metavar="K|all", help="stage to compile (default all)")
    verify_command.add_argument("--ranks", type=int, metavar="N", help="devices of the cluster (default: the fewest)")
    verify_command.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    verify_command.add_argument("--time-limit", type=float, metavar="S", help="seconds that compiling may take")
    export_command.add_arguments(_command(commands, "export", export_command.run, export_command.HELP))
    return parser


_SET_HELP = "setting passed to the factory: numbers, true/false, text; may be repeated"


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(run=run)
    return parser


def _source_arguments(parser: argparse.ArgumentParser, config_required: bool) -> None:
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    parser.add_argument(
        "-c", "--config", metavar="CONFIG", required=config_required,
        help="YAML file with stages, micro_batches, memory_limit, hardware and so on",
    )  # fmt: skip
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="NAME=VALUE", help=_SET_HELP)
    parser.add_argument("--units", metavar="CELL,CELL", help="cells to use as units instead of those found")
    parser.add_argument(
        "--assume-elementwise", action="store_true",
        help="price primitives without a cost rule as element-wise instead of refusing them; the plan records it",
    )  # fmt: skip


def _units(options: argparse.Namespace) -> list[str] | None:
    return options.units.split(",") if options.units else None


def _run_trace(options: argparse.Namespace, console: Console) -> int:
    _require_factory(options)
    settings = parse_settings(options.settings)
    sharding = trace_sharded.sharding_of_options(options)
    _time_limit(options)
    _require_writable(options.output)
    with console.status(f"tracing {options.factory}"):
        if sharding is None:
            recorded = record_factory(options.factory, settings)
            data = traced_file(recorded)
        else:
            recorded, data = record_sharded(options.factory, settings, sharding, options.time_limit)
        write_bytes_atomically(options.output, data)
    for note in recorded.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    sizes = ", ".join(f"{name} = {value}" for name, value in recorded.base.items())
    console.print(f"wrote {options.output}: {recorded.name}, {sizes or 'fixed sizes'}", markup=False, highlight=False)
    return 0


def _run_plan(options: argparse.Namespace, console: Console) -> int:
    config = _config(options)
    if options.output:
        _require_writable(options.output)
    subject = _subject(options, config, console)
    with console.status(f"planning {len(subject.units)} units on {subject.config.stages} stages"):
        problem, solution = solve_subject(subject, options.planner)
    if solution.decision is None:
        if options.json:
            _print_json(no_plan_summary(solution))
        raise no_plan_error(solution)
    plan = plan_of(subject, problem, solution)
    if options.output:
        plan.save(options.output)
    if options.json:
        _print_json(plan_summary(plan))
    else:
        print(render_plan(plan))
    if options.output:
        console.print(f"wrote {options.output}", markup=False, highlight=False)
    return 0


def _run_compare(options: argparse.Namespace, console: Console) -> int:
    return compare_command.run(_subject(options, _config(options), console), options, console)


def _run_explain(options: argparse.Namespace, console: Console) -> int:
    config = _config(options) if options.config else Config()
    with console.status(f"reading {options.source}"):
        # Unknown primitives are part of what is explained, so they must not end it.
        graph = load_graph(options.source, parse_settings(options.settings), assume_elementwise=True, config=config)
        costs = network_costs(graph, _units(options), assume_elementwise=True)
        settled = settle(costs, config)
        document = explain(costs, settled.hardware, settled.evaluated, settled.sizes)
        if options.memory:
            document["memory"] = unit_memory(costs, settled.evaluated, settled.sizes, options.memory)
    if options.json:
        _print_json(document)
    elif options.memory:
        print(render_unit_memory(document["memory"]))
    else:
        print(render_explanation(document))
    return 0


def _run_simulate(options: argparse.Namespace, console: Console) -> int:
    written = ((options.html, step_page), (options.svg, step_svg), (options.trace, trace_events))
    for path, _ in written:
        if path:
            _require_writable(path)
    simulation = simulate_plan(load_plan(options.plan))
    for path, text in written:
        if path:
            write_text_atomically(path, text(simulation))
            console.print(f"wrote {path}", markup=False, highlight=False)
    if options.json:
        _print_json(simulation_summary(simulation))
    else:
        print(render_simulation(simulation))
    return 0


def _run_check(options: argparse.Namespace, console: Console) -> int:
    plan = load_plan(options.plan)
    subject = _subject(options, _config(options), console)
    wrong = check_plan(plan, subject)
    if wrong:
        raise CheckFailedError(f"{options.plan} fails:\n" + "\n".join(f"  {line}" for line in wrong))
    print(f"{options.plan}: feasible, {plan.solver.step_time_ms:.3f} ms a step, as it says")
    return 0


def _run_verify(options: argparse.Namespace, console: Console) -> int:
    _require_factory(options)
    _time_limit(options)
    if options.ranks is not None and options.ranks < 1:
        raise InputError(f"--ranks {options.ranks}: give a number of devices above 0")
    if options.stage != "all" and not options.stage.isdecimal():
        raise InputError(f"--stage {options.stage}: give the number of a stage, or all")
    plan = load_plan(options.plan)
    stages = None if options.stage == "all" else (int(options.stage),)
    total = len(plan.stages) if stages is None else 1
    ended: list[int] = []
    with console.status(f"compiling {total} stages of {options.factory}") as status:

        def progress(rank: Rank, seconds: float) -> None:
            ended.append(rank.rank)
            console.print(f"rank {rank.rank} has compiled in {seconds:.0f} s", markup=False, highlight=False)
            status.update(f"compiled {len(ended)} of {total} stages")

        result = verify(
            plan, options.plan, options.factory, parse_settings(options.settings), stages, options.ranks,
            options.time_limit, progress,
        )  # fmt: skip
    if options.json:
        _print_json(verification_summary(result))
    else:
        print(render_verification(result, plan.source))
    return 1 if result.findings else 0


def _config(options: argparse.Namespace) -> Config:
    config = load_config(options.config)
    limit = _time_limit(options)
    return config if limit is None else replace(config, time_limit=limit)


def _subject(options: argparse.Namespace, config: Config, console: Console) -> Subject:
    settings = parse_settings(options.settings)
    with console.status(f"reading {options.source}"):
        return load_subject(options.source, config, settings, _units(options), options.assume_elementwise)


def _time_limit(options: argparse.Namespace) -> float | None:
    """Seconds of ``--time-limit``, where the command has it and it is given."""
    limit: float | None = getattr(options, "time_limit", None)
    if limit is not None and not limit > 0:
        raise InputError(f"--time-limit {limit}: give a number of seconds above 0")
    return limit


def _require_factory(options: argparse.Namespace) -> None:
    if not is_factory(options.factory):
        raise InputError(f"{options.factory}: write pkg.module:factory, for example tools.examples.llama:factory")


def _require_writable(path: str) -> None:
    """Refuse an output that cannot be written before minutes of work go into it."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise InputError(f"{path}: cannot be written; choose a file in a folder that exists")


def _print_json(document: dict[str, Any]) -> None:
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(main())
