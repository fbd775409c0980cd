"""Controls and observes the simulated driver of this process."""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from patience import PATIENCE

from simulated_driver.cuda import Cuda

HOST, DEVICE = 1, 2
ALL = HOST_END = -1  # instead of the number of a GPU
MODES = ("immediate", "manual", "threaded")
RESULTS = {
    "simulated_function": ctypes.c_void_p,
    "simulated_run_stream": ctypes.c_int,
    "simulated_step": ctypes.c_bool,
    "simulated_stop_thread": ctypes.c_bool,
    "simulated_let_thread_go": ctypes.c_bool,
    "simulated_knows": ctypes.c_bool,
    "simulated_pending": ctypes.c_char_p,
    "simulated_violations": ctypes.c_char_p,
    "simulated_take_log": ctypes.c_char_p,
}


def _load(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(os.environ["SIMULATED_DRIVER"]) / name), mode=ctypes.RTLD_GLOBAL)


class Driver:
    """The simulated driver of this process, in its first state. All objects are the same driver.

    Streams are named by their handles; any number is a stream of GPU 0 from its first use, but 0, 1
    and 2, which are default streams of the GPU that `on` says.
    """

    def __init__(self) -> None:
        _load("libcuda.so.1")
        self.library, self.torch_cuda = _load("libsimulation.so"), _load("libtorch_cuda.so")
        for name, result in RESULTS.items():
            getattr(self.library, name).restype = result
        self.cuda = Cuda(self.library)
        self.reset()
        atexit.register(self.library.simulated_reset)  # or its thread could copy while Python ends

    def reset(self) -> None:
        """Everything as in the beginning. What is pending is dropped and memory is forgotten."""
        self.library.simulated_reset()
        self.torch_cuda.simulated_reset_streams()
        self.set_patience(PATIENCE)
        self._adopted: list[torch.Tensor] = []
        self.asked_for_violations = False

    # Memory.

    def memory(self, num_bytes: int, kind: int, device: int = 0) -> torch.Tensor:
        """Memory that the driver takes for device memory or for pinned host memory."""
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        self.adopt(tensor, kind, device)
        return tensor

    def adopt(self, tensor: torch.Tensor, kind: int, device: int = 0) -> None:
        self._adopted.append(tensor)  # its memory must not come back as that of another tensor
        self.library.simulated_add(
            ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(tensor.nbytes), kind, device
        )

    def unmap(self, tensor: torch.Tensor) -> None:
        """Takes the memory of a part of a reservation away; the reservation was adopted whole."""
        begin, size = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(tensor.nbytes)
        self.library.simulated_unmap(begin, size)

    # Contexts.

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """The test's own calls are in the context of this GPU, in every thread; else of GPU 0. Those
        of the library are in the context that the library makes current."""
        before = self.library.simulated_set_context(device)
        try:
            yield
        finally:
            self.library.simulated_set_context(before)

    # When work is done.

    def set_mode(self, mode: str, seed: int = 0) -> None:
        """`immediate`: within the call. `manual`: in run() and step() and, as far as they need it,
        in the calls that synchronise. `threaded`: by a thread, streams in a random order."""
        self.library.simulated_set_mode(MODES.index(mode), seed)

    def run(self, stream: int | None = None) -> int:
        """Runs all that can run, of one stream or of all; returns the number of operations."""
        if stream is None:
            return self.library.simulated_run()
        return self.library.simulated_run_stream(ctypes.c_uint64(stream))

    def step(self, stream: int) -> bool:
        """Runs the stream's next operation; False if there is none that can run."""
        return self.library.simulated_step(ctypes.c_uint64(stream))

    def hold(self, stream: int) -> int:
        """Submits a kernel that runs until it is released by the number that this returns."""
        return self.library.simulated_hold(ctypes.c_uint64(stream))

    def release(self, hold: int) -> None:
        self.library.simulated_release(hold)

    @contextmanager
    def stopped(self, thread: int) -> Iterator[None]:
        """A thread, by its native id, stands still, wherever it is: it should hold no lock."""
        assert self.library.simulated_stop_thread(thread)
        try:
            yield
        finally:
            assert self.library.simulated_let_thread_go()

    def pending(self) -> str:
        """A line for each operation that has not run."""
        return self.library.simulated_pending().decode()

    def advance_clock(self, milliseconds: float) -> None:
        """Each copy call takes one millisecond; this lets more pass."""
        self.library.simulated_advance_clock(ctypes.c_double(milliseconds))

    def set_patience(self, seconds: float) -> None:
        """How long a call that synchronises waits before it aborts the process."""
        self.library.simulated_set_patience(int(seconds * 1000))

    # What goes wrong.

    def fail(self, name: str, nth: int = 1, code: int = 1) -> int:
        """The nth call of the driver function from now on does nothing but return the code.

        Returns its number, as calls() counts: other threads may call meanwhile.
        """
        self._check(name)
        return self.library.simulated_fail(name.encode(), nth, code)

    def fail_copy(self, index: int) -> None:
        self.library.simulated_fail_copy(index)

    def limit_allocations(self, nbytes: int, device: int = ALL) -> None:
        """From now on larger allocations of device memory fail, as on a GPU that is nearly full."""
        self.library.simulated_limit_allocations(ctypes.c_size_t(nbytes), device)

    def lose(self, code: int = 700, device: int = ALL, events_happen: bool = True) -> None:
        """From now on all but destroying fails; what is pending is dropped. Of one GPU: what is in
        its context, and its streams and events in any. events_happen: whether other GPUs go on that
        wait for the events of what was dropped."""
        self.library.simulated_lose(code, device, events_happen)

    def refuse_peer_access(self, device: int, peer: int) -> None:
        """The two GPUs cannot access each other's memory."""
        self.library.simulated_refuse_peers(device, peer)

    def drop_waits_between_gpus(self) -> None:
        """Streams do not wait for events of other GPUs, nor for words, as a control."""
        self.library.simulated_drop_waits_between_gpus()

    def set_link(self, device: int, slowness: int, peer: int = HOST_END) -> None:
        """Of a GPU's link to the host, or to a peer. slowness: 1 as usual; 0 stands still; n lets
        a copy begin in the threaded mode at one chance in n."""
        self.library.simulated_set_link(device, peer, slowness)

    def calls(self, name: str) -> int:
        self._check(name)
        return self.library.simulated_calls(name.encode())

    def calls_here(self, name: str) -> int:
        """Those of the calling thread, since it began."""
        self._check(name)
        return self.library.simulated_calls_here(name.encode())

    def _check(self, name: str) -> None:
        assert self.library.simulated_knows(name.encode()), f"the simulated driver has no {name}"

    # States of the driver.

    def set_stream(self, device: int, stream: int) -> None:
        """What PyTorch says is the current stream, in every thread."""
        self.library.simulated_adopt_stream(ctypes.c_uint64(stream), device)
        self.torch_cuda.simulated_set_stream(device, ctypes.c_size_t(stream))

    def set_initialized(self, value: bool) -> None:
        self.library.simulated_set_initialized(int(value))

    def set_attribute(self, attribute: int, value: int) -> None:
        """91 is CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: if it is 0, the device
        has other addresses for what is registered. 122 is
        CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS."""
        self.library.simulated_set_attribute(attribute, value)

    def limit_registration(self, in_one: int = 1 << 62, in_all: int = 1 << 62) -> None:
        """Bytes that may be registered in one piece, and in all pieces together."""
        self.library.simulated_limit_registration(ctypes.c_uint64(in_one), ctypes.c_uint64(in_all))

    def refuse_registration(self) -> None:
        """From now on no host memory can be registered: CUDA_ERROR_NOT_SUPPORTED."""
        self.library.simulated_set_registers(0)

    def set_capturing(self, value: bool, stream: int | None = None) -> None:
        """Begins or ends the capture of one stream, or of all. What is captured does not run."""
        if stream is None:
            self.library.simulated_set_capturing(int(value))
        else:
            self.library.simulated_set_stream_capturing(ctypes.c_uint64(stream), int(value))

    def set_global_capture(self, value: bool) -> None:
        """Somebody captures in global mode: calls that spoil this fail with 900 unless relaxed."""
        self.library.simulated_set_global_capture(int(value))

    # What happened.

    @property
    def capture_spoilt(self) -> int:
        return self.library.simulated_capture_spoilt()

    def live(self, what: str) -> int:
        """The `events`, `streams` or `allocations` that were created and not destroyed."""
        counts = {
            "allocations": self.library.simulated_live_allocations,
            "events": self.library.simulated_live_events,
            "streams": self.library.simulated_live_streams,
        }
        return counts[what]()

    def violations(self) -> int:
        """What CUDA takes and does wrong. A simulated test that does not ask fails if there are any."""
        self.asked_for_violations = True
        return len(self.library.simulated_violations().splitlines())

    def unexpected_violations(self) -> str:
        """What they were, unless violations() has been called."""
        return "" if self.asked_for_violations else self.library.simulated_violations().decode()

    def describe(self) -> str:
        """What is told with a failed test."""
        return f"the rest of the log:\n{self.log()}"

    def log(self) -> str:
        """The calls since the last time, without those that only ask, create or destroy events."""
        return self.library.simulated_take_log().decode()
