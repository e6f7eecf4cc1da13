"""Recompute options of a unit: the named recipes, and what nothing else beats in kept bytes and extra time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspore_bmpipe.costs.recipes import RECIPES, Recipes
from mindspore_bmpipe.costs.recompute import Places, RecomputeModel, RecomputeOption
from mindspore_bmpipe.costs.unit_model import UnitModel, indices_of

MOST_COMBINATIONS = 32
"""Combinations kept while combinations of cells and primitives are formed; more did not change any frontier of the
example networks."""

MOST_PLACES = 6
"""Cells and primitives that an option beside the recipes may name; more would not be read."""

Measure = Callable[[Places], tuple[float, float]]
"""Kept bytes and extra milliseconds of a choice."""


@dataclass(frozen=True)
class NamedOption:
    """One option under its name."""

    name: str
    """A recipe, or the option's places without the unit's own path."""
    option: RecomputeOption
    """The option."""
    equals: str
    """An option before it that keeps and repeats exactly the same; empty if there is none."""


def named_options(
    model: RecomputeModel,
    recipes: Recipes,
    operation_ms: NDArray[np.float64],
    monomials: NDArray[np.float64],
    unit: UnitModel,
    most: int,
) -> list[NamedOption]:
    """All recipes by name, and the ``most`` best of what the frontier has beside them, least recomputation first.

    Args:
        model: recompute model of the unit.
        recipes: recipes of the unit.
        operation_ms: time of every operation.
        monomials: values of the model's monomials.
        unit: the unit.
        most: options beside the recipes, at least 0.
    """
    measure = measure_of(model, operation_ms, monomials, unit)
    points = {measure(places) for places in recipes.places.values()}
    others = [
        places
        for places in combinations(model, measure, unit)
        if len(places) <= MOST_PLACES and measure(places) not in points
    ]
    # What a recipe beats is not worth its place either.
    others = [places for places in others if not any(_beats(point, measure(places)) for point in points)]
    ends = [recipes.places["none"], recipes.places["full"]]
    kept = [places for places in _thinned([*others, *ends], measure, most + 2) if places not in ends]
    rows = [(name, recipes.places[name]) for name in RECIPES]
    rows += [(option_name(places), places) for places in kept]
    last = len(rows)
    order = {name: number for number, name in enumerate(RECIPES)}
    rows.sort(key=lambda row: (row[0] == "full", row[0] != "none", measure(row[1])[1], order.get(row[0], last)))
    found: list[NamedOption] = []
    same: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, places in rows:
        effect = model.kept(places)
        found.append(NamedOption(name, model.option(places), same.get(effect, "")))
        same.setdefault(effect, name)
    return found


def _beats(point: tuple[float, float], other: tuple[float, float]) -> bool:
    return point[0] <= other[0] and point[1] <= other[1]


def measure_of(
    model: RecomputeModel, operation_ms: NDArray[np.float64], monomials: NDArray[np.float64], unit: UnitModel
) -> Measure:
    """The function that gives kept bytes and extra milliseconds of a choice at given sizes and times."""
    sizes = unit.sizes @ monomials
    measured: dict[Places, tuple[float, float]] = {}

    def measure(places: Places) -> tuple[float, float]:
        found = measured.get(places)
        if found is None:
            kept, repeated = model.kept(places)
            saved = float(sizes[indices_of(kept & ~unit.shared)].sum())
            found = measured[places] = (saved, float(operation_ms[list(repeated)].sum()))
        return found

    return measure


def combinations(model: RecomputeModel, measure: Measure, unit: UnitModel) -> list[Places]:
    """Choices of cells, primitives and communication that no other choice formed beats in kept bytes and extra time.

    Cells are combined bottom-up over the tree. To each combination come *chains*: for every result that backward keeps,
    the primitives that make it again from what is kept anyway, the last one to three of them or all.
    """
    found: list[Places] = [()]
    for cell in model.whole():
        choices = _of_cell(model, measure, cell)
        found = _pareto([(*some, *more) for some in found for more in choices], measure)
    for chain in chains(model, unit):
        found = _pareto([*found, *(_joined(some, chain) for some in found)], measure)
    return found


def _of_cell(model: RecomputeModel, measure: Measure, cell: str) -> list[Places]:
    below: list[Places] = [()]
    for child in model.children(cell):
        choices = _of_cell(model, measure, child)
        below = _pareto([(*some, *more) for some in below for more in choices], measure)
    return _pareto([*below, (cell,)], measure)


def chains(model: RecomputeModel, unit: UnitModel) -> list[Places]:
    """Primitives that make a kept result again: the last one, two or three before it, or all from what is kept."""
    forward = unit.operations[: unit.forward_count]
    maker = {storage: number for number, operation in enumerate(forward) for storage in indices_of(operation.writes)}
    place_of: dict[int, str] = {}
    for place in (*model.primitives, *model.communication):
        for number in model.operations_of(place):
            place_of.setdefault(number, place)
    kept, _ = model.kept(())
    found: dict[Places, None] = {}
    for storage in indices_of(kept):
        layer = {maker[storage]} if storage in maker else set()
        chain: dict[str, None] = {}
        steps: list[Places] = []
        while layer and all(number in place_of for number in layer):
            chain.update(dict.fromkeys(place_of[number] for number in sorted(layer)))
            steps.append(tuple(sorted(chain)))
            behind = {below for number in layer for below in indices_of(forward[number].reads & ~kept)}
            layer = {maker[below] for below in behind if below in maker and place_of.get(maker[below]) not in chain}
        found.update(dict.fromkeys((*steps[:3], *steps[-1:])))
    return list(found)


def _joined(some: Places, more: Places) -> Places:
    """Both; inside a recomputed cell, MindSpore has a primitive follow the cell."""
    outside = (place for place in more if not any(place.startswith(f"{cell}.") for cell in some))
    return tuple(dict.fromkeys((*some, *outside)))


def _pareto(candidates: Iterable[Places], measure: Measure) -> list[Places]:
    """Choices that no other beats in both kept bytes and extra time; fewer places first among equals."""
    ordered = sorted(set(candidates), key=lambda places: (*measure(places), len(places), places))
    best: list[Places] = []
    least = float("inf")
    for places in ordered:
        extra = measure(places)[1]
        if extra < least:
            best.append(places)
            least = extra
    return _thinned(best, measure, MOST_COMBINATIONS)


def _thinned(candidates: Sequence[Places], measure: Measure, most: int) -> list[Places]:
    """At most ``most`` of the candidates: those go first whose loss takes least from the area below the frontier."""
    left = sorted(candidates, key=lambda places: measure(places)[1])
    while len(left) > max(most, 2):
        points = [measure(places) for places in left]

        def loss(place: int, points: Sequence[tuple[float, float]] = points) -> float:
            before, here, after = points[place - 1], points[place], points[place + 1]
            return (before[0] - here[0]) * (after[1] - here[1])

        worst = min(range(1, len(left) - 1), key=lambda place: (loss(place), place))
        del left[worst]
    return left


def option_name(places: Places) -> str:
    """Name of an option that is no recipe: its places without the unit's own path."""
    return "+".join(place.split(".", 1)[1] if "." in place else place for place in places)
