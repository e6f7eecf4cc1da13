"""Draws the picture of the README: every forward and backward of one planned step, stage by stage.

python tools/draw_pipeline.py tests/data/case_a_v1.layers.json -c docs/step.yaml -o docs/step.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from mindspore_bmpipe.config import load_config
from mindspore_bmpipe.planner import solve
from mindspore_bmpipe.planning import pose
from mindspore_bmpipe.problem import schedule_of, virtual_stage_times
from mindspore_bmpipe.schedule.simulate import timeline
from mindspore_bmpipe.sources import load_subject
from mindspore_bmpipe.transfers import decision_transfers

COLOURS = {"F": "#4c78a8", "B": "#f58518"}
NAMES = {"F": "forward", "B": "backward and recomputation"}


def main() -> None:
    """Plan two ways, draw both below each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("-c", "--config", required=True)
    parser.add_argument("-o", "--output", required=True, type=Path)
    options = parser.parse_args()
    problem = pose(load_subject(options.source, load_config(options.config)))
    figure, axes = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    for axis, planner in zip(axes, ("even", "bmpipe"), strict=True):
        solution = solve(problem, planner)
        assert solution.decision is not None, solution.message
        forward, backward = virtual_stage_times(problem, solution.decision)
        transfers = decision_transfers(problem, solution.decision.counts)
        timed = timeline(schedule_of(problem), forward, backward, transfers)
        for stage in range(problem.stages):
            for kind, colour in COLOURS.items():
                spans = [
                    (entry.start_ms / 1e3, (entry.end_ms - entry.start_ms) / 1e3)
                    for entry in timed
                    if entry.stage == stage and entry.action.kind == kind
                ]
                axis.broken_barh(spans, (stage - 0.45, 0.9), color=colour, edgecolor="white", linewidth=0.3)
        axis.set_yticks(range(0, problem.stages, 3))
        axis.set_title(f"{planner}: {solution.step_time_ms / 1e3:.1f} s a step", loc="left", fontsize=10)
        axis.invert_yaxis()
        axis.set_ylabel("stage")
    axes[-1].set_xlabel("seconds")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in COLOURS]
    figure.legend(handles, NAMES.values(), loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    # Without a date the file is the same whenever it is drawn.
    figure.savefig(options.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
