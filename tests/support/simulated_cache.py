"""A paged cache, a host pool and a handler on the simulated driver, which runs nothing until a
test says so.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE, in_time
from simulated_driver import Driver, place, pool
from simulated_driver.handles import Event, Stream
from torch import Tensor

from torch_kvswap._native.loader import native
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.offload.metrics import ChannelMetrics
from torch_kvswap.results import Result

needs_kernels = pytest.mark.skipif(not native.kernel_version(), reason="built without nvcc")
CURRENT, SIDE = 42, 43  # streams of the caller
STREAMS = {  # in the order in which a handler creates them
    "101": "stores",
    "102": "stores' waiting",
    "103": "loads",
    "104": "loads' waiting",
    "105": "expedited",
    "106": "expedited's waiting",
    str(CURRENT): "current",
    str(SIDE): "side",
}
CHANNELS = ("store", "load", "expedited")
PF_EXITING = 4  # of Linux
HURTS_A_JOB = (  # calls of the driver that one job needs
    "cuEventCreate",
    "cuEventRecord",
    "cuLaunchKernel",
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuStreamWriteValue64",
)
SHARE = {  # kind, block and page of two jobs that must not overlap
    "store, load of its page": (("store", 1, 2), ("load", 3, 2)),
    "store, load into its block": (("store", 1, 2), ("load", 1, 3)),
    "load, store of its block": (("load", 1, 2), ("store", 1, 3)),
    "load, store into its page": (("load", 1, 2), ("store", 3, 2)),
    "load, expedited into its block": (("load", 1, 2), ("expedited", 1, 3)),
    "expedited, load into its block": (("expedited", 1, 2), ("load", 1, 3)),
    "store, expedited of its page": (("store", 1, 2), ("expedited", 3, 2)),
    "store, expedited into its block": (("store", 1, 2), ("expedited", 1, 3)),
    "expedited, store of its block": (("expedited", 1, 2), ("store", 1, 3)),
    "expedited, store into its page": (("expedited", 1, 2), ("store", 3, 2)),
}


class SimulatedCache:
    """A cache and a host pool, both full of random bytes, and a handler.

    `block(b)` is the content of block b of the cache, `page(p, s)` of slot s of page p.
    """

    def __init__(
        self,
        driver: Driver,
        blocks: int = 16,
        pages: int = 16,
        per_page: int = 1,
        layers: int = 1,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)  # or threads() would have those of PyTorch
        self.driver = driver
        driver.set_mode("manual")
        driver.set_stream(0, CURRENT)
        self.tensors = [torch.randint(256, (blocks, 64), dtype=torch.uint8) for _ in range(layers)]
        self.layout = place(driver, PagedLayout(self.tensors))
        self.host = pool(driver, self.layout, pages, per_page)
        self.host.pages.random_(256)
        self._start = torch.cat(self.tensors, 1), self._slots(self.host.pages).clone()
        self._moves: list[tuple[int, str, list[int], list[int]]] = []
        self._holds: list[int] = []
        self._events: dict[str, int] = {}
        self.handler = OffloadHandler(self.layout, self.host, **options)
        driver.log()

    # Bytes.

    def block(self, block: int) -> Tensor:
        return torch.cat([tensor[block] for tensor in self.tensors])

    def page(self, page: int, slot: int = 0) -> Tensor:
        return self.host.pages[page, slot].clone()

    def holds(self, page: int, block: Tensor) -> bool:
        return torch.equal(self.page(page), block)

    def is_right(self, without: Sequence[Job] = (), pages: Tensor | None = None) -> bool:
        """Whether all bytes are as if the jobs had run one after another, without those of `without`.
        pages: the memory of a pool that is closed."""
        blocks, slots = (part.clone() for part in self._start)
        left_out = {job.id for job in without}
        for number, kind, of_gpu, of_host in self._moves:
            if number in left_out:
                continue
            if kind == "store":
                slots[of_host] = blocks[of_gpu]
            else:
                blocks[of_gpu] = slots[of_host]
        found = self._slots(self.host.pages if pages is None else pages)
        return torch.equal(torch.cat(self.tensors, 1), blocks) and torch.equal(found, slots)

    def _slots(self, pages: Tensor) -> Tensor:
        return pages.view(-1, pages.shape[-1])

    # Jobs.

    def submit(self, kind: str, blocks: Any, pages: Any, **options: Any) -> Job:
        """Submits a job of a kind: store, load or expedited. By default it waits for no stream."""
        options.setdefault("after", ())
        if kind == "store":
            job = self.handler.store(gpu_block_ids=blocks, page_ids=pages, **options)
        else:
            job = self.handler.load(
                page_ids=pages, gpu_block_ids=blocks, expedited=kind == "expedited", **options
            )
        per_page, first = self.host.blocks_per_page, options.get("first_slot", 0)
        slots = [
            int(pages[i // per_page]) * per_page + i % per_page
            for i in range(first, first + len(blocks))
        ]
        self._moves.append((job.id, kind, [int(block) for block in blocks], slots))
        return job

    def store(self, block: int, page: int, **options: Any) -> Job:
        return self.submit("store", [block], [page], **options)

    def load(self, page: int, block: int, **options: Any) -> Job:
        return self.submit("load", [block], [page], **options)

    def fill(self, kind: str, block: int = 0, page: int = 0) -> list[Job]:
        """Submits jobs until one of them is queued; returns all of them."""
        jobs = []
        while not self.metrics(kind).queued:
            jobs.append(self.submit(kind, [block], [page]))
            assert len(jobs) < 5000
        return jobs

    def metrics(self, kind: str) -> ChannelMetrics:
        metrics = self.handler.metrics()
        of = {"store": metrics.stores, "load": metrics.loads, "expedited": metrics.expedited}
        return of[kind]

    def finish(self) -> list[Result]:
        """Runs the device until all jobs have ended, and returns what poll() returns then."""
        return run_until(self.driver, self.has_ended) and self.handler.poll()

    def has_ended(self) -> bool:
        # Not by synchronize(): a thread whose time is almost over submits fewer jobs together.
        of_all = map(self.metrics, CHANNELS)
        return all(of.submitted == of.done + of.failed + of.cancelled for of in of_all)

    # The device.

    def held(self, stream: int = CURRENT) -> int:
        """Holds a stream; returns a number for release()."""
        self._holds.append(self.driver.hold(stream))
        return self._holds[-1]

    def hold_up(self, kind: str, block: int = 0, page: int = 0) -> tuple[int, Job]:
        """Submits a job that blocks its channel until the hold is released."""
        hold = self.held(SIDE)
        return hold, self.submit(kind, [block], [page], after=Stream(SIDE))

    def release(self, hold: int) -> None:
        self.driver.release(hold)

    def event(self, stream: int) -> Event:
        event = Event(self.driver.cuda.create_event())
        self.driver.cuda.record(event.cuda_event, stream)
        return event

    def start_log(self) -> None:
        """The next log() starts here, and counts its events from 1."""
        self._events.clear()
        self.driver.log()

    def log(self) -> str:
        """The driver's log, with the streams' purposes, and events numbered by their first use."""

        def event(match: re.Match[str]) -> str:
            return f"event {self._events.setdefault(match[1], len(self._events) + 1)}"

        def stream(match: re.Match[str]) -> str:
            return STREAMS.get(match[1], match[0])

        log = re.sub(r", source order.*|p\w+ context.*\n", "", self.driver.log())
        return re.sub(r"stream (\w+)", stream, re.sub(r"event (\d+)", event, log))

    def __enter__(self) -> SimulatedCache:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        for hold in self._holds:
            self.release(hold)
        self.driver.set_mode("immediate")
        if failure is None:
            self.handler.close()


def run_until(driver: Driver, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Runs the device until the condition holds, and fails if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while True:
        driver.run()
        if condition():
            return True
        assert time.monotonic() < deadline, f"this hangs:\n{driver.pending()}"
        time.sleep(0.0002)


def states(results: list[Result]) -> list[str]:
    return [result.state for result in results]


def let_threads_look(driver: Driver, times: int = 10) -> None:
    """Gives all other threads the chance to do what they must not do: returns when all of them sleep,
    or when those that poll have asked the device `times` more times."""
    asked, own = driver.calls("cuEventQuery"), {threading.get_native_id()}

    def have_looked() -> bool:
        return driver.calls("cuEventQuery") >= asked + times or rest(threads() - own)

    assert in_time(have_looked), driver.pending()


def rest(of_threads: set[int]) -> bool:
    """Whether these threads (native ids) sleep until they are woken. Threads that poll sleep for a
    millisecond at a time, and are not at rest."""
    seen = set()
    for _ in range(10):
        seen |= {(thread, *_state(thread)) for thread in of_threads}
        time.sleep(0.002)
    return len(seen) == len(of_threads) and all(state in ("S", "ended") for _, state, _ in seen)


def _state(thread: int) -> tuple[str, str]:
    """The state of the thread, and how often it has slept so far."""
    try:
        status = Path(f"/proc/self/task/{thread}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "ended", ""
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    return fields["State"][0], fields["voluntary_ctxt_switches"]


def threads() -> set[int]:
    """The native ids of all threads of the process, also of those that Python did not start. Threads
    that are ending are left out: the system lists a thread for a moment after it was joined."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            flags = int((task / "stat").read_text().rpartition(")")[2].split()[6])
            if not flags & PF_EXITING:
                found.add(int(task.name))
    return found


def new_threads(before: set[int]) -> int:
    """The number of threads that were not there before."""
    return len(threads() - before)
