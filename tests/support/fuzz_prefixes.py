"""A scheduler that stores and loads random prompts through a prefix cache with few pages, on any device."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from bf16_blocks import KINDS, make_block, random_bits
from fuzz_cache import Group, Memory, MismatchError, Slab, make_groups, make_pools, random_shapes
from fuzz_devices import Device
from logged import logged

from torch_kvswap import HostPool, Job, PrefixCache
from torch_kvswap.prefix import BlockGroup

PROMPTS, LONGEST = 6, 5


def _nothing() -> None:
    """Stores have nothing to compare."""


class Server:
    """A scheduler that gives random GPU blocks to random prompts, and the bytes of every key."""

    has_below = False  # whose threads take pages at any time, and may not fill them
    says = (
        "blocks at once are more than"  # in what it logs: some prompts have more blocks than pages
    )

    def __init__(self, device: Device, seed: int, steps: int = 120) -> None:
        self.device, self.rng, self.steps = device, random.Random(f"{seed} prefixes"), steps
        self.num_blocks = self.rng.randint(40, 60)  # of all caches
        self.group, self.pool = self.make_cache()
        self.per_page = self.pool.blocks_per_page
        self.is_list = self.rng.random() < 0.3
        self.prefixes = self.make_prefixes()
        (self.stream,) = device.streams(1)[:1]
        # Prompts share beginnings; a key is the number of its first prompt, and how far in it is.
        self.prompts: list[list[tuple[int, int]]] = []
        for number in range(PROMPTS):
            shared = self.rng.choice(self.prompts) if self.prompts else []
            shared = shared[: self.rng.randint(0, len(shared))]
            length = self.rng.randint(max(len(shared), 1), LONGEST)
            own = [(number, place) for place in range(len(shared), length)]
            self.prompts.append(shared + own)
        self.alive: list[object] = []  # what kernels may still use
        self.change_contents()
        # Blocks, and the check of what a load ends with.
        self.jobs: dict[int, tuple[Job, list[int], Callable[[], None]]] = {}
        self.cancelled: set[int] = set()
        self.held: list[tuple[Any, list[tuple[int, int]], int | None]] = []  # with the store's job
        self.states: dict[int, str] = {}
        self.counts: Counter[str] = Counter()

    def make_cache(self) -> tuple[Group, HostPool]:
        self.shapes = random_shapes(self.rng, self.device, 1)
        group = self.make_group()
        (pool,), _ = make_pools(self.rng, self.device, [group], 3)
        return group, pool

    def make_prefixes(self, **below: Any) -> PrefixCache:
        layouts, pools = [self.group.layout], [self.pool]
        prefixes = PrefixCache(
            layouts if self.is_list else layouts[0],
            pools if self.is_list else pools[0],
            [BlockGroup(self.pool.num_pages)] if self.is_list else None,
            eviction_policy=self.rng.choice(["lru", "arc"]),
            copy_method=self.rng.choice(self.copy_methods()),
            **below,
        )
        prefixes.poll()  # else it warns that nobody ever does
        return prefixes

    def make_group(self) -> Group:
        """The memory of the cache, of random bytes."""
        groups, _ = make_groups(self.rng, self.device, self.shapes, [self.num_blocks])
        return groups[0]

    def change_contents(self) -> None:
        """From now on each key stands for other bytes."""
        table = self.make_rows(PROMPTS * LONGEST * self.per_page + 1)  # the last is nobody's
        self.contents, self.table = table.clone(), self.device.rows(table)
        self.alive.append(self.table)

    def copy_methods(self) -> Sequence[str]:
        return self.device.copy_methods

    def make_rows(self, count: int) -> torch.Tensor:
        """The bytes of so many blocks."""
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        shape = count, self.group.block_bytes
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator)

    def fits(self, key: tuple[int, int]) -> bool:
        """Whether the page of the key can be stored."""
        return True

    # Ids and bytes

    def row(self, key: tuple[int, int], part: int) -> int:
        return (key[0] * LONGEST + key[1]) * self.per_page + part

    def rows(self, keys: list[tuple[int, int]]) -> list[int]:
        return [self.row(key, part) for key in keys for part in range(self.per_page)]

    def passed(self, of_group: Any) -> Any:
        return [of_group] if self.is_list else of_group

    def named(self, keys: list[tuple[int, int]]) -> Any:
        """The keys as the prefix cache knows them."""
        return self.passed(keys)

    def free_blocks(self, count: int) -> list[int]:
        """Blocks that no job uses, which are given to others from now on."""
        busy = {block for _, blocks, _ in self.jobs.values() for block in blocks}
        free = [block for block in range(self.group.num_blocks) if block not in busy]
        return self.rng.sample(free, count) if len(free) >= count else []

    def write(self, blocks: list[int], rows: list[int]) -> bool:
        pairs = [
            (slab.view(block), slab.row(self.table, row))
            for block, row in zip(blocks, rows, strict=True)
            for slab in self.group.slabs
        ]
        return self.device.copy(pairs, self.stream)

    # What a scheduler does

    def store(self) -> None:
        keys = self.some_keys()
        blocks = self.free_blocks(len(keys) * self.per_page)
        if not blocks or not self.write(blocks, self.rows(keys)):
            return
        holds = len(self.held) < 2 and self.rng.random() < 0.3
        try:
            state, job, lease = self.prefixes.store(
                self.named(keys), self.passed(blocks), hold=holds
            )
        except RuntimeError:
            assert self.device.faults()[0]
            return
        self.counts[state] += not holds
        if lease is not None:
            self.held.append((lease, keys, job and job.id))
        if job is not None:
            self.jobs[job.id] = job, blocks, _nothing

    def load(self, keys: list[tuple[int, int]] | None = None) -> bool:
        keys = keys or self.some_keys()
        ready = self.prefixes.lookup(self.named(keys)).ready
        keys = keys[:ready]
        if not all(map(self.fits, keys)):
            raise MismatchError(f"of {keys} a block is found that does not fit")
        blocks = self.free_blocks(len(keys) * self.per_page)
        if not ready or not blocks:
            return False
        if not self.write(blocks, [len(self.contents) - 1] * len(blocks)):
            return False
        options = {"expedited": True} if self.rng.random() < 0.3 else {}
        try:
            job = self.prefixes.load(self.named(keys), self.passed(blocks), **options)
        except RuntimeError:
            assert self.device.faults()[0]
            return False
        if job is None:
            assert self.has_below, f"{keys} were ready"
            return False
        check = partial(self.compare, self.group, self.contents, blocks, self.rows(keys))
        self.jobs[job.id] = job, blocks, check
        self.counts["loads"] += 1
        return True

    def release(self) -> None:
        """Ends a hold, whose blocks must be there until then."""
        if not self.held:
            return
        lease, keys, number = self.held.pop(self.rng.randrange(len(self.held)))
        if number is not None and number in self.jobs:
            self.wait(self.jobs[number][0])
        self.poll()
        # Other stores, which these pages were shared with, may have failed.
        is_sure = not self.has_below and not set(self.states.values()) - {"done"}
        if is_sure and number not in self.jobs:
            found = self.prefixes.lookup(self.named(keys))
            assert found.found == len(keys), f"{keys} are held, but {found}"
        assert lease.let_go()

    def reset(self) -> None:
        """The weights change."""
        self.prefixes.reset()
        self.held.clear()
        self.change_contents()
        self.counts["resets"] += 1

    def rebind(self) -> None:
        """The cache moves, while jobs are in flight. Nothing of it is in the new memory."""
        if self.device.faults()[1]:
            return
        group = self.make_group()
        with self.device.running():
            self.prefixes.rebind(self.passed(group.layout))
        self.alive.append(self.group)
        self.group = group
        self.poll()
        self.counts["rebinds"] += 1

    def cancel(self) -> None:
        if self.jobs:
            number = self.rng.choice(list(self.jobs))
            if self.prefixes.cancel(self.jobs[number][0]):
                self.cancelled.add(number)

    def poll(self) -> None:
        for result in self.prefixes.poll():
            job, _, check = self.jobs.pop(result.job_id)
            assert job.result is not None
            self.counts[result.state] += 1
            self.states[result.job_id] = result.state
            assert result.state != "cancelled" or result.job_id in self.cancelled
            is_explained = self.device.faults()[0] or self.cancelled or result.rejected
            assert result.state != "failed" or is_explained
            self.counts["rejected"] += len(result.rejected)
            if result.ok:
                check()

    def read(self, view: torch.Tensor) -> torch.Tensor:
        """Its bytes. A failure that waits for a copy of the cache may meet this one."""
        while True:
            try:
                return view.cpu()
            except RuntimeError as error:
                if "as the test wants" not in str(error):
                    raise

    def compare(
        self, group: Group, contents: torch.Tensor, blocks: list[int], rows: list[int]
    ) -> None:
        for block, row in zip(blocks, rows, strict=True):
            for slab in group.slabs:
                if not torch.equal(self.read(slab.view(block)), slab.row(contents, row)):
                    raise MismatchError(
                        f"block {block} was loaded with other bytes than those of {row}"
                    )
        self.counts["compared"] += len(rows)

    def wait(self, job: Job) -> None:
        self.device.wait_for(self.prefixes, [job])

    def wait_for_one(self) -> None:
        if self.jobs:
            self.wait(self.rng.choice(list(self.jobs.values()))[0])

    def stall(self) -> None:
        self.device.stall(self.stream, self.rng)

    def fail(self) -> None:
        self.device.fail_sometime(self.rng)

    def some_keys(self) -> list[tuple[int, int]]:
        prompt = self.rng.choice(self.prompts)
        return prompt[: self.rng.randint(1, len(prompt))]

    def actions(self) -> dict[Callable[[], object], float]:
        return {
            self.store: 4,
            self.load: 5,
            self.release: 0.7,
            self.cancel: 0.5,
            self.poll: 4,
            self.wait_for_one: 1,
            self.stall: 0.3,
            self.fail: 0.1,
            self.reset: 0.2,
            self.rebind: 0.2,
        }

    def end_jobs(self) -> None:
        while self.held:
            self.release()
        for job, _, _ in list(self.jobs.values()):
            self.wait(job)
        self.poll()
        assert self.jobs == {}

    def run(self) -> Counter[str]:
        with logged() as messages:
            self.run_all()
        assert all(self.says in message for message in messages), messages
        return self.counts

    def run_all(self) -> None:
        actions = self.actions()
        for _ in range(self.steps):
            with self.device.using(self.stream):
                self.rng.choices(list(actions), list(actions.values()))[0]()
            self.device.let_run(self.rng)
        with self.device.using(self.stream):
            self.end_jobs()
        self.check_pages()
        self.counts["evicted"] += self.prefixes.stats().evicted
        self.device.synchronize([self.stream])
        self.pool.close()
        wrong = self.device.finish()
        assert not wrong, f"the driver was used wrongly:\n{wrong}"

    def check_pages(self) -> None:
        """All jobs have ended."""
        stats = self.prefixes.stats()
        assert stats.free_pages + stats.idle_pages == self.pool.num_pages
        assert stats.evicted <= stats.stored + stats.promoted

    def __str__(self) -> str:
        return f"{self.device.name}, {self.pool.num_pages} pages of {self.per_page}"


class EncodedServer(Server):
    """A server with encoded pages. Some of its blocks do not fit into their slots."""

    SLABS, SLAB_BYTES = 4, 4096

    def make_cache(self) -> tuple[Group, HostPool]:
        group = self.make_group()
        pool = HostPool(
            group.layout,
            self.rng.randint(3, 10),
            self.rng.choice([1, 1, 2, 3]),
            encoding="lossless",
        )
        return group, pool

    def make_group(self) -> Group:
        blocks, size = self.num_blocks, self.SLAB_BYTES
        raw = torch.zeros(self.SLABS * blocks * size + 64, dtype=torch.uint8)
        first = -raw.data_ptr() % 16  # as kernels need it
        memory = Memory(self.device.cache_memory(raw), "cache")
        tensor = memory.raw[first : first + self.SLABS * blocks * size].view(torch.bfloat16)
        layout = self.device.layout([tensor.view(self.SLABS, blocks, -1)], 1)
        slabs = [
            Slab(memory, first + number * blocks * size, size, size, number * size)
            for number in range(self.SLABS)
        ]
        return Group(layout, slabs, blocks, 0, self.SLABS * size, 1)

    def copy_methods(self) -> Sequence[str]:
        can_encode = ("auto", "staged", "kernel")
        return [method for method in self.device.copy_methods if method in can_encode]

    def make_rows(self, count: int) -> torch.Tensor:
        sizes = [self.SLAB_BYTES] * self.SLABS
        self.overflows = {row for row in range(count - 1) if self.rng.random() < 0.1}
        rows = [
            random_bits(sizes, row)
            if row in self.overflows
            else make_block(self.rng.choice(list(KINDS)), sizes, row)
            for row in range(count)
        ]
        return torch.from_numpy(np.stack([np.concatenate(row).view(np.uint8) for row in rows]))

    def fits(self, key: tuple[int, int]) -> bool:
        return self.overflows.isdisjoint(self.rows([key]))
