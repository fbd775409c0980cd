"""Bytes go where the ids say, in every layout, and every job ends once."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import simulated_driver
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from logged import logged
from patience import PATIENCE, in_time
from processes import run_script
from simulated_cache import Event, Stream
from simulated_driver import Driver, cache, place, simulated, without_cuda
from simulated_driver.cuda import CudaError

import torch_kvswap.results
from torch_kvswap import HostPool, OffloadHandler, PagedLayout, PrefixCache
from torch_kvswap._native.loader import native
from torch_kvswap.offload.handler import Job
from torch_kvswap.offload.streams import resolve_after, resolve_waiting
from torch_kvswap.results import TransferError


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_handler(
    device: str = "cpu", num_pages: int = 4, blocks_per_page: int = 1, copy_method: str = "auto"
) -> OffloadHandler:
    cache = torch.arange(8 * 6, dtype=torch.int16, device=device).view(8, 6)
    layout = PagedLayout([cache])
    pool = HostPool(layout, num_pages, blocks_per_page)
    return OffloadHandler(layout, pool, copy_method=copy_method)


def test_jobs_and_results_describe_the_transfer(device: str) -> None:
    handler = make_handler(device, copy_method="auto" if device == "cpu" else "batch")
    store, load = (
        handler.store(gpu_block_ids=[1, 2], page_ids=[0, 1]),
        handler.load(page_ids=[2], gpu_block_ids=[7]),
    )
    assert [(job.id, job.direction, job.nbytes) for job in (store, load)] == [
        (0, "store", 24),
        (1, "load", 12),
    ]
    handler.synchronize([store, load])
    assert store.query()
    results = handler.poll()
    assert results == [store.result, load.result]
    for result in results:
        assert (result.state, result.ok, result.error) == ("done", True, None)
        assert result.copy_method == ("host" if device == "cpu" else "batch")
        assert 0 <= result.copy_seconds < 10
        assert 0 <= result.queue_seconds < 10
        assert 0 < result.submit_seconds < 10
    handler.close()


@simulated
def test_waiting_for_failed_jobs_names_them(driver: Driver) -> None:
    handler = on_gpu(driver)
    driver.fail("cuMemcpyAsync", code=1)
    jobs = [
        handler.store(gpu_block_ids=[1], page_ids=[0]),
        handler.load(page_ids=[0], gpu_block_ids=[1]),
        handler.store(gpu_block_ids=[2], page_ids=[2]),
    ]
    for _ in range(2):
        with pytest.raises(TransferError) as failure:
            handler.synchronize()
        assert failure.value.results == [job.result for job in jobs[:2]]
        assert failure.value.__cause__ is not None
        assert str(failure.value.__cause__) == str(jobs[0].result.error)  # type: ignore[union-attr]
    assert_expected_inline(
        simulated_driver.error_of(handler.synchronize),
        """store 0 failed: cuMemcpyAsync failed at index 0, from 0x~ (device 0, allocation 0x~ + 96 bytes) to 0x~ (pinned host memory, allocation 0x~ + 48 bytes), 12 bytes: CUDA_ERROR_SIMULATED (1): made up by the simulated driver; load 1 failed: page 0 (page_ids[0]) must be stored again: store 0 failed: cuMemcpyAsync failed at index 0, from 0x~ (device 0, allocation 0x~ + 96 bytes) to 0x~ (pinned host memory, allocation 0x~ + 48 bytes), 12 bytes: CUDA_ERROR_SIMULATED (1): made up by the simulated driver""",
    )
    assert len(handler.poll()) == 3
    handler.synchronize()  # what was reported is nobody's surprise any more
    with pytest.raises(
        TransferError,
        match=r"load 1 failed: page 0 \(page_ids\[0\]\) must be stored again: store 0",
    ):
        handler.synchronize(jobs[1])  # but for those who ask
    handler.close()


def test_unnamed_ids_are_refused_with_the_names(device: str) -> None:
    with make_handler(device) as handler:
        for call in (handler.store, handler.load):
            for given in ({}, {"gpu_block_ids": [0], "page_ids": [0]}):
                with pytest.raises(TypeError, match=r"gpu_block_ids.*page_ids|page_ids.*gpu_block"):
                    call([0], **given)
        assert handler.poll() == []


def test_a_job_of_another_handler_is_refused(device: str) -> None:
    one, other = make_handler(device), make_handler(device)
    with pytest.raises(
        ValueError, match=r"^job.* is store 0 of another handler; pass it to that handler"
    ):
        one.synchronize(other.store(gpu_block_ids=[0], page_ids=[0]))
    one.close()
    other.close()


def test_a_closed_handler_still_reports(device: str) -> None:
    with make_handler(device) as handler:
        job = handler.store(gpu_block_ids=[0], page_ids=[0])
    handler.close()
    (tensor,) = handler.layouts[0].tensors
    tensor.data = tensor.data.clone()  # it says first that it is closed
    for call in (handler.store, handler.load):
        with pytest.raises(RuntimeError, match=r"^the handler is closed; make a new one$"):
            call(gpu_block_ids=None, page_ids=[0])  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"^the handler is closed; make a new one$"):
        handler.rebind(None)  # type: ignore[arg-type]
    assert [result.job_id for result in handler.poll()] == [0]
    assert job.query()
    job.wait()
    handler.synchronize(job)


# What only shows while jobs run: a driver that ends nothing until it is told to


STREAM = 42  # what is current


def on_gpu(driver: Driver, mode: str = "immediate") -> OffloadHandler:
    """A handler on a simulated GPU, whose work is done as the mode says."""
    cache = torch.arange(8 * 6, dtype=torch.int16).view(8, 6)
    layout = place(driver, PagedLayout([cache]))
    handler = OffloadHandler(layout, HostPool(layout, num_pages=4))
    driver.set_mode(mode)
    driver.set_stream(0, STREAM)
    return handler


@simulated
def test_polling_during_anothers_capture_is_safe(driver: Driver) -> None:
    handler = on_gpu(driver, "manual")
    handler.store(gpu_block_ids=[0], page_ids=[0])
    driver.run()
    driver.set_global_capture(True)
    handler.load(page_ids=[1], gpu_block_ids=[1])
    assert [result.job_id for result in handler.poll()] == [0]
    driver.run()
    assert [result.job_id for result in handler.poll()] == [1]
    assert driver.capture_spoilt == 0
    with pytest.raises(CudaError):  # the control: not in our mode
        driver.cuda.is_done(event=driver.cuda.create_event())
    driver.set_global_capture(False)
    driver.violations()


def while_it_waits(driver: Driver, call: Any) -> threading.Thread:
    """Calls it in another thread as soon as this one asks the driver again and again."""
    asked = driver.calls("cuEventQuery")
    looks = lambda: driver.calls("cuEventQuery") >= asked + 10  # noqa: E731
    thread = threading.Thread(target=lambda: in_time(looks) and call())
    thread.start()
    return thread


@simulated
def test_closing_the_pool_waits_for_jobs(driver: Driver) -> None:
    handler = on_gpu(driver, "threaded")
    held = driver.hold(STREAM)
    job = handler.store(gpu_block_ids=[5], page_ids=[3])
    thread = while_it_waits(driver, lambda: driver.release(held))
    pages = handler.pools[0].pages
    handler.pools[0].close()
    assert pages[3, 0].view(torch.int16).tolist() == list(range(30, 36))
    assert job.result is not None
    assert handler.poll() == [job.result]
    thread.join()


@pytest.mark.parametrize("in_a_cycle", [False, True])
@simulated
def test_a_dropped_handler_waits_for_jobs(driver: Driver, in_a_cycle: bool) -> None:
    layout = PagedLayout([torch.ones(4, 6)])
    place(driver, layout)
    driver.set_mode("threaded")
    driver.set_stream(0, STREAM)
    handler = OffloadHandler(layout, HostPool(layout, num_pages=4))
    alive = [weakref.ref(layout), weakref.ref(handler.pools[0])]
    del layout
    held = driver.hold(STREAM)
    seen = []

    def release() -> None:
        seen.append([reference() is not None for reference in alive])
        driver.release(held)

    handler.store(gpu_block_ids=[0], page_ids=[0])
    if in_a_cycle:
        handler.itself = handler  # type: ignore[attr-defined]
    thread = while_it_waits(driver, release)
    del handler
    gc.collect()
    assert seen == [[True, True]]
    thread.join()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert (driver.live("events"), driver.live("streams")) == (0, 0)


@simulated
def test_a_job_keeps_its_handler(driver: Driver) -> None:
    job: Job = on_gpu(driver, "manual").store(gpu_block_ids=[0], page_ids=[0])
    gc.collect()
    assert not job.query()
    driver.run()
    assert job.query()


@simulated_driver.without_cuda
def test_an_open_handler_waits_at_exit() -> None:
    def body(driver):  # type: ignore[no-untyped-def]
        import atexit
        import threading
        import time

        from simulated_driver import cache

        atexit.unregister(driver.library.simulated_reset)
        layout, host = cache(driver)
        driver.set_mode("threaded")
        driver.set_stream(0, 42)
        held = driver.hold(42)
        global handler, job
        from torch_kvswap import OffloadHandler

        handler = OffloadHandler(layout, host)
        job = handler.store(gpu_block_ids=[0], page_ids=[0])

        ended = threading.Event()

        def release() -> None:
            ended.wait()
            asked = driver.calls("cuEventQuery")
            while driver.calls("cuEventQuery") < asked + 10:  # by what waits for the job
                time.sleep(0.0002)
            print("still at work", flush=True)
            driver.release(held)

        # A daemon, or Python would wait for it by itself.
        threading.Thread(target=release, daemon=True).start()
        print("ends", flush=True)
        atexit.register(ended.set)

    assert simulated_driver.run(body, ends_as_usual=True).splitlines() == ["ends", "still at work"]


class Tag:
    """Something that a weak reference can watch."""


def test_a_tag_is_held_until_reported(device: str) -> None:
    handler, tag = make_handler(device), Tag()
    watched = weakref.ref(tag)
    tagged = handler.store(gpu_block_ids=[1], page_ids=[0], tag=tag)
    plain = handler.store(gpu_block_ids=[2], page_ids=[1])
    handler.synchronize()
    assert (tagged.tag, plain.tag) == (tag, None)
    assert tagged.result is not None
    assert tagged.result.tag is tag
    del tag, tagged
    gc.collect()
    assert watched() is not None
    assert [result.tag for result in handler.poll()] == [watched(), None]
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("tag", ["mine", None])
def test_a_poll_within_a_submission_gets_the_tag(
    monkeypatch: pytest.MonkeyPatch, tag: object
) -> None:
    """As in another thread that has polled the job before store() returns."""
    handler, polled = make_handler(), []
    submit = handler._native.submit

    def submit_and_poll(*arguments: Any) -> None:
        submit(*arguments)
        polled.extend(handler.poll())

    monkeypatch.setattr(handler._native, "submit", submit_and_poll)
    job = handler.store(gpu_block_ids=[1], page_ids=[0], tag=tag)
    assert [(result.job_id, result.tag) for result in polled] == [(job.id, tag)]
    assert handler._tags == {}


def test_a_forked_child_may_not_use_it() -> None:
    script = """
        import os
        sys.stderr = sys.stdout  # of which nothing is expected
        from test_handler import make_handler
        handler = make_handler()
        job = handler.store(gpu_block_ids=[0], page_ids=[0])
        parent, child = os.getpid(), os.fork()
        refused = f" belongs to process {parent} and cannot be used in process {os.getpid()}, forked from it; make a "
        if child == 0:
            for call in (
                lambda: handler.store(gpu_block_ids=[0], page_ids=[0]), lambda: handler.load(page_ids=[0], gpu_block_ids=[0]), handler.poll,
                handler.synchronize, lambda: handler.synchronize(job), lambda: handler.cancel(job),
                handler.metrics, lambda: handler.rebind(handler.layouts[0]),
                handler.close, handler.pools[0].close, job.query, job.wait,
                lambda: job.wait(layer_group=0), lambda: job.result,
            ):
                try:
                    call()
                except RuntimeError as error:
                    assert refused in str(error) and str(error).endswith(" in each process"), error
                else:
                    raise AssertionError("the call went on")
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        handler.close()
        print("closed")
    """
    assert run_script(script, folder=Path(__file__).parent).split() == ["closed"]


@pytest.mark.parametrize("nth", range(1, 7))
@simulated
def test_missing_streams_leave_nothing_behind(driver: Driver, nth: int) -> None:
    layout = place(driver, PagedLayout([torch.zeros(4, 6)]))
    driver.fail("cuStreamCreateWithPriority", nth, code=2)
    with (
        pytest.raises(RuntimeError, match="cuStreamCreateWithPriority: CUDA_ERROR_SIMULATED"),
        HostPool(layout, num_pages=1) as host,
        OffloadHandler(layout, host),
    ):
        raise AssertionError("it was made")
    assert driver.live("streams") == 0
    with HostPool(layout, num_pages=1) as host, OffloadHandler(layout, host) as handler:
        handler.synchronize(handler.store(gpu_block_ids=[0], page_ids=[0]))


def test_a_handler_that_cannot_wait_keeps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PagedLayout([torch.zeros(4, 6)])
    handler = OffloadHandler(layout, HostPool(layout, num_pages=1))
    handler.store(gpu_block_ids=[0], page_ids=[0])
    kept, handler_of_nobody = weakref.ref(handler.pools[0]), weakref.ref(handler)
    close = handler._native.close

    def cannot() -> None:
        raise RuntimeError("no thread can be joined")

    handler._native.close = cannot  # type: ignore[method-assign]
    with logged() as messages:
        del handler
    assert "cannot wait for its jobs: no thread can be joined" in messages[0]
    assert handler_of_nobody() is None
    assert kept() is not None
    close()


def test_a_poll_returns_what_memory_lacked_for() -> None:
    layout = PagedLayout([torch.zeros(4, 8192, dtype=torch.bfloat16)])
    handler = OffloadHandler(layout, HostPool(layout, 4, encoding="lossless"))
    handler.load(page_ids=[0], gpu_block_ids=[0], tag="mine")  # rejected: it was never stored

    def fail(*_: object) -> None:
        raise MemoryError

    native.set_python(make_error=fail)
    try:
        with pytest.raises(MemoryError):
            handler.poll()
    finally:
        native.set_python(make_error=torch_kvswap.results._make_error)
    assert [(result.state, result.tag) for result in handler.poll()] == [("failed", "mine")]
    assert handler._tags == {}


@pytest.mark.parametrize("call", ["handler.poll()", "manager.stats()", "manager.lookup(keys)"])
def test_a_thread_in_a_call_survives_exit(call: str) -> None:
    script = f"""
    import threading, torch
    from torch_kvswap import HostPool, OffloadHandler, PagedLayout
    from torch_kvswap.prefix import BlockManager
    layout, manager, keys = PagedLayout([torch.zeros(4, 6)]), BlockManager(4), bytes(32 * 200_000)
    handler, calls = OffloadHandler(layout, HostPool(layout, 4)), threading.Semaphore(0)
    def run():
        while True:
            {call}
            calls.release()
    for _ in range(2):
        threading.Thread(target=run, daemon=True).start()
    for _ in range(50):
        calls.acquire()
    """
    run_script(script, ends_as_usual=True)


# poll(timeout) waits for a job to end.


@simulated
@pytest.mark.parametrize("timeout", [PATIENCE, None])
@pytest.mark.parametrize("kind", [OffloadHandler, PrefixCache])
def test_it_returns_when_a_job_has_ended(
    driver: Driver, timeout: float | None, kind: type[OffloadHandler | PrefixCache]
) -> None:
    driver.set_mode("manual")
    with kind(*cache(driver)) as calls:
        if isinstance(calls, PrefixCache):
            calls.store(["a"], [1])
        else:
            calls.store(gpu_block_ids=[1], page_ids=[1])
        assert calls.poll(0.02) == []
        results: list[object] = []
        waiting = threading.Thread(target=lambda: results.extend(calls.poll(timeout)))
        waiting.start()
        driver.run()
        waiting.join(PATIENCE)
        assert len(results) == 1
        assert not isinstance(calls, PrefixCache) or calls.lookup(["a"]).ready == 1
        driver.set_mode("immediate")


@simulated
def test_a_job_ending_early_is_returned(driver: Driver) -> None:
    driver.set_mode("manual")
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        handler.store(gpu_block_ids=[1], page_ids=[1])
        load = handler.load(page_ids=[2], gpu_block_ids=[2])
        assert handler.cancel(load) is True
        driver.fail("cuMemcpyBatchAsync")
        failed = handler.load(page_ids=[3], gpu_block_ids=[3])
        assert failed.id in [result.job_id for result in handler.poll(PATIENCE)]
        driver.set_mode("immediate")


def test_it_returns_at_once_with_results() -> None:
    layout = PagedLayout([torch.zeros(4, 4)])
    with OffloadHandler(layout, HostPool(layout, 4)) as handler:
        assert handler.poll(None) == []
        handler.store(gpu_block_ids=[1], page_ids=[1])
        assert len(handler.poll(None)) == 1
        handler.store(gpu_block_ids=[1], page_ids=[1])
    assert len(handler.poll(None)) == 1  # closed
    assert handler.poll(None) == []


# What `after=` accepts, and what may wait for a job.


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@without_cuda
def test_the_driver_gets_stream_and_event_handles() -> None:
    assert resolve_after(Stream(42), CUDA) == [(False, 42)]
    assert resolve_after(Stream(0), CUDA) == [(False, 0)]
    assert resolve_after(Event(7), CUDA) == [(True, 7)]
    assert resolve_after((Stream(42), Event(7)), CUDA) == [(False, 42), (True, 7)]
    assert resolve_waiting(Stream(42), CUDA) == (42, 0)
    assert resolve_waiting(Stream(0, index=1), CUDA) == (0, 1)


def test_the_driver_looks_up_the_current_stream() -> None:
    for device in (CUDA, CPU):
        assert resolve_after(None, device) is None
        assert resolve_after((), device) == []
    assert resolve_waiting(None, CUDA) == (0, -1)


@without_cuda
def test_what_cannot_be_waited_for_is_refused() -> None:
    calls = [
        lambda: resolve_after(Event(0), CUDA),
        lambda: resolve_after(Stream(42, index=1), CUDA),
        lambda: resolve_after(42, CUDA),
        lambda: resolve_after((Stream(42), None), CUDA),
        lambda: resolve_after((Event(7), Event(0)), CUDA),
        lambda: resolve_after((Stream(42),), CPU),
        lambda: resolve_after(Stream(42), CPU),
        lambda: resolve_after(42, CPU),
        lambda: resolve_waiting(42, CUDA),
        lambda: resolve_waiting(torch.Stream("cpu"), CUDA),
        lambda: resolve_waiting(42, CPU),
    ]
    assert_expected_inline(
        "\n".join(error_text(call) for call in calls),
        """\
