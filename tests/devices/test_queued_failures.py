"""How jobs end on a device that torch drives: failures, lost devices, cancelling, closing, exit."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_text import error_text
from fake_accelerator.tests import needs_compiler
from interrupts import Interrupter
from patience import PATIENCE, in_time
from processes import in_child
from queued_devices import DEVICE, PAGES, Rows, current, on_queued_device, queue_of, run_on_device

from torch_kvswap import DeviceLostError, OffloadHandler, TransferError
from torch_kvswap.layout import PagedLayout


def failed(*jobs: object) -> str:
    """The errors of the jobs, which must have ended."""
    return "\n".join(str(job.result.error if job.result else None) for job in jobs)


# A call that fails ends its job, and nothing else.


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@on_queued_device
def test_a_copy_that_fails_ends_its_job_and_the_next_one_works(accelerator, nth):
    rows = Rows()
    ids = {"gpu_block_ids": [3, 4], "page_ids": [0, 2]}  # two runs of pages, behind the ids
    accelerator.fail("copy", nth)
    first = rows.handler.store(**ids)
    second = rows.handler.store(**ids, after=())
    with pytest.raises(TransferError):
        rows.handler.synchronize(timeout=PATIENCE)
    states = [job.result.state for job in (first, second) if job.result]
    assert sorted(states) == ["done", "failed"]
    assert states[0] == "failed" or nth > 3
    assert "the test" in failed(first, second)
    rows.handler.store(**ids).synchronize(PATIENCE)
    assert (rows.page(0), rows.page(2)) == ({3}, {4})


@pytest.mark.parametrize("call", ["kernel", "allocate"])
@on_queued_device
def test_an_operation_that_fails_ends_its_job(accelerator, call):
    rows = Rows()
    accelerator.fail(call)
    load = rows.load(0, 3)
    with pytest.raises(TransferError):
        load.synchronize(PATIENCE)
    rows.set_page(0, 100)
    rows.load(0, 3).synchronize(PATIENCE)
    assert rows.block(3) == {100}


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@on_queued_device
def test_an_event_that_cannot_be_recorded_ends_its_job_after_its_copies(accelerator, nth):
    rows = Rows()
    with accelerator.hold(current()):
        event = torch.Event(DEVICE)
        event.record(current())
        accelerator.fail("record", nth)  # of the caller's point, the job's, its start and its end
        try:
            job = rows.store(3, 0, after=event)
        except RuntimeError:
            assert nth == 1
            job = rows.store(3, 0, after=event)
    if nth == 1:
        job.synchronize(PATIENCE)
    else:
        with pytest.raises(TransferError):
            job.synchronize(PATIENCE)
    rows.store(4, 1).synchronize(PATIENCE)
    assert rows.page(1) == {4}


@on_queued_device
def test_a_wait_that_fails_keeps_the_job_from_copying(accelerator):
    rows = Rows()
    rows.set_page(0, 100)
    with accelerator.hold(current()):
        accelerator.fail("wait")
        load = rows.load(0, 3)
        with pytest.raises(TransferError):
            load.synchronize(PATIENCE)
    assert rows.block(3) == {3}
    rows.load(0, 3).synchronize(PATIENCE)
    assert rows.block(3) == {100}


@on_queued_device
def test_a_stream_that_cannot_wait_for_a_job_is_an_error(accelerator):
    rows = Rows()
    with accelerator.hold_copies():
        load = rows.load(0, 3)
        assert in_time(lambda: queue_of(rows.handler).commands.is_empty)
        accelerator.fail("wait")
        text = error_text(load.wait)
        load.wait()
    assert text.startswith("RuntimeError: the stream cannot wait:")
    load.synchronize(PATIENCE)


@on_queued_device
def test_no_stream_can_wait_for_copies_without_an_event(accelerator):
    rows = Rows()
    with accelerator.hold_copies():
        accelerator.fail("record", 2)  # behind the start
        load = rows.load(0, 3, after=())
        text = error_text(load.wait)
    assert text.startswith("RuntimeError: the stream cannot wait:")
    with pytest.raises(TransferError):
        load.synchronize(PATIENCE)


# A lost device ends all jobs.


@pytest.mark.parametrize("how", ["taken away", "a copy fails when it runs", "cannot be asked"])
@on_queued_device
def test_all_jobs_of_a_lost_device_end(accelerator, how):
    rows = Rows()
    with accelerator.hold(current()):
        jobs = [rows.store(i, i) for i in range(3)] + [rows.load(5, 5)]
        if how == "taken away":
            accelerator.lose()
        elif how == "cannot be asked":
            accelerator.fail("query", times=1 << 30)
        else:
            accelerator.fail("copy", when_it_runs=True)
            jobs.append(rows.store(4, 4, after=()))
    began = time.monotonic()
    with pytest.raises(DeviceLostError):
        rows.handler.synchronize(timeout=PATIENCE)
    results = [job.result for job in jobs if job.result]
    assert len(results) == len(jobs)
    failed = [result for result in results if result.state == "failed"]
    # Some jobs may end before a copy fails.
    assert failed if how == "a copy fails when it runs" else results == failed
    assert all(isinstance(result.error, DeviceLostError) for result in failed)
    with pytest.raises(DeviceLostError):
        rows.store(0, 0)
    with pytest.raises(DeviceLostError):
        rows.store(0, 0, after=())
    rows.handler.close()
    assert time.monotonic() - began < PATIENCE
    assert len(rows.handler.poll()) == len(jobs)
    if how == "cannot be asked":
        accelerator.lose()  # the copies must not run when the test has freed the cache


@pytest.mark.parametrize("after", ["current stream", "stream", "event"])
@on_queued_device
def test_calls_on_a_device_that_was_lost_while_idle_say_so(accelerator, after):
    rows = Rows()
    ended = rows.store(3, 0)
    ended.synchronize(PATIENCE)
    event = torch.Event(DEVICE)
    event.record(current())
    points = {"current stream": None, "stream": torch.Stream(device=DEVICE), "event": event}
    accelerator.lose()
    for call in (rows.store, rows.load, rows.store):
        with pytest.raises(DeviceLostError, match=f"^the device is lost: {DEVICE}: .*new process"):
            call(0, 0, after=points[after])
    with pytest.raises(DeviceLostError):
        rows.store(0, 0, after=())
    with pytest.raises(DeviceLostError):
        ended.wait()
    assert repr(rows.handler).endswith("device lost)")
    rows.handler.close()


@on_queued_device
def test_a_stream_that_cannot_wait_because_the_device_is_lost_says_so(accelerator):
    rows = Rows()
    queue = queue_of(rows.handler)
    with accelerator.hold_copies():
        load = rows.load(0, 3)
        assert in_time(lambda: queue.commands.is_empty)
        queue._report = lambda: None  # only the wait sees the loss
        accelerator.lose()
        with pytest.raises(DeviceLostError):
            load.wait()
    rows.handler.close()


@pytest.mark.parametrize("after", ["stream", "event"])
@on_queued_device
def test_a_device_is_not_lost_if_only_a_call_on_a_stream_fails(accelerator, after):
    rows = Rows()
    event = torch.Event(DEVICE)
    event.record(current())
    accelerator.fail("query" if after == "stream" else "wait")
    with pytest.raises(RuntimeError, match="the test") as caught:
        rows.store(3, 0, after=event if after == "event" else current())
    assert not isinstance(caught.value, DeviceLostError)
    rows.store(3, 0).synchronize(PATIENCE)
    assert rows.page(0) == {3}


@on_queued_device
def test_a_call_on_a_lost_device_waits_for_the_thread_that_carries_out_commands(accelerator):
    """That thread uses the streams and events that are dropped when the device is lost."""
    rows = Rows()
    queue = queue_of(rows.handler)
    carry_out, begun, goes_on = queue._carry_out, threading.Event(), threading.Event()
    asked, callers_stream = threading.Event(), queue._callers_stream
    seen: list[object] = []

    def ask() -> torch.Stream:
        asked.set()
        return callers_stream()

    def stop_and_carry_out(command: object) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE)
        seen.append(queue.lost)
        carry_out(command)

    queue._carry_out = stop_and_carry_out
    queue._callers_stream = ask
    copying = threading.Thread(target=rows.store, args=(3, 0), kwargs={"after": ()})
    copying.start()
    assert begun.wait(PATIENCE)
    accelerator.lose()
    text: list[str] = []
    calling = threading.Thread(target=lambda: text.append(error_text(rows.store, 4, 1)))
    calling.start()
    assert asked.wait(PATIENCE)
    goes_on.set()
    for thread in (copying, calling):
        thread.join(PATIENCE)
    assert seen[0] is None
    assert text[0].startswith("DeviceLostError: the device is lost")
    rows.handler.close()


def run_out_of_memory(command: object) -> None:
    raise MemoryError


@on_queued_device
def test_a_thread_that_fails_ends_all_jobs(accelerator):
    rows = Rows()
    queue = queue_of(rows.handler)
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        queue._turn.acquire()  # so that the queue's thread carries out the command
        queue._carry_out = run_out_of_memory
        other = threading.Thread(target=rows.store, args=(3, 0))
        other.start()
        other.join(PATIENCE)
        queue._turn.release()
        with pytest.raises(DeviceLostError, match="the thread that gives it commands has failed"):
            rows.handler.synchronize(timeout=PATIENCE)
    finally:
        threading.excepthook = hook


@on_queued_device
def test_a_caller_whose_thread_fails_behind_its_submission_gets_the_job(accelerator):
    rows = Rows()
    queue = queue_of(rows.handler)

    queue._carry_out_all = lambda: 3600.0  # so that the caller carries it out
    queue._carry_out = run_out_of_memory
    job = rows.store(3, 0)
    with pytest.raises(DeviceLostError, match="the thread that gives it commands has failed"):
        job.synchronize(PATIENCE)
    assert [result.job_id for result in rows.handler.poll()] == [job.id]
    # The queue's thread would find the command that failed again and again.
    assert in_time(lambda: "kvswap-queue" not in {one.name for one in threading.enumerate()})


# Cancelling, rebinding, closing


@on_queued_device
def test_a_handler_goes_on_with_a_cache_at_another_address(accelerator):
    rows = Rows()
    rows.store(3, 0)
    moved = (rows.tensors[0] + 100).contiguous()
    old = weakref.ref(rows.layout)
    rows.layout = PagedLayout([moved])
    rows.handler.rebind(rows.layout)
    rows.store(4, 1).synchronize(PATIENCE)
    rows.load(0, 5).synchronize(PATIENCE)
    rows.handler.poll()
    gc.collect()
    assert (rows.page(0), rows.page(1)) == ({3}, {104})
    assert set(moved[5].cpu().tolist()) == {3}
    assert rows.block(5) == {5}
    assert old() is None


@on_queued_device
def test_closing_waits_for_the_jobs_and_frees_streams_and_events(accelerator):
    rows = Rows()
    queue = queue_of(rows.handler)
    events = accelerator.counters().live_events
    for page in range(PAGES):
        rows.store(page, page)
    rows.handler.close()
    assert [rows.page(page) for page in range(PAGES)] == [{n} for n in range(PAGES)]
    assert in_time(lambda: queue.commands.is_empty)
    assert (queue.records, queue._streams) == ({}, {})
    gc.collect()
    assert accelerator.counters().live_events == events
    pages = weakref.ref(rows.pool.pages)
    rows.pool.close()
    assert pages() is None


@on_queued_device
def test_a_handler_that_is_dropped_while_commands_are_carried_out_is_closed(accelerator):
    """The garbage collector may run in the thread that the handler's jobs wait for."""
    rows, victim = Rows(), Rows()
    queue = queue_of(rows.handler)
    handler, pool = weakref.ref(victim.handler), victim.pool
    ring: list[object] = [victim]
    ring.append(ring)  # only the garbage collector frees it
    carry_out = queue._carry_out
    with accelerator.hold(current()):
        victim.store(3, 0)
        del victim, ring

        def collect_and_carry_out(command: object) -> None:
            gc.collect()
            carry_out(command)

        queue._carry_out = collect_and_carry_out
        store = rows.store(4, 1)
        assert in_time(lambda: handler() is None)
    store.synchronize(PATIENCE)
    queue._carry_out = carry_out
    closing = [thread for thread in threading.enumerate() if thread.name == "kvswap-close"]
    for thread in closing:
        thread.join(PATIENCE)
    assert set(pool.pages[0].view(torch.int32).flatten().tolist()) == {3}


