"""A paged cache on a GPU with a host pool and a handler, and ways to hold its streams."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
from contextlib import suppress

import torch
from patience import PATIENCE, SCALE
from torch import Tensor

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.results import TransferError

OLD, NEW = 17, 42
ROW = 1 << 16


@functools.cache
def cycles_per_ms() -> float:
    """How many cycles torch.cuda._sleep needs for a millisecond, at the highest clock seen."""
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
    """Keeps the current stream busy for much longer than the test's next calls take. Sanitizers make
    calls slower: SCALE makes this time longer too."""
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
    nothing may wait for the whole device: a kernel's first launch, closing a handler, pinning. The
    garbage collector is off meanwhile, because it may find an earlier test's pool and unpin it.
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
        gc.disable()

    def release(self) -> None:
        self._word.fill_(1)
        gc.enable()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class GpuCache:
    """A cache full of OLD bytes, a host pool of as many blocks full of NEW bytes, and a handler.

    The first launch of a kernel loads it and may wait for the device. Kernels that tests launch while
    a stream is held are therefore launched once here.
    """

    def __init__(
        self,
        blocks: int = 4,
        row: int = ROW,
        layers: int = 1,
        device: str = "cuda:0",
        copy_method: str = "auto",
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
            self._copy_method = copy_method
            self.handler = self.another_handler()
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
        self.handler.synchronize(
            [
                self.handler.load(page_ids=[3], gpu_block_ids=[3]),
                self.handler.store(gpu_block_ids=[2], page_ids=[2]),
            ]
        )
        for layer in self.layers:
            layer.fill_(OLD)
        self.host.pages.fill_(NEW)
        torch.cuda.synchronize()
        assert len(self.handler.poll()) == 2

    def slow(self, ms: float = 200) -> torch.cuda.Event:
        """Keeps the current stream busy; the event happens when it is free again."""
        keep_busy(ms)
        event = torch.cuda.Event()
        event.record()
        return event

    def slow_on(self, stream: torch.cuda.Stream, ms: float = 200) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            return self.slow(ms)

    def hold(self) -> Hold:
        """Holds the current stream until `release`, or until the context ends."""
        self._holds.append(Hold())
        return self._holds[-1]

    def hold_on(self, stream: torch.cuda.Stream) -> Hold:
        with torch.cuda.stream(stream):
            return self.hold()

    def release(self) -> None:
        for hold in self._holds:
            hold.release()

    def look(self) -> None:
        """Reads the first layer of the cache on the current stream, into `seen`.

        With a copy: compute-sanitizer lets no kernel pass another one that a held stream keeps back.
        """
        self.seen.copy_(self.cache)

    def page(self, index: int = 0) -> int:
        return only(self.host.pages[index])

    def another_handler(self) -> OffloadHandler:
        """A second handler for the same cache and pool, as a control: handlers do not order each other."""
        return OffloadHandler(self.layout, self.host, copy_method=self._copy_method)

    def __enter__(self) -> GpuCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self.host.close()
        torch.cuda.synchronize()


def only(tensor: Tensor) -> int:
    """The value that all elements have."""
    values = tensor.unique().tolist()
    assert len(values) == 1, values
    return int(values[0])


def ended(handler: OffloadHandler, job: Job) -> str:
    """Waits for the job and returns its state, also if it failed."""
    with suppress(TransferError):
        handler.synchronize(job, timeout=PATIENCE)
    assert job.result is not None
    return str(job.result.state)
