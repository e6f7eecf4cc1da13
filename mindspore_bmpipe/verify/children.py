"""Runs child processes that compile: as many at once as there are cores, with progress, a time limit, and none left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mindspore_bmpipe.errors import InputError, TimeLimitError
from mindspore_bmpipe.verify.jobs import Answer, Compile, read_answer, write_compiles
from mindspore_bmpipe.verify.stand_in import StandIn

_MODULE = "mindspore_bmpipe.verify.child"
_POLL_SECONDS = 0.05
_SHOWN_OF_LOG = 1500
_ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=268435456"
"""glibc keeps the compiler's millions of small nodes on huge pages: a third less time; other libraries ignore it."""


@dataclass(frozen=True)
class Rank:
    """One child process: what it compiles, and which device of which cluster it takes itself for."""

    rank: int
    """Rank, 0 to `ranks` - 1."""
    ranks: int
    """Ranks of the cluster."""
    compiles: tuple[Compile, ...]
    """What it compiles, one after the other; names are unique among all ranks."""


Progress = Callable[[Rank, float], None]
"""Told of each child that has ended, with the seconds it took."""


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_ranks(
    ranks: Sequence[Rank],
    toolkit: StandIn,
    folder: Path,
    time_limit_s: float | None = None,
    at_once: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Answer]:
    """Compile everything the ranks ask for; answers by name.

    Args:
        ranks: the children to run.
        toolkit: what to compile with.
        folder: existing folder for requests, answers, graphs and logs.
        time_limit_s: seconds that all children together may take; `None` for no limit.
        at_once: children at the same time; by default as many as there are cores.
        progress: called as children end.

    Raises:
        TimeLimitError: the limit is over; the message says which ranks had not finished.
        InputError: a child ended by itself without an answer. What a crash left unanswered is answered with an error.
    """
    waiting = list(enumerate(ranks))
    running: dict[int, tuple[Rank, subprocess.Popen[bytes], float]] = {}
    ended: dict[int, tuple[int, float]] = {}
    started = time.monotonic()
    limit = at_once or cores()
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                number, rank = waiting.pop(0)
                with interrupts_wait():  # a child that is started but not yet known would be left behind
                    running[number] = rank, _start(number, rank, toolkit, folder), time.monotonic()
            for number, (rank, process, since) in list(running.items()):
                if process.poll() is not None:
                    del running[number]
                    ended[number] = process.returncode, time.monotonic() - since
                    if progress is not None:
                        progress(rank, time.monotonic() - since)
            if time_limit_s is not None and time.monotonic() - started > time_limit_s and (waiting or running):
                late = sorted({rank.rank for rank, _, _ in running.values()} | {rank.rank for _, rank in waiting})
                raise TimeLimitError(
                    f"not compiled within {time_limit_s:g} s: rank {', '.join(map(str, late))}; raise --time-limit or "
                    "verify fewer stages"
                )
            time.sleep(_POLL_SECONDS)
    finally:
        for _, process, _ in running.values():
            _end(process)
    answers: dict[str, Answer] = {}
    for number, rank in enumerate(ranks):
        for wanted in rank.compiles:
            answer = read_answer(folder, wanted.name)
            code, seconds = ended[number]
            if answer is None and code < 0:
                error = f"the compiling process was ended by {signal.Signals(-code).name}"
                answer = Answer(wanted.name, None, seconds, 0, error)
            if answer is None:
                log = _log(folder, number)
                text = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
                raise InputError(
                    f"rank {rank.rank}: the compiling process ended without an answer for {wanted.name}: "
                    f"{text[-_SHOWN_OF_LOG:]}"
                )
            answers[wanted.name] = answer
    return answers


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """An interrupt (SIGINT) that comes meanwhile is delivered at the end.

    The handler is exchanged rather than the signal blocked: children would inherit a block, and any other thread of
    the process could still take the signal. Only the main thread is ever interrupted, so others need nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])


def _start(number: int, rank: Rank, toolkit: StandIn, folder: Path) -> subprocess.Popen[bytes]:
    requests = folder / f"requests_{number}.json"
    write_compiles(requests, rank.compiles)
    environment = toolkit.environment(os.environ)
    environment.update(RANK_SIZE=str(rank.ranks), RANK_ID=str(rank.rank), GLOG_v="3")
    environment.setdefault("GLIBC_TUNABLES", _ALLOCATOR)
    # The child works in the folder, so that what MindSpore writes goes there; modules are still found from here.
    here = [os.getcwd(), *(path for path in sys.path if path)]
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), *here]).lstrip(os.pathsep)
    with open(_log(folder, number), "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(os.getpid()), str(requests), str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True,
        )  # fmt: skip


def _log(folder: Path, number: int) -> Path:
    return folder / f"log_{number}.txt"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
