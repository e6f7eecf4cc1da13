"""What a plan says every stage must run, in terms of the traced network."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspore_bmpipe.costs.graph_index import GraphIndex, index_graph
from mindspore_bmpipe.costs.network import NetworkCosts
from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.graph.cell_graph import Phase, read_tensors
from mindspore_bmpipe.graph.mindir import TensorType
from mindspore_bmpipe.graph.symbols import evaluate_dimension
from mindspore_bmpipe.plan import Plan
from mindspore_bmpipe.verify.matching import Identities, identities_of
from mindspore_bmpipe.verify.repeated import repeated_operations, upwards

Place = tuple[int, int]
"""Stage and chunk."""


@dataclass(frozen=True)
class Border:
    """A tensor that crosses from one place to another."""

    tensor: int
    """The tensor as it is read."""
    identity: int
    """What it is."""
    made_at: Place
    """Where it is made."""
    producer: int
    """Operation that makes it."""


@dataclass(frozen=True)
class SharedWeight:
    """A weight that units of several stages read. The first stage sends it to the others in every step."""

    name: str
    """Name of the weight."""
    type: TensorType
    """Its type on one rank."""
    owner: int
    """Stage of the first unit that reads it."""
    readers: tuple[int, ...]
    """The other stages."""


@dataclass(frozen=True)
class Expected:
    """A plan laid over the traced network."""

    costs: NetworkCosts
    """The network."""
    plan: Plan
    """The plan."""
    identities: Identities
    """What its forward operations compute."""
    unit_of: Mapping[int, int]
    """Operation -> unit."""
    places: tuple[Place, ...]
    """Unit -> stage and chunk."""
    roots: Mapping[int, str]
    """Forward operation -> the staged cell it stands in; those outside all are left out."""
    place_of: Mapping[int, Place]
    """Forward operation -> where it runs. What stands in no staged cell goes where its latest input is made."""
    repeated: Mapping[int, frozenset[int]]
    """Unit -> forward operations that its recompute option runs again."""
    shared: tuple[SharedWeight, ...]
    """Weights that several stages read."""

    def units_at(self, place: Place) -> tuple[int, ...]:
        """Units of a chunk of a stage, in order."""
        return tuple(unit for unit, own in enumerate(self.places) if own == place)

    def operations_at(self, place: Place) -> dict[int, list[int]]:
        """Unit -> forward operations that run at a place, bare views left out."""
        found: dict[int, list[int]] = defaultdict(list)
        for operation, own in self.place_of.items():
            if own == place and operation in self.identities.of_operation:
                found[self.unit_of[operation]].append(operation)
        return dict(found)

    def borders(self, place: Place) -> list[Border]:
        """Tensors made elsewhere in the forward that a chunk reads, once for each cell that reads them.

        MindSpore sends a tensor once to each cell (or bare operation) of the network's own `construct` that reads it.
        """
        graph = self.costs.graph
        found: dict[tuple[int, str], Border] = {}
        for operation, own in self.place_of.items():
            if own != place:
                continue
            for tensor in read_tensors(graph.operations[operation]):
                producer = graph.tensors[tensor].producer
                if producer is None or producer not in self.place_of or self.place_of[producer] == place:
                    continue
                reader = self.roots.get(operation) or f"operation {operation}"
                identity = self.identities.of_tensor.get(tensor, -1)
                found.setdefault((identity, reader), Border(tensor, identity, self.place_of[producer], producer))
        return list(found.values())

    def has_types_of(self, ranks: int) -> bool:
        """Whether tensors have the traced types in a cluster of so many ranks.

        They have not where ranks share what was traced whole, or where a stage has more ranks than were traced.
        """
        sharding = self.costs.graph.sharding
        return ranks == len(self.plan.stages) * (1 if sharding is None else sharding.ranks)

    def crossing(self) -> dict[int, int]:
        """Identity -> tensor of every value that another unit than its maker reads in the forward."""
        graph = self.costs.graph
        found: dict[int, int] = {}
        for operation in self.place_of:
            for tensor in read_tensors(graph.operations[operation]):
                producer = graph.tensors[tensor].producer
                if producer is None or producer not in self.place_of:
                    continue
                if self.unit_of[producer] != self.unit_of[operation]:
                    found.setdefault(self.identities.of_tensor.get(tensor, -1), tensor)
        return found

    def needs_gradient(self, border: Border) -> bool:
        """Whether some weight stands behind a tensor, so that the stage that made it has a use for its gradient."""
        graph = self.costs.graph
        waiting, seen = [border.tensor], set()
        while waiting:
            tensor = waiting.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            name = graph.tensors[tensor].parameter
            if name is not None and graph.parameters[name].trainable:
                return True
            producer = graph.tensors[tensor].producer
            if producer is not None:
                waiting.extend(read_tensors(graph.operations[producer]))
        return False

    def type_of(self, tensor: int) -> TensorType:
        """Type of a tensor at the size that was traced."""
        kind = self.costs.graph.tensors[tensor].type
        sizes = dict(self.costs.graph.symbols)
        return TensorType(tuple(evaluate_dimension(size, sizes, "a border") for size in kind.shape), kind.dtype)

    def describe(self, operation: int) -> str:
        """An operation for people: its primitive and cell."""
        found = self.costs.graph.operations[operation]
        return f"{found.primitive} of {found.cell or 'the network itself'}"

    def describe_all(self, operations: Sequence[int]) -> str:
        """Several operations: how many of each primitive and cell."""
        counts = Counter(self.describe(operation) for operation in operations)
        return ", ".join(text if number == 1 else f"{number} {text}" for text, number in counts.items())


def expect(costs: NetworkCosts, plan: Plan) -> Expected:
    """Lay a plan over the network it was made for.

    Raises:
        InputError: the plan's units are not those of the network.
    """
    units = costs.split.units
    if [unit.name for unit in units] != [unit.name for unit in plan.units]:
        raise InputError(
            f"the plan of {plan.source} has {len(plan.units)} units and the network {len(units)}, or they have other "
            "names; verify the plan with the factory and settings it was made with"
        )
    index = index_graph(costs.graph, units)
    places = tuple((unit.stage, unit.chunk) for unit in plan.units)
    roots = _roots(costs, plan)
    return Expected(
        costs=costs,
        plan=plan,
        identities=identities_of(costs.graph),
        unit_of=dict(enumerate(index.unit_of)),
        places=places,
        roots=roots,
        place_of=_places_of_operations(costs, plan, index, places, roots),
        repeated={number: repeated_operations(index, number, unit) for number, unit in enumerate(plan.units)},
        shared=_shared_weights(costs, places),
    )


def _roots(costs: NetworkCosts, plan: Plan) -> dict[int, str]:
    staged = {cell for unit in plan.units for cell in unit.cells}
    found: dict[int, str] = {}
    for number, operation in enumerate(costs.graph.operations):
        if operation.phase is Phase.FORWARD:
            root = next((cell for cell in upwards(operation.cell) if cell in staged), None)
            if root is not None:
                found[number] = root
    return found


def _places_of_operations(
    costs: NetworkCosts, plan: Plan, index: GraphIndex, places: Sequence[Place], roots: Mapping[int, str]
) -> dict[int, Place]:
    of_cell = {cell: place for unit, place in zip(plan.units, places, strict=True) for cell in unit.cells}
    found: dict[int, Place] = {}
    for number, operation in enumerate(costs.graph.operations):
        if operation.phase is not Phase.FORWARD:
            continue
        if number in roots:
            found[number] = of_cell[roots[number]]
            continue
        makers = (costs.graph.tensors[tensor].producer for tensor in read_tensors(operation))
        behind = [found[maker] for maker in makers if maker is not None and maker in found]
        found[number] = max(behind, key=lambda place: (place[1], place[0]), default=places[index.unit_of[number]])
    return found


def _shared_weights(costs: NetworkCosts, places: Sequence[Place]) -> tuple[SharedWeight, ...]:
    found = []
    types = {tensor.parameter: tensor.type for tensor in costs.graph.tensors if tensor.parameter is not None}
    for name, units in costs.split.shared_parameters.items():
        stages = list(dict.fromkeys(places[unit][0] for unit in units))
        if len(stages) > 1:
            owner = places[min(units)][0]
            others = tuple(stage for stage in stages if stage != owner)
            found.append(SharedWeight(name, types[name], owner, others))
    return tuple(found)