# Threads


@pytest.mark.parametrize("direction", ["store", "load"])
@on_queued_device
def test_an_interrupted_call_loses_no_command(accelerator, direction):
    rows, interrupter, jobs = Rows(), Interrupter(), 0
    queue_of(rows.handler).stop()  # only this thread carries out commands
    for at in itertools.count(1):
        interrupted = interrupter.stops(at, partial(getattr(rows, direction), 3, 3, after=()))
        assert in_time(rows.store(3, 0, after=()).query), at  # behind the job, if there is one
        jobs += len(results := rows.handler.poll()) - 1
        assert {result.state for result in results} == {"done"}
        if not interrupted:
            break
    assert rows.page(0) == rows.block(3)
    assert jobs > 1


@on_queued_device
def test_a_record_that_is_interrupted_is_made_once(accelerator):
    """A record that was made twice would take an error that is of the next one."""
    rows = Rows()
    queue, interrupter = queue_of(rows.handler), Interrupter()
    rows.handler.synchronize(rows.store(3, 0))
    (stream,) = queue._streams.values()
    queue.stop()  # only this thread carries out commands
    for at in itertools.count(1):
        command: Any = SimpleNamespace(event=1 << 40, record=at, timed=False)
        kept = len(stream.records)
        stream.error = "of this record only"
        interrupted = interrupter.stops(at, partial(queue._record, command, stream))
        if interrupted:
            queue._record(command, stream)
        assert len(stream.records) == kept + 1
        assert stream.records[-1].error == "of this record only"
        assert stream.error is None
        if not interrupted:
            break
    stream.records.clear()
    assert at > 3


