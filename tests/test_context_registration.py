"""Registration in both import orders, each in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def run(script: str, folder: Path | None = None) -> str:
    """Standard output of a script in a fresh interpreter."""
    paths = [str(folder)] if folder else []
    paths += [str(TESTS), str(TESTS.parent)]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GLOG_v": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a quick package called mindspore, and a context module that counts its registrations."""
    (tmp_path / "mindspore").mkdir()
    (tmp_path / "mindspore" / "__init__.py").write_text(
        "import os, time\n"
        "time.sleep(float(os.environ.get('SLOW', '0')))\n"
        "if os.environ.get('FAIL'):\n"
        "    raise OSError('no driver')\n"
        "VALUE = 3\n"
    )
    return tmp_path


COUNTING = """
    import os, sys, types
    from mindspore_bmpipe import context_registration
    registered = []
    def count():
        import mindspore
        registered.append(mindspore.VALUE)
    stub = types.ModuleType("mindspore_bmpipe.context_key")
    stub.register = count
    sys.modules["mindspore_bmpipe.context_key"] = stub
    def waiting():
        return [finder for finder in sys.meta_path if getattr(finder, "_bmpipe_registers_context", False)]
"""


def test_planner_first_then_mindspore() -> None:
    run(
        """
        import sys
        from mindspore_bmpipe import context_registration
        context_registration.install()
        assert "mindspore" not in sys.modules and "mindspore_bmpipe.context_key" not in sys.modules
        hook = sys.meta_path[0]
        import mindspore
        mindspore.set_auto_parallel_context(pipeline_planner="bmpipe")
        assert mindspore.get_auto_parallel_context("pipeline_planner") == "bmpipe"
        assert hook not in sys.meta_path
        assert type(mindspore.__spec__.loader).__module__ == "_frozen_importlib_external"
        assert mindspore.__loader__ is mindspore.__spec__.loader
        """
    )


def test_mindspore_first_then_planner() -> None:
    run(
        """
        import sys
        from mindspore.context import set_auto_parallel_context, get_auto_parallel_context
        finders = list(sys.meta_path)
        from mindspore_bmpipe import context_registration
        context_registration.install()
        assert sys.meta_path == finders
        set_auto_parallel_context(pipeline_planner="bmpipe")
        context_registration.install()
        assert get_auto_parallel_context("pipeline_planner") == "bmpipe"
        """
    )


def test_installing_twice_and_reloading_wait_once(stand_in: Path) -> None:
    run(
        COUNTING
        + """
    import importlib
    context_registration.install()
    context_registration.install()
    importlib.reload(context_registration).install()
    assert len(waiting()) == 1
    import mindspore
    assert registered == [3] and not waiting()
    importlib.reload(mindspore)
    assert registered == [3] and not waiting()
    context_registration.install()
    assert registered == [3, 3]
    """,
        stand_in,
    )


def test_looking_for_mindspore_does_not_import_it(stand_in: Path) -> None:
    run(
        COUNTING
        + """
    import importlib.util
    context_registration.install()
    spec = importlib.util.find_spec("mindspore")
    assert spec.origin.endswith("__init__.py") and spec.loader.get_filename("mindspore") == spec.origin
    assert "mindspore" not in sys.modules and not registered and len(waiting()) == 1
    import mindspore
    assert registered == [3]
    """,
        stand_in,
    )


def test_a_failing_import_leaves_no_trace(stand_in: Path) -> None:
    run(
        COUNTING
        + """
    context_registration.install()
    os.environ["FAIL"] = "1"
    for _ in range(2):
        try:
            import mindspore
        except OSError as error:
            assert str(error) == "no driver"
        else:
            raise AssertionError
        assert "mindspore" not in sys.modules and not registered and len(waiting()) == 1
    del os.environ["FAIL"]
    import mindspore
    assert registered == [3] and not waiting()
    """,
        stand_in,
    )


def test_mindspore_missing_altogether() -> None:
    run(
        """
        import sys
        from mindspore_bmpipe import context_registration
        sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
        context_registration.install()
        try:
            import mindspore
        except ModuleNotFoundError as error:
            assert error.name == "mindspore"
        else:
            raise AssertionError
        """
    )


def test_threads_register_once(stand_in: Path) -> None:
    run(
        COUNTING
        + """
    import threading, time
    os.environ["SLOW"] = "0.3"
    context_registration.install()
    def load():
        import mindspore
        assert mindspore.VALUE == 3
    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert registered == [3] and not waiting()
    """,
        stand_in,
    )


def test_installing_while_another_thread_imports(stand_in: Path) -> None:
    run(
        COUNTING
        + """
    import threading, time
    # As if the package were imported only while the other thread is at it.
    for finder in waiting(): sys.meta_path.remove(finder)
    os.environ["SLOW"] = "0.5"
    thread = threading.Thread(target=lambda: __import__("mindspore"))
    thread.start()
    while "mindspore" not in sys.modules: time.sleep(0.01)
    context_registration.install()
    assert registered == [3]
    thread.join()
    """,
        stand_in,
    )


def test_a_failed_registration_warns_and_leaves_mindspore_usable(stand_in: Path) -> None:
    run(
        COUNTING
        + """
    import warnings
    def fail():
        raise AttributeError("Cell.compile")
    stub.register = fail
    context_registration.install()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import mindspore
    assert mindspore.VALUE == 3 and sys.modules["mindspore"] is mindspore
    assert "could not register" in str(caught[0].message) and "Cell.compile" in str(caught[0].message)
    """,
        stand_in,
    )


@pytest.mark.parametrize("module", ["api", "context", "graph.compile_private", "graph.trace", "apply.cells"])
def test_any_module_may_be_the_first_to_import_mindspore(module: str) -> None:
    script = (
        f"import mindspore_bmpipe.{module}, mindspore;"
        "assert mindspore.get_auto_parallel_context('pipeline_planner') is None"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
