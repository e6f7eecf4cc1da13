"""What the compiler refuses on a stage, shown by compiling it, and that we refuse the same before anything is compiled.

A row of cells is a word, one letter for each cell (see `rule_networks`); its places are the stages of the cells, with
`'` for those of the second chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import rule_networks
from apply_networks import unit
from verify_plans import needs_compiler

from mindspore_bmpipe.apply import apply
from mindspore_bmpipe.config import parse_config
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.plan import PLAN_FORMAT, BubblePlan, Plan, SolverReport, StageLoad, StagePlan
from mindspore_bmpipe.planning import pose
from mindspore_bmpipe.problem import Option, Problem, Run
from mindspore_bmpipe.problem_config import problem_from_config
from mindspore_bmpipe.sources import load_costs
from mindspore_bmpipe.subjects import subject_of_network
from mindspore_bmpipe.verify.children import Rank, compile_ranks
from mindspore_bmpipe.verify.jobs import Compile
from mindspore_bmpipe.verify.stand_in import stand_in

SOURCE = "rule_networks:factory"
ACCEPTED = ""
NO_TRAINABLE = "Stage 0 should has at least 1 trainable parameter"
NULL_GRADIENT = "The pointer[grad_node] is null"
NULL_PARAMETER = "The pointer[parameter_ptr] is null"
CYCLE = "Graph cycle exists"


class Case(NamedTuple):
    """One row to compile."""

    cells: str
    places: str
    schedule: str
    compiler: str
    """Part of what the compiler says on some stage; :data:`ACCEPTED` if it compiles everywhere."""
    ours: str = ACCEPTED
    """Part of what `apply` says."""
    micro_batches: int = 4
    ranks: int = 0
    """Ranks of the cluster; 0 for one a stage."""

    @property
    def name(self) -> str:
        return f"{self.cells}_{self.places}_{self.schedule}_{self.micro_batches}_{self.ranks}".replace("'", "v")

    @property
    def where(self) -> list[tuple[int, int]]:
        """Stage and chunk of each cell."""
        marked = self.places.replace("'", " '").split() if " " in self.places else list(self._marks())
        return [(int(mark[0]), len(mark) - 1) for mark in marked]

    def _marks(self) -> list[str]:
        marks: list[str] = []
        for letter in self.places:
            if letter == "'":
                marks[-1] += letter
            else:
                marks.append(letter)
        return marks

    @property
    def stages(self) -> int:
        return 1 + max(stage for stage, _ in self.where)


TRAINABLE = [
    Case("aw", "01", "1f1b", NO_TRAINABLE, "stage 0 holds no trainable parameter"),
    Case("fw", "01", "1f1b", NO_TRAINABLE, "stage 0 holds no trainable parameter"),
    Case("wa", "01", "1f1b", NULL_GRADIENT, "stage 1 holds no trainable parameter"),
    Case("waww", "0123", "1f1b", NULL_GRADIENT, "stage 1 holds no trainable parameter"),
    Case("awww", "010'1'", "interleaved", "Can not find border", "chunk 0 of stage 0 holds no trainable parameter"),
    Case("wwaw", "010'1'", "interleaved", NULL_GRADIENT, "chunk 1 of stage 0 holds no trainable parameter"),
    Case("wwwa", "010'1'", "interleaved", NULL_GRADIENT, "chunk 1 of stage 1 holds no trainable parameter"),
    Case("fwww", "011'0'", "zero_bubble_v", "Partial node was not found", "chunk 0 of stage 0 holds no trainable"),
    Case("wwwf", "011'0'", "zero_bubble_v", "Unexpected empty queue", "chunk 1 of stage 0 holds no trainable"),
]
STRICTER = [
    # A frozen weight alone satisfies the compiler on any stage but the first. No plan makes use of it.
    Case("wf", "01", "1f1b", ACCEPTED, "stage 1 holds no trainable parameter"),
    Case("wwfw", "010'1'", "interleaved", ACCEPTED, "chunk 1 of stage 0 holds no trainable parameter"),
]
ORDERS = [
    Case("www", "010", "1f1b", "PreNode's stage:1 is larger than NextNode's stage:0", "on an earlier stage (0 < 1)"),
    Case("www", "010'", "interleaved", CYCLE, "chunk 1 of stage 1 holds no trainable parameter"),
    Case("wwwww", "010'1'0''", "interleaved", CYCLE, "chunk 2 of stage 1 holds no trainable parameter"),
    Case("wwww", "011'0'", "interleaved", CYCLE, "follows 'layers.2' (stage 1, chunk 1)"),
    Case("wwww", "101'0'", "interleaved", "Can not find border", "follows 'layers.0' (stage 1, chunk 0)"),
    Case("wwww", "0110", "zero_bubble_v", "stage and segment configuration is incorrect", "on an earlier stage"),
    Case("www", "011'", "zero_bubble_v", "input shape must be same", "chunk 1 of stage 0 holds no trainable parameter"),
]
SHARED = [
    Case("twwt", "0011", "1f1b", NULL_PARAMETER, "'layers.0', 'layers.3' hold one weight and are on stages 0, 1"),
    Case("twwt", "010'1'", "interleaved", NULL_PARAMETER, "'layers.0', 'layers.3' hold one weight"),
    Case("twwt", "010'1'", "gpipe", NULL_PARAMETER, "'layers.0', 'layers.3' hold one weight"),
    Case("twtw", "010'1'", "interleaved", ACCEPTED),
    Case("twwt", "011'0'", "zero_bubble_v", ACCEPTED),
    Case("wwwb", "0011", "1f1b", ACCEPTED),
    Case("wwbb", "0123", "1f1b", ACCEPTED, "stage 2 holds no trainable parameter"),
    Case("wwwwb", "010'1'1'", "interleaved", ACCEPTED),
    Case("wwwwb", "010'1'1'", "gpipe", ACCEPTED),
    Case("wwwwb", "011'0'0'", "zero_bubble_v", ACCEPTED),
]
SPLIT = [
    # The weight gradients that zero bubble puts off are those of MatMul; apply cannot see operations, the planner can.
    Case("wwws", "011'0'", "zero_bubble_v", "Unexpected empty queue"),
    Case("wwwm", "011'0'", "zero_bubble_v", "Unexpected empty queue"),
    Case("wwwc", "011'0'", "zero_bubble_v", ACCEPTED),
    Case("wwws", "010'1'", "interleaved", ACCEPTED),
]
CLUSTERS = [
    Case("www", "012", "1f1b", "parallel init failed", ranks=3),
    Case("www", "012", "1f1b", "parallel init failed", ranks=6),
    Case("wwww", "0123", "1f1b", "parallel init failed", ranks=12),
    Case("www", "012", "1f1b", ACCEPTED, ranks=24),
]
CASES = [
    *TRAINABLE,
    *STRICTER,
    *ORDERS,
    *SHARED,
    *SPLIT,
    *CLUSTERS,
    *(Case("wwww", "010'1'", kind, "setting micro_batch_num > 1", micro_batches=1) for kind in ("gpipe", "seqpipe")),
    # The compiler crashes, so this one comes last.
    Case("wwbw", "011'0'", "zero_bubble_v", "ended by SIGSEGV"),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the compiler says of every case, all its stages together."""
    by_rank: dict[tuple[int, int], list[Compile]] = {}
    for case in CASES:
        ranks = case.ranks or case.stages
        for stage in range(case.stages):
            wanted = Compile(
                f"{case.name}_{stage}", SOURCE, {"kinds": case.cells}, case.schedule, case.stages, case.micro_batches,
                cells={f"layers.{number}": place for number, place in enumerate(case.where)},
                batch_factor=ranks // case.stages,
            )  # fmt: skip
            by_rank.setdefault((stage * (ranks // case.stages), ranks), []).append(wanted)
    jobs = [Rank(rank, ranks, tuple(wanted)) for (rank, ranks), wanted in by_rank.items()]
    answers = compile_ranks(jobs, stand_in(), tmp_path_factory.mktemp("rules"))
    return {case.name: "".join(answers[f"{case.name}_{stage}"].error for stage in range(case.stages)) for case in CASES}


def test_cases_are_distinct_and_spelt_right() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert Case("wwww", "010'1'", "1f1b", "").where == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(len(case.cells) == len(case.where) for case in CASES)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_the_compiler_says(said: dict[str, str], case: Case) -> None:
    if case.compiler:
        assert case.compiler in said[case.name]
    else:
        assert said[case.name] == ""


@pytest.mark.parametrize("case", [*TRAINABLE, *STRICTER, *ORDERS, *SHARED], ids=lambda case: case.name)
def test_what_apply_says(case: Case) -> None:
    network, _ = rule_networks.factory(case.cells)
    units = tuple(
        unit(network, f"layers.{number}", stage, chunk=chunk, **_frozen(case.cells[number]))
        for number, (stage, chunk) in enumerate(case.where)
    )
    plan = Plan(
        format=PLAN_FORMAT, fingerprint="0", source="row", settings={"schedule": case.schedule},
        solver=SolverReport("bmpipe", "optimal", 1.0, 1.0, 0.0, 0.0, ""), bubble=BubblePlan(0.0, 0.0, 0.0, 0.0, 0.0),
        stages=tuple(StagePlan(stage, 1, 1, 2, ()) for stage in range(case.stages)), units=units,
        transfer_ms=(), loads=tuple(StageLoad((), (), 0, 0) for _ in range(case.stages)), notes=(),
    )  # fmt: skip
    if case.ours:
        with pytest.raises(InputError) as caught:
            apply(network, plan)
        assert case.ours in str(caught.value)
        assert all(cell.pipeline_stage is None for cell in network.layers if hasattr(cell, "_pipeline_stage"))
    else:
        apply(network, plan)


def _frozen(letter: str) -> dict[str, int]:
    return {"parameters": 0, "parameter_elements": 0} if letter == "f" else {}


OPTION = (Option("none", 1, 0.0),)


def test_too_few_units_with_a_trainable_weight_are_refused() -> None:
    runs = (Run("a", 3, 1.0, 1.0, 1, OPTION, trainable=False), Run("b", 2, 1.0, 1.0, 1, OPTION))
    with pytest.raises(
        InputError, match=r"3 stages of 1 chunk.* and 2 of the 5 units have one; lower stages or chunks"
    ):
        Problem(runs, "1f1b", 3, 1, 4, (10,) * 3)
    Problem(runs, "1f1b", 2, 1, 4, (10,) * 2)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "seqpipe"])
def test_one_micro_batch_is_refused(schedule: str) -> None:
    runs = (Run("a", 4, 1.0, 1.0, 1, OPTION),)
    with pytest.raises(InputError, match="refuses a pipeline with 1 micro-batch; give at least 2"):
        Problem(runs, schedule, 2, 1, 1, (10, 10))
    Problem(runs, schedule, 1, 1, 1, (10,))


@pytest.mark.parametrize(("stages", "data_parallel", "ranks"), [(3, 1, 3), (3, 2, 6), (4, 3, 12)])
def test_a_cluster_of_another_size_is_refused(stages: int, data_parallel: int, ranks: int) -> None:
    config = {"stages": stages, "micro_batches": 4, "memory_limit": 100, "schedule": "1f1b"}
    runs = (Run("a", 4, 1.0, 1.0, 1, OPTION),)
    with pytest.raises(InputError, match=f"take {ranks} ranks, and MindSpore takes 1, 2, 4 or a multiple of 8"):
        problem_from_config(runs, parse_config({**config, "data_parallel": data_parallel}))
    problem_from_config(runs, parse_config({**config, "data_parallel": 8}))
    problem_from_config(runs, parse_config(config))


def posed(cells: str, schedule: str, chunks: int, stages: int = 2) -> Problem:
    costs = load_costs(SOURCE, {"kinds": cells})
    assert [unit.name for unit in costs.split.units[: len(cells)]] == [f"layers.{n}" for n in range(len(cells))]
    config = {"stages": stages, "chunks": chunks, "schedule": schedule, "micro_batches": 4, "memory_limit": "1GB"}
    return pose(subject_of_network(costs, parse_config(config)))


def test_a_weight_that_two_cells_hold_keeps_them_together() -> None:
    problem = posed("wttw", "1f1b", 1)
    assert problem.forbidden_cuts == {1}
    assert problem.pins == ()
    with pytest.raises(InputError, match=r"layers.0, layers.3 hold the weight layers.0.weight as one object"):
        posed("twwt", "interleaved", 2)
    with pytest.raises(InputError, match=r"layers.0, layers.3 hold the weight"):
        posed("twwt", "1f1b", 1)
    assert posed("twwt", "1f1b", 1, stages=1).forbidden_cuts == frozenset()


def test_a_weight_that_a_call_passes_on_is_free_but_in_a_v() -> None:
    assert posed("wwwwb", "1f1b", 1).forbidden_cuts == posed("wwwwb", "interleaved", 2).forbidden_cuts == frozenset()
    assert [(pin.first_unit, pin.last_unit, pin.stage) for pin in posed("wwwwb", "zero_bubble_v", 2).pins] == [
        (0, 0, 0), (4, 4, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("letter", ["s", "m", "w", "c"])
def test_a_virtual_stage_whose_backward_cannot_be_split_is_not_planned(letter: str) -> None:
    cells = f"{letter}wwww"
    counts_for = [posed(cells, schedule, 2) for schedule in ("interleaved", "zero_bubble_v")]
    first = [problem.runs[0].trainable for problem in counts_for]
    assert first == [True, letter in "wc"]
    with pytest.raises(InputError, match="needs a trainable weight on every one of 2 stages of 2 chunk"):
        posed("wwwss", "zero_bubble_v", 2)


def test_a_stage_with_a_borrowed_weight_only_is_not_planned() -> None:
    problem = posed("wwwwb", "1f1b", 1)
    assert [run.trainable for run in problem.runs for _ in range(run.count)][:5] == [True] * 4 + [False]
