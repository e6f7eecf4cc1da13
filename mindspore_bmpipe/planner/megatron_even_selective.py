"""Megatron-LM's default for large models: layers divided evenly, the attention core of every layer recomputed.

Algorithm: none; as `megatron_even_full` with `--recompute-granularity selective`.

Source: Korthikanti et al., arXiv 2205.05198, section 5. Recompute policy: the option `select`, `selective` or `both`,
the first that the table names, on every unit that has it; without one this planner refuses. In a network read by
this project it repeats gated products too, which Megatron-LM leaves alone.
"""

from __future__ import annotations

from mindspore_bmpipe.planner.base import Solution, SolveLimits
from mindspore_bmpipe.planner.even import even_recipe_plan
from mindspore_bmpipe.planner.recipes import SELECTIVE
from mindspore_bmpipe.problem import Problem

NAME = "megatron_even_selective"


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan above; infeasible if it does not fit.

    Raises:
        InputError: no unit has a selective option.
    """
    return even_recipe_plan(NAME, problem, limits, SELECTIVE, "even split, every layer recomputed selectively")
