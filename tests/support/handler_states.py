"""Random calls of a handler, random progress and failures of its device, against a model.

The rules are the same for every device. A subclass of :class:`HandlerMachine` says how its device does
what they need, and may add rules. KVSWAP_STATES_EXAMPLES: the number of examples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor
from transfer_model import Cell, Flight, Model

from torch_kvswap import HostPool, Job, OffloadHandler, PagedLayout, Result, TransferError

BLOCKS, PAGES, LAYERS, ROW = 6, 5, 2, 32
VERSIONS = 4096

ids = st.lists(st.integers(0, BLOCKS - 1), max_size=4, unique=True)
orders = st.permutations(range(PAGES))
afters = st.sampled_from(["current", "stream", "other", "event", "nothing"])
numbers = st.integers(0, 1 << 16)


class HandlerMachine(RuleBasedStateMachine):
    """Kernels run on the current stream. Another stream can be behind it. Nothing else runs by itself."""

    copy_methods: ClassVar[Sequence[str]] = ("auto",)
    kinds_of_loads: ClassVar[Sequence[str]] = ("load", "load", "expedited", "layers")
    hurts_a_job: ClassVar[Sequence[str]]  # calls of the device that one job needs
    may_lose_the_device: ClassVar[Sequence[str]]  # calls after which the handler may give it up
    device_errors: ClassVar[type[Exception]]  # what a call of the device itself raises
    # Whether the failure of one of the jobs that were joined fails all of them.
    fails_jobs_together: ClassVar[bool] = False
    waits: ClassVar[bool] = True  # False: jobs wait for no kernel, as a control

    # What a device does.

    def begin(self) -> None:
        """Everything as in the beginning."""
        raise NotImplementedError

    def rows_of(self, raw: Tensor) -> Tensor:
        """These bytes, in memory that kernels read and write."""
        raise NotImplementedError

    def make_cache(self, raw: list[Tensor], per_page: int) -> tuple[PagedLayout, HostPool]:
        """A cache with these bytes, and a pool."""
        raise NotImplementedError

    def bytes_of(self, tensor: Tensor) -> Tensor:
        """What is in memory of the device now, whatever is still to run."""
        raise NotImplementedError

    def stop(self) -> None:
        """From now on the device does nothing by itself."""
        raise NotImplementedError

    def go_on(self) -> None:
        """From now on the device does everything by itself."""
        raise NotImplementedError

    def run_some(self, number: int, steps: int) -> None:
        """The device goes on by some steps."""
        raise NotImplementedError

    def run_all(self) -> None:
        """The device does what is not held up."""
        raise NotImplementedError

    def hold_up(self, other: bool) -> Any:
        """Holds the current stream up, or the other one."""
        raise NotImplementedError

    def let_go(self, hold: Any) -> None:
        raise NotImplementedError

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A kernel on the current stream; pairs of target and source. Does all of it or raises."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """Whether the current stream has done everything."""
        raise NotImplementedError

    def behind(self, after: str) -> AbstractContextManager[Any]:
        """What a job can pass as `after` for all that the current stream was given so far."""
        raise NotImplementedError

    def make_fail(self, name: str, nth: int) -> None:
        """The nth call from now on fails."""
        raise NotImplementedError

    def calls(self, name: str) -> int:
        """How many calls were made."""
        raise NotImplementedError

    def take_away(self) -> None:
        """The device is lost."""
        raise NotImplementedError

    @property
    def is_lost(self) -> bool:
        """The device does not answer, or what it said makes the handler think so."""
        called = [name for name in self.may_lose_the_device if name in self.faults]
        return any(self.calls(name) >= min(self.faults[name])[0] for name in called)

    def check_rest(self) -> None:
        """What is left when the handler is closed."""
        raise NotImplementedError

    @initialize(
        per_page=st.integers(1, 3),
        mortal=st.integers(0, 3).map(lambda n: n == 0),
        copy_method=numbers,
        submit_thread=st.booleans(),
    )
    def make(self, per_page: int, mortal: bool, copy_method: int, submit_thread: bool) -> None:
        self.begin()
        self.mortal, self.per_page = mortal, per_page
        # Version v has bytes of its own in each layer.
        self.rows = torch.empty(VERSIONS, LAYERS, ROW, dtype=torch.uint8)
        versions = torch.arange(VERSIONS)
        low, high = (versions & 255).to(torch.uint8), (versions >> 8).to(torch.uint8)
        self.rows[:, :, ::2], self.rows[:, 0, 1::2] = low[:, None, None], high[:, None]
        self.rows[:, 1, 1::2] = ~high[:, None]
        self.sources = self.rows_of(self.rows)
        self.version = BLOCKS + PAGES * per_page
        self.layout, self.host = self.make_cache(
            [self.rows[:BLOCKS, layer].clone() for layer in range(LAYERS)], per_page
        )
        self.tensors = self.layout.tensors
        self.slots = self.host.pages.view(PAGES * per_page, LAYERS, ROW)
        self.slots[:] = self.rows[BLOCKS : self.version]
        self.model = Model(list(range(BLOCKS)), list(range(BLOCKS, self.version)))
        self.handler = self.make_handler(
            copy_method=self.copy_methods[copy_method % len(self.copy_methods)],
            staging_bytes=1 << 20,
            submit_thread=submit_thread,
        )
        self.holds: list[Any] = []
        # The number of each call that fails: at the earliest, at the latest.
        self.faults: dict[str, list[tuple[int, int]]] = {}
        self.looks: list[tuple[Tensor, int, Cell]] = []
        self.last: Flight | None = None
        self.peak = 0
        self.stop()

    def make_handler(self, **options: Any) -> OffloadHandler:
        return OffloadHandler(self.layout, self.host, **options)

    # Progress and failures

    @rule()
    def run(self) -> None:
        self.run_all()

    @rule(number=numbers, steps=st.integers(1, 4))
    def step(self, number: int, steps: int) -> None:
        self.run_some(number, steps)

    @rule(other=st.booleans())
    def hold(self, other: bool) -> None:
        # A job that fails while it is enqueued may wait for what is ahead of it.
        if not self.has_faults() and not self.is_lost:
            self.holds.append(self.hold_up(other))

    @rule()
    def release(self) -> None:
        while self.holds:
            self.let_go(self.holds.pop())

    @rule(number=numbers, nth=st.integers(1, 5))
    def fail(self, number: int, nth: int) -> None:
        if not self.holds:
            self.plan(self.hurts_a_job[number % len(self.hurts_a_job)], nth)

    @precondition(lambda self: self.mortal)
    @rule(number=numbers, nth=st.integers(1, 40))
    def fail_to_answer(self, number: int, nth: int) -> None:
        if not self.holds:
            self.plan(self.may_lose_the_device[number % len(self.may_lose_the_device)], nth)

    @precondition(lambda self: self.mortal)
    @rule(number=st.integers(0, 9))
    def lose(self, number: int) -> None:
        if number == 0:
            self.take_away()

    def plan(self, name: str, nth: int) -> None:
        # A thread of the handler may call it meanwhile: the call that fails is between the two.
        earliest = self.calls(name) + nth
        self.make_fail(name, nth)
        self.faults.setdefault(name, []).append((earliest, self.calls(name) + nth))

    def has_faults(self) -> bool:
        return any(
            self.calls(name) < latest for name, calls in self.faults.items() for _, latest in calls
        )

    # Jobs

    @rule(blocks=ids, order=orders, first=numbers, after=afters)
    def store(self, blocks: list[int], order: list[int], first: int, after: str) -> None:
        self.submit(blocks, order, first, after, "store")

    @rule(blocks=ids, order=orders, first=numbers, after=afters, kind=numbers)
    def load(self, blocks: list[int], order: list[int], first: int, after: str, kind: int) -> None:
        kinds = self.kinds_of_loads
        self.submit(blocks, order, first, after, kinds[kind % len(kinds)])

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

    def options_of(self, kind: str) -> dict[str, Any]:
        options = {"expedited": {"expedited": True}, "layers": {"layer_groups": LAYERS}}
        return options.get(kind, {})

    def submit(
        self, blocks: list[int], order: list[int], first: int, after: str, kind: str
    ) -> None:
        first = first % self.per_page if blocks else 0
        pages = order[: -(-(first + len(blocks)) // self.per_page)]
        slots = [
            pages[i // self.per_page] * self.per_page + i % self.per_page
            for i in range(first, first + len(blocks))
        ]
        options = self.options_of(kind)
        try:
            with self.behind(after) as options["after"]:
                if not self.waits:
                    options["after"] = ()
                if kind == "store":
                    job = self.handler.store(
                        gpu_block_ids=blocks, page_ids=pages, first_slot=first, **options
                    )
                else:
                    job = self.handler.load(
                        page_ids=pages, gpu_block_ids=blocks, first_slot=first, **options
                    )
        except (RuntimeError, self.device_errors):
            # A call that a submission itself needs, or the test, was made in vain.
            assert self.faults or self.is_lost
            return
        self.last = self.model.submit(job, kind == "store", blocks, slots)
        self.peak = max(self.peak, sum(f.result is None for f in self.model.flights.values()))

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
        if not all(self.is_behind(flight.job) for flight in self.model.users[block]):
            return
        self.version += 1
        pairs = [(self.tensors[i][block], self.sources[self.version, i]) for i in range(LAYERS)]
        try:
            self.copy(pairs)
        except self.device_errors:
            return
        self.model.overwrite(block, self.version)

    @rule(
        block=st.integers(0, BLOCKS - 1), layer=st.integers(0, LAYERS - 1), by_layer=st.booleans()
    )
    def look(self, block: int, layer: int, by_layer: bool) -> None:
        cell = self.model.blocks[block]
        if cell.writer is None or self.is_behind(cell.writer.job, layer if by_layer else None):
            self.copy_what_is_seen(block, layer, cell)

    def is_behind(self, job: Job, layer: int | None = None) -> bool:
        """Whether kernels from now on are behind the job."""
        try:
            job.wait() if layer is None else job.wait(layer_group=job.layer_group_of(layer))
        except TransferError:
            return True  # it has ended
        except RuntimeError:
            assert self.faults or self.is_lost
            return False
        return True

    def copy_what_is_seen(self, block: int, layer: int, cell: Cell) -> None:
        with suppress(self.device_errors):
            seen = self.rows_of(torch.zeros(ROW, dtype=torch.uint8))
            self.copy([(seen, self.tensors[layer][block])])
            self.looks.append((seen, layer, cell))

    # What the caller learns

    @rule()
    def poll(self) -> None:
        self.take(self.handler.poll())

    @rule(number=numbers, count=st.integers(0, 3))
    def wait(self, number: int, count: int) -> None:
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

    def take(self, results: list[Result]) -> None:
        self.model.report(results)
        faults = sum(
            self.calls(name) >= earliest
            for name, calls in self.faults.items()
            for earliest, _ in calls
        )
        explained = faults > 0 and self.fails_jobs_together
        assert explained or self.model.direct_failures <= faults or self.is_lost
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
            found = held if is_slot else self.bytes_of(held)
            assert torch.equal(found, self.rows[value, layer]), (index, is_slot, value, layer)

    @rule()
    def measure(self) -> None:
        metrics = self.handler.metrics()
        for channel in (metrics.stores, metrics.loads, metrics.expedited):
            assert channel.streams <= 3
            assert channel.events <= 6 * (self.peak + 4)

    # The end

    def teardown(self) -> None:
        if not hasattr(self, "peak"):
            return
        self.release()
        self.go_on()
        self.handler.close()
        self.take(self.handler.poll())
        missing = [flight.job.id for flight in self.model.flights.values() if not flight.result]
        assert missing == []
        assert self.handler.poll() == []
        self.check_rest()
        for channel in (lambda m: (m.stores, m.loads, m.expedited))(self.handler.metrics()):
            assert channel.submitted == channel.done + channel.failed + channel.cancelled
            assert (channel.queued, channel.running) == (0, 0)
        if self.is_lost:
            return
        for index, cell in enumerate(self.model.blocks):
            self.check(index, cell, is_slot=False)
        for index, cell in enumerate(self.model.slots):
            self.check(index, cell, is_slot=True)
        for seen, layer, cell in self.looks:
            value = cell.known()
            assert value is None or torch.equal(self.bytes_of(seen), self.rows[value, layer])


def run_states(machine: type[HandlerMachine], examples: int) -> None:
    """Runs random examples. A control finds its fault in the first ones, and need not simplify it."""
    options = {} if machine.waits else {"phases": [Phase.generate]}
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("KVSWAP_STATES_EXAMPLES", examples)),
            stateful_step_count=40,
            deadline=None,
            database=None,
            **options,
        ),
    )
