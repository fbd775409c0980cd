"""Tiny pools under forced eviction: every block is compared with what a model in Python expects.

KVSWAP_STRESS_SECONDS: how long each test runs.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch
from rigs import in_time, watchdog

from torch_kvswap.handler import Job, OffloadHandler, TransferError
from torch_kvswap.host_memory import HostPool
from torch_kvswap.layout import PagedLayout

ROW = 1 << 13  # numbers of 4 bytes
MOST_CHECKS = 4096
MOST_OUTSTANDING = 400


def seconds(device: str) -> float:
    return float(os.environ.get("KVSWAP_STRESS_SECONDS", "2" if device != "cpu" else "0.3"))


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_hang(capfd: pytest.CaptureFixture[str], device: str) -> Iterator[None]:
    with watchdog(capfd, seconds(device) + 60):
        yield


@dataclass(frozen=True)
class Content:
    """What a block or a page holds if all these jobs are done, and nobody knows what if not."""

    version: int
    jobs: tuple[Job, ...] = ()

    def settled(self) -> Content | None:
        """The same without the jobs that are done; None when one of them is not."""
        ended = [job for job in self.jobs if job.result is not None]
        if any(not job.result.ok for job in ended):
            return None
        return Content(self.version, tuple(job for job in self.jobs if job.result is None))


@dataclass
class Block:
    content: Content | None = None
    users: list[Job] = field(default_factory=list)  # that may still read or write it
    load: Job | None = None  # the last one into it


@dataclass
class Page:
    content: Content | None = None
    store: Job | None = None  # the last one into it


class Cache:
    """Block b has one number all over, and its complement in the second plane."""

    def __init__(self, device: str, blocks: int, pages: int) -> None:
        self.keys = torch.zeros(blocks, ROW, dtype=torch.int32, device=device)
        self.values = torch.full_like(self.keys, -1)
        self.layout = PagedLayout([self.keys, self.values])
        self.host = HostPool(self.layout, pages)
        self.on_gpu = device != "cpu"

    def overwrite(self, block: int, version: int) -> None:
        self.keys[block].fill_(version)
        self.values[block].fill_(~version)

    def differs(self, block: int, version: int) -> torch.Tensor:
        return (self.keys[block] != version).any() | (self.values[block] != ~version).any()


class Model:
    """Random jobs of some blocks and pages of a cache, and what must come of them.

    Its lock makes the order of submission the order of the model, and all kernels run on one
    stream, in the same order; results are taken, and jobs cancelled, without the lock.
    """

    def __init__(
        self, cache: Cache, blocks: range, pages: range, seed: int, waits: bool = True
    ) -> None:
        self.cache = cache
        self.handler = OffloadHandler(cache.layout, cache.host)
        self.rng = random.Random(seed)
        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(cache.keys.device) if cache.on_gpu else None
        self.blocks = {index: Block() for index in blocks}
        self.pages = {index: Page() for index in pages}
        self.version = 100_000_000 * seed
        self.waits = waits  # False: kernels read blocks before they are loaded, as a control
        self.jobs: list[Job] = []  # since the last audit
        self.predecessors: dict[int, list[Job]] = {}
        self.cancelled: set[int] = set()  # where cancel() said so
        self.reported: list[tuple[int, str]] = []
        self.flags = torch.zeros(MOST_CHECKS, dtype=torch.bool, device=cache.keys.device)
        self.checks: list[Content] = []
        self.counts: Counter[str] = Counter()

    # What may happen

    def step(self) -> None:
        with self.lock, torch.cuda.stream(self.stream):
            action = self.rng.choices(
                [self._stall, self._overwrite, self._check, self._store, self._load],
                [0.3, 2, 4, 4, 4],
            )[0]
            action()
            if len(self.checks) == MOST_CHECKS or len(self.jobs) == 4 * MOST_CHECKS:
                self.audit()
            if len(self.jobs) > MOST_OUTSTANDING:
                self._end(self.jobs[-MOST_OUTSTANDING])

    def _stall(self) -> None:
        if self.stream is not None:
            torch.cuda._sleep(2_000_000)  # a millisecond, in which jobs pile up

    def _overwrite(self) -> None:
        index = self.rng.choice(list(self.blocks))
        block = self.blocks[index]
        for job in block.users:
            self._stream_waits(job)
        block.users.clear()
        self.version += 1
        self.cache.overwrite(index, self.version)
        block.content = Content(self.version)
        self.counts["overwritten"] += 1

    def _check(self) -> None:
        index = self.rng.choice(list(self.blocks))
        block = self.blocks[index]
        if block.content is not None:
            block.content = block.content.settled()
        if block.content is None:
            return
        jobs = block.content.jobs  # the last of them, if any, is the load into the block
        if jobs and self.waits and not self._stream_waits(jobs[-1]):
            return
        differs = self.cache.differs(index, block.content.version)
        self.flags[len(self.checks)] = differs
        self.checks.append(block.content)

    def _store(self) -> None:
        blocks, pages = self._ids()
        job = self.handler.store(blocks, pages, after=self._after())
        loads = [self.blocks[block].load for block in blocks]
        self._note(job, [load for load in loads if load is not None])
        for index, number in zip(blocks, pages, strict=True):
            block, page = self.blocks[index], self.pages[number]
            block.users.append(job)
            page.content = _through(job, block.content)
            page.store = job

    def _load(self) -> None:
        blocks, pages = self._ids()
        expedited = self.rng.random() < 0.3
        groups = self.rng.choice([None, None, 1, 2])
        job = self.handler.load(
            pages, blocks, after=self._after(), expedited=expedited, layer_groups=groups
        )
        stores = [self.pages[page].store for page in pages]
        self._note(job, [store for store in stores if store is not None])
        for index, number in zip(blocks, pages, strict=True):
            block, page = self.blocks[index], self.pages[number]
            block.users.append(job)
            block.content = _through(job, page.content)
            block.load = job

    def _ids(self) -> tuple[list[int], list[int]]:
        count = self.rng.choice([1, 1, 1, 2, 3])
        count = min(count, len(self.blocks), len(self.pages))
        return self.rng.sample(list(self.blocks), count), self.rng.sample(list(self.pages), count)

    def _after(self) -> torch.cuda.Stream | torch.cuda.Event | None:
        if self.stream is None:
            return None
        return self.rng.choice([None, self.stream, self.stream.record_event()])

    def _note(self, job: Job, predecessors: list[Job]) -> None:
        self.jobs.append(job)
        self.predecessors[job.id] = predecessors
        self.counts["submitted"] += 1

    def _stream_waits(self, job: Job) -> bool:
        """False when the job has ended and not well: then it touches nothing any more."""
        try:
            job.wait_on(self.stream)
        except TransferError:
            self._end(job)
            return False
        return True

    def _end(self, job: Job) -> None:
        with suppress(TransferError):
            self.handler.wait(job, timeout=30)

    # What other threads do meanwhile

    def cancel_one(self) -> None:
        jobs = self.jobs[-50:]
        if jobs:
            job = random.choice(jobs)
            if self.handler.cancel(job):
                self.cancelled.add(job.id)

    def take_results(self) -> None:
        self.reported += [(r.job_id, r.state) for r in self.handler.finished()]

    # What must have come of it

    def audit(self) -> None:
        """Waits for everything, then compares how it ended and what the kernels saw."""
        for job in self.jobs:
            self._end(job)
        if self.stream is not None:
            self.stream.synchronize()
        for job in self.jobs:
            self._audit_job(job)
        wrong = self.flags[: len(self.checks)].tolist()
        for content, differs in zip(self.checks, wrong, strict=True):
            if all(job.result.ok for job in content.jobs):
                assert not differs, f"a block does not hold version {content.version}"
                self.counts["compared"] += 1
                self.counts["loaded"] += bool(content.jobs)
        self.jobs.clear()
        self.checks.clear()

    def _audit_job(self, job: Job) -> None:
        result = job.result
        self.counts[result.state] += 1
        failed = [other.id for other in self.predecessors.pop(job.id) if not other.result.ok]
        if result.state == "cancelled":
            assert in_time(lambda: job.id in self.cancelled, 1), f"nobody cancelled {job.id}"
        elif result.state == "failed":
            assert failed, f"{job.direction} {job.id} failed for no reason: {result.error!r}"
        elif job.direction == "load":
            assert not failed, f"load {job.id} is done, though store {failed} is not"

    def finish(self) -> None:
        with self.lock:
            self.audit()
            for index, page in self.pages.items():  # the pages too, on the host
                content = page.content.settled() if page.content is not None else None
                if content is not None:
                    keys, values = self.cache.host.pages[index, 0].view(torch.int32).split(ROW)
                    assert keys.unique().tolist() == [content.version]
                    assert values.unique().tolist() == [~content.version]
        self.handler.close()
        self.take_results()
        times = Counter(job_id for job_id, _ in self.reported)
        assert set(times.values()) == {1}
        assert len(times) == self.counts["submitted"]
        assert {job_id for job_id, state in self.reported if state == "cancelled"} <= self.cancelled
        states = Counter(state for _, state in self.reported)
        assert all(states[state] == self.counts[state] for state in states)
        assert self.counts["compared"] > 10
        if self.cache.on_gpu:  # else a load has ended before anybody looks
            assert self.counts["loaded"] > 10


def _through(job: Job, content: Content | None) -> Content | None:
    """What the job's destination holds when its source holds this."""
    if content is not None:
        content = content.settled()
    return None if content is None else Content(content.version, (*content.jobs, job))


