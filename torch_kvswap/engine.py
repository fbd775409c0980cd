"""What a scheduler calls: blocks that are looked up, loaded and stored by what is in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch_kvswap.block_groups import BlockGroup
from torch_kvswap.block_manager import BlockManager
from torch_kvswap.block_results import Load, Lookup, Store
from torch_kvswap.digests import Keys
from torch_kvswap.engine_pages import EnginePages
from torch_kvswap.handler import OffloadHandler
from torch_kvswap.ids import Ids
from torch_kvswap.job import Job
from torch_kvswap.result import Result
from torch_kvswap.storing import LazyStoring


class Preempted(NamedTuple):
    """job: until it has ended the GPU blocks must not change; None when the host has them all.
    lease: ends with OffloadEngine.release()."""

    job: Job | None
    lease: int


class OffloadEngine:
    """A BlockManager and an OffloadHandler that do what a scheduler needs in four calls: lookup(),
    load(), store() and finished().

    groups: for a handler with several layouts a BlockGroup for each, with as many pages as its pool
    has own_pages. A key stands for what one page holds, `blocks_per_page` GPU blocks. storing:
    "eager", at once; "lazy", what is about to leave the GPU cache, which evict() says. The other
    options are BlockManager's. Pools may be pinned in the background: pages are used as soon as
    they are ready. Nobody else may use the handler's pages, or call its finished(). The engine
    holds the handler, and closes nothing: close the handler, when all is done.

    Any thread may call any method.
    """

    def __init__(
        self,
        handler: OffloadHandler,
        groups: Sequence[BlockGroup] | None = None,
        *,
        storing: Literal["eager", "lazy"] = "eager",
        **options: Any,
    ) -> None:
        if storing not in ("eager", "lazy"):
            raise ValueError(f"storing is {storing!r}; it can be eager or lazy")
        self.handler = handler
        self._pages = EnginePages(handler.pools, handler.native.groups.is_list)
        counts = self._pages.counts
        if (groups is not None) != handler.native.groups.is_list:
            raise ValueError("a handler with a list of layouts, and no other, takes groups")
        if groups is not None and [group.num_pages for group in groups] != counts:
            named = [group.num_pages for group in groups]
            raise ValueError(f"the groups have {named} pages, their pools {counts}")
        self._ready = self._pages.ready
        self.manager = BlockManager(
            counts[0] if groups is None else groups, ready_pages=self._ready, **options
        )
        pools = handler.pools if storing == "lazy" else ()
        self._lazy = [LazyStoring(pool.blocks_per_page) for pool in pools]
        self._lock = threading.Lock()
        self._jobs: dict[int, Load | Store] = {}

    def lookup(self, keys: Keys | Sequence[Keys], *, again: bool = False) -> Lookup:
        """BlockManager.lookup()."""
        return self.manager.lookup(keys, again=again)

    def load(
        self,
        keys: Keys | Sequence[Keys],
        gpu_block_ids: Ids | Sequence[Ids],
        prefix: int | None = None,
        **options: Any,
    ) -> Job | None:
        """Loads what the keys stand for, None when some of it is not ready.

        gpu_block_ids: of all the keys; where it goes. prefix: only what is needed behind a prefix
        of this length, such as `Lookup.ready`. options: of OffloadHandler.load(). Whoever uses the
        blocks waits for the job; one that fails is forgotten by finished(), and looked up no more.
        """
        load = self.manager.prepare_load(keys, prefix)
        if load is None:
            return None

        def move() -> Job:
            blocks = self._pages.select(keys, gpu_block_ids, load.places)
            return self.handler.load(self._pages.in_pools(load.pages), blocks, **options)

        return self._submit(load, move)

    def store(
        self, keys: Keys | Sequence[Keys], gpu_block_ids: Ids | Sequence[Ids], **options: Any
    ) -> Job | None:
        """Stores what the host has not; None when that is nothing, or more than there is room for.

        gpu_block_ids: of all the keys. options: of OffloadHandler.store(). Until the job has ended
        the blocks must not change. They can be loaded when finished() has reported it. With lazy
        storing this is noted, None, and what evict() stores; the options are given there.
        """
        if not self._lazy:
            self._grow()
            store = self.manager.prepare_store(keys)
            return self._store(store, gpu_block_ids, keys, options) if store else None
        if options:
            raise TypeError(f"with lazy storing evict() takes the options {', '.join(options)}")
        computed = self._pages.read(keys, gpu_block_ids)
        with self._lock:
            for lazy, (digests, blocks) in zip(self._lazy, computed, strict=True):
                lazy.computed(digests, blocks)
        return None

    def evict(self, gpu_block_ids: Ids | Sequence[Ids], **options: Any) -> list[Job]:
        """With lazy storing stores what leaves the GPU, with all that is before it. Call it before
        any GPU block is given to others, and let none change until these jobs have ended, such as
        by Job.wait_on(). What there is no room for is not stored. options: of
        OffloadHandler.store(). With eager storing there is nothing to do."""
        leaving, jobs = self._pages.read_blocks(gpu_block_ids), []
        for group, lazy in enumerate(self._lazy):
            with self._lock:
                chains = lazy.evicting(leaving[group])
            for chain in chains:
                keys, blocks = (self._pages.only(group, its) for its in chain)
                self._grow()
                store = self.manager.prepare_store(keys)
                jobs.append(self._store(store, blocks, keys, options) if store else None)
        return [job for job in jobs if job is not None]

    def preempt(
        self, keys: Keys | Sequence[Keys], gpu_block_ids: Ids | Sequence[Ids], **options: Any
    ) -> Preempted | None:
        """store(), of blocks that stay until release() is called; None when there is no room. To
        take them back: load(), then release()."""
        self._grow()
        store = self.manager.preempt(keys)
        if store is None:
            return None
        try:
            return Preempted(self._store(store, gpu_block_ids, keys, options), store.lease)
        except BaseException:
            self.manager.release(store)
            raise

    def release(self, preempted: Preempted) -> bool:
        """Whether its blocks were still held."""
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

    def _store(self, store: Store, gpu_block_ids: Any, keys: Any, options: Any) -> Job | None:
        if store.id == 0:
            return None

        def move() -> Job:
            blocks = self._pages.select(keys, gpu_block_ids, store.places)
            return self.handler.store(blocks, self._pages.in_pools(store.pages), **options)

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
