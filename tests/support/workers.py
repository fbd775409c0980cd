"""Runs tests in other processes, each of which runs many tests one after another.

For tests that need what changes a process for good: another CUDA driver, a device of its own.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import expecttest
import pytest
from patience import PATIENCE, SCALE


class Worker:
    """A process in which tests run one after another.

    Args:
        program (str): the module that it runs, which calls :func:`worker_process.serve`.
        environment (dict[str, str]): of the process.
        seconds (float): what a test may take, which is more than its own waits may take: these say
            what they waited for.
    """

    def __init__(
        self, program: str, environment: dict[str, str], seconds: float = 3 * PATIENCE
    ) -> None:
        self._runs_a_test = False
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._tests, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, str(theirs.fileno()), str(seconds)],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()

    def call(self, module: str, name: str, arguments: dict[str, Any]) -> str | None:
        """Runs a test; returns None, or why it failed. After a failure the worker cannot be used again."""
        begin = self._output.seek(0, os.SEEK_END)
        try:
            self._runs_a_test = True
            self._tests.send((module, sys.modules[module].__file__))
            self._tests.send((name, arguments))
            failure, edits = self._tests.recv()
            self._runs_a_test = False
        except (EOFError, OSError):
            status = self._process.wait()
            failure, edits = f"the process of the test ended with status {status}", {}
        for file, of_file in edits.items():
            expecttest.EDIT_HISTORY.state.setdefault(file, []).extend(of_file)
        if failure is None:
            return None
        self._output.seek(begin)
        return f"{failure}\n{self._output.read()}"

    def close(self) -> None:
        """The worker ends by itself, or is killed if it still runs a test."""
        self._tests.close()
        try:
            self._process.wait(0 if self._runs_a_test else PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


class Workers:
    """The worker of this process for one program, replaced after each failure.

    Args:
        program (str): as for a :class:`Worker`.
        environment (Callable): returns the environment, with what has to be built for it.
    """

    def __init__(self, program: str, environment: Callable[[], dict[str, str]]) -> None:
        self._program, self._environment = program, environment
        self._worker: Worker | None = None
        atexit.register(self.close)

    def new(self, seconds: float = 3 * PATIENCE) -> Worker:
        return Worker(self._program, self._environment(), seconds)

    def call(self, module: str, name: str, arguments: dict[str, Any]) -> str | None:
        fuzz = float(os.environ.get("KVSWAP_FUZZ_SECONDS", "0"))
        self._worker = self._worker or self.new(3 * PATIENCE + fuzz * SCALE)
        failure = self._worker.call(module, name, arguments)
        # A failed test may leave threads and streams behind, an accepted one other line numbers.
        if failure is not None or os.environ.get("EXPECTTEST_ACCEPT"):
            self.close()
        return failure

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def runs(self, body: Callable[..., None]) -> Callable[..., None]:
        """The test that runs `body` in the worker, with the worker's device as its first argument.

        The worker loads the test's module from its file. The other arguments are pickled.
        """

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            failure = self.call(body.__module__, body.__name__, arguments)
            if failure is not None:
                pytest.fail(failure, pytrace=False)

        signature = inspect.signature(body)
        parameters = list(signature.parameters.values())[1:]
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return test