ValueError: after= is an event that was never recorded, so the transfer would wait for
nothing; record it after the work it stands for, or pass that stream
ValueError: after= is a stream of cuda:1, the transfer is on cuda:0; record an event on
that stream and pass the event
TypeError: after= must be None (the current stream), a torch.cuda.Stream or a
torch.cuda.Event, or a tuple of them, not an int
TypeError: after[1] must be a torch.cuda.Stream or a torch.cuda.Event, not None
ValueError: after[1] is an event that was never recorded, so the transfer would wait for
nothing; record it after the work it stands for, or pass that stream
TypeError: after[0] is a Stream, but transfers of a cache on the CPU run inside the call
and cannot wait for a stream; wait on the host first, and pass None or ()
TypeError: after= is a Stream, but transfers of a cache on the CPU run inside the call
and cannot wait for a stream; wait on the host first, and pass None or ()
TypeError: after= is an int, but transfers of a cache on the CPU run inside the call and
cannot wait for a stream; wait on the host first, and pass None or ()
TypeError: stream is an int; pass a torch.cuda.Stream or None
TypeError: stream is a Stream; pass a torch.cuda.Stream or None
TypeError: stream is an int, but the cache is on the CPU: its transfers have ended when
store() or load() returns, so no stream has to wait; pass None""",
    )
