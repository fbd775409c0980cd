"""The process in which a :class:`workers.Worker` runs tests."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import reprlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import expecttest
from logged import Handler

from torch_kvswap._native.log import log


class Device(Protocol):
    """What the tests of a worker run on, their first argument."""

    def reset(self) -> None:
        """Everything as in the beginning."""

    def unexpected_violations(self) -> str:
        """How it was used wrongly, unless the test asked for that, or nothing."""

    def describe(self) -> str:
        """What is told with a failure."""


short = reprlib.Repr()
short.maxother = short.maxstring = short.maxlong = 300
lost: list[str] = []  # errors that were raised where nobody catches them


def note_warning(message: str) -> None:
    lost.append(f"logged: {message}")


def load(module: str, file: str) -> None:
    """Imports a module of tests, which no search path need lead to."""
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)


def unlock(module: str, name: str) -> Callable[..., None]:
    """The body under the decorator."""
    return getattr(sys.modules[module], name).__wrapped__


def locals_of(error: BaseException, module: str) -> str:
    """The variables of the test where it failed, which a bare assert does not tell."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if frame.f_globals.get("__name__") == module]
    lines = []
    for name, value in own[-1].f_locals.items() if own else ():
        try:
            lines.append(f"    {name} = {short.repr(value)}")
        except Exception as failure:
            lines.append(f"    {name}: no repr, {failure!r}")
    return "\n".join(["where", *lines])


def attempt(device: Device, module: str, name: str, arguments: dict[str, Any]) -> str | None:
    """None, or why the test failed."""
    device.reset()
    lost.clear()
    try:
        unlock(module, name)(device, **arguments)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        return f"{text}{locals_of(error, module)}\n{device.describe()}"
    gc.collect()
    if lost:
        return "\n".join(lost)
    if violations := device.unexpected_violations():
        return f"the device was used wrongly:\n{violations}{device.describe()}"
    return None


def serve(make_device: Callable[[], Device]) -> None:
    """Runs the tests that the worker sends, until it sends no more, and ends the process."""
    faulthandler.enable()
    tests = Connection(int(sys.argv[1]))
    seconds = float(sys.argv[2])
    device = make_device()
    sys.unraisablehook = lambda hook: lost.append(
        "".join(traceback.format_exception(hook.exc_value)) + f"in {hook.object!r}"
    )
    threading.excepthook = lambda hook: lost.append(
        "".join(traceback.format_exception(hook.exc_value)) + f"in {hook.thread}"
    )
    log.addHandler(Handler(note_warning))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # tests that fork
    warnings.filterwarnings("default", module=r"torch(\.|$)")
    while True:
        try:
            module, file = tests.recv()
        except EOFError:
            break
        if module not in sys.modules:
            load(
                module, file
            )  # before the test's time begins, and before its arguments are unpickled
            gc.collect()
            gc.freeze()  # what was imported stays: to look through all of it for garbage takes long
        name, arguments = tests.recv()
        faulthandler.dump_traceback_later(seconds, exit=True)
        failure = attempt(device, module, name, arguments)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        tests.send((failure, expecttest.EDIT_HISTORY.state))
    sys.stderr.flush()
    os._exit(0)  # threads that a failed test left do not matter
