"""What holds for every planner."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from problem_samples import case_a, random_problem, small, with_full, with_known_recipes

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.planner import SolveLimits, Status, lookup, register, registered, solve
from mindspore_bmpipe.problem import check, evaluate


def test_names_are_normalised_and_unique() -> None:
    assert {"bmpipe", "even", "exhaustive", "sapp"} < set(registered())
    assert registered() == tuple(sorted(registered()))
    assert lookup(" BMPipe") is lookup("bmpipe")
    with pytest.raises(InputError, match="already registered"):
        register("Even", lookup("even"))
    with pytest.raises(InputError, match=f"there are {', '.join(registered())}"):
        lookup("guess")


@pytest.mark.parametrize("planner", registered())
@pytest.mark.parametrize("seed", range(25))
def test_solutions_are_consistent(planner: str, seed: int) -> None:
    problem = with_known_recipes(random_problem(seed))
    try:
        solution = solve(problem, planner)
    except InputError as error:
        # Only methods that need a named option may refuse, and only where no unit has it.
        if "no unit has an option named" not in str(error):
            raise
        return
    assert solution.planner == planner
    assert solution.solve_seconds >= 0
    if solution.status is Status.INFEASIBLE:
        assert (solution.decision, solution.step_time_ms, solution.bound_ms, solution.gap) == (None,) * 4
        assert solution.message
        if solution.needed_bytes is not None:
            raised = replace(problem, memory_limit_bytes=tuple(max(1, need) for need in solution.needed_bytes))
            assert solve(raised, planner).decision is not None
        return
    assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert solution.decision is not None
    assert solution.needed_bytes is None
    assert check(problem, solution.decision) == ()
    assert solution.step_time_ms == evaluate(problem, solution.decision).step_time_ms
    if solution.status is Status.OPTIMAL:
        assert solution.gap is not None
        assert 0 <= solution.gap <= 1e-4
        assert solution.bound_ms is not None
        assert solution.bound_ms <= solution.step_time_ms


@pytest.mark.parametrize("planner", registered())
def test_the_same_seed_gives_the_same_plan(planner: str) -> None:
    problem = small() if planner == "exhaustive" else with_full(case_a(memory_limit_bytes=(59 * 10**9,) * 16))
    first, second = (solve(problem, planner, SolveLimits(seed=3)) for _ in range(2))
    assert first.decision == second.decision
    assert first.bound_ms == second.bound_ms


@pytest.mark.parametrize(
    "changes", [{"time_limit_s": 0}, {"seed": -1}, {"threads": 0}, {"relative_gap": 1.0}, {"node_limit": 0}]
)
def test_impossible_limits(changes: dict[str, float]) -> None:
    with pytest.raises(InputError):
        SolveLimits(**changes)  # type: ignore[arg-type]


def test_status_prints_as_its_value() -> None:
    assert str(Status.UNKNOWN) == "no plan found in the time limit"
    assert json.dumps(Status.OPTIMAL) == '"optimal"'


def test_planning_writes_nothing_to_stdout_or_stderr() -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from problem_samples import random_problem\n"
        "from mindspore_bmpipe.planner import SolveLimits\n"
        "from mindspore_bmpipe.planner.base import Clock\n"
        "from mindspore_bmpipe.planner.milp import plan_counts\n"
        "limits = SolveLimits()\n"
        "for solver in (None, 'CBC'):\n"
        "    for seed in range(4):\n"
        "        plan_counts('x', random_problem(seed), limits, Clock(limits), None, solver)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")
