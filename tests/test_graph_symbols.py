"""Solving dimensions for symbols: what was put in comes out, and what fits no form is refused."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.mindir import Constant, Function, Module, Node, TensorType
from mindspore_bmpipe.graph.symbols import Mismatch, evaluate_dimension, symbol, symbolic_module

B, S = symbol("b"), symbol("s")
SIZES = ({"b": 2, "s": 96}, {"b": 3, "s": 48}, {"b": 5, "s": 72})
MONOMIALS = (sympy.Integer(1), B, S, B * S, S**2, B * S**2, B**2)


def module(dimensions: list[Any], sizes: dict[str, int], operation: str = "Add") -> Module:
    """A module of one node whose result has the given dimensions at given sizes."""
    shape = tuple(int(sympy.sympify(item).subs({symbol(k): v for k, v in sizes.items()})) for item in dimensions)
    kind = TensorType(shape, "float32")
    node = Node("y", operation, False, ("x", "c"), kind, "Default/Add-op0", {}, None)
    constants = {"c": Constant(None, TensorType(shape[:1], "float32"))}
    return Module(Function("main", (("x", kind),), constants, (node,), "y"), {}, {})


def solved(dimensions: list[Any]) -> tuple[Any, ...]:
    found = symbolic_module([module(dimensions, sizes) for sizes in SIZES], SIZES)
    (node,) = found.entry.nodes
    assert found.entry.inputs[0][1] == node.type
    assert found.entry.constants["c"].type.shape == node.type.shape[:1]
    return tuple(node.type.shape)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 64), st.sampled_from(MONOMIALS), st.sampled_from((sympy.Integer(1), B)), st.integers(0, 300)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_dimensions_written_in_the_supported_forms_come_back(parts: list[tuple[int, Any, Any, int]]) -> None:
    dimensions = [sympy.expand(common * (factor * monomial + offset)) for factor, monomial, common, offset in parts]
    for given_dimension, found in zip(dimensions, solved(dimensions), strict=True):
        # Another form may fit the traced sizes too only if it is the same everywhere.
        for sizes in ({"b": 7, "s": 24}, {"b": 1, "s": 4096}):
            expected = given_dimension.subs({symbol(k): v for k, v in sizes.items()})
            assert evaluate_dimension(found, sizes, "test") == expected


def test_a_fraction_of_an_axis_is_a_fraction() -> None:
    assert solved([S / 2, 3]) == (S / 2, 3)
    with pytest.raises(InputError, match="choose sizes that divide evenly"):
        evaluate_dimension(S / 2, {"s": 33}, "test")


def test_what_fits_no_form_is_refused() -> None:
    with pytest.raises(Mismatch, match="follows no form"):
        solved([S**3 + B])


def test_graphs_that_differ_are_refused() -> None:
    with pytest.raises(Mismatch, match="Add, Mul"):
        symbolic_module([module([B], SIZES[0]), module([B], SIZES[1], "Mul"), module([B], SIZES[2])], SIZES)
    with pytest.raises(Mismatch, match="rank"):
        symbolic_module([module([B], SIZES[0]), module([B, S], SIZES[1]), module([B], SIZES[2])], SIZES)
