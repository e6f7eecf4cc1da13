"""Collectives on weights and gradients against the graphs that MindSpore compiles for a pipeline."""

from __future__ import annotations

import pytest
from verify_plans import needs_compiler

from tools.verified_weight_exchange import CASES, Case, compiled, predicted

EVERYDAY = (
    Case("cast to float16", 4, 1, 1),
    Case("cast to float16", 4, 3, 0),
    Case("llama", 2, 3, 1),
    Case("pairs", 2, 2, 0),
    Case("pairs of 4", 2, 1, 1),
    Case("mixtral, pairs", 2, 1, 1),
)
"""Weights cast before they are gathered, one that cannot be cut evenly, small ones, gathers in both directions; weights
that tensor-parallel ranks hold whole or in parts, on both sides of 64 KB; experts."""


def compare(cases: tuple[Case, ...]) -> None:
    for case, found in compiled(cases).items():
        assert found.collectives and found.owned_bytes, case
        assert predicted(case) == found, case


@needs_compiler
def test_collectives_are_those_of_compiled_graphs() -> None:
    compare(EVERYDAY)


@needs_compiler
@pytest.mark.long
def test_collectives_of_all_levels_are_those_of_compiled_graphs() -> None:
    compare(tuple(case for case in CASES if case not in EVERYDAY))
