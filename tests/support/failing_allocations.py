"""Lets the allocations of the native library fail, each once.

simulated_driver/liballocations is preloaded and makes them fail. It counts the allocations of the
library itself and of the C++ library, in all threads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path

from patience import PATIENCE
from simulated_driver import Driver, build, run

from torch_kvswap._native.loader import native


class FailingAllocation:
    """The `nth` allocation from begin() to end() fails."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.has_failed = False
        self._library = ctypes.CDLL(str(build() / "liballocations.so"))
        self._library.allocations_fail.restype = ctypes.c_bool
        self._library.allocations_stop.restype = ctypes.c_bool

    def begin(self) -> None:
        name = native.__file__.encode()
        assert self._library.allocations_fail(name, ctypes.c_long(self.nth))

    def end(self) -> None:
        self.has_failed = self._library.allocations_stop()


def each_fails(attempt: Callable[[FailingAllocation], None]) -> None:
    """Calls it with the first allocation failing, with the second, until none fails. Prints how many
    have failed."""
    # nanobind ends the process if its table of objects cannot grow: it has room for all from now on.
    objects = [native.Job(0, 1, None, None) for _ in range(1000)]
    del objects
    for nth in itertools.count(1):
        allocation = FailingAllocation(nth)
        faulthandler.dump_traceback_later(3 * PATIENCE, exit=True)
        try:
            attempt(allocation)
        except BaseException:
            print(f"allocation {nth}")
            raise
        faulthandler.cancel_dump_traceback_later()
        if not allocation.has_failed:
            print(nth - 1)
            return


def number_of_failures(sweep: Callable[[Driver, str], None], name: str = "") -> int:
    """Runs `sweep(driver, name)`, which calls each_fails(), in a process of its own."""
    file = Path(inspect.getfile(sweep))
    where = f"{file.parent}:{file.stem}:{sweep.__name__}:{name}"
    return int(run(_sweep, SWEEP=where, LD_PRELOAD=str(build() / "liballocations.so")))


def _sweep(driver: Driver) -> None:
    import importlib
    import os
    import sys

    folder, module, sweep, name = os.environ["SWEEP"].split(":")
    sys.path.insert(0, folder)
    getattr(importlib.import_module(module), sweep)(driver, name)
