"""The process that compiles: `python -m mindspore_bmpipe.verify.child PARENT REQUESTS FOLDER`.

It is started by :mod:`mindspore_bmpipe.verify.children` with the toolkit on its path, as one rank of a cluster. It
never returns to the interpreter's own clean-up, which would unload libraries that cannot run. MindSpore is imported
only once the process is tied to its parent: the import takes seconds, in which the parent may be gone.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mindspore_bmpipe.errors import BmpipeError
from mindspore_bmpipe.verify.jobs import Answer, Compile, read_compiles, write_answer

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_LONGEST_ERROR = 2000


def main(parent: str, requests: str, folder: str) -> None:
    """Compile every request; a failed one does not end the rest."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    compiling = importlib.import_module("mindspore_bmpipe.verify.child_compile")
    compiling.prepare()
    for wanted in read_compiles(Path(requests)):
        write_answer(Path(folder), _answer(wanted, Path(folder), compiling.compiled))


def _answer(wanted: Compile, folder: Path, compiled: Callable[[Compile], bytes]) -> Answer:
    started = time.perf_counter()
    path = folder / f"{wanted.name}.mindir"
    error = ""
    try:
        path.write_bytes(compiled(wanted))
    except BmpipeError as wrong:
        error = str(wrong)
    except Exception as wrong:  # MindSpore raises many types
        error = f"{type(wrong).__name__}: {str(wrong).strip()[:_LONGEST_ERROR]}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Answer(wanted.name, None if error else path, time.perf_counter() - started, peak, error)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
        code = 0
    except BaseException as wrong:
        sys.stderr.write(f"{type(wrong).__name__}: {wrong}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
