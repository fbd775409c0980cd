"""Processes that tests start: a fork, a script, and the end of one that hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from patience import PATIENCE


def in_child(body: Callable[[], object]) -> int:
    """The exit status of a fork: 1 if the body was true, 0 if not; that of a signal is negative."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            faulthandler.disable()
            signal.alarm(int(PATIENCE))
            status = int(bool(body()))
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def a_fork_lives() -> Iterator[None]:
    """Of this process; it does nothing."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(write_end)
        os.waitpid(child, 0)
        os.close(read_end)


def run_script(script: str, *arguments: str, folder: Path | None = None) -> str:
    """Runs it in a process of its own that imports what this one does, and modules of the folder;
    returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{textwrap.dedent(script)}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def watchdog(capfd: pytest.CaptureFixture[str], seconds: float = 3 * PATIENCE) -> Iterator[None]:
    """Ends the process, with the stacks of all threads, when a test hangs where no deadline of its
    own can help: inside the driver, or in closing."""
    with capfd.disabled():
        stderr = os.dup(2)
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(stderr)
