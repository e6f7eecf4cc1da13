"""The hardware descriptions: complete, and every number says where it comes from."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
import yaml

FOLDER = files("mindspore_bmpipe").joinpath("configs", "hardware")
NAMES = sorted(entry.name.removesuffix(".yaml") for entry in FOLDER.iterdir() if entry.name.endswith(".yaml"))
NUMBERS = {
    "memory_capacity_bytes",
    "flops.matmul_float16",
    "flops.matmul_bfloat16",
    "flops.matmul_float32",
    "flops.vector_float16",
    "flops.vector_float32",
    "efficiency.matmul",
    "efficiency.vector",
    "efficiency.memory",
    "memory_bandwidth_bytes_per_s",
    "launch_overhead_us",
    "links.intra_node.latency_us",
    "links.intra_node.bandwidth_bytes_per_s",
    "links.inter_node.latency_us",
    "links.inter_node.bandwidth_bytes_per_s",
    "devices_per_node",
}
OPTIONAL = {
    *(f"links.{link}.point_to_point_bandwidth_bytes_per_s" for link in ("intra_node", "inter_node")),
    "links.inter_group.latency_us",
    "links.inter_group.bandwidth_bytes_per_s",
    "nodes_per_group",
}


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load(FOLDER.joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


def leaves(node: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    if "value" in node:
        return {path: node}
    found: dict[str, dict[str, Any]] = {}
    for key, child in node.items():
        if isinstance(child, dict):
            found.update(leaves(child, f"{path}.{key}" if path else key))
    return found


def test_the_machines_named_in_the_documentation_exist() -> None:
    assert {"ascend910b", "ascend910a", "a100", "h100", "cpu_example"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_description_is_complete_and_sourced(name: str) -> None:
    description = load(name)
    assert description["name"] == name
    assert description["description"]
    assert set(description) - {"name", "description", "nodes_per_group"} == {n.split(".")[0] for n in NUMBERS}
    numbers = leaves(description)
    assert NUMBERS <= set(numbers) <= NUMBERS | OPTIONAL
    groups = {path for path in numbers if "group" in path}
    assert groups in (set(), {path for path in OPTIONAL if "group" in path})
    for path, leaf in numbers.items():
        assert set(leaf) <= {"value", "source", "contradicts"}, path
        for claim in [leaf, *leaf.get("contradicts", [])]:
            assert isinstance(claim["value"], (int, float)), path
            assert claim["value"] > 0, path
            assert claim["source"].strip(), path


@pytest.mark.parametrize("name", NAMES)
def test_fractions_and_orders_of_magnitude(name: str) -> None:
    numbers = {path: leaf["value"] for path, leaf in leaves(load(name)).items()}
    for kind in ("matmul", "vector", "memory"):
        assert 0 < numbers[f"efficiency.{kind}"] <= 1
    inside, between = (numbers[f"links.{link}.bandwidth_bytes_per_s"] for link in ("intra_node", "inter_node"))
    assert between < inside < numbers["memory_bandwidth_bytes_per_s"]
    assert numbers["links.intra_node.latency_us"] <= numbers["links.inter_node.latency_us"]
    assert isinstance(numbers["devices_per_node"], int)
    if "nodes_per_group" in numbers:
        assert isinstance(numbers["nodes_per_group"], int)
        assert numbers["links.inter_node.latency_us"] <= numbers["links.inter_group.latency_us"]
        assert numbers["links.inter_group.bandwidth_bytes_per_s"] <= between


def test_a_value_never_contradicts_itself() -> None:
    for name in NAMES:
        for path, leaf in leaves(load(name)).items():
            assert leaf["value"] not in [claim["value"] for claim in leaf.get("contradicts", [])], (name, path)