def run(device: str, *loops: Callable[[], object]) -> None:
    """Runs each again and again in a thread of its own; raises what one of them raised."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def repeat(loop: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                loop()
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=repeat, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    stop.wait(seconds(device))
    stop.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def paced(call: Callable[[], object]) -> Callable[[], object]:
    """Leaves the others some time in between."""

    def loop() -> None:
        call()
        time.sleep(0.0005)

    return loop


def test_a_tiny_pool_that_many_threads_use_holds_what_it_must(device: str) -> None:
    cache = Cache(device, blocks=6, pages=8)
    model = Model(cache, range(6), range(8), seed=1)
    run(device, model.step, model.step, paced(model.cancel_one), paced(model.take_results))
    model.finish()
    if device != "cpu":
        assert model.counts["cancelled"] > 0
    cache.host.close()


def test_handlers_of_their_own_blocks_and_pages_share_a_cache_and_a_pool(device: str) -> None:
    cache = Cache(device, blocks=8, pages=10)
    models = [
        Model(cache, range(0, 4), range(0, 5), seed=2),
        Model(cache, range(4, 8), range(5, 10), seed=3),
    ]
    others = [paced(call) for model in models for call in (model.cancel_one, model.take_results)]
    run(device, *(model.step for model in models), *others)
    for model in models:
        model.finish()
    cache.host.close()


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_as_a_control_kernels_that_do_not_wait_for_loads_are_noticed(device: str) -> None:
    cache = Cache(device, blocks=6, pages=8)
    model = Model(cache, range(6), range(8), seed=1, waits=False)

    def run_and_finish() -> None:
        run(device, model.step)
        model.finish()

    with pytest.raises(AssertionError, match="does not hold"):
        run_and_finish()
    cache.host.close()
