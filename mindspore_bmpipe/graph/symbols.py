"""Dimensions as expressions in the input symbols, found by tracing at several sizes.

Each dimension of the traced graphs is matched against ``c * x`` and ``x * (c * y + d)`` with ``x`` and ``y`` products
of powers of symbols: token counts, and token counts next to a fixed number of image patches. More sizes are traced than
a form has unknowns, so that a form that fits by chance is refused; a dimension that no form fits makes the graph
unusable at other sizes, and that is an error, not a guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import sympy

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.mindir import Function, Module, Node, TensorType

LARGEST_POWER = 2
"""Highest power of a symbol looked for in one dimension (attention scores flattened over s * s have power 2)."""


def symbol(name: str) -> sympy.Symbol:
    """The sympy symbol of an input axis: a positive integer."""
    return sympy.Symbol(name, integer=True, positive=True)


class Mismatch(Exception):
    """Traces at different sizes are different graphs, so sizes cannot be solved from them."""


def symbolic_module(modules: Sequence[Module], sizes: Sequence[Mapping[str, int]]) -> Module:
    """Return the first module with every dimension written in symbols.

    Args:
        modules: traces of one network at different sizes.
        sizes: value of each symbol in each trace.

    Raises:
        Mismatch: the traces differ in more than their dimensions, or a dimension follows no supported form.
    """
    solver = _DimensionSolver(sizes)
    aligned = [list(_functions_by_first_use(module)) for module in modules]
    if len({len(functions) for functions in aligned}) != 1:
        raise Mismatch("a different number of functions")
    rebuilt: dict[str, Function] = {}
    for position, function in enumerate(aligned[0]):
        rebuilt[function.name] = _solve_function([functions[position] for functions in aligned], solver)
    first = modules[0]
    return replace(
        first,
        entry=rebuilt[first.entry.name],
        functions={name: rebuilt.get(name, function) for name, function in first.functions.items()},
    )


class _DimensionSolver:
    def __init__(self, sizes: Sequence[Mapping[str, int]]) -> None:
        self._names = sorted(sizes[0])
        self._sizes = sizes
        self._known: dict[tuple[int, ...], Any] = {}
        powers = sorted(itertools.product(range(LARGEST_POWER + 1), repeat=len(self._names)), key=sum)
        self._monomials = [
            (
                sympy.prod([symbol(name) ** power for name, power in zip(self._names, exponents, strict=True)]),
                [self._value(exponents, size) for size in sizes],
            )
            for exponents in powers
            if any(exponents)
        ]

    def _value(self, exponents: tuple[int, ...], size: Mapping[str, int]) -> int:
        product = 1
        for name, power in zip(self._names, exponents, strict=True):
            product *= size[name] ** power
        return product

    def solve(self, values: tuple[int, ...]) -> Any:
        if len(set(values)) == 1:
            return values[0]
        if values not in self._known:
            self._known[values] = self._search(values)
        return self._known[values]

    def _search(self, values: tuple[int, ...]) -> Any:
        for monomial, points in self._monomials:
            factor = Fraction(values[0], points[0])
            if all(factor * point == value for point, value in zip(points, values, strict=True)):
                return sympy.Rational(factor.numerator, factor.denominator) * monomial
        for common, scale in [(sympy.Integer(1), [1] * len(values)), *self._monomials]:
            if any(value % factor for value, factor in zip(values, scale, strict=True)):
                continue
            rest = [value // factor for value, factor in zip(values, scale, strict=True)]
            for monomial, points in self._monomials:
                if points[0] == points[1]:
                    continue
                factor = Fraction(rest[1] - rest[0], points[1] - points[0])
                offset = rest[0] - factor * points[0]
                if factor <= 0 or offset.denominator != 1:
                    continue
                if all(factor * point + offset == value for point, value in zip(points, rest, strict=True)):
                    return sympy.expand(
                        common * (sympy.Rational(factor.numerator, factor.denominator) * monomial + int(offset))
                    )
        named = ", ".join(f"{dict(size)}: {value}" for size, value in zip(self._sizes, values, strict=True))
        raise Mismatch(f"a dimension follows no form in {self._names}: {named}")


def _functions_by_first_use(module: Module) -> Iterator[Function]:
    """Functions in the order in which the entry function reaches them; their names carry counters."""
    seen = {module.entry.name}
    queue = [module.entry]
    while queue:
        function = queue.pop(0)
        yield function
        for node in function.nodes:
            for name in (node.operation, *node.inputs):
                name = name.removeprefix("REF::")
                if name in module.functions and name not in seen:
                    seen.add(name)
                    queue.append(module.functions[name])


def _solve_function(functions: Sequence[Function], solver: _DimensionSolver) -> Function:
    first = functions[0]
    if len({(len(function.nodes), len(function.inputs)) for function in functions}) != 1:
        raise Mismatch(f"function {first.name} has another number of nodes")
    nodes: list[Node] = []
    for versions in zip(*(function.nodes for function in functions), strict=True):
        node = versions[0]
        if not node.is_call and len({version.operation for version in versions}) != 1:
            raise Mismatch(f"{node.scope}: {', '.join(sorted({version.operation for version in versions}))}")
        nodes.append(replace(node, type=_solve_type([version.type for version in versions], solver)))
    inputs = tuple(
        (versions[0][0], _solve_type([version[1] for version in versions], solver))
        for versions in zip(*(function.inputs for function in functions), strict=True)
    )
    constants = dict(first.constants)
    for versions in zip(*(function.nodes for function in functions), strict=True):
        # Constants of equal value are written once, so only their uses pair up across traces.
        for names in zip(*(version.inputs for version in versions), strict=True):
            found = [function.constants.get(name) for function, name in zip(functions, names, strict=True)]
            if found[0] is not None and found[0].type is not None and all(found):
                kinds = [constant.type for constant in found if constant is not None]
                constants[names[0]] = replace(found[0], type=_solve_type(kinds, solver))
    return replace(first, nodes=tuple(nodes), inputs=inputs, constants=constants)


def _solve_type(types: Sequence[Any], solver: _DimensionSolver) -> Any:
    first = types[0]
    if isinstance(first, TensorType):
        if any(not isinstance(kind, TensorType) or len(kind.shape) != len(first.shape) for kind in types):
            raise Mismatch("a tensor has another rank")
        dimensions = zip(*(kind.shape for kind in types), strict=True)
        return TensorType(tuple(solver.solve(values) for values in dimensions), first.dtype)
    if isinstance(first, tuple):
        if any(not isinstance(kind, tuple) or len(kind) != len(first) for kind in types):
            raise Mismatch("a tuple has another length")
        return tuple(_solve_type(items, solver) for items in zip(*types, strict=True))
    return first


def evaluate_dimension(dimension: Any, sizes: Mapping[str, int], where: str) -> int:
    """Value of one dimension at given sizes.

    Raises:
        InputError: the value is not a whole number, so the network cannot run at these sizes.
    """
    value = dimension if isinstance(dimension, int) else dimension.subs({symbol(k): v for k, v in sizes.items()})
    if value != int(value):
        raise InputError(f"{where}: dimension {dimension} is {value} at {dict(sizes)}; choose sizes that divide evenly")
    return int(value)
