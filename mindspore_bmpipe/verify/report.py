"""A verification as text and as JSON."""

from __future__ import annotations

from typing import Any

from mindspore_bmpipe.report.tables import render_rows
from mindspore_bmpipe.schedule import format_order
from mindspore_bmpipe.verify.run import Verification, VerifiedStage

_MIB = 1 << 20


def render_verification(result: Verification, name: str) -> str:
    """A table of the stages, then everything that differs, then the warnings."""
    columns = ["stage", "compile s", "operations", "run again", "weights MiB", "activations MiB",
               "update MiB", "predicted", "wrong"]  # fmt: skip
    rows = [_row(stage) for stage in result.stages]
    lines = [render_rows(f"{name}: compiled for Ascend, {result.ranks} ranks", columns, rows).rstrip()]
    lines.extend(f"wrong: {finding}" for finding in result.findings)
    lines.extend(f"warning: {warning}" for warning in result.warnings)
    checked = ", ".join(str(stage.stage) for stage in result.stages)
    verdict = "differs from the plan" if result.findings else "does what the plan says"
    lines.append(f"stage {checked}: the compiled network {verdict}")
    return "\n".join(lines)


def verification_summary(result: Verification) -> dict[str, Any]:
    """The same as one JSON object."""
    return {
        "status": "failed" if result.findings else "verified",
        "ranks": result.ranks,
        "stages": [_summary(stage) for stage in result.stages],
        "findings": [
            {
                "stage": finding.stage, "check": finding.check, "cell": finding.cell, "message": finding.message,
                "nodes": list(finding.nodes),
            }
            for finding in result.findings
        ],
        "warnings": list(result.warnings),
    }  # fmt: skip


def _row(stage: VerifiedStage) -> list[str]:
    checked, memory = stage.checked, stage.memory
    return [
        str(stage.stage),
        f"{stage.seconds:.1f}",
        "-" if checked is None else str(checked.operations),
        "-" if checked is None else str(checked.repeated),
        "-" if memory is None else f"{memory.weights / _MIB:.2f}",
        "-" if memory is None else f"{memory.peak.activation_bytes / _MIB:.2f}",
        "-" if memory is None else f"{memory.peak.update_bytes / _MIB:.2f}",
        "-" if memory is None else f"{memory.error:+.1%}",
        str(len(stage.findings)),
    ]


def _summary(stage: VerifiedStage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "stage": stage.stage,
        "rank": stage.rank,
        "compile_seconds": stage.seconds,
        "compiler_bytes": stage.compiler_bytes,
        "wrong": len(stage.findings),
    }
    if stage.checked is not None:
        found.update(
            operations=stage.checked.operations,
            repeated=stage.checked.repeated,
            order=format_order(stage.checked.order),
        )
    if stage.memory is not None:
        found.update(
            static_bytes=stage.memory.weights,
            predicted_static_bytes=stage.memory.predicted.static,
            activation_bytes=stage.memory.peak.activation_bytes,
            predicted_activation_bytes=stage.memory.predicted.activations,
            planned_activation_bytes=stage.memory.predicted.planned_activations,
            update_bytes=stage.memory.peak.update_bytes,
            predicted_update_bytes=stage.memory.predicted.update,
            peak_during=None if stage.memory.peak.during is None else str(stage.memory.peak.during),
            peak_operation=stage.memory.peak.operation,
        )
    return found
