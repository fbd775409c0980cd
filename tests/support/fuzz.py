"""Random jobs of random caches and pools, on any device, against a model of numpy arrays.

KVSWAP_FUZZ_SEED: of the first scenario; each further one has the next seed (default 1). A failure
says the seed of its scenario. KVSWAP_FUZZ_SECONDS: how long each test goes on with further
scenarios; without it each test has a fixed number of them.

Everything that a session submits is written to its log: jobs, and kernels of the caller that write
or read blocks. When all of it has ended, the log is replayed on numpy arrays, one entry after
another. What a job that failed or was cancelled was to write is undefined from there on. Then every
byte that a kernel has read, and every byte of caches, padding and pools, is compared.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fuzz_cache import Group, MismatchError, make_groups, make_pools, random_shapes
from fuzz_devices import Device
from transfer_model import Flight, Model

from torch_kvswap import Job, Result, TransferError

LOG = 300  # jobs between two audits
Move = tuple[Group, int, int]  # block and slot


@dataclass
class Options:
    """Of a scenario.

    Attributes:
        steps (int): random calls of each session.
        sessions (int): callers. One runs in the calling thread, several in threads of their own.
        handlers (int): on the same cache and pools, for some of the sessions each.
        after_nothing (bool): stores and loads wait for no kernel, as a control.
        no_waits (bool): kernels that read do not wait for loads, as a control.
    """

    steps: int = 150
    sessions: int = 1
    handlers: int = 1
    after_nothing: bool = False
    no_waits: bool = False


@dataclass
class Cell:
    """Who uses a block. Streams by number: those whose kernels may still write or read it."""

    written: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    users: list[Job] = field(default_factory=list)  # since a kernel has waited for all of them
    load: tuple[Job, Group] | None = None  # the last of them that loads


class Session:
    """One caller's random calls. It has blocks and pages of its own, and of the streams."""

    def __init__(self, scenario: Scenario, number: int) -> None:
        self.scenario, self.number = scenario, number
        self.device, self.options = scenario.device, scenario.options
        self.rng = random.Random(f"{scenario.seed} {number}")
        self.lock = threading.RLock()
        self.index = number % len(scenario.handlers)  # of the handler
        self.handler = scenario.handlers[self.index]
        self.streams = self.device.streams(3)
        rows, width = scenario.contents.shape
        self.row = rows_in_turn(self.rng, rows)
        self.most_reads = min(160, rows)  # between two audits
        self.seen = self.device.rows(torch.zeros(self.most_reads, width, dtype=torch.uint8))
        slots = max(slot for slot in scenario.slot_numbers()) + 1
        self.model = Model(slots)
        self.model.exact = self.options.sessions == 1
        self.log: list[tuple[Any, ...]] = []
        self.reads = self.jobs = self.taken = 0
        self.recent: list[Flight] = []
        self.slot_jobs: dict[int, list[Job]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """With a new cache, none of whose blocks anybody uses."""
        groups = self.scenario.groups
        self.cells: dict[tuple[int, int], Cell] = defaultdict(Cell)
        self.model.set_blocks(sum(group.num_blocks for group in groups))
        count = self.options.sessions
        self.blocks = {
            group.space: list(range(self.number, group.num_blocks, count)) for group in groups
        }
        self.pages = {
            group.pool: list(range(self.number, group.host.num_pages, count)) for group in groups
        }

    # Random calls.

    def step(self) -> None:
        with self.lock:
            if self.jobs >= LOG or self.reads >= self.most_reads - 8:
                self.audit()
            actions = self._actions()
            action = self.rng.choices(list(actions), list(actions.values()))[0]
            number = self.rng.randrange(len(self.streams))
            with self.device.using(self.streams[number]):
                action(number)
            self.take()
            self.device.let_run(self.rng)

    def _actions(self) -> dict[Callable[[int], object], float]:
        return {
            self._write: 3,
            self._read: 4,
            self._use: 2,
            self._write_and_store: 2,
            self._store: 3,
            self._load: 4,
            self._load_and_read: 1,
            self._flood: 0.1,
            self._cancel: 0.6,
            self._poll: 2,
            self._look: 0.5,
            self._synchronize: 0.3,
            self._write_page: 0.5,
            self._stall: 0.4,
            self._fault: 0.15,
        }

    def _write(self, stream: int, where: tuple[Group, int] | None = None) -> None:
        """A kernel writes a block."""
        group, block = where or self._some_block()
        cell = self.cells[group.space, block]
        if not all(self._wait(stream, other) for other in (cell.written | cell.read) - {stream}):
            return
        if not all(self._wait_on(stream, job) is not None for job in cell.users):
            return
        row, table = next(self.row), self.scenario.table
        pairs = [(slab.view(block), slab.row(table, row)) for slab in group.slabs]
        if not self.device.copy(pairs, self.streams[stream]):
            return
        self.cells[group.space, block] = Cell(written={stream})
        self.model.overwrite(self.scenario.block_number(group, block))
        self.log.append(("write", group, block, row))
        self.counts["written"] += 1

    def _read(self, stream: int, where: tuple[Group, int] | None = None) -> None:
        """A kernel reads a block, or one layer of it as soon as that was loaded."""
        group, block = where or self._some_block()
        cell, layer = self.cells[group.space, block], None
        if cell.load is not None and not self.options.no_waits:
            job, of_group = cell.load
            relays = self.device.relays()
            if relays and self.rng.random() < 0.2:
                relay = self.rng.choice(relays)
                if not self._wait_on_stream(relay, job):
                    return
                if not self.device.wait(self.streams[stream], relay):
                    return
            else:
                first = self.scenario.first_layer(group)
                if of_group is group and self.rng.random() < 0.5:
                    layer = self.rng.randrange(group.num_layers)
                if not self._wait_on(stream, job, None if layer is None else first + layer):
                    return
        if not all(self._wait(stream, other) for other in cell.written - {stream}):
            return
        self._see(stream, group, block, layer, [slab.view(block) for slab in group.slabs])

    def _see(
        self,
        stream: int,
        group: Group,
        block: int,
        layer: int | None,
        views: list[torch.Tensor],
    ) -> None:
        pairs = [
            (slab.row(self.seen, self.reads), view)
            for slab, view in zip(group.slabs, views, strict=True)
            if layer is None or slab.layer == layer
        ]
        if self.device.copy(pairs, self.streams[stream]):
            self.cells[group.space, block].read.add(stream)
            self.log.append(("read", group, block, layer, self.reads))
            self.reads += 1

    def _use(self, stream: int) -> None:
        """A kernel reads a block, and the next one overwrites it."""
        where = self._some_block()
        self._read(stream, where)
        self._write(stream, where)

    def _write_and_store(self, stream: int) -> None:
        where = self._some_block()
        self._write(stream, where)
        self._submit(stream, "store", where)

    def _store(self, stream: int) -> None:
        self._submit(stream, "store")

    def _load(self, stream: int) -> None:
        self._submit(stream, "load")

    def _load_and_read(self, stream: int) -> None:
        """A load, and kernels that read its blocks at once, layer after layer."""
        for group, block, _ in self._submit(stream, "load")[: self.most_reads - self.reads]:
            self._read(self.rng.randrange(len(self.streams)), (group, block))

    def _flood(self, stream: int) -> None:
        """More than may be in flight."""
        kind = self.rng.choice(["store", "load"])
        for _ in range(self.rng.randint(60, 90)):
            self._submit(stream, kind, self._some_block())

    def _submit(self, stream: int, kind: str, where: tuple[Group, int] | None = None) -> list[Move]:
        """What the job moves; nothing when there is no job."""
        moves, ids = self._ids(where, avoids_bad=kind == "load" and self.rng.random() < 0.95)
        blocks = {(group.space, block) for group, block, _ in moves}
        cells = [self.cells[key] for key in blocks]
        before = set().union(*[cell.written for cell in cells])
        if kind == "load":
            before = before.union(*[cell.read for cell in cells])
        if not self.options.after_nothing and not all(
            self._wait(stream, other) for other in before - {stream}
        ):
            return []
        options: dict[str, Any] = {}
        if kind == "load":
            options["expedited"] = self.rng.random() < 0.3
            if self.rng.random() < 0.4:
                layers = sum(group.num_layers for group in self.scenario.groups)
                options["layer_groups"] = self.rng.randint(1, layers)
        gpu, pages, first = (part if self.scenario.is_list else part[0] for part in ids)
        gpu, pages = self._as_passed(gpu), self._as_passed(pages)
        try:
            with self.device.afters(self.streams[stream]) as afters:
                if self.options.after_nothing or (
                    self.rng.random() < 0.2
                    and all(self.device.is_idle(self.streams[other]) for other in before)
                ):
                    afters = [()]
                options["after"] = self.rng.choice(afters)
                if kind == "store":
                    job = self.handler.store(
                        gpu_block_ids=gpu, page_ids=pages, first_slot=first, **options
                    )
                else:
                    job = self.handler.load(
                        page_ids=pages, gpu_block_ids=gpu, first_slot=first, **options
                    )
        except RuntimeError:
            assert self.device.faults()[0]  # one of the calls that a submission itself needs
            return []
        finally:
            spoil(gpu)
            spoil(pages)
        self._note(job, kind, moves)
        return moves

    def _note(self, job: Job, kind: str, moves: list[Move]) -> None:
        nbytes = sum(group.block_bytes for group, _, _ in moves)
        assert (job.direction, job.nbytes) == (kind, nbytes), (job.direction, job.nbytes, nbytes)
        block_numbers = [self.scenario.block_number(group, block) for group, block, _ in moves]
        slot_numbers = [self.scenario.slot_number(group, slot) for group, _, slot in moves]
        flight = self.model.submit(job, kind == "store", block_numbers, slot_numbers)
        for (group, block, _), slot in zip(moves, slot_numbers, strict=True):
            cell = self.cells[group.space, block]
            cell.users.append(job)
            if kind == "load":
                cell.load = job, group
            self.slot_jobs[slot].append(job)
        self.log.append((kind, flight, moves))
        self.recent = [*self.recent[-30:], flight]
        self.jobs += 1
        self.counts["jobs"] += 1

    def _ids(
        self, where: tuple[Group, int] | None, avoids_bad: bool
    ) -> tuple[list[Move], tuple[Any, Any, Any]]:
        """Of all groups: block ids, page ids and first blocks. avoids_bad: leaves pages out that
        are invalid, as far as is known; else failures would spread over the whole pool."""
        moves: list[Move] = []
        gpu, pages, firsts = [], [], []
        free_blocks = {space: list(blocks) for space, blocks in self.blocks.items()}
        free_pages = {pool: list(of_pool) for pool, of_pool in self.pages.items()}
        if avoids_bad:
            free_pages = {group.pool: self._valid_pages(group) for group in self.scenario.groups}
        if where is not None:
            free_blocks[where[0].space].remove(where[1])
        must = self.rng.randrange(len(self.scenario.groups))
        for number, group in enumerate(self.scenario.groups):
            per_page = group.host.blocks_per_page
            first = self.rng.randrange(per_page)
            room = len(free_pages[group.pool]) * per_page - first
            chosen = [where[1]] if where is not None and where[0] is group and room > 0 else []
            count = self.rng.choice([1, 1, 2, 3, 6])
            if where is not None or (number != must and self.rng.random() < 0.5):
                count = 0
            count = max(min(count, len(free_blocks[group.space]), room - len(chosen)), 0)
            chosen += self._some_of(free_blocks[group.space], count)
            first = first if chosen else 0
            taken = self._some_of(free_pages[group.pool], -(-(first + len(chosen)) // per_page))
            for block in chosen:
                if block in free_blocks[group.space]:
                    free_blocks[group.space].remove(block)
            for page in taken:
                free_pages[group.pool].remove(page)
            for i, block in enumerate(chosen, first):
                moves.append((group, block, taken[i // per_page] * per_page + i % per_page))
            gpu.append(chosen)
            pages.append(taken)
            firsts.append(first)
        return moves, (gpu, pages, firsts)

    def _valid_pages(self, group: Group) -> list[int]:
        per_page = group.host.blocks_per_page
        return [
            page
            for page in self.pages[group.pool]
            for first in [self.scenario.slot_number(group, page * per_page)]
            if not any(cell.is_bad for cell in self.model.slots[first : first + per_page])
        ]

    def _some_of(self, numbers: list[int], count: int) -> list[int]:
        if count < len(numbers) and self.rng.random() < 0.3:  # neighbours, which are merged
            begin = self.rng.randrange(len(numbers) - count + 1)
            return numbers[begin : begin + count]
        return self.rng.sample(numbers, count)

    def _as_passed(self, ids: Any) -> Any:
        """The ids as one of the types that a caller may pass."""
        if self.scenario.is_list:
            return [self._as_type(of_group) for of_group in ids]
        return self._as_type(ids)

    def _as_type(self, ids: list[int]) -> Any:
        made: Any = self.rng.choice(
            [
                list,
                list,
                lambda ids: np.array(ids, np.int64),
                lambda ids: np.array(ids, np.int32),
                lambda ids: torch.tensor(ids, dtype=torch.int64),
            ]
        )(ids)
        return made

    def _cancel(self, stream: int) -> None:
        self.cancel_one(self.rng)

    def cancel_one(self, rng: random.Random) -> None:
        """Other threads may call this at any time."""
        recent = self.recent
        if not recent:
            return
        flight = rng.choice(recent)
        with self.scenario.cancelling:  # so that nobody judges the result before this has noted it
            flight.cancelled = self.handler.cancel(flight.job) or flight.cancelled

    def _poll(self, stream: int) -> None:
        self.scenario.poll(self.index)

    def _look(self, stream: int) -> None:
        """Questions that wait for nothing."""
        self.handler.metrics()
        jobs = [flight.job for flight in self.rng.sample(self.recent, min(2, len(self.recent)))]
        try:
            self.handler.synchronize(jobs, timeout=0)
            assert all(job.result is not None and job.result.ok for job in jobs)
        except TransferError as error:
            told = {result.job_id for result in error.results}
            failed = {job.id for job in jobs if job.result is not None and not job.result.ok}
            assert told == failed
        except TimeoutError:
            assert jobs
        assert all(job.result is not None for job in jobs if job.query())

    def _synchronize(self, stream: int) -> None:
        self.device.synchronize([self.streams[stream]])
        for cell in self.cells.values():
            cell.written.discard(stream)
            cell.read.discard(stream)

    def _write_page(self, stream: int) -> None:
        """The host writes a slot, once all jobs on it have ended."""
        group = self.rng.choice(self.scenario.groups)
        per_page = group.host.blocks_per_page
        slot = self.rng.choice(self.pages[group.pool]) * per_page + self.rng.randrange(per_page)
        number = self.scenario.slot_number(group, slot)
        if not all(job.query() for job in self.slot_jobs[number]):
            return
        self.slot_jobs[number].clear()
        row = next(self.row)
        group.slots.view(slot).copy_(
            torch.from_numpy(self.scenario.contents[row, : group.block_bytes])
        )
        self.log.append(("page", group, slot, row))

    def _stall(self, stream: int) -> None:
        self.device.stall(self.streams[stream], self.rng)

    def _fault(self, stream: int) -> None:
        self.device.fail_sometime(self.rng)

    def _some_block(self) -> tuple[Group, int]:
        group = self.rng.choice(self.scenario.groups)
        return group, self.rng.choice(self.blocks[group.space])

    # Order.

    def _wait(self, stream: int, other: int) -> bool:
        return self.device.wait(self.streams[stream], self.streams[other])

    def _wait_on(self, stream: int, job: Job, layer: int | None = None) -> bool | None:
        return self._wait_on_stream(self.streams[stream], job, layer)

    def _wait_on_stream(self, stream: Any, job: Job, layer: int | None = None) -> bool | None:
        """Whether the stream is behind the job; False when it has ended and not well, so that it
        touches nothing any more; None when a call failed."""
        try:
            job.wait(stream) if layer is None else job.wait(
                stream, layer_group=job.layer_group_of(layer)
            )
        except RuntimeError:
            assert self.device.faults()[0]
            return None
        return job.result is None or job.result.ok

    # What must have come of it.

    def take(self) -> None:
        """Judges the results of this session that anybody has asked for."""
        inbox = self.scenario.inboxes[self.index]
        end = len(inbox)
        results = [result for result in inbox[self.taken : end] if self._is_mine(result)]
        self.taken = end
        with self.scenario.cancelling:
            self.model.report(results)
        for result in results:
            flight = self.model.flights[result.job_id]
            assert result.nbytes == flight.job.nbytes
            self.counts[result.state] += 1
        happened, _ = self.device.faults()
        errors = [result.error for result in results if result.state == "failed"]
        assert self.model.direct_failures <= happened, f"a job failed for no reason: {errors}"

    def _is_mine(self, result: Result) -> bool:
        return result.job_id in self.model.flights

    def audit(self) -> None:
        """Waits for everything, and compares what kernels have read."""
        flights = list(self.model.flights.values())
        self.device.wait_for(self.handler, [flight.job for flight in flights])
        self.device.synchronize(self.streams)
        self.scenario.poll(self.index)
        self.take()
        missing = [flight.job.id for flight in flights if flight.result is None]
        assert not missing, f"jobs {missing} have ended, but poll() has not told of them"
        seen = self.seen.cpu().numpy()
        for entry in self.log:
            self._replay(seen, *entry)
        self.log.clear()
        self.model.settle()
        self.recent = []
        self.slot_jobs.clear()
        self.cells.clear()
        self.reads = self.jobs = 0

    def _replay(self, seen: Any, kind: str, *entry: Any) -> None:
        contents = self.scenario.contents
        if kind == "write":
            group, block, row = entry
            for slab in group.slabs:
                slab.memory.expected[slab.span(block)] = slab.row(contents, row)
                slab.memory.defined[slab.span(block)] = True
        elif kind == "page":
            group, slot, row = entry
            group.slots.memory.expected[group.slots.span(slot)] = group.slots.row(contents, row)
            group.slots.memory.defined[group.slots.span(slot)] = True
        elif kind == "read":
            self._compare(seen, *entry)
        else:
            flight, moves = entry
            for group, block, slot in moves:
                self._move(kind == "store", flight.is_done, group, block, slot)

    def _move(self, is_store: bool, is_done: bool, group: Group, block: int, slot: int) -> None:
        pages, begin = group.slots.memory, group.slots.span(slot).start
        for slab in group.slabs:
            in_page = slice(begin + slab.start, begin + slab.start + slab.size)
            ends = [(slab.memory, slab.span(block)), (pages, in_page)]
            (source, of), (target, to) = ends if is_store else reversed(ends)
            if is_done:
                target.expected[to] = source.expected[of]
                target.defined[to] = source.defined[of]
            else:
                target.defined[to] = False

    def _compare(self, seen: Any, group: Group, block: int, layer: int | None, row: int) -> None:
        for slab in group.slabs_of(layer):
            span = slab.span(block)
            found, expected = slab.row(seen, row), slab.memory.expected[span]
            defined = slab.memory.defined[span]
            wrong = np.flatnonzero((found != expected) & defined)
            if wrong.size:
                number = self.scenario.groups.index(group)
                raise MismatchError(
                    f"a kernel has read {wrong.size} wrong bytes of {slab.size}, the first is byte "
                    f"{wrong[0]}, of block {block} of group {number}, {slab.memory.name}: "
                    f"{found[wrong[0]]}, expected {expected[wrong[0]]}"
                )
            self.counts["compared"] += bool(defined.any())


class Scenario:
    """A cache with pools and handlers, and the sessions that use them."""

    def __init__(self, device: Device, seed: int, options: Options | None = None) -> None:
        options = options or Options()
        self.device, self.seed, self.options = device, seed, options
        self.rng = random.Random(f"{seed} scenario")
        self.shapes = random_shapes(self.rng, device, self.rng.choice([1, 1, 2, 3]))
        self.is_list = len(self.shapes) > 1 or self.rng.random() < 0.2
        self.groups, self.memories = make_groups(self.rng, device, self.shapes, self._sizes())
        pools = make_pools(self.rng, device, self.groups, 3 * options.sessions)
        self.pools, self.pool_memories = pools
        width = max(group.block_bytes for group in self.groups)
        generator = torch.Generator().manual_seed(seed)
        rows = max(min(257, device.memory_bytes // width), 32)
        table = torch.randint(256, (rows, width), dtype=torch.uint8, generator=generator)
        self.contents = table.numpy().copy()
        self.table = device.rows(table)
        self.polling = threading.Lock()
        self.cancelling = threading.Lock()
        self.made = {
            "copy_method": self.rng.choice(device.copy_methods),
            "submit_thread": self.rng.random() < 0.3,
            "staging_bytes": self.rng.choice([1 << 20, 1 << 22]),
        }
        self.handlers = [
            device.handler(self._layouts(), self._hosts(), **self.made)
            for _ in range(options.handlers)
        ]
        self.inboxes: list[list[Result]] = [[] for _ in self.handlers]
        self.reported: list[set[int]] = [set() for _ in self.handlers]
        self.sessions = [Session(self, number) for number in range(options.sessions)]

    def __str__(self) -> str:
        groups = [f"{group.num_blocks} x {group.block_bytes}" for group in self.groups]
        return f"{self.device.name}, {self.made}, groups {groups}, {self.shapes}"

    def _sizes(self) -> list[int]:
        least = 3 * self.options.sessions
        return [self.rng.randint(least, least + 6) for _ in self.shapes]

    def _layouts(self) -> Any:
        layouts = [group.layout for group in self.groups]
        return layouts if self.is_list else layouts[0]

    def _hosts(self) -> Any:
        hosts = [group.host for group in self.groups]
        return hosts if self.is_list else hosts[0]

    # Numbers for the model of transfers: blocks of all groups, slots of all pools.

    def block_number(self, group: Group, block: int) -> int:
        return sum(other.num_blocks for other in self.groups[: group.space]) + block

    def slot_number(self, group: Group, slot: int) -> int:
        return group.pool * 1000 + slot

    def slot_numbers(self) -> Iterator[int]:
        for group in self.groups:
            yield self.slot_number(group, group.host.num_pages * group.host.blocks_per_page)

    def first_layer(self, group: Group) -> int:
        return sum(other.num_layers for other in self.groups[: self.groups.index(group)])

    # What concerns all sessions.

    def poll(self, index: int) -> None:
        with self.polling:
            results = self.handlers[index].poll()
            ids = {result.job_id for result in results}
            assert len(ids) == len(results), "a job is reported twice"
            assert not ids & self.reported[index], "a job is reported twice"
            self.reported[index] |= ids
            self.inboxes[index] += results

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """No session does anything."""
        with ExitStack() as stack:
            for session in self.sessions:
                stack.enter_context(session.lock)
            yield

    def rebind(self) -> None:
        """The cache moves, while jobs are in flight."""
        if self.options.handlers > 1 or self.device.faults()[1]:
            return
        with self.stopped():
            groups, memories = make_groups(self.rng, self.device, self.shapes, self._sizes())
            layouts = [group.layout for group in groups]
            with self.device.running():
                self.handlers[0].rebind(layouts if self.is_list else layouts[0])
            self.check()
            for old, new in zip(self.groups, groups, strict=True):
                new.host, new.pool, new.slots = old.host, old.pool, old.slots
            self.groups, self.memories = groups, memories
            for session in self.sessions:
                session.begin()

    def check(self) -> None:
        """Compares every byte of caches and pools."""
        with self.stopped():
            for session in self.sessions:
                session.audit()
            for memory in [*self.memories, *self.pool_memories]:
                memory.check()

    def run(self) -> Counter[str]:
        """Runs all sessions to their end; what happened."""
        if len(self.sessions) == 1:
            for step in range(self.options.steps):
                self.sessions[0].step()
                if step % 70 == 69 and self.rng.random() < 0.5:
                    self.rebind()
        else:
            self._run_threads()
        self.check()
        for index, handler in enumerate(self.handlers):
            handler.close()
            self.poll(index)
        counts = sum((session.counts for session in self.sessions), Counter[str]())
        assert sum(map(len, self.inboxes)) == counts["jobs"]
        for pool in self.pools:
            pool.close()
        wrong = self.device.finish()
        assert not wrong, f"the driver was used wrongly:\n{wrong}"
        return counts

    def _run_threads(self) -> None:
        """One or two threads for each session, and one that polls, cancels and rebinds."""
        errors: list[BaseException] = []
        over = threading.Event()

        def work(session: Session) -> None:
            try:
                for _ in range(self.options.steps):
                    if errors:
                        break
                    session.step()
            except BaseException as error:
                errors.append(error)

        def disturb() -> None:
            rng = random.Random(f"{self.seed} others")
            try:
                while not over.wait(0.0005):
                    self.poll(rng.randrange(len(self.handlers)))
                    rng.choice(self.sessions).cancel_one(rng)
                    if rng.random() < 0.01:
                        self.rebind()
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=work, args=(session,))
            for session in self.sessions
            for _ in range(self.rng.choice([1, 1, 2]))
        ]
        disturber = threading.Thread(target=disturb)
        for thread in [*threads, disturber]:
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        disturber.join()
        if errors:
            raise errors[0]


def rows_in_turn(rng: random.Random, rows: int) -> Iterator[int]:
    """Rows of the table, none again before all others."""
    row = rng.randrange(rows)
    while True:
        row = (row + 1) % rows
        yield row


def spoil(ids: Any) -> None:
    """Ids were copied: what the caller does with them later changes nothing."""
    for of_group in ids if isinstance(ids, list) else [ids]:
        if isinstance(of_group, np.ndarray | torch.Tensor):
            of_group[:] = 1 << 20


def fuzz_seconds() -> float:
    """How long each test is to go on; 0 for the number of scenarios that it has."""
    return float(os.environ.get("KVSWAP_FUZZ_SECONDS", "0"))


def fuzz(make: Callable[[int], Any], scenarios: int) -> Counter[str]:
    """Makes and runs scenarios with one seed after another; what happened in all of them.

    Args:
        make: a scenario of this seed, with run() that counts what happens.
        scenarios (int): how many, unless KVSWAP_FUZZ_SECONDS says for how long.

    Raises:
        MismatchError: a byte is wrong.
        AssertionError: anything else went wrong. Both name the seed.
    """
    seed, seconds = int(os.environ.get("KVSWAP_FUZZ_SEED", "1")), fuzz_seconds()
    began, counts, number = time.monotonic(), Counter[str](), 0
    while time.monotonic() < began + seconds if seconds else number < scenarios:
        scenario = None
        try:
            scenario = make(seed + number)
            counts.update(scenario.run())
        except BaseException as error:
            kind = MismatchError if isinstance(error, MismatchError) else AssertionError
            again = f"again with KVSWAP_FUZZ_SEED={seed + number}: {scenario}"
            raise kind(f"{type(error).__name__}: {error}\n{again}") from error
        number += 1
    return counts
