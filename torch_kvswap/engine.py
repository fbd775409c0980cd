"""What a scheduler calls: blocks that are looked up, loaded and stored by what is in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_kvswap.block_groups import BlockGroup
from torch_kvswap.block_manager import BlockManager
from torch_kvswap.block_results import Load, Lookup, Store
from torch_kvswap.handler import OffloadHandler
from torch_kvswap.ids import Ids, read_ids
from torch_kvswap.job import Job
from torch_kvswap.native_blocks import Keys, read_digests
from torch_kvswap.prefix_hash import DIGEST_BYTES
from torch_kvswap.result import Result


class Preempted(NamedTuple):
    """job: until it has ended the GPU blocks must not change; None when the host has them all.
    lease: ends with OffloadEngine.release()."""

    job: Job | None
    lease: int


class OffloadEngine:
    """A BlockManager and an OffloadHandler that do what a scheduler needs in four calls: lookup(),
    load(), store() and finished().

    groups: for a handler with several layouts a BlockGroup for each, with as many pages as its
    pool. A key stands for what one page holds, `blocks_per_page` GPU blocks. The rest goes to
    BlockManager. Nobody else may use the handler's pages, or call its finished(). The engine holds
    the handler, and closes nothing: close the handler, when all is done.

    Any thread may call any method.
    """

    def __init__(
        self, handler: OffloadHandler, groups: Sequence[BlockGroup] | None = None, **options: Any
    ) -> None:
        self.handler = handler
        pages = [pool.num_pages for pool in handler.pools]
        self._is_list = handler.native.groups.is_list
        if (groups is not None) != self._is_list:
            raise ValueError("a handler with a list of layouts, and no other, takes groups")
        if groups is not None and [group.num_pages for group in groups] != pages:
            named = [group.num_pages for group in groups]
            raise ValueError(f"the groups have {named} pages, their pools {pages}")
        self.manager = BlockManager(pages[0] if groups is None else groups, **options)
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
            blocks = self._select(keys, gpu_block_ids, load.places)
            return self.handler.load(load.pages, blocks, **options)

        return self._submit(load, move)

    def store(
        self, keys: Keys | Sequence[Keys], gpu_block_ids: Ids | Sequence[Ids], **options: Any
    ) -> Job | None:
        """Stores what the host has not; None when that is nothing, or more than there is room for.

        gpu_block_ids: of all the keys. options: of OffloadHandler.store(). Until the job has ended
        the blocks must not change. They can be loaded when finished() has reported it.
        """
        store = self.manager.prepare_store(keys)
        return self._store(store, gpu_block_ids, keys, options) if store else None

    def preempt(
        self, keys: Keys | Sequence[Keys], gpu_block_ids: Ids | Sequence[Ids], **options: Any
    ) -> Preempted | None:
        """store(), of blocks that stay until release() is called; None when there is no room. To
        take them back: load(), then release()."""
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

    def _store(self, store: Store, gpu_block_ids: Any, keys: Any, options: Any) -> Job | None:
        if store.id == 0:
            return None

        def move() -> Job:
            blocks = self._select(keys, gpu_block_ids, store.places)
            return self.handler.store(blocks, store.pages, **options)

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

    def _select(self, keys: Any, gpu_block_ids: Any, places: Any) -> Any:
        """The GPU blocks of those keys."""
        if not self._is_list:
            pool = self.handler.pools[0]
            return _select("gpu_block_ids", keys, gpu_block_ids, places, pool.blocks_per_page)
        if len(gpu_block_ids) != len(self.handler.pools):
            raise ValueError(f"gpu_block_ids must have a list for each of {len(places)} groups")
        several = zip(keys, gpu_block_ids, places, self.handler.pools, strict=True)
        return [
            _select(f"gpu_block_ids[{group}]", its_keys, ids, its_places, pool.blocks_per_page)
            for group, (its_keys, ids, its_places, pool) in enumerate(several)
        ]


def _select(name: str, keys: Keys, ids: Ids, places: Any, per_page: int) -> npt.NDArray[np.int64]:
    """Of the blocks of all keys, `per_page` of each, those of some; the last key may have fewer."""
    blocks = np.frombuffer(read_ids(name, ids), np.int64)
    count = len(read_digests("keys", keys)) // DIGEST_BYTES
    if -(-len(blocks) // per_page) != count:
        raise ValueError(f"{name} has {len(blocks)} ids for {count} keys of {per_page} blocks each")
    slots = np.asarray(places, np.int64)[:, None] * per_page + np.arange(per_page)
    selected: npt.NDArray[np.int64] = blocks[slots[slots < len(blocks)]]
    return selected
