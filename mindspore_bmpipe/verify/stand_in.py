"""A stand-in for the Ascend toolkit (CANN), enough for MindSpore to compile for Ascend where CANN is not installed.

MindSpore's wheel holds its Ascend plugin, which loads only if CANN's shared libraries do. The stand-in is one library
that offers every symbol the plugin misses, each a function that returns 0, under the names of CANN's libraries.
Compiling needs no more than that. It is good for compilation and for nothing else: its library ends any process that
loads it without asking for a compile-only run.

MindSpore's own folder is only read. The result lies in a cache folder, one for each version of MindSpore, and is on the
path of the process that compiles, no other.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.verify.elf import read_shared_library

CACHE_VARIABLE = "BMPIPE_CACHE_DIR"
"""Environment variable that names the cache folder; by default `bmpipe` in the user's cache folder."""
COMPILER_VARIABLE = "CXX"
"""Environment variable that names the C++ compiler; by default the first of :data:`COMPILERS` that exists."""
COMPILERS = ("g++", "c++", "clang++")
"""Names under which a C++ compiler is looked for."""
SIMULATION_VARIABLE = "MS_SIMULATION_LEVEL"
"""MindSpore's switch for runs without a device; level 0 only compiles."""

# Changes whenever what is built changes, so that caches of earlier versions of this file are not used.
_RECIPE = "1"
# CANN's libraries that the plugin names or opens by name at run time.
_CANN_LIBRARIES = (
    "libascend_hal", "libascendcl", "libc_sec", "libge_runner", "libgraph", "libhccl", "libmsprofiler", "libnnopbase",
    "libplatform", "libruntime",
)  # fmt: skip
_LIBRARY = "libascendcl.so"
# Found in any toolkit, whatever its version.
_PROOF_OF_CANN = "libascendcl.so"
_CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_CANN_FOLDERS = (
    "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", "/usr/local/Ascend/latest",
    "/usr/local/Ascend/nnae/latest",
)  # fmt: skip
_PYTHON_PREFIXES = ("Py", "_Py")
_STATUS_FACTORY = "_ZN2ge13StatusFactory8InstanceEv"
_SOC_NAME = "aclrtGetSocName"
_SOC = "Ascend910B3"

_HEAD = f"""\
// Written by mindspore_bmpipe from the symbols that MindSpore's Ascend plugin misses.
// For compiling networks where CANN is not installed. Nothing can be executed with it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {{
struct StatusTexts {{
  std::map<uint32_t, std::string> texts;
  char unused[256] = {{}};
}};
}}  // namespace

extern "C" {{
__attribute__((constructor)) void bmpipe_check() {{
  const char *level = std::getenv("{SIMULATION_VARIABLE}");
  if (level == nullptr || std::strcmp(level, "0") != 0) {{
    std::fputs("mindspore_bmpipe: this is a stand-in for CANN that can compile networks and not run them; "
               "take its folder off LD_LIBRARY_PATH\\n", stderr);
    std::_Exit(70);
  }}
}}
long bmpipe_nothing() {{ return 0; }}
const char *{_SOC_NAME}() {{ return "{_SOC}"; }}
// Read as a map of error texts while the plugin is loaded.
void *{_STATUS_FACTORY}() {{
  static StatusTexts status;
  return &status;
}}
}}
"""
_README = """\
This folder stands in for the Ascend toolkit (CANN) while mindspore_bmpipe compiles networks to verify plans.
It can compile and cannot run anything. It may be deleted; it is built again when needed.
"""


@dataclass(frozen=True)
class StandIn:
    """A toolkit folder for the process that compiles."""

    root: Path | None
    """Folder of the stand-in; `None` where CANN itself is installed and nothing needs standing in for."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` changed so that a Python process started with it can compile for Ascend without a device."""
        changed = {**base, SIMULATION_VARIABLE: "0"}
        if self.root is None:
            return changed
        toolkit = self.root / "cann"
        changed["ASCEND_HOME_PATH"] = str(toolkit)
        changed["LD_LIBRARY_PATH"] = _prepended(toolkit / "lib64", base.get("LD_LIBRARY_PATH"))
        changed["PYTHONPATH"] = _prepended(self.root / "python", base.get("PYTHONPATH"))
        return changed


def stand_in() -> StandIn:
    """The toolkit to compile with: CANN where it is installed, else the stand-in, built now if it is not cached.

    Raises:
        InputError: there is no C++ compiler, MindSpore is missing or has no Ascend plugin, or building fails.
    """
    if real_toolkit() is not None:
        return StandIn(None)
    package = _mindspore_folder()
    root = cache_folder() / _key(package)
    if not _is_complete(root):
        _build(package, root)
    return StandIn(root)


