"""Megatron-LM's plain setting: layers divided evenly over the virtual stages, every layer recomputed in full.

Algorithm: none; `--pipeline-model-parallel-size p [--num-layers-per-virtual-pipeline-stage ...] --recompute-granularity
full --recompute-method uniform --recompute-num-layers 1`. The embedding sits on the first virtual stage, the head on
the last. Several chunks are interleaved as evenly.

Source: Narayanan et al., arXiv 2104.04473 (interleaving); Korthikanti et al., arXiv 2205.05198 (recomputation); the
arguments are public. Recompute policy: the option `full` on every unit that has it; embedding and head keep theirs.
Megatron refuses layers that do not divide evenly; here the split nearest to even is taken, more units to later stages.
"""

from __future__ import annotations

from mindspore_bmpipe.planner.base import Solution, SolveLimits
from mindspore_bmpipe.planner.even import even_recipe_plan
from mindspore_bmpipe.planner.recipes import FULL
from mindspore_bmpipe.problem import Problem

NAME = "megatron_even_full"


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan above; infeasible if it does not fit.

    Raises:
        InputError: no unit has an option `full`.
    """
    return even_recipe_plan(NAME, problem, limits, FULL, "even split, every layer recomputed in full")
