"""The stand-in for CANN: built once, in one place, by any number of builders, and only where CANN is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from verify_plans import needs_compiler

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.verify import stand_in as module
from mindspore_bmpipe.verify.elf import read_shared_library
from mindspore_bmpipe.verify.stand_in import CACHE_VARIABLE, COMPILER_VARIABLE, StandIn, real_toolkit, stand_in

without_cann = pytest.mark.skipif(real_toolkit() is not None, reason="CANN is installed, so nothing is stood in for")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder))
        return stand_in()


def library(made: StandIn) -> Path:
    assert made.root is not None
    return made.root / "cann" / "lib64" / "libascendcl.so"


@needs_compiler
@without_cann
def test_offers_what_the_plugin_misses(built: StandIn) -> None:
    offered = read_shared_library(library(built)).defined
    package = module._mindspore_folder()
    assert set(module.missing_symbols(package, module.compiler())) <= offered
    # What MindSpore asks CANN for at the least: devices, collectives, graphs.
    assert {"aclrtMalloc", "HcclCommDestroy", "_ZN2ge13StatusFactory8InstanceEv"} - offered <= {"HcclCommDestroy"}
    # Symbols of libraries that are there must not be hidden.
    assert not offered & {"malloc", "dlopen", "pthread_create", "PyObject_Call", "_Znwm"}


@needs_compiler
@without_cann
def test_is_built_once_and_leaves_nothing_else(built: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built.root is not None
    monkeypatch.setenv(CACHE_VARIABLE, str(built.root.parent))
    before = library(built).stat().st_mtime_ns
    assert stand_in() == built
    assert library(built).stat().st_mtime_ns == before
    assert [path.name for path in built.root.parent.iterdir()] == [built.root.name]
    assert "cannot run anything" in (built.root / "README").read_text()


@needs_compiler
@without_cann
def test_builders_at_the_same_time_share_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: stand_in(), range(3)))
    assert len(set(made)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [made[0].root.name if made[0].root else ""]


@needs_compiler
@without_cann
def test_a_damaged_copy_is_replaced(built: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built.root is not None
    copy = tmp_path / built.root.name
    shutil.copytree(built.root, copy, symlinks=True)
    library(StandIn(copy)).unlink()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert stand_in() == StandIn(copy)
    assert library(StandIn(copy)).is_file()


@needs_compiler
@without_cann
def test_ends_a_process_that_wants_to_run_something(built: StandIn) -> None:
    environment = built.environment(os.environ)
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libascendcl.so')"]
    assert subprocess.run(load, env=environment, check=False).returncode == 0
    environment["MS_SIMULATION_LEVEL"] = "1"
    done = subprocess.run(load, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert "stand-in for CANN" in done.stderr


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(COMPILER_VARIABLE, raising=False)
    with pytest.raises(InputError, match=r"found none \(g\+\+, c\+\+, clang\+\+\); install g\+\+"):
        stand_in()
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked))
    with pytest.raises(InputError, match=f"{blocked}.*{CACHE_VARIABLE}"):
        stand_in()


def test_where_cann_is_installed_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "toolkit" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libascendcl.so").write_text("")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(folder.parent))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    assert real_toolkit() == folder
    assert stand_in() == StandIn(None)
    assert not (tmp_path / "cache").exists()
    base = {"LD_LIBRARY_PATH": "/there", "PYTHONPATH": "/here"}
    assert StandIn(None).environment(base) == {**base, "MS_SIMULATION_LEVEL": "0"}


def test_the_cache_lies_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.cache_folder() == tmp_path / "bmpipe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert module.cache_folder() == Path.home() / ".cache" / "bmpipe"


@pytest.mark.skipif(shutil.which("nm") is None, reason="compares with nm, which is not installed")
def test_symbols_are_those_that_nm_prints() -> None:
    path = module._mindspore_folder() / "lib" / "plugin" / "ascend" / "libd_collective.so"
    printed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].partition("@")[0] for line in printed.splitlines()}
    found = read_shared_library(path)
    assert found.defined == names
    assert {"libhccl.so", "libc.so.6"} <= found.needed
    assert not found.undefined & {"malloc", "memcpy"}


def test_files_that_are_no_libraries_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("#!/bin/sh\n")
    with pytest.raises(InputError, match="not a 64-bit little-endian ELF library"):
        read_shared_library(tmp_path / "text")
    with pytest.raises(InputError, match="cannot be read"):
        read_shared_library(tmp_path / "missing")
