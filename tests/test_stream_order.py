"""On a GPU: what waits for what, shown with slow kernels, each beside a control that goes wrong."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Iterator

import pytest
import torch
from test_handler import run_script
from torch import Tensor

from torch_kvswap import handler as handler_module
from torch_kvswap.handler import OffloadHandler, TransferError
from torch_kvswap.hazards import Hazards
from torch_kvswap.host_memory import HostPool
from torch_kvswap.layout import PagedLayout

pytestmark = pytest.mark.gpu

OLD, NEW = 17, 42
ROW = 1 << 16


@pytest.fixture(scope="module")
def cycles_per_ms() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / start.elapsed_time(end)


class Rig:
    """A cache with 4 blocks of OLD bytes, 4 pages of NEW bytes, and kernels that take long."""

    def __init__(self, cycles_per_ms: float, device: str = "cuda:0") -> None:
        self._cycles_per_ms = cycles_per_ms
        self.cache = torch.full((4, ROW), OLD, dtype=torch.uint8, device=device)
        self.seen = torch.zeros_like(self.cache)
        layout = PagedLayout([self.cache])
        self.host = HostPool(layout, num_pages=4)
        self.host.pages.fill_(NEW)
        self.handler = OffloadHandler(layout, self.host)
        self.side = torch.cuda.Stream(device)
        self.consumer = torch.cuda.Stream(device)

    def slow(self, ms: float = 200) -> torch.cuda.Event:
        """Holds the current stream up; the event happens when it is free again."""
        torch.cuda._sleep(int(ms * self._cycles_per_ms))
        event = torch.cuda.Event()
        event.record()
        return event

    def slow_on(self, stream: torch.cuda.Stream, ms: float = 200) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            return self.slow(ms)

    def look(self) -> None:
        """A kernel on the current stream that reads the cache."""
        torch.add(self.cache, 0, out=self.seen)

    def page(self, index: int = 0) -> int:
        return only(self.host.pages[index])


def only(tensor: Tensor) -> int:
    """The one value that all elements have."""
    values = tensor.unique().tolist()
    assert len(values) == 1, values
    return int(values[0])


@pytest.fixture
def rig(cycles_per_ms: float) -> Iterator[Rig]:
    rig = Rig(cycles_per_ms)
    # Kernels are loaded at their first launch, which may wait for the device: launch each once.
    rig.slow(1)
    rig.look()
    rig.cache.fill_(NEW)
    rig.cache.fill_(OLD)
    rig.handler.wait([rig.handler.load([3], [3]), rig.handler.store([2], [2])])
    rig.cache.fill_(OLD)
    rig.host.pages.fill_(NEW)
    torch.cuda.synchronize()
    assert len(rig.handler.finished()) == 2
    yield rig
    rig.host.close()
    torch.cuda.synchronize()


# Stores wait for the kernels that write their blocks


@pytest.mark.parametrize(("after", "stored"), [(None, NEW), ((), OLD)], ids=["waits", "control"])
def test_a_store_waits_for_the_kernel_that_writes_its_block(
    rig: Rig, after: tuple[()] | None, stored: int
) -> None:
    busy = rig.slow()
    rig.cache.fill_(NEW)
    rig.handler.wait(rig.handler.store([1], [0], after=after))
    assert busy.query() == (stored == NEW)
    assert rig.page() == stored


def test_a_store_waits_for_the_side_stream_that_is_current(rig: Rig) -> None:
    with torch.cuda.stream(rig.side):
        rig.slow()
        rig.cache.fill_(NEW)
        job = rig.handler.store([1], [0])
    rig.handler.wait(job)
    assert rig.page() == NEW


@pytest.mark.parametrize("named", ["stream", "event", "control"])
def test_a_store_waits_for_what_it_is_told_to(rig: Rig, named: str) -> None:
    with torch.cuda.stream(rig.side):
        busy = rig.slow()
        rig.cache.fill_(NEW)
        event = rig.side.record_event()
    after = {"stream": rig.side, "event": event, "control": None}[named]
    rig.handler.wait(rig.handler.store([1], [0], after=after))
    assert busy.query() == (named != "control")
    assert rig.page() == (OLD if named == "control" else NEW)


def test_a_thread_waits_for_its_own_current_stream(rig: Rig) -> None:
    def store() -> None:
        with torch.cuda.stream(rig.side):
            rig.slow()
            rig.cache.fill_(NEW)
            rig.handler.store([1], [0])

    thread = threading.Thread(target=store)
    thread.start()
    thread.join()
    rig.handler.wait()
    assert rig.page() == NEW


# Loads wait for the kernels that still read their blocks


@pytest.mark.parametrize(("after", "seen"), [(None, OLD), ((), NEW)], ids=["waits", "control"])
def test_a_load_waits_for_the_kernel_that_reads_its_block(
    rig: Rig, after: tuple[()] | None, seen: int
) -> None:
    busy = rig.slow()
    rig.look()
    rig.handler.wait(rig.handler.load([0], [1], after=after))
    assert busy.query() == (seen == OLD)
    torch.cuda.synchronize()
    assert only(rig.seen[1]) == seen
    assert only(rig.cache[1]) == NEW
    assert only(rig.cache[[0, 2, 3]]) == OLD


@pytest.mark.parametrize(("after", "left"), [(None, NEW), ((), 0)], ids=["waits", "control"])
def test_a_load_waits_for_the_kernel_that_zeroes_its_block(
    rig: Rig, after: tuple[()] | None, left: int
) -> None:
    rig.slow()
    rig.cache.fill_(0)
    rig.handler.wait(rig.handler.load([0], [1], after=after))
    torch.cuda.synchronize()
    assert only(rig.cache[1]) == left


@pytest.mark.parametrize("named", ["stream", "event", "control"])
def test_a_load_waits_for_what_it_is_told_to(rig: Rig, named: str) -> None:
    with torch.cuda.stream(rig.side):
        rig.slow()
        rig.look()
        event = rig.side.record_event()
    after = {"stream": rig.side, "event": event, "control": None}[named]
    rig.handler.wait(rig.handler.load([0], [1], after=after))
    torch.cuda.synchronize()
    assert only(rig.seen[1]) == (NEW if named == "control" else OLD)


def test_an_event_that_was_never_recorded_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="never recorded"):
        rig.handler.load([0], [1], after=torch.cuda.Event())
    assert rig.handler.finished() == []


# Order between the directions, by the pages and the blocks


@pytest.mark.parametrize("hazards", ["kept", "ignored as a control"])
@pytest.mark.parametrize("first", ["store", "load"])
@pytest.mark.parametrize("shared", ["page", "block"])
def test_a_store_and_a_load_that_share_a_page_or_a_block_run_in_the_order_of_submission(
    rig: Rig, first: str, shared: str, hazards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hazards != "kept":
        monkeypatch.setattr(Hazards, "latest_before", lambda *_: -1)
    rig.host.pages[1].fill_(NEW + 1)
    rig.cache[2].fill_(OLD + 1)
    torch.cuda.synchronize()
    rig.slow_on(rig.side)
    # The first moves between block 1 and page 0; the second shares the one or the other.
    block, page = (2, 0) if shared == "page" else (1, 1)
    if first == "store":
        rig.handler.store([1], [0], after=rig.side)
        rig.handler.wait(rig.handler.load([page], [block], after=()))
    else:
        rig.handler.load([0], [1], after=rig.side)
        rig.handler.wait(rig.handler.store([block], [page], after=()))
    rig.handler.wait()
    torch.cuda.synchronize()
    seen = {
        ("store", "page"): only(rig.cache[2]),
        ("store", "block"): rig.page(0),
        ("load", "page"): only(rig.cache[1]),
        ("load", "block"): rig.page(1),
    }[first, shared]
    right, wrong = {
        ("store", "page"): (OLD, NEW),  # the block that was stored, or the page before that
        ("store", "block"): (OLD, NEW + 1),  # the block as it was, or what was loaded into it
        ("load", "page"): (NEW, OLD + 1),  # the page as it was, or what was stored into it
        ("load", "block"): (NEW, OLD),  # the page that was loaded, or the block before that
    }[first, shared]
    assert seen == (right if hazards == "kept" else wrong)


# Order within a direction


@pytest.mark.parametrize("channel", ["same", "another as a control"])
def test_stores_run_in_the_order_of_submission(rig: Rig, channel: str) -> None:
    rig.cache[1].fill_(NEW + 1)
    torch.cuda.synchronize()
    second = rig.handler if channel == "same" else OffloadHandler(rig.handler.gpu, rig.host)
    rig.slow_on(rig.side)
    rig.handler.store([0, 2, 3], [0, 2, 3], after=rig.side)
    second.store([1], [0], after=())
    rig.handler.wait()
    second.wait()
    assert rig.page() == (NEW + 1 if channel == "same" else OLD)


@pytest.mark.parametrize("channel", ["same", "another as a control"])
def test_loads_run_in_the_order_of_submission(rig: Rig, channel: str) -> None:
    rig.host.pages[1].fill_(NEW + 1)
    second = rig.handler if channel == "same" else OffloadHandler(rig.handler.gpu, rig.host)
    rig.slow_on(rig.side)
    rig.handler.load([0, 2, 3], [0, 2, 3], after=rig.side)
    second.load([1], [0], after=())
    rig.handler.wait()
    second.wait()
    assert only(rig.cache[0]) == (NEW + 1 if channel == "same" else NEW)


def test_jobs_are_reported_in_the_order_of_submission(rig: Rig) -> None:
    busy = rig.slow()
    for blocks in ([0, 1, 2, 3], [2], [0, 1, 3], []):
        rig.handler.store(blocks, blocks)
    assert rig.handler.finished() == []
    assert not busy.query()
    reported: list[int] = []
    while len(reported) < 4:
        reported.extend(result.job_id for result in rig.handler.finished())
    assert reported == [2, 3, 4, 5]  # 0 and 1 are the rig's


def test_a_page_is_used_again_and_again_without_the_host_waiting(rig: Rig) -> None:
    rig.cache.copy_(torch.arange(4, device="cuda:0")[:, None])
    rig.slow()
    for _ in range(100):  # rotates the four blocks through one page each
        for block in range(4):
            rig.handler.store([block], [(block + 1) % 4]).wait_on()
        rig.handler.load([0, 1, 2, 3], [0, 1, 2, 3]).wait_on()
    rig.slow(1)
    rig.cache.add_(0)
    torch.cuda.synchronize()
    assert [only(row) for row in rig.cache] == [0, 1, 2, 3]  # 100 is a multiple of 4
    assert [rig.page(index) for index in range(4)] == [0, 1, 2, 3]


# Whoever uses loaded blocks waits for the job


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_a_stream_that_waits_for_a_load_sees_its_bytes(rig: Rig, waits: bool) -> None:
    busy = rig.slow_on(rig.side)
    job = rig.handler.load([0], [1], after=rig.side)
    with torch.cuda.stream(rig.consumer):
        if waits:
            job.wait_on(rig.consumer)
        rig.look()
    assert not busy.query()  # the host waited for nothing
    assert not job.done()
    rig.consumer.synchronize()
    assert busy.query() == waits
    assert only(rig.seen[1]) == (NEW if waits else OLD)


def test_the_current_stream_waits_when_none_is_named(rig: Rig) -> None:
    rig.slow_on(rig.side)
    job = rig.handler.load([0], [1], after=rig.side)
    with torch.cuda.stream(rig.consumer):
        job.wait_on()
        rig.look()
    rig.consumer.synchronize()
    assert only(rig.seen[1]) == NEW


def test_waiting_for_an_ended_job_does_not_wait_for_the_job_that_has_its_event(rig: Rig) -> None:
    first = rig.handler.load([0], [1])
    rig.handler.wait(first)
    assert len(rig.handler.finished()) == 1
    busy = rig.slow_on(rig.side)
    second = rig.handler.load([0], [1], after=rig.side)
    assert rig.handler._loads.events.idle == 0  # it took the events of the first
    first.wait_on(rig.consumer)
    rig.consumer.synchronize()
    assert not busy.query()
    assert not second.done()


def test_the_host_waits_for_a_job_that_has_not_started(rig: Rig) -> None:
    rig.slow()
    rig.cache.fill_(NEW)
    job = rig.handler.store([1], [0])
    with pytest.raises(TimeoutError, match="store 2"):
        rig.handler.wait(job, timeout=0.01)
    rig.handler.wait(job, timeout=60)
    assert rig.page() == NEW
    assert [result.job_id for result in rig.handler.finished()] == [2]


def test_the_time_of_a_job_is_that_of_its_copy(rig: Rig) -> None:
    rig.slow(200)
    job = rig.handler.store([0, 1, 2, 3], [0, 1, 2, 3])
    rig.handler.wait(job)
    assert job.result is not None
    assert 0 < job.result.seconds < 0.1
    assert 0 < job.result.submit_seconds < 0.1


# What submission leaves as it was


def test_the_callers_stream_and_device_stay_current(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Tensor) -> None:
        raise RuntimeError("no copy engine")

    def check(stream: torch.cuda.Stream) -> None:
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_device() == 0

    for stream in (torch.cuda.default_stream(), rig.side):
        with torch.cuda.stream(stream):
            rig.handler.store([0], [0]).wait_on(rig.consumer)
            check(stream)
            rig.handler.load([0], [0], after=rig.consumer)
            check(stream)
            with monkeypatch.context() as patch:
                patch.setattr(handler_module, "swap_blocks_batch", fail)
                assert rig.handler.store([0], [0]).done()
            check(stream)


def test_jobs_take_no_gpu_memory(rig: Rig) -> None:
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(50):
        rig.handler.store([0, 1], [0, 1])
        rig.handler.load([2], [3])
    rig.handler.wait()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("current", [0, 1])
def test_the_cache_may_be_on_another_device_than_the_current(
    current: int, cycles_per_ms: float
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(1):
        rig = Rig(cycles_per_ms, "cuda:1")
        rig.slow(1)
        rig.look()
        torch.cuda.synchronize()
    with torch.cuda.device(current):
        with torch.cuda.device(1):
            rig.slow()
            rig.cache.fill_(OLD + 1)
        store = rig.handler.store([1], [0])
        assert torch.cuda.current_device() == current
        rig.handler.wait(store)
        assert rig.page() == OLD + 1
        with torch.cuda.device(1):
            rig.slow()
            rig.look()
        load = rig.handler.load([2], [1])
        load.wait_on()  # the current stream of cuda:1
        other = torch.cuda.Stream("cuda:0")
        load.wait_on(other)
        other.synchronize()
        assert load.done()
        torch.cuda.synchronize(1)
        assert only(rig.seen[1]) == OLD + 1
        assert only(rig.cache[1]) == NEW
        rig.host.close()
        assert torch.cuda.current_device() == current


# Many jobs


def test_more_jobs_than_a_stream_holds_are_submitted_without_blocking(rig: Rig) -> None:
    busy = rig.slow_on(rig.side, ms=5000)
    for j in range(1200):
        rig.handler.store([j % 4], [j % 4], after=busy)
    assert not busy.query()
    rig.handler.wait()
    assert [result.ok for result in rig.handler.finished()] == [True] * 1200
    stores = rig.handler._stores
    assert stores.events.in_use == 0


# Failures and ends


def test_a_failed_copy_is_waited_for_and_the_next_job_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = handler_module.swap_blocks_batch

    def copy_and_fail(*args: Tensor) -> None:
        copy(*args)
        raise RuntimeError("too late")

    with monkeypatch.context() as patch:
        patch.setattr(handler_module, "swap_blocks_batch", copy_and_fail)
        rig.slow()
        rig.cache.fill_(NEW + 1)
        job = rig.handler.store([1], [0])
    assert rig.page() == NEW + 1  # nothing of it is in flight any more
    assert job.done()
    with pytest.raises(TransferError, match="store 2 failed: RuntimeError: too late"):
        job.wait_on()
    rig.handler.wait(rig.handler.store([2], [2]))
    assert rig.page(2) == NEW + 1
    stores = rig.handler._stores
    assert stores.events.in_use == 0


def test_nothing_can_be_captured_and_the_capture_goes_on(rig: Rig) -> None:
    job = rig.handler.store([1], [0])
    rig.handler.wait()
    graph = torch.cuda.CUDAGraph()
    rig.cache.add_(1)
    with torch.cuda.graph(graph):
        for call in (
            lambda: rig.handler.store([1], [0]),
            lambda: rig.handler.load([0], [1], after=()),
            rig.handler.finished,
            rig.handler.wait,
            job.done,
            job.wait_on,
        ):
            with pytest.raises(RuntimeError, match="is capturing a CUDA graph"):
                call()
        rig.cache.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert only(rig.cache) == OLD + 2
    assert len(rig.handler.finished()) == 1


def test_closing_a_pool_waits_for_the_jobs_in_flight(rig: Rig) -> None:
    view = rig.host.pages
    busy = rig.slow()
    rig.cache.fill_(NEW + 1)
    job = rig.handler.store([1], [0])
    rig.host.close()
    assert busy.query()
    assert job.result is not None
    assert job.result.ok
    assert only(view[0]) == NEW + 1
    assert not view.is_pinned()


def test_a_dropped_handler_waits_for_its_jobs(rig: Rig) -> None:
    handler = OffloadHandler(rig.handler.gpu, rig.host)
    busy = rig.slow()
    rig.cache.fill_(NEW + 1)
    handler.store([1], [0])
    del handler
    assert busy.query()
    assert rig.page() == NEW + 1


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_a_process_that_exits_waits_for_the_jobs_in_flight(waits: bool) -> None:
    script = f"""
        import atexit
        atexit.register(lambda: print("slow kernel has ended:", busy.query()))  # runs last
        import torch
        from test_stream_order import Rig
        rig = Rig(2e6)
        rig.slow(1)
        torch.cuda.synchronize()
        busy = rig.slow(3000)
        rig.handler.store([1], [0])
        rig.host._unpin.detach()  # which might wait as well
        if not {waits}:
            rig.handler._finalizer.detach()
    """
    assert run_script(textwrap.dedent(script)) == f"slow kernel has ended: {waits}\n"


def test_a_lost_device_fails_all_jobs_and_closing_takes_no_time() -> None:
    script = """
        import os, time, warnings, torch
        from test_stream_order import Rig
        rig = Rig(2e6)
        numbers, good, bad = (torch.tensor([n], device="cuda:0") for n in (5, 0, 99))
        numbers[good]  # loads the kernel, so that the next launch waits for nothing
        torch.cuda.synchronize()
        rig.slow(1000)
        numbers[bad]
        store, load = rig.handler.store, rig.handler.load
        jobs = [store([1], [0]), load([1], [1]), store([2], [2])]
        rig.handler.drain()
        print([(r.job_id, r.ok) for r in rig.handler.finished()], [j.done() for j in jobs])
        try:
            rig.handler.store([1], [0])
        except RuntimeError as error:
            print("the device is lost" in str(error))
        began = time.monotonic()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            rig.host.close()
        print(time.monotonic() - began < 1)
        sys.stdout.flush()
        os._exit(0)  # how torch itself ends on a lost device is not ours to test
    """
    assert run_script(textwrap.dedent(script)).splitlines() == [
        "[(0, False), (2, False), (1, False)] [True, True, True]",
        "True",
        "True",
    ]


def test_a_forked_child_is_told_so_before_it_touches_cuda() -> None:
    script = """
        import os, warnings
        warnings.simplefilter("ignore")
        from test_stream_order import Rig
        rig = Rig(2e6)
        rig.handler.wait(rig.handler.store([1], [0]))
        child = os.fork()
        if child == 0:
            for call in (rig.handler.finished, rig.handler.close, rig.host.close):
                try:
                    call()
                except RuntimeError as error:
                    assert "forked from it" in str(error), error
                else:
                    raise AssertionError("the call went on")
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        rig.handler.wait(rig.handler.load([0], [1]))
        print(rig.page())
    """
    assert run_script(textwrap.dedent(script)) == "17\n"
