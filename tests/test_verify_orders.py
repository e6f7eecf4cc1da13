"""Orders of actions as MindSpore compiles them: stored text, our schedules, and what was read out of them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from verify_plans import needs_compiler

from mindspore_bmpipe.schedule import format_order, make_schedule
from tools.compiled_order import GOLDEN, REFUSED, Setting, orders

FOLDER = Path(__file__).parent / "data" / "compiled_orders"
HEADER = re.compile(r"# MindSpore (\S+), (\w+), p=(\d+) v=(\d+) m=(\d+)(?: k=(\d+))?")


def stored(setting: Setting) -> list[str]:
    """Lines of a stored order, one for each stage."""
    header, *lines = (FOLDER / f"{setting.name}.txt").read_text(encoding="utf-8").splitlines()
    match = HEADER.fullmatch(header)
    assert match is not None and match.group(2) == setting.schedule
    assert tuple(map(int, match.groups("1")[2:])) == setting[1:]
    return lines


def is_refused(setting: Setting) -> bool:
    return stored(setting)[0].startswith(REFUSED)


ACCEPTED = [setting for setting in GOLDEN if not is_refused(setting)]


def of(*schedules: str) -> list[Setting]:
    return [setting for setting in ACCEPTED if setting.schedule in schedules]


def planned(schedule: str, setting: Setting) -> list[str]:
    made = make_schedule(schedule, *setting[1:])
    return [format_order(order) for order in made.orders]


def test_every_schedule_is_stored_in_at_least_six_settings() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {setting.name for setting in GOLDEN}
    for schedule in {setting.schedule for setting in GOLDEN}:
        settings = [setting for setting in GOLDEN if setting.schedule == schedule]
        assert len(settings) >= 6
        assert any(setting.micro_batches % setting.stages for setting in settings)
        assert any(setting.micro_batches < setting.stages for setting in settings)


@pytest.mark.parametrize("setting", ACCEPTED, ids=lambda setting: setting.name)
def test_every_action_runs_once(setting: Setting) -> None:
    for line in stored(setting):
        words = line.replace("BW", "B W").split() if "BW" not in line else _split(line)
        kinds = "FBW" if setting.schedule == "zero_bubble_v" else "FB"
        wanted = {
            f"{kind}{micro_batch}{f'/{chunk}' if chunk else ''}"
            for kind in kinds
            for micro_batch in range(setting.micro_batches * setting.sequence_parts)
            for chunk in range(setting.chunks)
        }
        assert sorted(words) == sorted(wanted)


def _split(line: str) -> list[str]:
    """Words of an order, whole backwards as their two parts."""
    return [part for word in line.split() for part in ((f"B{word[2:]}", f"W{word[2:]}") if word[1] == "W" else (word,))]


@pytest.mark.parametrize("setting", of("1f1b"), ids=lambda setting: setting.name)
def test_1f1b_is_compiled_as_planned(setting: Setting) -> None:
    assert stored(setting) == planned("1f1b", setting)


@pytest.mark.parametrize(
    "setting",
    [setting for setting in of("gpipe", "interleaved", "seqpipe", "seqvpp", "seqsmartvpp") if setting[2::2] == (1, 1)],
    ids=lambda setting: setting.name,
)
def test_with_one_chunk_a_stage_every_scheduler_is_1f1b(setting: Setting) -> None:
    assert stored(setting) == planned("1f1b", setting)


@pytest.mark.parametrize(
    "setting", [setting for setting in of("gpipe") if setting.chunks > 1], ids=lambda setting: setting.name
)
def test_gpipe_with_chunks_runs_chunk_after_chunk(setting: Setting) -> None:
    micro_batches, chunks = range(setting.micro_batches), range(setting.chunks)
    forward = [f"F{j}{f'/{c}' if c else ''}" for c in chunks for j in micro_batches]
    backward = [f"B{j}{f'/{c}' if c else ''}" for c in reversed(chunks) for j in micro_batches]
    assert stored(setting) == [" ".join(forward + backward)] * setting.stages


def interleaved(setting: Setting, warmup: int) -> str:
    """Forwards in groups of micro-batches, chunk after chunk; backwards likewise; alternating after the warm-up."""
    bounds = list(itertools.accumulate(groups(setting), initial=0))
    spans = [range(low, high) for low, high in itertools.pairwise(bounds)]
    chunks, parts = range(setting.chunks), range(setting.sequence_parts)
    forward = [word("F", j, r, c, setting) for span in spans for c in chunks for j in span for r in parts]
    backward = [
        word("B", j, r, c, setting) for span in spans for c in reversed(chunks) for j in span for r in reversed(parts)
    ]
    warmup = min(warmup, len(forward) - 1)
    steady = [word for pair in zip(forward[warmup:], backward, strict=False) for word in pair]
    return " ".join(forward[:warmup] + steady + backward[len(forward) - warmup :])


def word(kind: str, micro_batch: int, part: int, chunk: int, setting: Setting) -> str:
    number = micro_batch * setting.sequence_parts + part
    return f"{kind}{number}/{chunk}" if chunk else f"{kind}{number}"


def groups(setting: Setting) -> list[int]:
    """Sizes of the groups: p each, or p div k for two schedulers; the rest to the first, or to all in turn."""
    size = setting.stages if setting.schedule in ONE_LARGER or setting.schedule == "seqpipe" else (
        setting.stages // setting.sequence_parts
    )  # fmt: skip
    found = [size] * (setting.micro_batches // size) or [0]
    for number in range(setting.micro_batches - sum(found)):
        found[0 if setting.schedule in ONE_LARGER else number % len(found)] += 1
    return found


ONE_LARGER = ("interleaved", "interleaved_less_memory")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("interleaved", [5, 3]), ("seqpipe", [4, 4]), ("seqvpp", [4, 4]), ("seqsmartvpp", [4, 4])],
)
def test_a_rest_of_two_tells_the_groups_apart(schedule: str, expected: list[int]) -> None:
    setting = Setting(schedule, 3, 2, 8)
    assert groups(setting) == expected
    # The second chunk begins after the first group.
    assert stored(setting)[0].split().index("F0/1") == expected[0]


def warm_up(setting: Setting, distance: int) -> int:
    """Forwards before the first backward, for a stage at this distance from the last."""
    parts = setting.sequence_parts
    return (setting.chunks - 1) * groups(setting)[0] * parts + parts - 1 + distance


@pytest.mark.parametrize(
    "setting",
    [setting for setting in of("seqpipe", "seqvpp", "seqsmartvpp") if setting.chunks == 1],
    ids=lambda setting: setting.name,
)
def test_parts_of_sequences_pass_as_micro_batches_do(setting: Setting) -> None:
    for stage, line in enumerate(stored(setting)):
        assert line == interleaved(setting, warm_up(setting, setting.stages - 1 - stage))


@pytest.mark.parametrize(
    "setting",
    [setting for setting in of("interleaved", "seqpipe", "seqvpp") if setting.chunks > 1],
    ids=lambda setting: setting.name,
)
def test_interleaved_warm_up_is_two_forwards_for_each_later_stage(setting: Setting) -> None:
    for stage, line in enumerate(stored(setting)):
        assert line == interleaved(setting, warm_up(setting, 2 * (setting.stages - 1 - stage)))


@pytest.mark.parametrize(
    "setting",
    [setting for setting in of("interleaved_less_memory", "seqsmartvpp") if setting.chunks > 1],
    ids=lambda setting: setting.name,
)
def test_less_memory_warm_up_is_one_forward_for_each_later_stage(setting: Setting) -> None:
    for stage, line in enumerate(stored(setting)):
        assert line == interleaved(setting, warm_up(setting, setting.stages - 1 - stage))


def test_what_the_compiler_refuses() -> None:
    reasons = {setting.name: stored(setting)[0] for setting in GOLDEN if is_refused(setting)}
    assert "micro_batch_num > 1" in reasons["1f1b_p2_v1_m1"]
    assert "MicroBatch num must be larger or equal than StageNum" in reasons["interleaved_p3_v2_m2"]
    assert "greater than or equal to twice stage_num" in reasons["zero_bubble_v_p2_v2_m2"]
    assert "micro_num * seq_chunk_size should be greater than or equal to pp" in reasons["seqvpp_p3_v2_m2"]
    # Fewer micro-batches than stages are refused for interleaving, not for one chunk, and not for gpipe.
    assert not {"1f1b_p4_v1_m2", "gpipe_p4_v1_m2", "gpipe_p3_v2_m2"} & set(reasons)


@needs_compiler
def test_stored_orders_are_those_of_the_installed_version() -> None:
    chosen = [setting for setting in GOLDEN if setting[1:] in ((2, 1, 4, 1), (2, 2, 5, 1), (2, 1, 4, 2))]
    assert len(chosen) >= 8
    for setting, text in orders(chosen).items():
        assert text.splitlines() == stored(setting)


@needs_compiler
@pytest.mark.long
def test_all_stored_orders_are_those_of_the_installed_version() -> None:
    for setting, text in orders(GOLDEN).items():
        assert text.splitlines() == stored(setting)
