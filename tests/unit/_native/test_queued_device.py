"""The native side of a queued device, driven by the test in place of torch. No accelerator."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from patience import PATIENCE, in_time

from torch_kvswap._native import abi, loader
from torch_kvswap._native.submit import Request
from torch_kvswap.copy_method import copy_method_options
from torch_kvswap.groups import Groups
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout

native = loader.library()
indices = itertools.count(1 << 20)  # which no real device has
NAMES = ("blocks", "batch", "record", "wait", "caller wait", "destroy event", "destroy stream")
EVERYTHING = 1 << 30


def numbers(command: abi.Command, which: int) -> list[int]:
    count = command.count
    return list((ctypes.c_int64 * count).from_address(command.numbers[which])) if count else []


class Queue:
    """A queued device and a handler of a cache in host memory."""

    def __init__(self, has_batch: bool = False) -> None:
        self.index = next(indices)
        self.pointer = loader.call("kvswap_queue_create", self.index, b"test:0", has_batch)
        self.cache = torch.arange(8, dtype=torch.int64)
        self.layout = PagedLayout([self.cache])
        self.pool = HostPool(self.layout, 6)
        self.groups = Groups(self.layout, self.pool)
        self.groups.structures[0].number = 77
        options = copy_method_options(None, 0, torch.device("cpu"))
        self.handler = loader.call(
            "kvswap_handler_create",
            *(self.groups.structures, 1, 1, abi.QUEUED_DEVICE, self.index, False),
            ctypes.byref(options),
        )
        self.error: bytes | None = None

    def submit(self, channel: int, block: int, page: int) -> int:
        request = Request(self.groups, channel, ([block], [page], 0), ())
        address = request.numbers.buffer_info()[0]
        loader.call("kvswap_handler_submit", self.handler, address)
        return request.numbers[2]

    def carry_out(self, most: int = EVERYTHING) -> list[str]:
        """Carries out commands at once, and says which."""
        command, done = abi.Command(), []
        while len(done) < most and native.kvswap_queue_first(self.pointer, ctypes.byref(command)):
            again = abi.Command()
            assert native.kvswap_queue_first(self.pointer, ctypes.byref(again))
            assert bytes(again) == bytes(command)  # until it is done
            done.append(NAMES[command.kind])
            if command.kind == abi.COMMAND_BLOCKS:
                assert command.group == 77
                for block, slot in zip(*(numbers(command, i) for i in range(2)), strict=True):
                    ends = self.pool.pages.data_ptr() + 8 * slot, self.cache.data_ptr() + 8 * block
                    target, source = ends if command.to_host else reversed(ends)
                    ctypes.memmove(target, source, 8)
            elif command.kind == abi.COMMAND_BATCH:
                for copy in zip(*(numbers(command, i) for i in range(3)), strict=True):
                    ctypes.memmove(*copy)
            elif command.kind == abi.COMMAND_RECORD:
                event = command.event, command.record
                native.kvswap_queue_happened(self.pointer, *event, float(len(done)), self.error)
            native.kvswap_queue_done(self.pointer)
        return done

    def result(self, job: int) -> tuple[int, bytes | None]:
        found = abi.JobResult()
        loader.call("kvswap_job_query", self.handler, job)
        loader.call("kvswap_job_result", self.handler, job, ctypes.byref(found))
        return found.state, found.error

    def close(self) -> list[str]:
        assert loader.call("kvswap_handler_close", self.handler, PATIENCE) == 1
        native.kvswap_handler_destroy(self.handler)
        return self.carry_out()


@contextmanager
def running(queue: Queue) -> Iterator[None]:
    """A thread carries out the commands."""

    def work() -> None:
        while native.kvswap_queue_wait(queue.pointer, PATIENCE) >= 0:
            queue.carry_out()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        native.kvswap_queue_stop(queue.pointer)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_transfer_is_a_start_its_copies_and_an_end() -> None:
    queue = Queue()
    job = queue.submit(abi.STORES, 3, 0)
    assert queue.result(job) == (abi.RUNNING, None)
    assert queue.carry_out() == ["record", "batch", "blocks", "record"]
    assert queue.result(job) == (abi.DONE, None)
    assert int(queue.pool.pages.view(torch.int64)[0]) == 3
    native.kvswap_job_release(job)
    assert set(queue.close()) == {"destroy event", "destroy stream"}


def test_a_backend_gets_fragments() -> None:
    queue = Queue(has_batch=True)
    job = queue.submit(abi.STORES, 3, 0)
    assert queue.carry_out() == ["record", "batch", "record"]
    assert int(queue.pool.pages.view(torch.int64)[0]) == 3
    native.kvswap_job_release(job)
    queue.close()


def test_jobs_that_share_a_page_wait_across_channels() -> None:
    queue = Queue()
    jobs = [queue.submit(abi.STORES, 3, 0), queue.submit(abi.LOADS, 5, 0)]
    assert queue.carry_out()[4:] == ["wait", "record", "batch", "blocks", "record"]
    assert [queue.result(job)[0] for job in jobs] == [abi.DONE, abi.DONE]
    assert queue.cache.tolist() == [0, 1, 2, 3, 4, 3, 6, 7]
    for job in jobs:
        native.kvswap_job_release(job)
    queue.close()


def test_the_error_of_an_end_fails_the_job() -> None:
    queue = Queue()
    job = queue.submit(abi.STORES, 3, 0)
    queue.error = b"the copy has failed"
    queue.carry_out()
    assert queue.result(job) == (abi.FAILED, b"the copy has failed")
    native.kvswap_job_release(job)
    queue.error = None
    queue.close()


def test_a_lost_device_ends_jobs_and_drops_commands() -> None:
    queue = Queue()
    job = queue.submit(abi.STORES, 3, 0)
    native.kvswap_queue_lose(queue.pointer, b"it fell off the bus")
    assert queue.result(job) == (
        abi.FAILED,
        b"the device is lost: test:0: it fell off the bus; only a new process can use it again",
    )
    native.kvswap_job_release(job)
    assert queue.close() == []


def test_a_wait_ends_with_commands_or_when_it_is_woken_or_stopped() -> None:
    queue = Queue()
    assert native.kvswap_queue_is_empty(queue.pointer)
    assert native.kvswap_queue_wait(queue.pointer, 0.0) == 0
    native.kvswap_queue_wake(queue.pointer)
    assert native.kvswap_queue_wait(queue.pointer, 10 * PATIENCE) == 0
    job = queue.submit(abi.STORES, 3, 0)
    assert native.kvswap_queue_wait(queue.pointer, 10 * PATIENCE) == 1
    assert not native.kvswap_queue_is_empty(queue.pointer)
    queue.carry_out()
    native.kvswap_job_release(job)
    queue.close()
    native.kvswap_queue_stop(queue.pointer)
    assert native.kvswap_queue_wait(queue.pointer, 10 * PATIENCE) == -1


def test_threads_submit_while_another_one_carries_out_commands() -> None:
    queue = Queue()

    def submit(number: int) -> None:
        for _ in range(100):
            for channel in (abi.STORES, abi.LOADS, abi.EXPEDITED):
                native.kvswap_job_release(queue.submit(channel, number, number))

    with running(queue):
        threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert loader.call("kvswap_handler_close", queue.handler, PATIENCE) == 1
        assert queue.cache.tolist() == list(range(8))
    native.kvswap_handler_destroy(queue.handler)
    assert in_time(lambda: queue.carry_out() == [])


def test_an_index_names_one_device() -> None:
    queue = Queue()
    text = loader.library().kvswap_queue_create(queue.index, b"again", False)
    assert text is None
    assert native.kvswap_last_error() == f"queued device {queue.index} exists: test:0".encode()
    queue.close()
