"""The native side of a queued device, driven by the test in place of torch. No accelerator."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from failing_allocations import FailingAllocation, each_fails, number_of_failures
from patience import PATIENCE, in_time
from simulated_cache import rest
from simulated_driver import Driver, without_cuda

from torch_kvswap._native.loader import native
from torch_kvswap.copy_method import copy_method_options
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.groups import Groups
from torch_kvswap.offload.handler import LOADS, STORES

indices = itertools.count(1 << 20)  # which no real device has
KIND = native.CommandKind
EVERYTHING = 1 << 30


class Queue:
    """A queued device and a handler of a cache in host memory."""

    def __init__(self) -> None:
        self.index = next(indices)
        self.commands = native.make_queue(self.index, "test:0")
        self.cache = torch.arange(8, dtype=torch.int64)
        self.layout = PagedLayout([self.cache])
        self.pool = HostPool(self.layout, 6)
        groups = Groups(self.layout, self.pool)
        groups.layouts_for_native[0].number = 77
        kind, options = native.DeviceKind.QUEUED, copy_method_options(None, 0)
        self.handler = native.Handler(
            groups, groups.layouts_for_native, False, 1, kind, self.index, False, options
        )
        self.error: str | None = None

    def submit(self, channel: int, block: int, page: int) -> native.Job:
        job = native.Job(channel, 1, None, None)
        self.handler.submit(job, [block], [page], 0, [], False, 0, None)
        return job

    def carry_out(self, most: int = EVERYTHING) -> list[str]:
        """Carries out commands at once, and says which."""
        done: list[str] = []
        while len(done) < most and (command := self.commands.first()) is not None:
            assert self.commands.first() is command  # until it is done
            done.append(command.kind.name.lower().replace("_", " "))
            if command.kind is KIND.BLOCKS:
                assert command.group == 77
                for block, slot in zip(command.blocks, command.slots, strict=True):
                    ends = self.pool.pages.data_ptr() + 8 * slot, self.cache.data_ptr() + 8 * block
                    target, source = ends if command.to_host else reversed(ends)
                    ctypes.memmove(int(target), int(source), 8)
            elif command.kind is KIND.RECORD:
                event = command.event, command.record
                self.commands.happened(*event, float(len(done)), self.error)
            self.commands.done()
        return done

    def result(self, job: native.Job) -> tuple[str, str | None]:
        self.handler.query(job)
        result = self.handler.result(job)
        error = None if result is None or result.error is None else str(result.error)
        return self.handler.state(job), error

    def close(self) -> list[str]:
        self.handler.close()
        del self.handler
        return self.carry_out()


@contextmanager
def running(queue: Queue) -> Iterator[None]:
    """A thread carries out the commands."""

    def work() -> None:
        while queue.commands.wait(10 * PATIENCE) >= 0:
            queue.carry_out()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        in_time(lambda: rest({thread.native_id or 0}))  # it waits for commands
        queue.commands.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_wait_ends_with_commands_or_when_it_is_woken_or_stopped() -> None:
    queue = Queue()
    assert queue.commands.is_empty
    began = time.monotonic()
    assert queue.commands.wait(0.01) == 0
    assert time.monotonic() - began >= 0.01
    waiting = threading.Thread(target=queue.commands.wait, args=(10 * PATIENCE,))
    waiting.start()
    in_time(lambda: rest({waiting.native_id or 0}))
    queue.commands.wake()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    queue.commands.wake()
    assert queue.commands.wait(10 * PATIENCE) == 0
    job = queue.submit(STORES, 3, 0)
    assert queue.commands.wait(10 * PATIENCE) == 1
    assert not queue.commands.is_empty
    queue.carry_out()
    del job
    queue.close()
    queue.commands.stop()
    assert queue.commands.wait(10 * PATIENCE) == -1


@contextmanager
def lost(queue: Queue) -> Iterator[None]:
    """The device is lost when this thread waits for it, or at the end."""
    waiting, is_over = threading.get_native_id(), threading.Event()

    def lose() -> None:
        in_time(lambda: is_over.is_set() or rest({waiting}))
        queue.commands.lose("it fell off the bus")

    thread = threading.Thread(target=lose)
    thread.start()
    yield
    is_over.set()
    thread.join()


def sweep(_: Driver, device: str) -> None:
    def submit_two(allocation: FailingAllocation) -> None:
        queue, jobs = Queue(), []
        with {"running": running, "lost": lost}[device](queue):
            allocation.begin()
            with suppress(MemoryError, RuntimeError):
                for channel in (STORES, LOADS):
                    jobs.append(queue.submit(channel, 3, 0))
            allocation.end()
        assert all(queue.result(job)[0] in ("done", "failed") for job in jobs)
        del jobs
        queue.close()

    each_fails(submit_two)


@pytest.mark.parametrize("device", ["running", pytest.param("lost", marks=pytest.mark.slow)])
@without_cuda
def test_every_job_ends_whichever_allocation_fails(device: str) -> None:
    assert number_of_failures(sweep, device) > 10
