"""Predicted memory of LLaMA-175B on 16 stages against the dry-run that the SAPP tool's readme prints."""

from __future__ import annotations

import pytest
from verify_plans import needs_compiler

from tools.dryrun_table import MIB, layer_runs, published, stages, traced

pytestmark = [needs_compiler, pytest.mark.long]


def test_every_stage_within_eight_percent_of_the_dry_run() -> None:
    costs, data = traced(), published()
    errors = [abs(stage.error) for stage in stages(costs, data)]
    assert len(errors) == 16
    assert max(errors) < 0.08
    assert sum(errors) / 16 < 0.05
    # By hand, MiB: states of one rank's tokens 24, all tokens 192, a rank's share of the MLP 104 for each tensor.
    states, gathered, inner = 24, 192, 104
    attention = states + gathered + states + 2 * 4 + 2 * 3 + 2 * states  # input, gather, q, k and v, sums, result twice
    feed_forward = states + gathered + 4 * inner
    layer = {option.name: option.saved_bytes / MIB for option in layer_runs(costs, 16)[1].options}
    small = 0.05  # the norms' inverse root mean squares
    assert layer["none"] == pytest.approx(attention + feed_forward, abs=small)
    assert layer["select"] == pytest.approx(layer["none"] - 2 * inner, abs=small)
    assert layer["comm"] == pytest.approx(layer["none"] - 2 * (gathered - states), abs=small)
    assert layer["both"] == pytest.approx(layer["comm"] - 2 * inner, abs=small)
