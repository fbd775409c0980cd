"""Several threads call one handler, while the device runs its streams in random order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from patience import PATIENCE, in_time
from simulated_driver import HOST, Driver, place, pool, simulated
from simulated_driver.cuda import CudaError
from simulated_driver.handles import Stream
from transfer_model import Cell, Flight, Model

if TYPE_CHECKING:
    from torch_kvswap.offload.handler import Job

THREADS, OWN, SHARED = 5, 6, 3  # blocks, and as many pages
LAYERS, ROW, VERSIONS = 2, 32, 1 << 14
JOBS = 2000  # at least, of all threads
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]
STATES = {"done", "failed", "cancelled"}


class World:
    """A handler, and who has been told what."""

    def __init__(self, driver: Driver, seed: int) -> None:
        from torch_kvswap.layout import PagedLayout
        from torch_kvswap.offload.handler import OffloadHandler

        self.driver = driver
        driver.set_mode("threaded", seed)
        driver.set_stream(0, 42)
        count = THREADS * OWN + SHARED
        versions = torch.arange(VERSIONS, dtype=torch.int32)
        self.rows = driver.memory(VERSIONS * LAYERS * ROW, HOST).view(torch.int32)
        self.rows = self.rows.view(VERSIONS, LAYERS, ROW // 4)
        self.rows[:, 0], self.rows[:, 1] = versions[:, None], ~versions[:, None]
        self.tensors = [self.rows[:count, layer].clone() for layer in range(LAYERS)]
        layout = place(driver, PagedLayout(self.tensors))
        self.host = pool(driver, layout, count)
        self.slots = self.host.pages.view(torch.int32).view(count, LAYERS, ROW // 4)
        self.slots[:] = self.rows[:count]
        self.handler = OffloadHandler(layout, self.host)
        self.lock = threading.Lock()
        self.results: list[Any] = []  # in the order in which they were reported
        self.errors: list[BaseException] = []

    def poll(self) -> None:
        with self.lock:
            self.results += self.handler.poll()

    def version_at(self, index: int, is_slot: bool) -> int | None:
        """What a block or a slot holds; None where it is torn."""
        held = [self.slots[index, i] if is_slot else self.tensors[i][index] for i in range(LAYERS)]
        version = int(held[0][0])
        whole = all(torch.equal(held[i], self.rows[version % VERSIONS, i]) for i in range(LAYERS))
        return version if whole else None


class Caller:
    """One thread: jobs of blocks and pages of its own, followed by a model, and of shared ones."""

    def __init__(self, world: World, number: int, seed: int) -> None:
        self.world, self.handler = world, world.handler
        self.rng = random.Random(f"{seed} {number}")
        self.first = number * OWN
        self.stream = Stream(50 + number)
        # Other threads take results too: what was reported when is known when all has ended.
        self.model = Model(list(range(self.first, self.first + OWN)), [*self.own])
        self.versions = iter(range(1000 + number, VERSIONS, THREADS))
        self.shared: list[Job] = []
        self.seen = 0
        self.stop = False
        self.refusal = ""

    @property
    def own(self) -> range:
        return range(self.first, self.first + OWN)

    def run(self) -> None:
        actions = [self.store, self.load, self.overwrite, self.cancel, self.wait, self.share]
        actions += [self.world.poll, self.handler.metrics, self.settle]
        weights = [8, 8, 4, 2, 1, 3, 2, 1, 0.3]
        try:
            while not self.stop:
                self.rng.choices(actions, weights)[0]()
        except (RuntimeError, CudaError) as error:
            self.refusal = str(error)
        except BaseException as error:
            self.world.errors.append(error)

    def may_be_bad(self, cell: Cell) -> bool:
        """Whether it holds anything, or the job that writes it may fail."""
        if cell.writer is None:
            return cell.value is None
        seen, ahead = set[Flight](), [cell.writer]
        while ahead:
            flight = ahead.pop()
            if flight.cancelled or (flight.result is not None and not flight.is_done):
                return True
            if flight.result is None and flight not in seen:
                seen.add(flight)
                ahead += [source.writer for source in flight.sources if source.writer is not None]
                ahead += flight.loads
        return False

    def some(self) -> tuple[list[int], list[int]]:
        count = self.rng.randint(1, 3)
        return self.rng.sample(range(OWN), count), self.rng.sample(range(OWN), count)

    def ids(self, numbers: list[int]) -> list[int]:
        return [self.first + number for number in numbers]

    def store(self) -> None:
        blocks, pages = self.some()
        if any(self.may_be_bad(self.model.blocks[block]) for block in blocks):
            return
        job = self.handler.store(
            gpu_block_ids=self.ids(blocks), page_ids=self.ids(pages), after=self.stream
        )
        self.model.submit(job, True, blocks, pages)

    def load(self) -> None:
        blocks, pages = self.some()
        kind = self.rng.choice([{}, {}, {"expedited": True}, {"layer_groups": 2}])
        job = self.handler.load(
            page_ids=self.ids(pages), gpu_block_ids=self.ids(blocks), after=self.stream, **kind
        )
        self.model.submit(job, False, blocks, pages)

    def share(self) -> None:
        blocks = random.sample(range(THREADS * OWN, THREADS * OWN + SHARED), 2)
        if self.rng.random() < 0.5:
            self.shared.append(
                self.handler.store(gpu_block_ids=blocks, page_ids=blocks[::-1], after=())
            )
        else:
            self.shared.append(
                self.handler.load(page_ids=blocks, gpu_block_ids=blocks[::-1], after=())
            )

    def overwrite(self) -> None:
        from torch_kvswap.results import TransferError

        block, version = self.rng.randrange(OWN), next(self.versions)
        for flight in self.model.users[block]:
            try:
                flight.job.wait(self.stream)
            except TransferError:
                if "lost" in str(flight.job.result):
                    raise
        index = self.first + block
        pairs = [(self.world.tensors[i][index], self.world.rows[version, i]) for i in range(LAYERS)]
        self.world.driver.cuda.copy_batch(pairs, self.stream.cuda_stream)
        self.model.overwrite(block, version)

    def cancel(self) -> None:
        recent = list(self.model.flights.values())[-8:]
        if recent:
            flight = self.rng.choice(recent)
            flight.cancelled |= self.handler.cancel(flight.job)

    def wait(self) -> None:
        from torch_kvswap.results import TransferError

        jobs = [flight.job for flight in list(self.model.flights.values())[-3:]]
        with suppress(TransferError, TimeoutError):
            self.handler.synchronize(jobs, timeout=self.rng.choice([0, 0.001]))

    def settle(self) -> None:
        """Waits for all jobs of this thread and compares all bytes."""
        self.take()
        if not self.stop:
            for number in range(OWN):
                self.check(number, self.model.blocks[number], is_slot=False)
                self.check(number, self.model.slots[number], is_slot=True)

    def take(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            self.world.poll()
            with self.world.lock:
                results, self.seen = self.world.results[self.seen :], len(self.world.results)
            own = [result for result in results if result.job_id in self.model.flights]
            self.model.report(own)
            missing = {n for n, flight in self.model.flights.items() if flight.result is None}
            if not missing:
                break
            assert time.monotonic() < deadline, f"jobs {sorted(missing)} do not end"
            time.sleep(0.0002)
        while not self.world.driver.cuda.is_done(stream=self.stream.cuda_stream):
            time.sleep(0.0002)

    def check(self, number: int, cell: Cell, is_slot: bool) -> None:
        value = cell.known()
        if value is not None:
            found = self.world.version_at(self.first + number, is_slot)
            assert found == value, (self.first + number, is_slot, found, value)


def number_of_jobs(callers: list[Caller]) -> int:
    return sum(len(caller.model.flights) + len(caller.shared) for caller in callers)


def run(
    world: World, seed: int, meanwhile: Callable[[list[Caller]], object] = lambda callers: None
) -> list[Caller]:
    callers = [Caller(world, number, seed) for number in range(THREADS)]
    threads = [threading.Thread(target=caller.run) for caller in callers]
    for thread in threads:
        thread.start()

    def is_enough() -> bool:
        ended_as = {result.state for result in world.results}
        return bool(world.errors) or (number_of_jobs(callers) >= JOBS and ended_as == STATES)

    assert in_time(is_enough), "the threads do not go on"
    meanwhile(callers)
    for caller in callers:
        caller.stop = True
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for error in world.errors:
        raise error
    return callers


def assert_all_are_reported_once(world: World, callers: list[Caller]) -> None:
    world.poll()
    submitted = [number for caller in callers for number in caller.model.flights]
    submitted += [job.id for caller in callers for job in caller.shared]
    reported = [result.job_id for result in world.results]
    assert sorted(reported) == sorted(submitted)
    assert (world.driver.live("streams"), world.driver.live("events")) == (0, 0)


def assert_bytes_are_right(world: World, callers: list[Caller]) -> None:
    for caller in callers:
        caller.stop = False
        caller.settle()
    shared = {job.id for caller in callers for job in caller.shared}
    assert {result.state for result in world.results if result.job_id in shared} == {"done"}
    for index in range(THREADS * OWN, THREADS * OWN + SHARED):
        assert world.version_at(index, is_slot=False) is not None
        assert world.version_at(index, is_slot=True) is not None


@pytest.mark.parametrize("seed", SEEDS)
@simulated
def test_threads_that_do_everything_at_once_get_what_each_of_them_expects(driver, seed):
    world = World(driver, seed)
    callers = run(world, seed)
    assert [caller.refusal for caller in callers] == [""] * THREADS
    world.handler.close()
    assert_all_are_reported_once(world, callers)
    assert_bytes_are_right(world, callers)
    states = {result.state for result in world.results}
    assert states == STATES


@pytest.mark.parametrize("seed", SEEDS)
@simulated
def test_a_handler_that_is_closed_while_threads_submit_ends_every_job_that_it_took(driver, seed):
    world = World(driver, seed)

    def close(callers: list[Caller]) -> None:
        closers = [threading.Thread(target=world.handler.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(PATIENCE)
            assert not closer.is_alive()
        assert in_time(lambda: all(caller.refusal for caller in callers))

    callers = run(world, seed, meanwhile=close)
    assert all("the handler is closed" in caller.refusal for caller in callers)
    assert_all_are_reported_once(world, callers)
    assert_bytes_are_right(world, callers)


@pytest.mark.parametrize("seed", SEEDS)
@simulated
def test_a_device_that_is_lost_while_threads_submit_ends_every_job_once(driver, seed):
    world = World(driver, seed)

    def lose(callers: list[Caller]) -> None:
        driver.lose()
        assert in_time(lambda: all(caller.refusal for caller in callers))

    callers = run(world, seed, meanwhile=lose)
    world.handler.close()
    world.poll()
    submitted = [number for caller in callers for number in caller.model.flights]
    submitted += [job.id for caller in callers for job in caller.shared]
    assert sorted(result.job_id for result in world.results) == sorted(submitted)
    assert {result.state for result in world.results} == STATES
    assert driver.live("streams") == 0
