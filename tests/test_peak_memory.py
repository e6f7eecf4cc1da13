"""Peaks that MindSpore's memory pool reports for a training step on a CPU, against what the cost model predicts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tools.peak_memory import MIB, NETWORKS, Network, Peaks, option_peaks

TOLERANCE = 0.15
"""Share by which a measured difference between options may miss the predicted one."""
RESOLUTION = 2 * MIB
"""A difference of two peaks in whole MiB is off by less than two steps."""


def check(peaks: list[Peaks], field: str = "predicted") -> None:
    """Every option saves what it should against `none`, and options come in the order of their predicted peaks."""
    none = peaks[0]
    assert none.option == "none" and len(peaks) > 2
    predicted = {option.option: getattr(option, field) for option in peaks}
    for option in peaks[1:]:
        expected = predicted["none"] - predicted[option.option]
        assert none.measured - option.measured == pytest.approx(expected, rel=TOLERANCE, abs=RESOLUTION), option.option
    ordered = sorted(peaks, key=lambda option: predicted[option.option])
    for less, more in pairwise(ordered):
        if predicted[more.option] - predicted[less.option] > RESOLUTION:
            assert less.measured < more.measured, f"{less.option} against {more.option}"


def test_recipes_of_gpt() -> None:
    """The recipes on three small layers; `select` keeps the mask that all layers share."""
    settings = {"layers": 3, "hidden": 256, "heads": 8, "ffn": 1024, "vocab": 64, "sequence": 128, "batch": 16}
    peaks = list(option_peaks(Network("gpt", settings), ("none", "select", "full")))
    check(peaks)
    none, select = peaks[0], peaks[1]
    # Scores are three tensors of 16 * 8 * 128 * 128 * 4 bytes a layer: weights, weights after dropout, its mask.
    assert none.measured - select.measured == pytest.approx(3 * 3 * 8 * MIB, abs=RESOLUTION)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "field"), [("gpt", "predicted"), ("bert", "predicted"), ("vit", "predicted"), ("llama", "on_cpu")]
)
def test_every_option(name: str, field: str) -> None:
    """All options that the planner offers for the repeated unit; a CPU keeps more of `llama` than its graph has."""
    check(list(option_peaks(NETWORKS[name])), field)
