"""Only the integer program knows the solver. Import contracts cannot name files by prefix, so this reads the source."""

from __future__ import annotations

import ast
from pathlib import Path

import mindspore_bmpipe

PACKAGE = Path(mindspore_bmpipe.__file__).parent


def imported_packages(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_only_milp_files_import_the_solver() -> None:
    users = {path for path in PACKAGE.rglob("*.py") if "mip" in imported_packages(path.read_text(encoding="utf-8"))}
    strangers = [str(path.relative_to(PACKAGE)) for path in users if not path.name.startswith("milp")]
    assert strangers == []


def test_every_form_of_import_is_seen() -> None:
    assert imported_packages(
        "def f():\n    import mip.model as m\n    from highsbox import x\n    from . import y"
    ) == {
        "mip",
        "highsbox",
    }
