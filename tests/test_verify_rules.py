"""What the compiler refuses on a stage, shown by compiling it, and that we refuse the same before anything is compiled.

A row of cells is a word, one letter for each cell (see `rule_networks`); its places are the stages of the cells, with
`'` for those of the second chunk.
"""

from __future__ import annotations

import itertools
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
UNGATHERED = "the input dimensions must be equal"


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
    level: int = 0
    """Level of `parallel_optimizer`."""
    width: int = rule_networks.WIDTH
    """Rows and columns of weights: 256 x 256 floats are shared out by the ranks of a stage, 8 x 8 are not."""

    @property
    def name(self) -> str:
        numbers = "_".join(map(str, (self.micro_batches, self.ranks, self.level, self.width)))
        return f"{self.cells}_{self.places}_{self.schedule}_{numbers}".replace("'", "v")

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
TOGETHER = Case("wwbww", "00111", "1f1b", "'value' must have the same shape", ranks=4, level=2, width=256)
LEVELS = [
    Case("wwwb", "0011", "1f1b", ACCEPTED, ranks=4, level=1, width=256),
    Case("ttww", "0011", "1f1b", ACCEPTED, ranks=4, level=1, width=256),
    Case("wwwb", "0011", "1f1b", ACCEPTED, ranks=4, level=2),
    Case("wwwb", "0011", "1f1b", "'value' must have the same shape as 'variable'", ranks=4, level=2, width=256),
    Case("wwwwb", "010'1'1'", "interleaved", "'value' must have the same shape", ranks=4, level=2, width=256),
    Case("wwwb", "0011", "1f1b", ACCEPTED, ranks=2, level=2, width=256),
    Case("fwwb", "0011", "1f1b", UNGATHERED, ranks=4, level=2, width=256),
    Case("ttww", "0011", "1f1b", ACCEPTED, ranks=4, level=2, width=256),
    Case("wbww", "0011", "1f1b", ACCEPTED, ranks=4, level=2, width=256),
    Case("wwww", "0011", "1f1b", ACCEPTED, ranks=4, level=3, width=256),
    Case("wwwb", "0011", "1f1b", "The pointer[context] is null", ranks=2, level=3),
    Case("wwwb", "0011", "1f1b", "The pointer[context] is null", ranks=4, level=3, width=256),
    Case("wwwwb", "010'1'1'", "interleaved", "Illegal AnfNode", ranks=4, level=3),
    Case("fwwb", "0011", "1f1b", ACCEPTED, ranks=4, level=3),
    Case("fwwb", "0011", "1f1b", UNGATHERED, ranks=4, level=3, width=256),
    Case("ttww", "0011", "1f1b", ACCEPTED, ranks=4, level=3),
    Case("ttww", "0011", "1f1b", UNGATHERED, ranks=4, level=3, width=256),
    Case("wbww", "0011", "1f1b", UNGATHERED, ranks=4, level=3, width=256),
    Case("wwwb", "0000", "1f1b", ACCEPTED, ranks=2, level=3, width=256),
]
SPLIT_LEVELS = [
    Case("wwww", "011'0'", "zero_bubble_v", ACCEPTED, ranks=4, level=1, width=256),
    Case("wwww", "011'0'", "zero_bubble_v", ACCEPTED, ranks=4, level=2),
    Case("wwww", "011'0'", "zero_bubble_v", ACCEPTED, ranks=2, level=3, width=256),
    Case("wwww", "011'0'", "zero_bubble_v", "Unexpected empty queue", ranks=4, level=2, width=256),
    Case("wwww", "011'0'", "zero_bubble_v", "Unexpected empty queue", ranks=4, level=3, width=256),
]
CASES = [
    *TRAINABLE,
    *STRICTER,
    *ORDERS,
    *SHARED,
    *SPLIT,
    *CLUSTERS,
    *LEVELS,
    TOGETHER,
    *SPLIT_LEVELS,
    *(Case("wwww", "010'1'", kind, "setting micro_batch_num > 1", micro_batches=1) for kind in ("gpipe", "seqpipe")),
    # The compiler crashes, so this one comes last.
    Case("wwbw", "011'0'", "zero_bubble_v", "ended by SIGSEGV"),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the compiler says of every case, all its stages together."""
    by_rank: dict[tuple[int, int, str], list[Compile]] = {}
    for case in CASES:
        ranks = case.ranks or case.stages
        for stage in range(case.stages):
            wanted = Compile(
                f"{case.name}_{stage}", SOURCE, {"kinds": case.cells, "width": case.width}, case.schedule, case.stages,
                case.micro_batches, cells={f"layers.{number}": place for number, place in enumerate(case.where)},
                batch_factor=ranks // case.stages, optimizer_shard_level=case.level,
            )  # fmt: skip
            # A second compile of shared weights in one process fails on their shapes.
            own = wanted.name if case.level else ""
            by_rank.setdefault((stage * (ranks // case.stages), ranks, own), []).append(wanted)
    jobs = [Rank(rank, ranks, tuple(wanted)) for (rank, ranks, _), wanted in by_rank.items()]
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


def posed(
    cells: str, schedule: str, chunks: int, stages: int = 2, width: int = rule_networks.WIDTH, **further: int
) -> Problem:
    costs = load_costs(SOURCE, {"kinds": cells, "width": width})
    assert [unit.name for unit in costs.split.units[: len(cells)]] == [f"layers.{n}" for n in range(len(cells))]
    config = {"stages": stages, "chunks": chunks, "schedule": schedule, "micro_batches": 4, "memory_limit": "1GB"}
    return pose(subject_of_network(costs, parse_config({**config, **further})))


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


@pytest.mark.parametrize("case", [case for case in LEVELS if case.stages > 1], ids=lambda case: case.name)
def test_levels_at_which_a_weight_cannot_be_shared(case: Case) -> None:
    """What the compiler refuses is refused; what it accepts may be planned."""
    chunks = 1 + max(chunk for _, chunk in case.where)
    degrees = {"data_parallel": case.ranks // case.stages, "optimizer_shard_level": case.level, "width": case.width}
    cuts = {unit for unit, (here, there) in enumerate(itertools.pairwise(case.where)) if here != there}
    if case.compiler:
        said = f"does not compile level {case.level} where .*the weight layers.0.weight.*optimizer_shard_level to 1"
        with pytest.raises(InputError, match=said):
            posed(case.cells, case.schedule, chunks, **degrees)
        return
    problem = posed(case.cells, case.schedule, chunks, **degrees)
    assert not cuts & problem.forbidden_cuts


@pytest.mark.parametrize("case", SPLIT_LEVELS, ids=lambda case: case.name)
def test_levels_at_which_a_backward_cannot_be_split(case: Case) -> None:
    degrees = {"data_parallel": case.ranks // case.stages, "optimizer_shard_level": case.level, "width": case.width}
    if not case.compiler:
        posed(case.cells, case.schedule, 2, **degrees)
        return
    with pytest.raises(InputError, match=f"zero_bubble_v does not compile at optimizer_shard_level {case.level}"):
        posed(case.cells, case.schedule, 2, **degrees)


def test_units_that_can_share_a_stage_are_kept_together_at_level_2() -> None:
    assert TOGETHER.compiler and TOGETHER.where[0] != TOGETHER.where[2]
    problem = posed("wwbww", "1f1b", 1, data_parallel=2, optimizer_shard_level=2, width=256)
    assert problem.forbidden_cuts == {0, 1}


def test_a_table_of_embedding_and_head_at_levels() -> None:
    """512 x 128 floats (256 KB) that two ranks share out; embedding and head are the ends of the network."""
    settings = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 512, "tied": True}
    costs = load_costs("tools.examples.llama:factory", settings)
    base = {"stages": 2, "micro_batches": 4, "memory_limit": "1GB", "schedule": "1f1b"}

    def pose_at(level: int, **further: int) -> Problem:
        return pose(subject_of_network(costs, parse_config({**base, "optimizer_shard_level": level, **further})))

    assert pose_at(1, data_parallel=2).forbidden_cuts == pose_at(2, data_parallel=1).forbidden_cuts == frozenset()
    for level, ranks in ((2, 2), (3, 2), (3, 1)):
        with pytest.raises(
            InputError, match=f"level {level} where embedding, head.* read the weight embedding.weight.*level to 1"
        ):
            pose_at(level, data_parallel=ranks)
    pose_at(3, data_parallel=2, stages=1)
