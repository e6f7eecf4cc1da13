"""Dynamic symbols and needed libraries of an ELF shared library, read without any tool."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.errors import InputError

_MAGIC = b"\x7fELF"
_CLASS_64, _LITTLE_ENDIAN = 2, 1
_DYNAMIC, _DYNAMIC_SYMBOLS, _VERSIONS = 6, 11, 0x6FFFFFFF
_NEEDED = 1
_UNDEFINED_SECTION = 0
_GLOBAL = 1
_FIRST_NAMED_VERSION = 2
_VERSION_MASK = 0x7FFF

_SECTION = np.dtype(
    [("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"), ("size", "<u8"),
     ("link", "<u4"), ("info", "<u4"), ("alignment", "<u8"), ("entry_size", "<u8")]
)  # fmt: skip
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_ENTRY = np.dtype([("tag", "<i8"), ("value", "<u8")])


@dataclass(frozen=True)
class SharedLibrary:
    """What the dynamic linker would read from a shared library."""

    machine: int
    """ELF number of the processor it is made for."""
    needed: frozenset[str]
    """File names of the libraries it asks for."""
    defined: frozenset[str]
    """Symbols it offers."""
    undefined: frozenset[str]
    """Symbols it cannot do without and expects from others, those of a versioned library (glibc) left out."""


def read_shared_library(path: str | os.PathLike[str]) -> SharedLibrary:
    """Read a 64-bit little-endian ELF library.

    Raises:
        InputError: the file cannot be read or is not such a library.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: cannot be read ({error.strerror})") from error
    if data[:4] != _MAGIC or data[4:6] != bytes((_CLASS_64, _LITTLE_ENDIAN)):
        raise InputError(f"{os.fspath(path)}: not a 64-bit little-endian ELF library")
    machine = struct.unpack_from("<H", data, 18)[0]
    (start,) = struct.unpack_from("<Q", data, 40)
    (count,) = struct.unpack_from("<H", data, 60)
    sections = np.frombuffer(data, _SECTION, count, start)
    needed: set[str] = set()
    defined: set[str] = set()
    undefined: set[str] = set()
    versions: npt.NDArray[np.uint16] | None = None
    for section in sections[sections["type"] == _VERSIONS]:
        versions = np.frombuffer(data, "<u2", int(section["size"]) // 2, int(section["offset"]))
    for section in sections[sections["type"] == _DYNAMIC]:
        names = _Names(data, sections[section["link"]])
        entries = np.frombuffer(data, _ENTRY, int(section["size"]) // _ENTRY.itemsize, int(section["offset"]))
        needed.update(names[value] for value in entries[entries["tag"] == _NEEDED]["value"].tolist())
    for section in sections[sections["type"] == _DYNAMIC_SYMBOLS]:
        names = _Names(data, sections[section["link"]])
        symbols = np.frombuffer(data, _SYMBOL, int(section["size"]) // _SYMBOL.itemsize, int(section["offset"]))
        binding = symbols["info"] >> 4
        missing = symbols["section"] == _UNDEFINED_SECTION
        wanted = missing & (binding == _GLOBAL)
        if versions is not None:
            wanted &= (versions[: len(symbols)] & _VERSION_MASK) < _FIRST_NAMED_VERSION
        undefined.update(names[value] for value in symbols[wanted]["name"].tolist())
        defined.update(names[value] for value in symbols[~missing & (binding >= _GLOBAL)]["name"].tolist())
    return SharedLibrary(machine, frozenset(needed), frozenset(defined), frozenset(undefined))


class _Names:
    """A string table: offset -> text."""

    def __init__(self, data: bytes, section: np.void) -> None:
        first, size = int(section["offset"]), int(section["size"])
        self._table = data[first : first + size]

    def __getitem__(self, offset: int) -> str:
        return self._table[offset : self._table.index(b"\0", offset)].decode("utf-8", "replace")
