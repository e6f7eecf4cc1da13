"""Machines: the numbers of ``configs/hardware/*.yaml``, each with its source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from mindspore_bmpipe.errors import InputError

_FLOPS_KEYS = ("matmul_float16", "matmul_bfloat16", "matmul_float32", "vector_float16", "vector_float32")
_SIXTEEN_BIT = frozenset({"float16", "bfloat16"})


@dataclass(frozen=True)
class Link:
    """One class of connection between devices."""

    latency_ms: float
    """Time before the first byte arrives."""
    bandwidth_bytes_per_ms: float
    """Bytes per millisecond of one device with all its partners together, one way: what collectives see."""
    pair_bytes_per_ms: float
    """Bytes per millisecond between two devices, one way; less where devices form a mesh of separate links."""

    def transfer_ms(self, size_bytes: float) -> float:
        """Time to send ``size_bytes`` from one device to another (alpha-beta model)."""
        return self.latency_ms + size_bytes / self.pair_bytes_per_ms

    def group_bytes_per_ms(self, ranks: int) -> float:
        """Bytes per millisecond that each of ``ranks`` devices, at least 2, sends to all others together.

        In a mesh of separate links a small group reaches only as many links as it has partners.
        """
        return min(self.bandwidth_bytes_per_ms, (ranks - 1) * self.pair_bytes_per_ms)


@dataclass(frozen=True)
class Hardware:
    """One kind of device and the machine it sits in."""

    name: str
    """Name of its file."""
    memory_capacity_bytes: int
    """Device memory."""
    flops_per_ms: Mapping[str, float]
    """Achievable floating-point operations per millisecond by engine and type (``matmul_bfloat16``)."""
    bytes_per_ms: float
    """Achievable bytes per millisecond to and from device memory."""
    launch_ms: float
    """Time every operation costs beside its work."""
    intra_node: Link
    """Between devices of one node."""
    inter_node: Link
    """Between nodes."""
    devices_per_node: int
    """Devices of one node."""
    inter_group: Link | None = None
    """Between groups of nodes, such as those below one set of switches; ``None`` where all nodes are alike."""
    nodes_per_group: int = 0
    """Nodes of one group; without meaning where all nodes are alike."""

    def link_of(self, ranks: Iterable[int]) -> Link:
        """Slowest connection among ranks, which fill up node after node and group after group."""
        nodes = {rank // self.devices_per_node for rank in ranks}
        if len(nodes) == 1:
            return self.intra_node
        if self.inter_group is None or len({node // self.nodes_per_group for node in nodes}) == 1:
            return self.inter_node
        return self.inter_group

    def stage_links(self, stages: int, ranks_per_stage: int) -> tuple[Link, ...]:
        """Slowest connection from each stage to the next one, and from the last to the first.

        Stages fill up the cluster one after the other, as MindSpore numbers its ranks; each rank sends to the rank of
        the same number within the next stage.
        """
        classes = (self.intra_node, self.inter_node, self.inter_group)
        found = []
        for stage in range(stages):
            starts = stage * ranks_per_stage, (stage + 1) % stages * ranks_per_stage
            used = {classes.index(self.link_of(start + rank for start in starts)) for rank in range(ranks_per_stage)}
            link = classes[max(used)]
            assert link is not None
            found.append(link)
        return tuple(found)

    def rate(self, engine: str, dtype: str) -> float:
        """Achievable flops per millisecond of an engine (``matmul`` or ``vector``) for a tensor type."""
        if engine == "vector":
            kind = "float16" if dtype in _SIXTEEN_BIT else "float32"
        else:
            kind = dtype if dtype in _SIXTEEN_BIT else "float32"
        return self.flops_per_ms[f"{engine}_{kind}"]


def available_hardware() -> tuple[str, ...]:
    """Names of the machines that come with bmpipe."""
    folder = resources.files("mindspore_bmpipe") / "configs" / "hardware"
    return tuple(sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")))


def load_hardware(name: str) -> Hardware:
    """Read a machine by the name of its file, or by a path to a YAML file.

    Raises:
        InputError: no such machine, or a number that is missing, not positive or not a number.
    """
    if name in available_hardware():
        text = (resources.files("mindspore_bmpipe") / "configs" / "hardware" / f"{name}.yaml").read_text("utf-8")
        where = f"hardware {name}"
    elif name.endswith((".yaml", ".yml")):
        where = name
        try:
            text = Path(name).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{name}: cannot read the hardware file ({error})") from error
    else:
        raise InputError(
            f"hardware: {name!r} is unknown; known are {', '.join(available_hardware())}, or give a path to a YAML file"
        )
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(document, dict):
        raise InputError(f"{where}: must be a mapping of keys")
    return _parse(document, where)


def _parse(document: Mapping[str, Any], where: str) -> Hardware:
    def number(*path: str, maximum: float = math.inf) -> float:
        value: Any = document
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                raise InputError(f"{where}: {'.'.join(path)} is missing; see the files under configs/hardware")
            value = value[key]
        if isinstance(value, Mapping):
            value = value.get("value")
        try:
            result = float(value)
        except (TypeError, ValueError):
            raise InputError(f"{where}: {'.'.join(path)}: {value!r} is not a number") from None
        if not 0 < result <= maximum or not math.isfinite(result):
            limit = f" of at most {maximum:g}" if math.isfinite(maximum) else ""
            raise InputError(f"{where}: {'.'.join(path)}: {value!r} must be a positive number{limit}")
        return result

    def link(name: str) -> Link:
        latency = number("links", name, "latency_us") / 1e3
        bandwidth = number("links", name, "bandwidth_bytes_per_s") / 1e3
        pair = "point_to_point_bandwidth_bytes_per_s"
        separate = pair in document["links"][name]
        return Link(
            latency,
            bandwidth,
            number("links", name, pair) / 1e3 if separate else bandwidth,
        )

    grouped = "nodes_per_group" in document or "inter_group" in document.get("links", {})
    efficiency = {engine: number("efficiency", engine, maximum=1.0) for engine in ("matmul", "vector", "memory")}
    return Hardware(
        name=str(document.get("name", where)),
        memory_capacity_bytes=int(number("memory_capacity_bytes")),
        flops_per_ms={key: number("flops", key) * efficiency[key.split("_", 1)[0]] / 1e3 for key in _FLOPS_KEYS},
        bytes_per_ms=number("memory_bandwidth_bytes_per_s") * efficiency["memory"] / 1e3,
        launch_ms=number("launch_overhead_us") / 1e3,
        intra_node=link("intra_node"),
        inter_node=link("inter_node"),
        devices_per_node=int(number("devices_per_node")),
        inter_group=link("inter_group") if grouped else None,
        nodes_per_group=int(number("nodes_per_group")) if grouped else 0,
    )
