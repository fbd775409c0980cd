"""On a GPU: a CUDA graph that is captured meanwhile stays valid, whatever the handler is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from patience import PATIENCE
from rigs import NEW, OLD, Rig, ended, in_time, only, run_script, watchdog

from torch_kvswap.handler import TransferError
from torch_kvswap.host_pool.pool import HostPool

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _no_hang(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    with watchdog(capfd):
        yield


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


def captured(rig: Rig, meanwhile: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph that adds 2 to the first block, in the default mode, "global"."""
    rig.cache[0].add_(1)  # loads the kernel
    rig.cache[0].fill_(OLD)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.cache[0].add_(1)
        meanwhile()
        rig.cache[0].add_(1)
    return graph


def check_replay(rig: Rig, graph: torch.cuda.CUDAGraph) -> None:
    for replays in (1, 2):
        graph.replay()
        torch.cuda.synchronize()
        assert only(rig.cache[0]) == OLD + 2 * replays


# Another thread than the one that captures may do everything


def store_and_load(rig: Rig) -> None:
    rig.handler.wait([rig.handler.store([1], [1]), rig.handler.load([2], [2])])
    assert (rig.page(1), rig.page(2)) == (OLD, NEW)


def submit_behind_a_busy_stream(rig: Rig) -> None:
    with torch.cuda.stream(rig.side):
        rig.slow(20)
        jobs = [rig.handler.store([1], [1]), rig.handler.load([2], [2], after=rig.side)]
        jobs.append(rig.handler.load([3], [3], after=rig.side.record_event()))
    rig.handler.wait(jobs)


def poll(rig: Rig) -> None:
    hold = rig.hold_on(rig.side)
    job = rig.handler.load([1], [1], after=hold)
    assert rig.handler.finished() == []
    hold.release()
    while not rig.handler.finished():
        pass
    assert job.done()


def wait_on_a_stream(rig: Rig) -> None:
    job = rig.handler.load([1], [1], after=rig.slow_on(rig.side, ms=20), layer_groups=1)
    job.wait_on(rig.consumer)
    job.wait_layer(0, rig.consumer)
    rig.handler.wait(job)


def fill_the_queue(rig: Rig) -> None:
    busy = rig.slow_on(rig.side, ms=20)
    jobs = [rig.handler.store([1], [1], after=busy) for _ in range(300)]
    jobs[-1].wait_on(rig.consumer)
    rig.handler.wait(jobs)


def cancel(rig: Rig) -> None:
    busy = rig.slow_on(rig.side, ms=20)
    jobs = [rig.handler.store([1], [1], after=busy) for _ in range(100)]
    assert rig.handler.cancel(jobs[0])
    assert rig.handler.cancel(jobs[-1])
    with pytest.raises(TransferError):
        rig.handler.wait(jobs)


def time_out(rig: Rig) -> None:
    hold = rig.hold_on(rig.side)
    job = rig.handler.load([1], [1], after=hold)
    with pytest.raises(TimeoutError):
        rig.handler.wait(job, timeout=0.005)
    hold.release()
    rig.handler.wait(job)


def close_a_gate(rig: Rig) -> None:
    gate = rig.handler.gate()
    job = rig.handler.load([1], [1], after=rig.slow_on(rig.side, ms=20), gate=gate)
    gate.wait(0, rig.consumer)
    rig.handler.wait(job)


def pin_and_close(rig: Rig) -> None:
    with HostPool(rig.layout, num_pages=64) as host:
        assert host.is_pinned


def make_and_close_a_handler(rig: Rig) -> None:
    with rig.another_handler() as handler:
        handler.store([1], [1])
        handler.rebind(rig.layout)
        handler.load([1], [1], expedited=True)


def drop_a_handler(rig: Rig) -> None:
    handler = rig.another_handler()
    handler.store([1], [1], after=rig.slow_on(rig.side, ms=20))
    del handler


ACTIONS = [
    store_and_load,
    submit_behind_a_busy_stream,
    poll,
    wait_on_a_stream,
    fill_the_queue,
    cancel,
    time_out,
    close_a_gate,
    pin_and_close,
    make_and_close_a_handler,
    drop_a_handler,
]


@pytest.mark.parametrize("action", ACTIONS, ids=[action.__name__ for action in ACTIONS])
def test_a_capture_stays_valid_whatever_another_thread_does(
    rig: Rig, action: Callable[[Rig], None]
) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(rig.side):
                action(rig)
        except BaseException as error:
            errors.append(error)

    # On a stream that is not captured everything works anyway; it loads the kernels as well.
    work()
    assert not errors
    torch.cuda.synchronize()
    rig.handler.finished()
    rig.cache.fill_(OLD)
    rig.host.pages.fill_(NEW)
    torch.cuda.synchronize()
    thread = threading.Thread(target=work)

    def meanwhile() -> None:
        thread.start()
        thread.join(PATIENCE)

    graph = captured(rig, meanwhile)
    assert not thread.is_alive()
    assert not errors, errors
    check_replay(rig, graph)


