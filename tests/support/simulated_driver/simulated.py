"""The decorator of tests that run on the simulated driver."""

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
import torch
from patience import PATIENCE, SCALE

from simulated_driver.program import environment

without_cuda = pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="the simulated driver needs a PyTorch without CUDA",
)


class Worker:
    """A process with the simulated driver, in which tests run one after another.

    A test may take `seconds`, which is more than its own waits may take: these say what they waited
    for.
    """

    def __init__(self, seconds: float = 3 * PATIENCE, **variables: str) -> None:
        self._runs_a_test = False
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._tests, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "simulated_driver.worker", str(theirs.fileno()), str(seconds)],
            env=environment(PYTHONDONTWRITEBYTECODE="1", **variables),
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
        """The worker ends by itself, and with that writes what tools/measure_coverage.py counts. It
        is killed if it still runs a test."""
        self._tests.close()
        try:
            self._process.wait(0 if self._runs_a_test else PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


class Workers:
    """The worker of this process with these variables in its environment, replaced after each
    failure.
    """

    def __init__(self, **variables: str) -> None:
        self._variables = variables
        self._worker: Worker | None = None
        atexit.register(self.close)

    def call(self, module: str, name: str, arguments: dict[str, Any]) -> str | None:
        fuzz = float(os.environ.get("KVSWAP_FUZZ_SECONDS", "0"))
        seconds = 3 * PATIENCE + fuzz * SCALE
        self._worker = self._worker or Worker(seconds, **self._variables)
        failure = self._worker.call(module, name, arguments)
        # A failed test may leave threads and streams behind, an accepted one other line numbers.
        if failure is not None or os.environ.get("EXPECTTEST_ACCEPT"):
            self.close()
        return failure

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None


workers, workers_on_hip = Workers(), Workers(SIMULATED_FACE="hip")


def simulated(body: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test whose first argument is a :class:`Driver`: runs it on the simulated driver.

    It runs in another process, which loads the test's module from its file. Its arguments are
    pickled.
    """
    return _decorate(body, lambda arguments: workers)


def simulated_on_hip(body: Callable[..., None]) -> Callable[..., None]:
    """As :func:`simulated`, with HIP's functions instead of those of CUDA's driver."""
    return _decorate(body, lambda arguments: workers_on_hip)


def simulated_on_both(body: Callable[..., None]) -> Callable[..., None]:
    """As :func:`simulated`, once with the functions of CUDA's driver and once with HIP's."""
    of = {"CUDA": workers, "HIP": workers_on_hip}
    test = _decorate(body, lambda arguments: of[arguments.pop("runtime")], "runtime")
    marked: Callable[..., None] = pytest.mark.parametrize("runtime", of)(test)
    return marked


def _decorate(
    body: Callable[..., None], choose: Callable[[dict[str, Any]], Workers], *more: str
) -> Callable[..., None]:
    """A test that a worker of those that `choose` picks by its arguments runs.

    Args:
        body (Callable): the test; its first argument is the driver.
        choose (Callable): takes the arguments that the body has not out of them.
        more (str): their names.
    """

    @functools.wraps(body)
    def test(**arguments: Any) -> None:
        failure = choose(arguments).call(body.__module__, body.__name__, arguments)
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    signature = inspect.signature(body)
    parameters = list(signature.parameters.values())[1:]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in more]
    test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return without_cuda(test)
