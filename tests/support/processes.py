"""Runs code in other processes, and ends tests that hang."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from fork_server import ForkServer
from patience import PATIENCE, in_time


def in_child(body: Callable[[], object]) -> int:
    """Runs the body in a forked process. Returns 1 if it returned something true and 0 if not, or the
    negative number of the signal that ended the process."""
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
def live_fork() -> Iterator[int]:
    """A forked process lives and does nothing. Its number."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        yield child
    finally:
        os.close(write_end)
        os.waitpid(child, 0)
        os.close(read_end)


@functools.cache
def _fork_server() -> ForkServer:
    return ForkServer("fork_server", {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def run_script(
    script: str, *arguments: str, folder: Path | None = None, ends_as_usual: bool = False
) -> str:
    """Runs a script in another process, with the module search path of this one, and returns what it
    printed. The script can also import the modules of `folder`. See :meth:`ForkServer.run`."""
    program = textwrap.dedent(script)
    return _fork_server().run(program, os.environ, arguments, folder, ends_as_usual)


class Process:
    """A program in a process of its own, killed at the end. It has printed `line` when it is made.

    Args:
        arguments (Sequence[str]): of Python: -c and a program, or -m and a module, and theirs.
    """

    def __init__(self, arguments: Sequence[str], line: str) -> None:
        kind, program, *rest = arguments
        if kind == "-m":
            program = f"import runpy; runpy.run_module({program!r}, None, '__main__', True)"
        (stdin, self._stdin), (self._stdout, stdout) = os.pipe(), os.pipe()
        self._status: int | None = None
        self.pid = _fork_server().start(program, os.environ, tuple(rest), (stdin, stdout))
        os.close(stdin)
        os.close(stdout)
        try:
            with os.fdopen(os.dup(self._stdout)) as printing:
                printed = printing.readline()
            assert printed.startswith(line), printed
        except BaseException:
            self.kill()
            raise

    def _has_ended(self) -> bool:
        if self._status is None:
            self._status = _fork_server().status(self.pid)
        return self._status is not None

    def send(self, number: int) -> None:
        if not self._has_ended():
            os.kill(self.pid, number)

    def wait(self) -> int:
        assert in_time(self._has_ended)
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()
        for pipe in {self._stdin, self._stdout} if self._stdin >= 0 else ():
            os.close(pipe)
        self._stdin = -1

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def free_port() -> int:
    """Of loopback, on which a program can listen."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@contextmanager
def watchdog(capfd: pytest.CaptureFixture[str], seconds: float = 3 * PATIENCE) -> Iterator[None]:
    """Ends the process and prints the stacks of all threads if a test hangs, for hangs in the driver
    or in close(), where the test has no deadline of its own."""
    with capfd.disabled():
        stderr = os.dup(2)
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(stderr)
