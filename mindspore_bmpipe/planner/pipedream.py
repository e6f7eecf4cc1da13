"""PipeDream's partitioner for a straight pipeline: the split whose slowest stage is fastest.

Algorithm: dynamic program A(j, s) = min over i of max(A(i, s - 1), time of units i..j-1 on one device), where the time
is forward plus backward of one micro-batch. Stages are not replicated (its option `straight_pipeline`), and transfers
do not enter (they do only with its option `activation_compression_ratio`).

Source: Narayanan et al., SOSP 2019, doi 10.1145/3341301.3359646, and the public partitioner (msr-fiddle/pipedream,
`optimizer/optimizer_graph_hierarchical.py`). Recompute policy: PipeDream has none. Added here: one recipe for all
units, the one with the fastest slowest stage; groups that do not fit in memory with it are left out (its option
`use_memory_constraint`, with our memory instead of its own estimate).
"""

from __future__ import annotations

from mindspore_bmpipe.planner.base import Clock, Solution, SolveLimits
from mindspore_bmpipe.planner.recipe_groups import best_recipe_split, require_listable
from mindspore_bmpipe.planner.splits import best_split
from mindspore_bmpipe.problem import Problem

NAME = "pipedream"


def plan(problem: Problem, limits: SolveLimits) -> Solution:
    """The plan above.

    Raises:
        InputError: several chunks per stage, or too many groups.
    """
    require_listable(problem, NAME)
    return best_recipe_split(
        NAME,
        problem,
        Clock(limits),
        lambda groups: best_split(groups.stage_ms, additive=False),
        "fastest slowest stage, one recipe for all units",
    )