def real_toolkit(environment: Mapping[str, str] | None = None) -> Path | None:
    """Library folder of an installed CANN; `None` if there is none."""
    given = os.environ if environment is None else environment
    folders = [Path(part) for part in given.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    folders += [Path(given[name]) / "lib64" for name in _CANN_VARIABLES if given.get(name)]
    folders += [Path(name) / "lib64" for name in _CANN_FOLDERS]
    for folder in folders:
        if (folder / _PROOF_OF_CANN).exists() and not _is_complete(folder.parent.parent):
            return folder
    return None


def compiler() -> str:
    """Path of the C++ compiler.

    Raises:
        InputError: there is none.
    """
    wanted = os.environ.get(COMPILER_VARIABLE)
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    looked = wanted or ", ".join(COMPILERS)
    raise InputError(
        f"verifying compiles for Ascend, and without CANN that takes a C++ compiler once; found none ({looked}); "
        f"install g++, or name a compiler in the environment variable {COMPILER_VARIABLE}"
    )


def cache_folder() -> Path:
    """Folder that stand-ins are kept in; it may not exist yet."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bmpipe"


def missing_symbols(package: Path, command: str) -> tuple[str, ...]:
    """Symbols that MindSpore's Ascend plugin expects from CANN, sorted.

    Args:
        package: MindSpore's folder.
        command: C++ compiler, which knows where the system's own libraries are.

    Raises:
        InputError: the folder holds no MindSpore with an Ascend plugin for this machine.
    """
    plugin = package / "lib" / "plugin"
    main = sorted(plugin.glob("libmindspore_ascend.so*"))
    if not main:
        raise InputError(
            f"MindSpore in {package} has no Ascend plugin (libmindspore_ascend.so), so it cannot compile for "
            "Ascend; install a Linux wheel of mindspore 2.9 or 2.10 from PyPI"
        )
    asking = [*main, *plugin.glob("libmindspore_ops_ascend.so"), *(plugin / "ascend").glob("*.so")]
    asking += (plugin / "ascend").glob("ms_kernels_*/**/lib/*.so")
    machine = read_shared_library(main[0]).machine
    missing: set[str] = set()
    offered: set[str] = set()
    needed: set[str] = set()
    for path in asking:
        library = read_shared_library(path)
        # The wheel also carries kernels for the processor inside the device.
        if library.machine == machine:
            missing |= library.undefined
            offered |= library.defined
            needed |= library.needed
    for path in (*package.glob("*.so"), *(package / "lib").glob("*.so*"), *_system_libraries(needed, command)):
        offered |= read_shared_library(path).defined
    return tuple(sorted(name for name in missing - offered if not name.startswith(_PYTHON_PREFIXES)))


def _system_libraries(names: Iterable[str], command: str) -> list[Path]:
    """Those of the libraries that the compiler finds; it prints the name back for one it does not."""
    asked = [f"-print-file-name={name}" for name in sorted(names)]
    found = (subprocess.run([command, option], capture_output=True, text=True, check=False).stdout for option in asked)
    return [path for path in map(Path, map(str.strip, found)) if path.is_absolute() and path.is_file()]


def source_text(symbols: Iterable[str]) -> str:
    """C++ source of the library that offers these symbols."""
    names = [name for name in symbols if name not in (_SOC_NAME, _STATUS_FACTORY)]
    lines = [f'asm(".globl {name}\\n.type {name}, %function\\n.set {name}, bmpipe_nothing\\n");' for name in names]
    return _HEAD + "\n".join(lines) + "\n"


def _mindspore_folder() -> Path:
    found = importlib.util.find_spec("mindspore")
    if found is None or not found.submodule_search_locations:
        raise InputError("MindSpore is not installed; verifying compiles with it: pip install 'mindspore>=2.9,<2.11'")
    return Path(next(iter(found.submodule_search_locations)))


def _key(package: Path) -> str:
    """Folder name: the version for people, and a digest of what else the build depends on."""
    version = metadata.version("mindspore")
    plugin = sorted((package / "lib" / "plugin").glob("libmindspore_ascend.so*"))
    parts = [_RECIPE, platform.machine(), *(f"{path.name}:{path.stat().st_size}" for path in plugin)]
    return f"stand-in-{version}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:8]}"


def _files(root: Path) -> list[Path]:
    return [
        *(root / "cann" / "lib64" / f"{name}.so" for name in _CANN_LIBRARIES),
        root / "python" / "hccl" / "__init__.py",
        root / "python" / "hccl" / "sys_version.py",
        root / "README",
    ]


def _is_complete(root: Path) -> bool:
    return all(path.is_file() for path in _files(root))


def _build(package: Path, root: Path) -> None:
    """Build beside `root` and rename, so that builders at the same time do not meet and no half of it is ever used."""
    command = compiler()
    symbols = missing_symbols(package, command)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=".building-") as folder:
            made = Path(folder) / "made"
            _write(made, command, symbols)
            if root.exists() and not _is_complete(root):
                os.replace(root, Path(folder) / "damaged")
            try:
                os.replace(made, root)
            except OSError:
                if not _is_complete(root):  # else another builder was faster
                    raise
    except OSError as error:
        raise InputError(
            f"{root.parent}: the stand-in for CANN cannot be kept there ({error.strerror}); name another folder in the "
            f"environment variable {CACHE_VARIABLE}"
        ) from error


def _write(made: Path, command: str, symbols: tuple[str, ...]) -> None:
    libraries = made / "cann" / "lib64"
    package = made / "python" / "hccl"
    libraries.mkdir(parents=True)
    package.mkdir(parents=True)
    source = made / "stand_in.cc"
    source.write_text(source_text(symbols), encoding="utf-8")
    arguments = ["-shared", "-fPIC", "-O0", f"-Wl,-soname,{_LIBRARY}", "-o", str(libraries / _LIBRARY), str(source)]
    done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            f"{command} cannot build the stand-in for CANN (exit code {done.returncode}): {done.stderr.strip()[:2000]}"
        )
    for name in _CANN_LIBRARIES:
        link = libraries / f"{name}.so"
        if link.name != _LIBRARY:
            link.symlink_to(_LIBRARY)
    (package / "__init__.py").write_text('"""Stands in for the package that comes with CANN."""\n', encoding="utf-8")
    (package / "sys_version.py").write_text('__sys_version__ = "0"\n', encoding="utf-8")
    (made / "README").write_text(_README, encoding="utf-8")


def _prepended(folder: Path, path: str | None) -> str:
    return f"{folder}{os.pathsep}{path}" if path else str(folder)
