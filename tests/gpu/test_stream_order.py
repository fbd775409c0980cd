"""On a GPU: what waits for what, shown with slow kernels, each beside a control that goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rigs import NEW, OLD, Rig, only, run_script

from torch_kvswap.handler import Job, OffloadHandler

pytestmark = pytest.mark.gpu


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


@pytest.fixture(params=["kept", "lost as a control"])
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def second_handler(rig: Rig, order: str) -> OffloadHandler:
    """The rig's, or as a control another one, which knows nothing of the first one's jobs."""
    return rig.handler if order == "kept" else rig.another_handler()


# Stores wait for the kernels that write their blocks


@pytest.mark.parametrize(("after", "stored"), [(None, NEW), ((), OLD)], ids=["waits", "control"])
def test_a_store_waits_for_the_kernel_that_writes_its_block(
    rig: Rig, after: tuple[()] | None, stored: int
) -> None:
    rig.hold()
    rig.cache.fill_(NEW)
    job = rig.handler.store([1], [0], after=after)
    if after is None:
        rig.release()
    rig.handler.wait(job)
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
        rig.hold()
        rig.cache.fill_(NEW)
        event = rig.side.record_event()
    after = {"stream": rig.side, "event": event, "control": None}[named]
    job = rig.handler.store([1], [0], after=after)
    if named != "control":
        rig.release()
    rig.handler.wait(job)
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
    rig.hold()
    rig.look()
    job = rig.handler.load([0], [1], after=after)
    if after is None:
        rig.release()
    rig.handler.wait(job)
    rig.release()
    torch.cuda.synchronize()
    assert only(rig.seen[1]) == seen
    assert only(rig.cache[1]) == NEW
    assert only(rig.cache[[0, 2, 3]]) == OLD


@pytest.mark.parametrize(("after", "left"), [(None, NEW), ((), 0)], ids=["waits", "control"])
def test_a_load_waits_for_the_kernel_that_zeroes_its_block(
    rig: Rig, after: tuple[()] | None, left: int
) -> None:
    rig.hold()
    rig.cache.fill_(0)
    job = rig.handler.load([0], [1], after=after)
    if after is None:
        rig.release()
    rig.handler.wait(job)
    rig.release()
    torch.cuda.synchronize()
    assert only(rig.cache[1]) == left


@pytest.mark.parametrize("named", ["stream", "event", "control"])
def test_a_load_waits_for_what_it_is_told_to(rig: Rig, named: str) -> None:
    with torch.cuda.stream(rig.side):
        rig.hold()
        rig.look()
        event = rig.side.record_event()
    after = {"stream": rig.side, "event": event, "control": None}[named]
    job = rig.handler.load([0], [1], after=after)
    if named != "control":
        rig.release()
    rig.handler.wait(job)
    rig.release()
    torch.cuda.synchronize()
    assert only(rig.seen[1]) == (NEW if named == "control" else OLD)


def test_an_event_that_was_never_recorded_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="never recorded"):
        rig.handler.load([0], [1], after=torch.cuda.Event())
    assert rig.handler.finished() == []


# Order between the directions, by the pages and the blocks


@pytest.mark.parametrize("first", ["store", "load"])
@pytest.mark.parametrize("shared", ["page", "block"])
def test_a_store_and_a_load_that_share_a_page_or_a_block_run_in_the_order_of_submission(
    rig: Rig, first: str, shared: str, order: str
) -> None:
    second = second_handler(rig, order)
    rig.host.pages[1].fill_(NEW + 1)
    rig.cache[2].fill_(OLD + 1)
    torch.cuda.synchronize()
    rig.hold_on(rig.side)
    # The first moves between block 1 and page 0; the second shares the one or the other.
    block, page = (2, 0) if shared == "page" else (1, 1)
    if first == "store":
        rig.handler.store([1], [0], after=rig.side)
        job = second.load([page], [block], after=())
    else:
        rig.handler.load([0], [1], after=rig.side)
        job = second.store([block], [page], after=())
    if order == "kept":
        rig.release()
    second.wait(job)
    rig.release()
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
    assert seen == (right if order == "kept" else wrong)


def test_a_load_submitted_before_the_store_of_its_page_has_run_reads_what_is_stored(
    rig: Rig, order: str
) -> None:
    second = second_handler(rig, order)
    with torch.cuda.stream(rig.side):
        busy = rig.hold()
        rig.cache[1].fill_(NEW + 1)
        rig.handler.store([1], [0])
    load = second.load([0], [2], after=())
    load.wait_on(rig.consumer)
    with torch.cuda.stream(rig.consumer):
        rig.look()
    assert not busy.query()  # the host waited for nothing
    if order == "kept":
        rig.release()
    rig.consumer.synchronize()
    rig.release()
    assert only(rig.seen[2]) == (NEW + 1 if order == "kept" else NEW)


# Order within a direction


def test_stores_run_in_the_order_of_submission(rig: Rig, order: str) -> None:
    second = second_handler(rig, order)
    rig.cache[1].fill_(NEW + 1)
    torch.cuda.synchronize()
    rig.hold_on(rig.side)
    rig.handler.store([0, 2, 3], [0, 2, 3], after=rig.side)
    job = second.store([1], [0], after=())
    if order == "kept":
        rig.release()
    second.wait(job)
    rig.release()
    rig.handler.wait()
    assert rig.page() == (NEW + 1 if order == "kept" else OLD)


def test_loads_run_in_the_order_of_submission(rig: Rig, order: str) -> None:
    second = second_handler(rig, order)
    rig.host.pages[1].fill_(NEW + 1)
    rig.hold_on(rig.side)
    rig.handler.load([0, 2, 3], [0, 2, 3], after=rig.side)
    job = second.load([1], [0], after=())
    if order == "kept":
        rig.release()
    second.wait(job)
    rig.release()
    rig.handler.wait()
    assert only(rig.cache[0]) == (NEW + 1 if order == "kept" else NEW)


def test_an_expedited_load_of_a_block_waits_for_the_queued_loads_of_that_block(
    rig: Rig, order: str
) -> None:
    second = second_handler(rig, order)
    rig.host.pages[1].fill_(NEW + 1)
    busy = rig.hold_on(rig.side)
    for _ in range(100):  # more than are given to the device at once
        rig.handler.load([0], [0], after=busy)
    job = second.load([1], [0], after=(), expedited=True)
    if order == "kept":
        rig.release()
    second.wait(job)
    rig.release()
    rig.handler.wait()
    assert only(rig.cache[0]) == (NEW + 1 if order == "kept" else NEW)


def test_jobs_of_a_direction_are_reported_in_the_order_of_submission(rig: Rig) -> None:
    rig.hold()
    jobs = [rig.handler.store(blocks, blocks) for blocks in ([0, 1, 2, 3], [2], [0, 1, 3])]
    assert rig.handler.finished() == []
    rig.release()
    reported: list[int] = []
    while len(reported) < 3:
        reported.extend(result.job_id for result in rig.handler.finished())
    assert reported == [job.id for job in jobs]


def test_blocks_rotate_through_the_pages_without_the_host_waiting(rig: Rig) -> None:
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


def test_a_page_is_filled_again_and_again_while_loads_still_read_it(order: str) -> None:
    # One page; blocks 0 to 3 are stored to it in turn, and it is loaded into 4 to 7 in turn.
    with Rig(blocks=8) as rig, torch.cuda.stream(rig.side):
        loader = second_handler(rig, order)
        wrong = torch.zeros(500, dtype=torch.bool, device="cuda:0")
        wrong[0] = (rig.cache[4] != 0).any()
        torch.cuda.synchronize()
        stores: list[Job] = []
        busy = rig.hold()
        for i in range(500):
            if i >= 4:
                stores[i - 4].wait_on()  # which read the block that is overwritten now
            rig.cache[i % 4].fill_(i % 251)
            stores.append(rig.handler.store([i % 4], [0]))
            load = loader.load([0], [4 + i % 4], after=rig.consumer)
            load.wait_on(rig.consumer)
            with torch.cuda.stream(rig.consumer):
                wrong[i] = (rig.cache[4 + i % 4] != i % 251).any()
            if i == 50:
                assert not busy.query()  # the host waited for nothing
                rig.release()
        torch.cuda.synchronize()
        assert bool(wrong.any()) == (order != "kept")


# What the caller passes is read in the call


@pytest.mark.parametrize("kind", ["list", "numpy array", "tensor"])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_ids_that_change_right_after_the_call_change_nothing(
    rig: Rig, direction: str, kind: str
) -> None:
    make = {
        "list": list,
        "numpy array": lambda ids: np.array(ids, np.int32),
        "tensor": torch.tensor,
    }[kind]
    blocks, pages = make([1, 2]), make([3, 0])
    busy = rig.hold()
    if direction == "store":
        rig.handler.store(blocks, pages)
    else:
        rig.handler.load(pages, blocks)
    blocks[0], blocks[1] = 0, 3
    pages[0], pages[1] = 1, 2
    assert not busy.query()
    rig.release()
    rig.handler.wait()
    if direction == "store":
        assert [rig.page(index) for index in range(4)] == [OLD, NEW, NEW, OLD]
        assert only(rig.cache) == OLD
    else:
        assert [only(row) for row in rig.cache] == [OLD, NEW, NEW, OLD]
        assert only(rig.host.pages) == NEW


# Whoever uses loaded blocks waits for the job


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_a_stream_that_waits_for_a_load_sees_its_bytes(rig: Rig, waits: bool) -> None:
    busy = rig.hold_on(rig.side)
    job = rig.handler.load([0], [1], after=rig.side)
    with torch.cuda.stream(rig.consumer):
        if waits:
            job.wait_on(rig.consumer)
        rig.look()
    assert not busy.query()  # the host waited for nothing
    assert not job.done()
    if waits:
        rig.release()
    rig.consumer.synchronize()
    rig.release()
    assert only(rig.seen[1]) == (NEW if waits else OLD)


def test_the_current_stream_waits_when_none_is_named(rig: Rig) -> None:
    rig.hold_on(rig.side)
    job = rig.handler.load([0], [1], after=rig.side)
    with torch.cuda.stream(rig.consumer):
        job.wait_on()
        rig.look()
    rig.release()
    rig.consumer.synchronize()
    assert only(rig.seen[1]) == NEW


def test_waiting_for_an_ended_job_does_not_wait_for_the_job_that_has_its_event(rig: Rig) -> None:
    rig.hold_on(rig.side)
    first = rig.handler.load([0], [1], after=rig.side)
    rig.release()
    rig.handler.wait(first)
    assert len(rig.handler.finished()) == 1
    events = rig.handler.metrics().loads.events
    rig.hold_on(rig.side)
    second = rig.handler.load([0], [1], after=rig.side)
    assert rig.handler.metrics().loads.events == events  # it took those of the first
    first.wait_on(rig.consumer)
    rig.consumer.synchronize()
    assert not second.done()


def test_the_host_waits_for_a_job_that_has_not_started(rig: Rig) -> None:
    rig.hold()
    rig.cache.fill_(NEW)
    job = rig.handler.store([1], [0])
    with pytest.raises(TimeoutError, match=f"store {job.id}"):
        rig.handler.wait(job, timeout=0.01)
    rig.release()
    rig.handler.wait(job, timeout=60)
    assert rig.page() == NEW
    assert [result.job_id for result in rig.handler.finished()] == [job.id]


def test_the_time_of_a_job_is_that_of_its_copy(rig: Rig) -> None:
    rig.slow(200)
    job = rig.handler.store([0, 1, 2, 3], [0, 1, 2, 3])
    rig.handler.wait(job)
    assert job.result is not None
    assert 0 < job.result.copy_seconds < 0.1
    assert 0 < job.result.submit_seconds < 0.1
    assert 0 <= job.result.queue_seconds < 0.1


# What submission leaves as it was


def test_the_callers_stream_and_device_stay_current(rig: Rig) -> None:
    for stream in (torch.cuda.default_stream(), rig.side):
        with torch.cuda.stream(stream):
            for call in (
                lambda: rig.handler.store([0], [0]).wait_on(rig.consumer),
                lambda: rig.handler.load([0], [0], after=rig.consumer),
                lambda: rig.handler.cancel(rig.handler.load([1], [1], expedited=True)),
                rig.handler.finished,
                rig.handler.drain,
                lambda: rig.handler.rebind(rig.layout),
            ):
                call()
                assert torch.cuda.current_stream() == stream
                assert torch.cuda.current_device() == 0


def test_jobs_take_no_gpu_memory(rig: Rig) -> None:
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(50):
        rig.handler.store([0, 1], [0, 1])
        rig.handler.load([2], [3])
    rig.handler.wait()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# Ends


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
    handler = rig.another_handler()
    busy = rig.slow()
    rig.cache.fill_(NEW + 1)
    handler.store([1], [0])
    del handler
    assert busy.query()
    assert rig.page() == NEW + 1


@pytest.mark.parametrize("copies", ["handler", "torch as a control"])
def test_a_process_that_exits_waits_for_the_jobs_in_flight(copies: str) -> None:
    script = """
        import os, weakref, torch
        from rigs import Rig
        os.environ["KVSWAP_PATH"] = "batch"  # to free staging buffers waits by itself
        rig = Rig()
        # At exit the newest finalizer comes first: this one behind the second handler's, before
        # those of the pool, which wait as well.
        weakref.finalize(rig, lambda: print("slow kernel has ended:", busy.query()))
        second = rig.another_handler()
        busy = rig.slow(1000)
        if sys.argv[1] == "handler":
            second.store([1], [0])
        else:
            rig.host.pages[0].view(-1).copy_(rig.cache[1], non_blocking=True)
    """
    assert run_script(script, copies) == f"slow kernel has ended: {copies == 'handler'}\n"


def test_a_lost_device_fails_all_jobs_and_closing_takes_no_time() -> None:
    script = """
        import os, warnings, torch
        from rigs import Rig
        rig = Rig()
        numbers, good, bad = (torch.tensor([n], device="cuda:0") for n in (5, 0, 99))
        numbers[good]  # loads the kernel, so that the next launch waits for nothing
        torch.cuda.synchronize()
        rig.slow(500)
        numbers[bad]
        store, load = rig.handler.store, rig.handler.load
        jobs = [store([1], [0]), load([1], [1]), store([2], [2]), load([2], [3], expedited=True)]
        jobs += [store([0], [3]) for _ in range(100)]  # some of them in the software queue
        rig.handler.drain()
        results = rig.handler.finished()
        print(sorted(r.job_id for r in results) == [job.id for job in jobs])
        print({r.state for r in results}, all(job.done() for job in jobs))
        try:
            rig.handler.store([1], [0])
        except RuntimeError as error:
            print("lost" in str(error))
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            rig.handler.close()
            rig.host.close()
        print("closed")  # which waits for nothing that the device would have to do
        sys.stdout.flush()
        os._exit(0)  # how torch itself ends on a lost device is not ours to test
    """
    assert run_script(script).splitlines() == ["True", "{'failed'} True", "True", "closed"]


def test_a_forked_child_is_told_so_before_it_touches_cuda() -> None:
    script = """
        import os, warnings
        warnings.simplefilter("ignore")
        from rigs import Rig
        rig = Rig()
        job = rig.handler.store([1], [0])
        rig.handler.wait(job)
        child = os.fork()
        if child == 0:
            for call in (
                rig.handler.finished, rig.handler.close, rig.host.close, rig.handler.drain,
                lambda: rig.handler.store([1], [0]), lambda: rig.handler.cancel(job),
                rig.handler.gate, rig.handler.metrics,
            ):
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
    assert run_script(script) == "17\n"
