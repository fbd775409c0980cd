"""A cache, pages and a handler on a GPU, and kernels that take long, for tests of order."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from patience import PATIENCE, SCALE
from torch import Tensor

from torch_kvswap.handler import Job, OffloadHandler, TransferError
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout

OLD, NEW = 17, 42
ROW = 1 << 16


@functools.cache
def cycles_per_ms() -> float:
    """Of the kernel that keeps a GPU busy, at the highest clock that was seen."""
    torch.cuda._sleep(1_000_000)
    rates = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        rates.append(20_000_000 / start.elapsed_time(end))
    return max(rates)


def keep_busy(ms: float = 200) -> None:
    """Holds the current stream up: for so much longer than the calls take that a test makes
    meanwhile that these come first. Calls that a sanitizer watches take more: see SCALE."""
    torch.cuda._sleep(int(ms * SCALE * cycles_per_ms()))


@functools.cache
def _hold_words() -> Tensor:
    """Pinned once: pinning waits for the device, which a held stream keeps busy."""
    return torch.zeros(1 << 16, dtype=torch.int32).pin_memory()


_next_hold = itertools.count()


class Hold(torch.cuda.Event):
    """Makes the current stream wait until `release`. The event happens when the stream goes on.

    The stream waits for a value in pinned memory, so that what a test sees while the stream is held
    does not depend on time. As a context manager it releases at the end. While a stream is held,
    nothing may wait for the whole device: a kernel's first launch, closing a handler, pinning.
    """

    def __init__(self) -> None:
        stream = torch.cuda.current_stream()
        self._word = _hold_words()[next(_next_hold)]
        address = ctypes.c_uint64(self._word.data_ptr())
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        greater_or_equal = 0
        with torch.cuda.device(stream.device):
            status = wait(
                ctypes.c_void_p(stream.cuda_stream), address, ctypes.c_uint32(1), greater_or_equal
            )
        assert status == 0, f"cuStreamWaitValue32 failed with CUDA error {status}"
        self.record(stream)

    def release(self) -> None:
        self._word.fill_(1)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


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


class Rig:
    """A cache of OLD bytes in `layers` tensors, as many pages of NEW bytes, and a handler.

    Kernels are loaded at their first launch, which may wait for the device: what a test launches
    while something is held up, it launches once before.
    """

    def __init__(
        self, blocks: int = 4, row: int = ROW, layers: int = 1, device: str = "cuda:0"
    ) -> None:
        with torch.cuda.device(device):
            cycles_per_ms()
            self.layers = [
                torch.full((blocks, row), OLD, dtype=torch.uint8, device=device)
                for _ in range(layers)
            ]
            self.cache = self.layers[0]
            self.seen = torch.zeros_like(self.cache)
            self.layout = PagedLayout(self.layers)
            self.host = HostPool(self.layout, num_pages=blocks)
            self.handler = OffloadHandler(self.layout, self.host)
            self.side = torch.cuda.Stream(device)
            self.consumer = torch.cuda.Stream(device)
            self._holds: list[Hold] = []
            _hold_words()
            self._warm_up()

    def _warm_up(self) -> None:
        self.slow(1)
        self.look()
        self.cache.fill_(NEW)
        self.cache[1].fill_(NEW)
        self.cache.fill_(OLD)
        self.handler.wait([self.handler.load([3], [3]), self.handler.store([2], [2])])
        for layer in self.layers:
            layer.fill_(OLD)
        self.host.pages.fill_(NEW)
        torch.cuda.synchronize()
        assert len(self.handler.finished()) == 2

    def slow(self, ms: float = 200) -> torch.cuda.Event:
        """Holds the current stream up; the event happens when it is free again."""
        keep_busy(ms)
        event = torch.cuda.Event()
        event.record()
        return event

    def slow_on(self, stream: torch.cuda.Stream, ms: float = 200) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            return self.slow(ms)

    def hold(self) -> Hold:
        """Holds the current stream up until it is released, or the rig is left."""
        self._holds.append(Hold())
        return self._holds[-1]

    def hold_on(self, stream: torch.cuda.Stream) -> Hold:
        with torch.cuda.stream(stream):
            return self.hold()

    def release(self) -> None:
        for hold in self._holds:
            hold.release()

    def look(self) -> None:
        """A kernel on the current stream that reads the first layer of the cache."""
        torch.add(self.cache, 0, out=self.seen)

    def page(self, index: int = 0) -> int:
        return only(self.host.pages[index])

    def another_handler(self) -> OffloadHandler:
        """On the same cache and pages. Handlers do not know of each other: a control."""
        return OffloadHandler(self.layout, self.host)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self.host.close()
        torch.cuda.synchronize()


def only(tensor: Tensor) -> int:
    """The one value that all elements have."""
    values = tensor.unique().tolist()
    assert len(values) == 1, values
    return int(values[0])


def in_time(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Polls until the condition holds; False when it does not for that long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0002)
    return True


def ended(handler: OffloadHandler, job: Job) -> str:
    """How the job ended, once it has, also when that is a failure."""
    with suppress(TransferError):
        handler.wait(job, timeout=PATIENCE)
    assert job.result is not None
    return str(job.result.state)


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


class Steps:
    """Holds the thread that pins after each chunk but the first, until it may go on."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(0)
        self.seen: list[tuple[int, int]] = []

    def __call__(self, ready: int, count: int) -> None:
        self.seen.append((ready, count))
        if threading.current_thread() is not threading.main_thread():
            assert self._turns.acquire(timeout=PATIENCE)

    def go_on(self, chunks: int = 1) -> None:
        self._turns.release(chunks)
