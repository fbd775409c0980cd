"""What a scheduler calls: blocks that are looked up, loaded and stored by what is in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

from torch_kvswap._native.arguments import NotCopyable
from torch_kvswap._native.ids import Ids
from torch_kvswap.after import After
from torch_kvswap.gate import Gate
from torch_kvswap.handler import OffloadHandler
from torch_kvswap.job import Job
from torch_kvswap.prefix.digests import Keys
from torch_kvswap.prefix.engine_pages import EnginePages
from torch_kvswap.prefix.groups import BlockGroup, read_groups
from torch_kvswap.prefix.lazy import LazyStoring
from torch_kvswap.prefix.manager import BlockManager
from torch_kvswap.prefix.results import EventKind, Load, Lookup, Store
from torch_kvswap.result import Result


class Preempted(NamedTuple):
    """job: until it has ended the GPU blocks must not change; None when the host has them all.
    lease: ends with OffloadEngine.release()."""

    job: Job | None
    lease: int


class OffloadEngine(NotCopyable):
    """A BlockManager and an OffloadHandler that do what a scheduler needs in four calls: lookup(),
    load(), store() and finished().

    A key stands for what one page holds, `blocks_per_page` GPU blocks. Pools may be pinned in the
    background: pages are used as soon as they are ready. Nobody else may use the handler's pages,
    or call its finished(). The engine holds the handler, and closes nothing: close the handler,
    when all is done.

    Any thread may call any method. An engine cannot be copied or pickled.

    Args:
        handler: moves the blocks.
        groups: for a handler with several layouts a BlockGroup for each, with as many pages as its
            pool has own_pages.
        storing: "eager" stores at once; "lazy" stores what is about to leave the GPU cache, when
            evict() says so.
        policy, store_threshold, events, clock: see BlockManager.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    def __init__(
        self,
        handler: OffloadHandler,
        groups: Sequence[BlockGroup] | None = None,
        *,
        storing: Literal["eager", "lazy"] = "eager",
        policy: str = "lru",
        store_threshold: int = 1,
        events: bool | Collection[EventKind] = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not hasattr(handler, "pools"):
            raise TypeError(f"handler is a {type(handler).__name__}; pass an OffloadHandler")
        if storing not in ("eager", "lazy"):
            raise ValueError(f"storing is {storing!r}; it can be eager or lazy")
        self.handler = handler
        self._pages = EnginePages(handler.pools, handler.native.groups.is_list)
        counts = self._pages.counts
        if (groups is not None) != handler.native.groups.is_list:
            raise ValueError("a handler with a list of layouts, and no other, takes groups")
        if groups is not None:
            named = [group.num_pages for group in read_groups(groups)]
            if named != counts:
                raise ValueError(f"the groups have {named} pages, their pools {counts}")
        self._ready = self._pages.ready
        self.manager = BlockManager(
            counts[0] if groups is None else groups,
            ready_pages=self._ready,
            policy=policy,
            store_threshold=store_threshold,
            events=events,
            clock=clock,
        )
        pools = handler.pools if storing == "lazy" else ()
        self._lazy = [LazyStoring(pool.blocks_per_page) for pool in pools]
        self._lock = threading.Lock()
        self._jobs: dict[int, Load | Store] = {}
        self._started: list[Job] = []  # by an evict() that raised: the next one returns them

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
        background: bool = False,
    ) -> Job | None:
        """Loads what the keys stand for, None when some of it is not ready.

        Whoever uses the blocks waits for the job. Blocks of a load that failed are forgotten by
        finished(), and found no more.

        Args:
            gpu_block_ids: of all the keys; where it goes.
            prefix (int): only what is needed behind a prefix of this length, such as
                `Lookup.ready`.
            after, layer_groups, expedited, gate, background: see OffloadHandler.load().
        """
        load = self.manager.prepare_load(keys, prefix)
        if load is None:
            return None

        def move() -> Job:
            blocks = self._pages.select(keys, gpu_block_ids, load.places)
            pages = self._pages.in_pools(load.pages)
            return self.handler.load(
                pages,
                blocks,
                after=after,
                layer_groups=layer_groups,
                expedited=expedited,
                gate=gate,
                background=background,
            )

        return self._submit(load, move)

    def store(
        self,
        keys: Keys | Sequence[Keys],
        gpu_block_ids: Ids | Sequence[Ids],
        *,
        after: After = None,
        background: bool = False,
    ) -> Job | None:
        """Stores what the host has not; None when that is nothing, or more than there is room for.

        Until the job has ended the blocks must not change. They can be loaded when finished() has
        reported it. With lazy storing this is noted, None, and what evict() stores.

        Args:
            gpu_block_ids: of all the keys.
            after, background: see OffloadHandler.store(). With lazy storing evict() takes them.
        """
        if not self._lazy:
            self._grow()
            store = self.manager.prepare_store(keys)
            return self._store(store, gpu_block_ids, keys, after, background) if store else None
        if after is not None or background:
            raise TypeError("with lazy storing evict() takes the options after and background")
        computed = self._pages.read(keys, gpu_block_ids)
        for group, (_, blocks) in enumerate(computed):
            self._check_blocks(group, blocks)
        with self._lock:
            for lazy, (digests, blocks) in zip(self._lazy, computed, strict=True):
                lazy.computed(digests, blocks)
        return None

    def evict(
        self,
        gpu_block_ids: Ids | Sequence[Ids],
        *,
        after: After = None,
        background: bool = False,
    ) -> list[Job]:
        """With lazy storing stores what leaves the GPU, with all that is before it.

        Call it before any GPU block is given to others, and let none change until these jobs have
        ended, such as by Job.wait_on(). What there is no room for is not stored. With eager storing
        there is nothing to do.

        When it raises, no block has left yet. Call it again: it goes on, and returns the jobs that
        had been started before, too.

        Args:
            after, background: see OffloadHandler.store().
        """
        leaving = self._pages.read_blocks(gpu_block_ids)
        with self._lock:
            jobs, self._started = self._started, []
        try:
            for group, lazy in enumerate(self._lazy):
                with self._lock:
                    chains = lazy.chains_of(leaving[group])
                for chain in chains:
                    keys, blocks = (self._pages.only(group, its) for its in chain)
                    self._grow()
                    store = self.manager.prepare_store(keys)
                    job = self._store(store, blocks, keys, after, background) if store else None
                    jobs += [job] if job else []
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
        background: bool = False,
    ) -> Preempted | None:
        """store(), of blocks that stay until release() is called; None when there is no room. To
        take them back: load(), then release()."""
        self._grow()
        store = self.manager.preempt(keys)
        if store is None:
            return None
        try:
            job = self._store(store, gpu_block_ids, keys, after, background)
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

    def finished(self) -> list[Result]:
        """OffloadHandler.finished(). What was stored can be loaded from now on; what failed is
        forgotten. Call it at every step."""
        results = self.handler.finished()
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

    def _check_blocks(self, group: int, blocks: Sequence[int]) -> None:
        count = self.handler.layouts[group].num_blocks
        place = next((i for i, block in enumerate(blocks) if not 0 <= block < count), None)
        if place is not None:
            name = f"{self._pages.name(group)}[{place}]"
            raise IndexError(
                f"{name} is {blocks[place]}; there are {count} GPU blocks, 0 to {count - 1}"
            )

    def _store(
        self, store: Store, gpu_block_ids: Any, keys: Any, after: After, background: bool
    ) -> Job | None:
        if store.id == 0:
            return None

        def move() -> Job:
            blocks = self._pages.select(keys, gpu_block_ids, store.places)
            pages = self._pages.in_pools(store.pages)
            return self.handler.store(blocks, pages, after=after, background=background)

        return self._submit(store, move)

    def _submit(self, job: Load | Store, move: Callable[[], Job]) -> Job:
        try:
            with self._lock:  # finished() may see the end of the job before we have its number
                submitted = move()
                self._jobs[submitted.id] = job
        except BaseException:
            # Nothing was copied: what was to be loaded is what it was.
            (self.manager.complete if isinstance(job, Load) else self.manager.fail)(job)
            raise
        return submitted