@pytest.mark.parametrize("call", ["query", "pin"])
def test_as_a_control_what_the_handler_does_spoils_a_capture_in_cudas_default_mode(
    call: str,
) -> None:
    script = """
        import os, threading, torch
        memory = torch.zeros(1 << 20, dtype=torch.uint8)
        numbers = torch.zeros(4, device="cuda:0")
        event = torch.cuda.Event()
        event.record()
        numbers.add_(1)
        torch.cuda.synchronize()

        def work():
            try:
                if sys.argv[1] == "query":
                    event.query()
                else:
                    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 1)
            except RuntimeError:
                pass

        thread = threading.Thread(target=work)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                numbers.add_(1)
                thread.start()
                thread.join()
                numbers.add_(1)
            print("valid")
        except RuntimeError:
            print("spoilt")
        sys.stdout.flush()
        os._exit(0)
    """
    assert run_script(script, call) == "spoilt\n"


def test_the_queue_is_emptied_while_its_owner_captures(rig: Rig) -> None:
    with torch.cuda.stream(rig.side):
        rig.slow(1)

    def meanwhile() -> None:
        busy = rig.slow_on(rig.side, ms=20)  # which is not captured
        rig.handler.wait(
            [rig.handler.store([1], [1], after=busy) for _ in range(300)], timeout=PATIENCE
        )

    check_replay(rig, captured(rig, meanwhile))
    assert [result.state for result in rig.handler.finished()] == ["done"] * 300


# The thread that captures may look at jobs, and submit what waits for no captured stream


def test_while_capturing_jobs_can_be_looked_at(rig: Rig) -> None:
    done = rig.handler.load([1], [1])
    rig.handler.wait(done)
    rig.handler.finished()
    unseen = rig.handler.load([2], [2])  # torch.cuda.graph waits for it, but nobody looks

    def meanwhile() -> None:
        assert done.done()
        assert unseen.done()
        rig.handler.wait([done, unseen])
        assert [result.job_id for result in rig.handler.finished()] == [unseen.id]
        assert rig.handler.finished() == []
        rig.handler.wait()
        assert not rig.handler.cancel(done)
        rig.handler.metrics()

    check_replay(rig, captured(rig, meanwhile))


def test_while_capturing_the_captured_stream_cannot_be_waited_for(rig: Rig) -> None:
    def meanwhile() -> None:
        for call in (
            lambda: rig.handler.store([1], [1]),
            lambda: rig.handler.load([1], [1]),
            lambda: rig.handler.load([1], [1], expedited=True),
            lambda: rig.handler.load([1], [1], after=torch.cuda.current_stream()),
        ):
            with pytest.raises(RuntimeError, match="captur"):
                call()

    check_replay(rig, captured(rig, meanwhile))
    assert rig.handler.finished() == []
    assert only(rig.cache[1]) == OLD
    assert rig.page(1) == NEW
    rig.handler.wait(rig.handler.store([1], [1]))
    assert rig.page(1) == OLD


def test_while_capturing_not_even_a_job_that_has_ended_can_be_waited_for_on_the_captured_stream(
    rig: Rig,
) -> None:
    done = rig.handler.load([1], [1], layer_groups=1)
    rig.handler.wait(done)

    def meanwhile() -> None:
        for wait in (done.wait_on, lambda: done.wait_layer(0)):
            with pytest.raises(RuntimeError, match="captur"):
                wait()
        done.wait_on(rig.side)  # which is not captured

    check_replay(rig, captured(rig, meanwhile))


def test_while_capturing_jobs_that_wait_for_nothing_are_submitted_and_not_captured(
    rig: Rig,
) -> None:
    event = rig.side.record_event()

    def meanwhile() -> None:
        jobs = [
            rig.handler.store([1], [1], after=()),
            rig.handler.load([2], [2], after=()),
            rig.handler.load([3], [3], after=event, expedited=True),
        ]
        rig.handler.wait(jobs, timeout=PATIENCE)
        assert all(job.done() for job in jobs)

    graph = captured(rig, meanwhile)
    assert only(rig.cache[2:]) == NEW
    assert rig.page(1) == OLD
    rig.cache[1:].fill_(OLD)
    rig.host.pages.fill_(NEW + 1)
    check_replay(rig, graph)
    assert only(rig.cache[1:]) == OLD  # a replay loads and stores nothing
    assert only(rig.host.pages) == NEW + 1


def test_while_capturing_a_running_job_cannot_be_waited_for_on_the_captured_stream(
    rig: Rig,
) -> None:
    held = torch.cuda.Stream()
    jobs = []

    def meanwhile() -> None:
        with torch.cuda.stream(held):  # not captured
            busy = rig.hold()
            jobs.append(rig.handler.load([1], [1], after=busy))
        assert not jobs[0].done()
        with pytest.raises(RuntimeError, match="captur"):
            jobs[0].wait_on()
        rig.release()

    check_replay(rig, captured(rig, meanwhile))
    assert ended(rig.handler, jobs[0]) == "done"
    assert in_time(jobs[0].done)
    assert only(rig.cache[1]) == NEW
