"""Fixtures shared by tests that trace real networks."""

from __future__ import annotations

import os

# MindSpore's compiler logs warnings about private details of every trace; set before MindSpore is imported.
os.environ.setdefault("GLOG_v", "3")

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of instances and published tables."""
    return DATA
