"""Every Python block of the documentation runs, from the top of its page to the bottom."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!http)([^)#]+)\)")
WITH_CODE = [page for page in PAGES if _BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # MindSpore looks cells up in their module and reads their source, so there must be a module and a file.
    module = types.ModuleType("page_under_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, block in enumerate(_BLOCK.findall(page.read_text())):
        file = tmp_path / f"block{number}.py"
        file.write_text(block)
        exec(compile(block, str(file), "exec"), vars(module))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_pages_with_mathematics_have_code() -> None:
    assert {page.stem for page in WITH_CODE} >= {"graphs", "costs", "planning"}