@on_queued_device
def test_an_exception_of_a_signal_handler_loses_no_device(accelerator):
    rows = Rows()
    queue = queue_of(rows.handler)
    queue.stop()  # only this thread carries out commands
    carry_out = queue._carry_out

    def once(command: Any) -> None:
        queue._carry_out = carry_out
        raise TimeoutError("the alarm")

    queue._carry_out = once
    with pytest.raises(TimeoutError, match="the alarm"):
        rows.store(3, 0, after=(), tag="mine")
    results: list[Any] = []
    assert in_time(lambda: bool(results.extend(rows.handler.poll()) or results))
    assert [(result.state, result.tag) for result in results] == [("done", "mine")]
    assert rows.page(0) == {3}


@on_queued_device
def test_memory_stays_under_a_copy_whatever_interrupts_the_drop_of_its_handler(accelerator):
    interrupter, points = Interrupter(in_waits=True), 0
    for at in itertools.count():
        rows = Rows()
        native = weakref.ref(rows.handler._native)
        with accelerator.hold_copies():
            rows.store(3, 0)
            dropped = [rows.handler]
            del rows
            if at:
                assert interrupter.drop(at, dropped.clear)
                assert native() is not None
        if at:
            native().close()
        else:
            interrupter.drop(0, dropped.clear)
            points = interrupter.points
            assert points > 5
            assert native() is None
        if at == points:
            break


@on_queued_device
def test_a_forked_process_may_not_use_the_handler_or_the_device(accelerator):
    rows = Rows()
    rows.store(3, 0)

    def use() -> bool:
        text = error_text(rows.store, 3, 0, after=())
        other = error_text(OffloadHandler, rows.layout, rows.pool)
        return "belongs to process" in text and "process" in other

    assert in_child(use) == 1
    rows.handler.synchronize(timeout=PATIENCE)


@pytest.mark.parametrize("how", ["open handler", "dropped job", "threads"])
@needs_compiler
def test_a_process_with_running_jobs_exits(how):
    printed = run_on_device(
        """
        import threading, time
        import torch
        from queued_devices import Rows, DEVICE
        accelerator.set_copy_delay(0.02)
        rows = Rows()
        how = sys.argv[1]
        if how == "threads":
            submits = threading.Event()
            def submit():
                while True:
                    rows.store(1, 1, after=())
                    submits.set()
                    time.sleep(0.001)
            threading.Thread(target=submit, daemon=True).start()
            assert submits.wait(60)
        jobs = [rows.store(n, n) for n in range(5)]
        if how == "dropped job":
            jobs.clear()
        print("end of the script")
        """,
        how,
    )
    assert printed == "end of the script\n"
