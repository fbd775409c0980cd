"""What a scheduler calls: blocks that are looked up, loaded and stored by what is in them."""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_kvswap._native.arguments import NotCopyable
from torch_kvswap._native.submit import After, Ids, read_ids
from torch_kvswap.handler import Gate, Job, OffloadHandler, Result
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.prefix.groups import BlockGroup, read_groups
from torch_kvswap.prefix.hashing import DIGEST_BYTES, Keys, read_digests
from torch_kvswap.prefix.lazy import LazyStorePolicy
from torch_kvswap.prefix.manager import BlockManager, EventKind, Load, Lookup, Store

Numbers: TypeAlias = npt.NDArray[np.int64]


class _Pages:
    """The pages of the pools that this process can use, from 0 on, and the GPU blocks of keys.

    is_list: whether keys, ids and pages are lists, with an entry for each pool.
    """

    def __init__(self, pools: Sequence[HostPool], is_list: bool) -> None:
        self._pools = pools
        self._is_list = is_list
        self.counts = [len(pool.local_pages) for pool in pools]

    def check_groups(self, groups: Sequence[BlockGroup] | None) -> None:
        """Raises ValueError when these are not the groups of the pools."""
        if (groups is not None) != self._is_list:
            raise ValueError("a handler with a list of layouts, and no other, takes groups")
        if groups is not None:
            named = [group.num_pages for group in read_groups(groups)]
            if named != self.counts:
                raise ValueError(f"the groups have {named} pages, their pools {self.counts}")

    @property
    def ready(self) -> list[int]:
        """How many of each pool are pinned by now."""
        return [pool.num_ready_pages for pool in self._pools]

    def in_pools(self, pages: Any) -> Numbers | list[Numbers]:
        """Their numbers in the pools."""
        return self._join([pages + pool.local_pages.start for pool, _, pages in self._split(pages)])

    def select(self, blocks: Sequence[array[int]], key_indices: Any) -> Numbers | list[Numbers]:
        """Of the GPU blocks of all keys those of some."""
        indices = key_indices if self._is_list else [key_indices]
        return self._join(list(map(_select, self._pools, blocks, indices)))

    def read(self, keys: Any, gpu_block_ids: Any) -> tuple[list[bytes], list[array[int]]]:
        """The digests of each pool, and the GPU blocks."""
        split = self._split(keys, gpu_block_ids)
        digests = [
            read_digests(f"keys[{group}]" if self._is_list else "keys", keys)
            for group, (_, _, keys, _) in enumerate(split)
        ]
        blocks = [
            _blocks_of(pool, name, len(of_pool) // DIGEST_BYTES, ids)
            for of_pool, (pool, name, _, ids) in zip(digests, split, strict=True)
        ]
        return digests, blocks

    def keys(self, digests: list[bytes]) -> Any:
        """What a caller would pass as the keys."""
        return digests if self._is_list else digests[0]

    def read_blocks(self, gpu_block_ids: Any) -> list[array[int]]:
        """The GPU blocks of each pool."""
        return [read_ids(name, ids) for _, name, ids in self._split(gpu_block_ids)]

    def only(self, group: int, value: Any) -> Any:
        """What a caller would pass who had it of one pool and nothing of the others."""
        if not self._is_list:
            return value
        return [value if index == group else [] for index in range(len(self._pools))]

    def name(self, group: int) -> str:
        """What a caller calls the GPU blocks of a group."""
        return f"gpu_block_ids[{group}]" if self._is_list else "gpu_block_ids"

    def _split(self, *of_pools: Any) -> list[tuple[Any, ...]]:
        """For each pool: the pool, the name of its GPU blocks, and its part of each argument."""
        if not self._is_list:
            return [(self._pools[0], self.name(0), *of_pools)]
        count = len(self._pools)
        if not all(isinstance(several, Sequence) and len(several) == count for several in of_pools):
            raise ValueError(f"keys and gpu_block_ids must have a list for each of {count} groups")
        return list(zip(self._pools, map(self.name, range(count)), *of_pools, strict=True))

    def _join(self, of_pools: list[Numbers]) -> Numbers | list[Numbers]:
        """In the form in which the caller passes ids."""
        return of_pools if self._is_list else of_pools[0]


def _blocks_of(pool: HostPool, name: str, count: int, ids: Ids) -> array[int]:
    """blocks_per_page blocks of each of `count` keys; the last key may have fewer."""
    blocks, per_page = read_ids(name, ids), pool.blocks_per_page
    if -(-len(blocks) // per_page) != count:
        raise ValueError(f"{name} has {len(blocks)} ids for {count} keys of {per_page} blocks each")
    return blocks


def _check_blocks(name: str, count: int, blocks: array[int]) -> None:
    numbers = np.frombuffer(blocks, np.uint64)  # a negative number is larger than any block's
    if len(numbers) and numbers.max() >= count:
        at = int(np.argmax(numbers >= count))
        raise IndexError(
            f"{name}[{at}] is {blocks[at]}; there are {count} GPU blocks, 0 to {count - 1}"
        )


def _select(pool: HostPool, blocks: array[int], key_indices: Any) -> Numbers:
    numbers, per_page = np.frombuffer(blocks, np.int64), pool.blocks_per_page
    slots = np.asarray(key_indices, np.int64)[:, None] * per_page + np.arange(per_page)
    selected: Numbers = numbers[slots[slots < len(numbers)]]
    return selected


class Preempted(NamedTuple):
    """job: until it has ended the GPU blocks must not change; None when the host has them all.
    lease: ends with OffloadEngine.release()."""

    job: Job | None
    lease: int


class OffloadEngine(NotCopyable):
    """A BlockManager and an OffloadHandler that do what a scheduler needs in four calls: lookup(),
    load(), store() and poll().

    A key stands for what one page holds, `blocks_per_page` GPU blocks. Pools may be pinned in the
    background: pages are used as soon as they are ready.

    The engine assigns all pages of its handler: pass no page ids to that handler yourself, and call
    poll() of the engine, since that of the handler raises. cancel(), synchronize() and metrics() of
    the handler may be used. A handler has one engine at a time. The engine holds the handler, and
    closes nothing: close the handler when all is done.

    Any thread may call any method. An engine cannot be copied or pickled.

    Attributes:
        handler (OffloadHandler): moves the blocks.
        manager (BlockManager): knows which block is on which page. Its stats(), events(), touch(),
            order(), lease() and reset() may be used; leave its jobs to the engine.

    Args:
        handler: moves the blocks.
        groups: for a handler with several layouts a BlockGroup for each, with as many pages as its
            pool has local_pages.
        store_policy: "eager" stores at once; "lazy" stores what is about to leave the GPU cache,
        when
            evict() says so.
        policy, store_threshold, events, clock: see BlockManager.

    Raises:
        TypeError, ValueError: an argument does not fit, or the handler has an engine already.
        RuntimeError: the handler is closed.
    """

    def __init__(
        self,
        handler: OffloadHandler,
        groups: Sequence[BlockGroup] | None = None,
        *,
        store_policy: Literal["eager", "lazy"] = "eager",
        policy: str = "lru",
        store_threshold: int = 1,
        events: bool | Collection[EventKind] = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not hasattr(handler, "pools"):
            raise TypeError(f"handler is a {type(handler).__name__}; pass an OffloadHandler")
        if store_policy not in ("eager", "lazy"):
            raise ValueError(f"store_policy is {store_policy!r}; it can be eager or lazy")
        self.handler = handler
        self._pages = _Pages(handler.pools, handler._native.groups.is_list)
        self._pages.check_groups(groups)
        self._ready = self._pages.ready
        self.manager = BlockManager(
            self._pages.counts[0] if groups is None else groups,
            num_ready_pages=self._ready,
            policy=policy,
            store_threshold=store_threshold,
            events=events,
            clock=clock,
        )
        pools = handler.pools if store_policy == "lazy" else ()
        self._lazy = [LazyStorePolicy(pool.blocks_per_page) for pool in pools]
        self._lock = threading.Lock()
        # By job id: the tag of a job is the caller's.
        self._jobs: dict[int, Load | Store] = {}
        self._started: list[Job] = []  # by an evict() that raised: the next one returns them
        handler._assign_pages_to(self)

    def lookup(self, keys: Keys | Sequence[Keys], *, again: bool = False) -> Lookup:
        """BlockManager.lookup()."""
        return self.manager.lookup(keys, again=again)

    def load(
        self,
        keys: Keys | Sequence[Keys],
        gpu_block_ids: Ids | Sequence[Ids],
        prefix: int | None = None,
        *,
        after: After = None,
        layer_groups: int | None = None,
        expedited: bool = False,
        gate: Gate | None = None,
        copy_engines_only: bool = False,
        tag: object = None,
    ) -> Job | None:
        """Loads what the keys stand for, None when some of it is not ready.

        Whoever uses the blocks waits for the job. Blocks of a load that failed are forgotten by
        poll(), and found no more.

        Args:
            gpu_block_ids: of all the keys; where it goes.
            prefix (int): only what is needed behind a prefix of this length, such as
                `Lookup.ready`.
            after, layer_groups, expedited, gate, copy_engines_only, tag: see OffloadHandler.load().
        """
        digests, blocks = self._pages.read(keys, gpu_block_ids)
        load = self.manager.prepare_load(self._pages.keys(digests), prefix)
        if load is None:
            return None

        start = functools.partial(
            self.handler.load,
            after=after,
            layer_groups=layer_groups,
            expedited=expedited,
            gate=gate,
            copy_engines_only=copy_engines_only,
            tag=tag,
        )
        return self._submit(load, blocks, start)

    def store(
        self,
        keys: Keys | Sequence[Keys],
        gpu_block_ids: Ids | Sequence[Ids],
        *,
        after: After = None,
        copy_engines_only: bool = False,
        tag: object = None,
    ) -> Job | None:
        """Stores what the host has not; None when that is nothing, or more than there is room for.

        Until the job has ended the blocks must not change. They can be loaded when poll() has
        reported it. With lazy storing this is noted, None, and what evict() stores.

        Args:
            gpu_block_ids: of all the keys.
            after, copy_engines_only, tag: see OffloadHandler.store(). With a lazy store policy
                evict() takes the first two, and its jobs have no tags.
        """
        if self._lazy:
            if after is not None or copy_engines_only:
                raise TypeError(
                    "with lazy storing evict() takes the options after and copy_engines_only"
                )
            self._note_computed(keys, gpu_block_ids)
            return None
        digests, blocks = self._read(keys, gpu_block_ids)
        self._grow()
        store = self.manager.prepare_store(self._pages.keys(digests))
        if store is None or store.id == 0:
            return None
        start = functools.partial(
            self.handler.store, after=after, copy_engines_only=copy_engines_only, tag=tag
        )
        return self._submit(store, blocks, start)

    def evict(
        self,
        gpu_block_ids: Ids | Sequence[Ids],
        *,
        after: After = None,
        copy_engines_only: bool = False,
    ) -> list[Job]:
        """With lazy storing stores what leaves the GPU, with all that is before it.

        Call it before any GPU block is given to others, and let none change until these jobs have
        ended, such as by Job.wait(). What there is no room for is not stored. With eager storing
        there is nothing to do.

        When it raises, no block has left yet. Call it again: it goes on, and returns the jobs that
        had been started before, too.

        Args:
            after, copy_engines_only: see OffloadHandler.store().
        """
        start = functools.partial(
            self.handler.store, after=after, copy_engines_only=copy_engines_only
        )
        leaving = self._pages.read_blocks(gpu_block_ids)
        with self._lock:
            jobs, self._started = self._started, []
        try:
            for group, lazy in enumerate(self._lazy):
                with self._lock:
                    chains = lazy.chains_of(leaving[group])
                for chain in chains:
                    keys, ids = (self._pages.only(group, its) for its in chain)
                    digests, blocks = self._pages.read(keys, ids)
                    self._grow()
                    store = self.manager.prepare_store(self._pages.keys(digests))
                    if store is not None and store.id:
                        jobs.append(self._submit(store, blocks, start))
        except BaseException:
            with self._lock:
                self._started += jobs
            raise
        with self._lock:
            for group, lazy in enumerate(self._lazy):
                lazy.forget(leaving[group])
        return jobs

    def preempt(
        self,
        keys: Keys | Sequence[Keys],
        gpu_block_ids: Ids | Sequence[Ids],
        *,
        after: After = None,
        copy_engines_only: bool = False,
        tag: object = None,
    ) -> Preempted | None:
        """Stores all blocks of a request, which stay until release() is called.

        To take them back call load(), then release(), which may follow at once: the load itself
        holds the pages until it has ended. When load() returns None and
        `lookup(keys, again=True).pending` is not 0, try again after a later poll(). Otherwise the
        blocks are lost, such as by a store that failed: call release(), and compute them again. A
        load that fails later is reported by poll().

        Args:
            keys: of all blocks that are computed. PrefixHasher.partial_key() has the last one when
                it is part full.
            gpu_block_ids: of all the keys.
            after, copy_engines_only, tag: see OffloadHandler.store().

        Returns:
            None when there is no room. Every other answer needs one release().
        """
        digests, blocks = self._read(keys, gpu_block_ids)
        self._grow()
        store = self.manager.preempt(self._pages.keys(digests))
        if store is None:
            return None
        start = functools.partial(
            self.handler.store, after=after, copy_engines_only=copy_engines_only, tag=tag
        )
        try:
            job = self._submit(store, blocks, start) if store.id else None
        except BaseException:
            self.manager.release(store)
            raise
        return Preempted(job, store.lease)

    def release(self, preempted: Preempted) -> bool:
        """Whether its blocks were still held."""
        if not isinstance(preempted, Preempted):
            kind = type(preempted).__name__
            raise TypeError(f"preempted is a {kind}; pass what preempt() returned")
        return self.manager.release(preempted.lease)

    def poll(self) -> list[Result]:
        """OffloadHandler.poll(). What was stored can be loaded from now on; what failed is
        forgotten. Call it at every step."""
        results = self.handler._take_results()
        for result in results:
            with self._lock:
                job = self._jobs.pop(result.job_id, None)
            if job is None:
                continue  # not one of ours
            if result.ok or (result.state == "cancelled" and isinstance(job, Load)):
                self.manager.complete(job)
            else:
                self.manager.fail(job)
        return results

    def _grow(self) -> None:
        """Lets the manager use the pages that are pinned by now."""
        if self._ready != self._pages.counts:
            self._ready = self._pages.ready
            self.manager.grow(self._ready)

    def _note_computed(self, keys: Any, gpu_block_ids: Any) -> None:
        """Remembers what the blocks hold, for evict()."""
        computed = self._read(keys, gpu_block_ids)
        with self._lock:
            for lazy, digests, blocks in zip(self._lazy, *computed, strict=True):
                lazy.computed(digests, blocks)

    def _read(self, keys: Any, gpu_block_ids: Any) -> tuple[list[bytes], list[array[int]]]:
        """What is to be stored, checked in full: the native side sees only what is new."""
        digests, several = self._pages.read(keys, gpu_block_ids)
        for group, (layout, blocks) in enumerate(zip(self.handler.layouts, several, strict=True)):
            _check_blocks(self._pages.name(group), layout.num_blocks, blocks)
        return digests, several

    def _submit(
        self,
        job: Load | Store,
        blocks: Sequence[array[int]],
        start: Callable[..., Job],
    ) -> Job:
        """Starts the copy that the manager has prepared; start: handler.load or handler.store with
        its options."""
        try:
            selected = self._pages.select(blocks, job.key_indices)
            pages = self._pages.in_pools(job.pages)
            with self._lock:  # poll() may see the end of the job before we have its number
                submitted = start(gpu_block_ids=selected, page_ids=pages)
                self._jobs[submitted.id] = job
        except BaseException:
            # Nothing was copied: what was to be loaded is what it was.
            (self.manager.complete if isinstance(job, Load) else self.manager.fail)(job)
            raise
        return submitted
