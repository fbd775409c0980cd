"""Loads the fake accelerator into this process, controls it and observes it."""

from __future__ import annotations

import atexit
import ctypes
import types
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch

from fake_accelerator.library import build

DEVICE_TYPE = "fakeaccel"
NUM_DEVICES = 2
Call = Literal[
    "allocate",
    "copy",
    "kernel",
    "create_stream",
    "query",
    "record",
    "synchronize",
    "wait",
]
CALLS: tuple[Call, ...] = get_args(Call)


class Counters(NamedTuple):
    """What a device has done since the test began, and what it has now.

    Args:
        calls (dict[str, int]): how often each call was made, also where it failed.
        copies_to_device (int): from the host.
        copies_to_host (int): from the device.
        live_events (int): events that were recorded and not freed.
    """

    calls: dict[Call, int]
    copies_to_device: int
    copies_to_host: int
    live_events: int


class Hold:
    """Something that stands still until :meth:`release`, or until its `with` block ends."""

    def __init__(self, release: Callable[..., object], *arguments: object) -> None:
        self._release, self._arguments = release, arguments

    def release(self) -> None:
        """It goes on. A second call does nothing."""
        self._release(*self._arguments)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Accelerator:
    """The fake accelerator of this process. A device is named by its index."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name in ("failure", "error", "pending"):
            getattr(library, f"accelerator_{name}").restype = ctypes.c_char_p
        for name in ("hold", "fail"):
            getattr(library, f"accelerator_{name}").restype = ctypes.c_int64
        library.accelerator_is_forked.restype = ctypes.c_bool
        self._library = library
        self._asked_for_error = False

    # What happens when.

    def hold(self, stream: torch.Stream) -> Hold:
        """The stream stands still once it has done what it has to do now, until the hold ends."""
        index, number = stream.device_index, ctypes.c_int64(stream.stream_id)
        hold = self._check(self._library.accelerator_hold(index, number))
        return Hold(self._library.accelerator_release, ctypes.c_int64(hold))

    def hold_copies(self, device: int = 0) -> Hold:
        """Copies between host and device do not start, on all streams, until the hold ends."""
        self._library.accelerator_hold_copies(device, True)
        return Hold(self._library.accelerator_hold_copies, device, False)

    def let_copies(self, count: int = 1, device: int = 0) -> None:
        """The next copies go on, although copies are held."""
        self._library.accelerator_let_copies(device, ctypes.c_int64(count))

    def set_copy_delay(self, seconds: float, device: int = 0) -> None:
        """Each copy between host and device takes that much longer."""
        self._library.accelerator_set_copy_delay(device, ctypes.c_double(seconds))

    # Failures.

    def fail(
        self,
        call: Call,
        nth: int = 1,
        times: int = 1,
        device: int = 0,
        when_it_runs: bool = False,
    ) -> None:
        """The nth call from now on fails with RuntimeError, and the next ones.

        Args:
            call (str): which call. "copy" is any `copy_()` from, to or on the device, "kernel" any
                other operator. "query" and "synchronize" are those of streams and of events.
            nth (int): 1 is the next.
            times (int): so many calls one after another.
            device (int): its index.
            when_it_runs (bool): the call of a copy or kernel succeeds. Its work fails on the device,
                which is lost then.
        """
        wanted = self._library.accelerator_fail(
            device, call.encode(), ctypes.c_int64(nth), ctypes.c_int64(times), when_it_runs
        )
        self._check(wanted)
        self._asked_for_error |= when_it_runs

    def lose(self, device: int = 0, message: str = "the test took it away") -> None:
        """Drops what the device has to do. From now on every call fails, except what frees."""
        self._library.accelerator_lose(device, message.encode())

    def take_error(self, device: int = 0) -> str:
        """Why the device was lost without :meth:`lose`, or nothing. The test may end with it then."""
        error: str = self._library.accelerator_error(device).decode()
        self._library.accelerator_forget_error(device)
        return error

    # What can be seen.

    def counters(self, device: int = 0) -> Counters:
        found = (ctypes.c_int64 * (len(CALLS) + len(Counters._fields) - 1))()
        self._library.accelerator_counters(device, found)
        calls = dict(zip(CALLS, found, strict=False))
        return Counters(calls, *found[len(CALLS) :])

    def pending(self) -> str:
        """What the streams have to do and do now, a line for each operation."""
        texts = [self._library.accelerator_pending(device) for device in range(NUM_DEVICES)]
        return b"".join(texts).decode()

    # What a worker of tests needs.

    def reset(self) -> None:
        """Everything as in the beginning, but for memory and events that live. Streams end."""
        self._library.accelerator_reset()
        self._asked_for_error = False

    def unexpected_violations(self) -> str:
        if self._asked_for_error:
            return ""
        errors = [self._library.accelerator_error(device) for device in range(NUM_DEVICES)]
        return "".join(f"{error.decode()}\n" for error in errors if error)

    def describe(self) -> str:
        return f"pending:\n{self.pending()}"

    def _check(self, result: int) -> int:
        if result < 0:
            raise RuntimeError(self._library.accelerator_failure().decode())
        return result


def load_as_rocm() -> Accelerator:
    """Makes the accelerator the "cuda" devices of this process, as in a PyTorch for ROCm, for good.

    The library must have been loaded before torch, which asks once whether there is CUDA. A PyTorch
    without CUDA has no torch.cuda.Stream and Event, so torch's own take their places.
    """
    torch.cuda._lazy_init = lambda: None  # type: ignore[method-assign]
    torch.cuda.Stream, torch.cuda.Event = torch.Stream, torch.Event  # type: ignore[misc, assignment]
    controls = ctypes.CDLL(str(build("CUDA")))
    atexit.register(controls.accelerator_stop)
    return Accelerator(controls)


@cache
def load() -> Accelerator:
    """Makes the accelerator the one of this process, for good."""
    library = build()
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    torch.ops.load_library(str(library))
    controls = ctypes.CDLL(str(library))
    accelerator = Accelerator(controls)
    module = types.ModuleType(f"torch.{DEVICE_TYPE}")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "device": lambda device: torch.accelerator.device_index(
            torch._utils._get_device_index(device)
        ),
        "set_device": torch.accelerator.set_device_index,
        "current_stream": torch.accelerator.current_stream,
        "synchronize": torch.accelerator.synchronize,
        "manual_seed": lambda seed: None,  # random numbers are the CPU's
        "manual_seed_all": lambda seed: None,
        "_is_in_bad_fork": controls.accelerator_is_forked,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    torch._register_device_module(DEVICE_TYPE, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(controls.accelerator_stop)
    return accelerator
