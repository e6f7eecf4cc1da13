"""Peaks that MindSpore's memory pool reports for a training step on a CPU, against what the cost model predicts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tools.peak_memory import MIB, NETWORKS, Network, Peaks, option_peaks

TOLERANCE = 0.15
"""Share by which a measured difference between options may miss the predicted one."""
RESOLUTION = 2 * MIB
"""A difference of two peaks in whole MiB is off by less than two steps."""


def check(peaks: list[Peaks]) -> None:
    """Every option saves what it should against `none`, and options come in the order of their predicted peaks."""
    none = peaks[0]
    assert none.option == "none" and len(peaks) > 2
    for option in peaks[1:]:
        predicted, measured = none.predicted - option.predicted, none.measured - option.measured
        assert measured == pytest.approx(predicted, rel=TOLERANCE, abs=RESOLUTION), option.option
    ordered = sorted(peaks, key=lambda option: option.predicted)
    for less, more in pairwise(ordered):
        if more.predicted - less.predicted > RESOLUTION:
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
@pytest.mark.parametrize("name", ["gpt", "bert", "vit"])
def test_every_option(name: str) -> None:
    """All options that the planner offers for the repeated unit."""
    check(list(option_peaks(NETWORKS[name])))
