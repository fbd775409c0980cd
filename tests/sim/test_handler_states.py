"""Random calls of a handler, random progress and failures of its device, against a model.

KVSWAP_STATES_EXAMPLES: the number of examples.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated_cache import HURTS_A_JOB, new_threads, threads
from simulated_driver import HOST, Driver, place, pool, simulated
from simulated_driver.cuda import CudaError
from simulated_driver.handles import Event, Stream
from transfer_model import Cell, Flight, Model

from torch_kvswap._native import loader

if TYPE_CHECKING:
    from torch_kvswap.handler import Job

BLOCKS, PAGES, LAYERS, ROW = 6, 5, 2, 32
KERNELS, OTHER = 42, 43  # streams: of the kernels, which is current; another that is behind it
VERSIONS = 4096
MAY_LOSE_THE_DEVICE = ("cuCtxPushCurrent", "cuEventElapsedTime", "cuEventQuery", "cuStreamQuery")

ids = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=4, unique=True)
orders = st.permutations(range(PAGES))
afters = st.sampled_from(["current", "stream", "other", "event", "nothing"])
numbers = st.integers(0, 1 << 16)
HAS_KERNELS = bool(loader.library().kvswap_kernel_version())
PATHS = ("auto", "staged", "kernel") if HAS_KERNELS else ("auto",)


class Machine(RuleBasedStateMachine):
    driver: ClassVar[Driver]

    @initialize(
        per_page=st.integers(1, 3),
        mortal=st.integers(0, 3).map(lambda n: n == 0),
        copy_method=st.sampled_from(PATHS),
        submit_thread=st.booleans(),
    )
    def make(self, per_page: int, mortal: bool, copy_method: str, submit_thread: bool) -> None:
        from torch_kvswap.handler import OffloadHandler
        from torch_kvswap.layout import PagedLayout

        self.driver.reset()
        self.driver.set_mode("manual")
        self.driver.set_stream(0, KERNELS)
        self.mortal, self.per_page = mortal, per_page
        # Version v has bytes of its own in each layer.
        self.rows = self.driver.memory(VERSIONS * LAYERS * ROW, HOST).view(VERSIONS, LAYERS, ROW)
        versions = torch.arange(VERSIONS)
        low, high = (versions & 255).to(torch.uint8), (versions >> 8).to(torch.uint8)
        self.rows[:, :, ::2], self.rows[:, 0, 1::2] = low[:, None, None], high[:, None]
        self.rows[:, 1, 1::2] = ~high[:, None]
        self.version = BLOCKS + PAGES * per_page
        self.tensors = [self.rows[:BLOCKS, layer].clone() for layer in range(LAYERS)]
        layout = place(self.driver, PagedLayout(self.tensors))
        self.host = pool(self.driver, layout, PAGES, per_page)
        self.slots = self.host.pages.view(PAGES * per_page, LAYERS, ROW)
        self.slots[:] = self.rows[BLOCKS : self.version]
        self.model = Model(list(range(BLOCKS)), list(range(BLOCKS, self.version)))
        self.threads = threads()
        if copy_method != "auto":  # the first such handler loads the kernels
            OffloadHandler(layout, self.host, copy_method=copy_method).close()
        first = self.driver.cuda.create_stream()
        self.driver.cuda.destroy_stream(first)
        self.handler = OffloadHandler(
            layout,
            self.host,
            copy_method=copy_method,
            staging_bytes=1 << 20,
            submit_thread=submit_thread,
        )
        self.gate = self.handler.gate(LAYERS)
        self.streams = [KERNELS, OTHER, *range(first + 1, first + 10)]
        self.holds: list[int] = []
        # The number of each call that fails: at the earliest, at the latest.
        self.faults: dict[str, list[tuple[int, int]]] = {}
        self.looks: list[tuple[torch.Tensor, int, Cell]] = []
        self.last: Flight | None = None
        self.peak = 0

    # What the device does

    @rule()
    def run(self) -> None:
        self.driver.run()

    @rule(number=numbers, steps=st.integers(1, 4))
    def step(self, number: int, steps: int) -> None:
        for _ in range(steps):
            self.driver.step(self.streams[number % len(self.streams)])

    @rule(stream=st.sampled_from([KERNELS, OTHER]))
    def hold(self, stream: int) -> None:
        # A job that fails while it is enqueued waits for what is ahead of it.
        if not self.has_faults():
            self.holds.append(self.driver.hold(stream))

    @rule()
    def release(self) -> None:
        while self.holds:
            self.driver.release(self.holds.pop())

    @rule(name=st.sampled_from(HURTS_A_JOB), nth=st.integers(1, 5))
    def fail(self, name: str, nth: int) -> None:
        if not self.holds:
            self.plan(name, nth)

    @precondition(lambda self: self.mortal)
    @rule(name=st.sampled_from(MAY_LOSE_THE_DEVICE), nth=st.integers(1, 40))
    def fail_to_answer(self, name: str, nth: int) -> None:
        if not self.holds:
            self.plan(name, nth)

    @precondition(lambda self: self.mortal)
    @rule(number=st.integers(0, 9))
    def lose(self, number: int) -> None:
        if number == 0:
            self.driver.lose()

    def plan(self, name: str, nth: int) -> None:
        # A thread of the handler may call it meanwhile: the call that fails is between the two.
        earliest = self.driver.calls(name) + nth
        self.driver.fail(name, nth)
        self.faults.setdefault(name, []).append((earliest, self.driver.calls(name) + nth))

    def has_faults(self) -> bool:
        return any(
            self.driver.calls(name) < latest
            for name, calls in self.faults.items()
            for _, latest in calls
        )

    # Jobs

    @rule(blocks=ids, order=orders, first=numbers, after=afters)
    def store(self, blocks: list[int], order: list[int], first: int, after: str) -> None:
        self.submit(blocks, order, first, after, "store")

    @rule(
        blocks=ids,
        order=orders,
        first=numbers,
        after=afters,
        kind=st.sampled_from(["load", "load", "expedited", "layers", "gate"]),
    )
    def load(self, blocks: list[int], order: list[int], first: int, after: str, kind: str) -> None:
        self.submit(blocks, order, first, after, kind)

    @rule(
        kind=st.sampled_from(["store", "load", "expedited"]),
        count=st.integers(60, 90),
        stride=st.integers(0, 7),
        after=afters,
    )
    def flood(self, kind: str, count: int, stride: int, after: str) -> None:
        """More than may be in flight."""
        for i in range(count):
            pages = [(i * stride + j) % PAGES for j in range(PAGES)]
            self.submit([i % BLOCKS], pages, i, after, kind)

    def submit(
        self, blocks: list[int], order: list[int], first: int, after: str, kind: str
    ) -> None:
        if kind == "gate" and self.has_faults():
            # A gate that cannot be opened stays closed: tests/sim/test_handler_faults.py.
            kind = "layers"
        first %= self.per_page
        pages = order[: -(-(first + len(blocks)) // self.per_page)]
        slots = [
            pages[i // self.per_page] * self.per_page + i % self.per_page
            for i in range(first, first + len(blocks))
        ]
        options: dict[str, Any] = {
            "expedited": {"expedited": True},
            "layers": {"layer_groups": LAYERS},
            "gate": {"gate": self.gate},
        }.get(kind, {})
        event = None
        try:
            options["after"], event = self.behind(after)
            if kind == "store":
                job = self.handler.store(
                    gpu_block_ids=blocks, page_ids=pages, first_block=first, **options
                )
            else:
                job = self.handler.load(
                    page_ids=pages, gpu_block_ids=blocks, first_block=first, **options
                )
        except (RuntimeError, CudaError):
            # Capturing is asked for, a gate closed, or the test's own event recorded, in vain.
            assert self.faults or self.is_lost
            return
        finally:
            if event is not None:
                with suppress(CudaError):
                    self.driver.cuda.record(event, OTHER)  # means another moment from now on
                self.driver.cuda.destroy_event(event)
        self.last = self.model.submit(job, kind == "store", blocks, slots)
        self.peak = max(self.peak, sum(f.result is None for f in self.model.flights.values()))

    def behind(self, after: str) -> tuple[Any, int | None]:
        """What is behind all kernels so far, and an event to destroy."""
        if after == "nothing" and self.driver.cuda.is_done(stream=KERNELS):
            return (), None
        if after not in ("other", "event"):
            return (Stream(KERNELS) if after == "stream" else None), None
        event = self.driver.cuda.create_event(timed=False)
        try:
            self.driver.cuda.record(event, KERNELS)
            self.driver.cuda.wait(OTHER, event)
        except CudaError:
            self.driver.cuda.destroy_event(event)
            raise
        return (Stream(OTHER) if after == "other" else Event(event)), event

    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        if self.model.flights:
            flight = self.model.flights[number % len(self.model.flights)]
            if self.handler.cancel(flight.job):
                flight.cancelled = True
            else:
                assert flight.job.result is not None
                assert flight.result is None or flight.result.state == flight.job.result.state

    @rule()
    def cancel_the_last(self) -> None:
        if self.last is not None and self.handler.cancel(self.last.job):
            self.last.cancelled = True

    # Kernels

    @rule(block=st.integers(0, BLOCKS - 1))
    def overwrite(self, block: int) -> None:
        if not all(self.waits(flight.job) for flight in self.model.users[block]):
            return
        self.version += 1
        pairs = [(self.tensors[i][block], self.rows[self.version, i]) for i in range(LAYERS)]
        try:
            self.driver.cuda.copy_batch(pairs, KERNELS)
        except CudaError:
            return
        self.model.overwrite(block, self.version)

    @rule(
        block=st.integers(0, BLOCKS - 1), layer=st.integers(0, LAYERS - 1), by_layer=st.booleans()
    )
    def look(self, block: int, layer: int, by_layer: bool) -> None:
        cell = self.model.blocks[block]
        if cell.writer is None or self.waits(cell.writer.job, layer if by_layer else None):
            self.copy_what_is_seen(block, layer, cell)

    @rule(layer=st.integers(0, LAYERS - 1), after=afters, held=st.booleans())
    def look_behind_the_gate(self, layer: int, after: str, held: bool) -> None:
        """Right after a load with the gate. held: which another one lets wait."""
        flight = self.last
        if flight is None or flight.is_store or self.is_lost or self.has_faults():
            return
        before, blocks = len(self.model.flights), list(flight.targets)
        if held:
            self.submit(blocks, list(range(PAGES)), 1, "current", "gate")
            self.hold(OTHER)
            after = "other"
        self.submit(blocks, list(range(PAGES))[::-1], 0, after, "gate")
        if len(self.model.flights) == before + 1 + held:
            self.gate.wait(layer)
            self.copy_what_is_seen(blocks[0], layer, self.model.blocks[blocks[0]])

    def waits(self, job: Job, layer: int | None = None) -> bool:
        """Whether kernels from now on are behind the job."""
        from torch_kvswap.handler import TransferError

        try:
            job.wait() if layer is None else job.wait(layer_group=job.layer_group_of(layer))
        except TransferError:
            return True  # it has ended
        except RuntimeError:
            assert self.faults or self.is_lost
            return False
        return True

    def copy_what_is_seen(self, block: int, layer: int, cell: Cell) -> None:
        seen = self.driver.memory(ROW, HOST)
        with suppress(CudaError):
            self.driver.cuda.copy(seen, self.tensors[layer][block], KERNELS)
            self.looks.append((seen, layer, cell))

    # What the caller learns

    @rule()
    def poll(self) -> None:
        self.take(self.handler.poll())

    @rule(number=numbers, count=st.integers(0, 3))
    def wait(self, number: int, count: int) -> None:
        from torch_kvswap.handler import TransferError

        flights = list(self.model.flights.values())
        jobs = [flights[(number + i) % len(flights)].job for i in range(count) if flights]
        try:
            self.handler.synchronize(jobs, timeout=0)
            assert all(job.result is not None and job.result.ok for job in jobs)
        except TransferError as error:
            told = [result.job_id for result in error.results]
            ended = [job for job in jobs if job.result is not None]
            failed = [job.id for job in ended if job.result and not job.result.ok]
            assert (ended, told) == (jobs, failed)
        except TimeoutError:
            assert jobs

    def take(self, results: list[Any]) -> None:
        self.model.report(results)
        faults = sum(
            self.driver.calls(name) >= earliest
            for name, calls in self.faults.items()
            for earliest, _ in calls
        )
        assert self.model.direct_failures <= faults or self.is_lost
        if self.is_lost:
            return
        for result in results:
            flight = self.model.flights[result.job_id]
            for index, cell in flight.targets.items():
                held = self.model.slots if flight.is_store else self.model.blocks
                if held[index] is cell:
                    self.check(index, cell, flight.is_store)

    def check(self, index: int, cell: Cell, is_slot: bool) -> None:
        value = cell.known()
        if value is None:
            return
        for layer in range(LAYERS):
            held = self.slots[index, layer] if is_slot else self.tensors[layer][index]
            assert torch.equal(held, self.rows[value, layer]), (index, is_slot, value, layer)

    @property
    def is_lost(self) -> bool:
        """The device does not answer, or what it said makes the handler think so."""
        try:
            self.driver.cuda.is_done(stream=KERNELS)
        except CudaError:
            return True
        called = [name for name in MAY_LOSE_THE_DEVICE if name in self.faults]
        return any(self.driver.calls(name) >= min(self.faults[name])[0] for name in called)

    @invariant()
    def is_used_well(self) -> None:
        assert self.driver.unexpected_violations() == ""

    @rule()
    def measure(self) -> None:
        metrics = self.handler.metrics()
        for channel in (metrics.stores, metrics.loads, metrics.expedited):
            assert channel.streams <= 3
            assert channel.events <= 6 * (self.peak + 4)

    # The end

    def teardown(self) -> None:
        if not hasattr(self, "handler"):
            return
        self.release()
        self.driver.set_mode("immediate")
        self.handler.close()
        self.take(self.handler.poll())
        self.is_used_well()
        missing = [flight.job.id for flight in self.model.flights.values() if not flight.result]
        assert missing == []
        assert self.handler.poll() == []
        assert new_threads(self.threads) == 0
        assert self.driver.live("streams") == 1  # the gate's, which stays
        assert self.driver.live("events") == 2 or self.is_lost
        for channel in (lambda m: (m.stores, m.loads, m.expedited))(self.handler.metrics()):
            assert channel.submitted == channel.done + channel.failed + channel.cancelled
            assert (channel.queued, channel.running) == (0, 0)
        if self.is_lost:
            return
        assert self.driver.pending() == ""
        for index, cell in enumerate(self.model.blocks):
            self.check(index, cell, is_slot=False)
        for index, cell in enumerate(self.model.slots):
            self.check(index, cell, is_slot=True)
        for seen, layer, cell in self.looks:
            value = cell.known()
            assert value is None or torch.equal(seen, self.rows[value, layer])


@pytest.mark.slow
@simulated
def test_a_handler_does_what_the_model_does_whatever_is_called_and_fails(driver: Driver) -> None:
    Machine.driver = driver
    examples = int(os.environ.get("KVSWAP_STATES_EXAMPLES", "400"))
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, database=None
        ),
    )
