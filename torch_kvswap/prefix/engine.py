"""Offloading by content: a BlockManager and an OffloadHandler behind one interface."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from torch_kvswap._native.arguments import (
    UINT64_MAX,
    Int64Array,
    NotCopyable,
    count_of,
    kind_of,
    read_switch,
)
from torch_kvswap._native.ids import Ids
from torch_kvswap._native.loader import native
from torch_kvswap._native.streams import After
from torch_kvswap.handler import LOADS, STORES, Gate, Job, OffloadHandler, Result
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.prefix.groups import BlockGroup, read_groups
from torch_kvswap.prefix.hashing import DIGEST_BYTES, Keys, read_digests
from torch_kvswap.prefix.lazy import LazyStorePolicy
from torch_kvswap.prefix.manager import (
    BlockManager,
    EventKind,
    LoadReservation,
    Lookup,
    Reservation,
)
from torch_kvswap.prefix.open_jobs import OpenJob, OpenJobs


class _Pools:
    """The pools of a handler: their usable pages, and the conversion of arguments per pool.

    The manager numbers the usable pages of each pool from 0 on.

    Args:
        pools: the host pools.
        is_list (bool): whether keys, ids and pages are lists with one entry per pool.

    Attributes:
        counts (list[int]): usable pages of each pool.
    """

    def __init__(self, pools: Sequence[HostPool], is_list: bool) -> None:
        self._pools = pools
        self._is_list = is_list
        self.counts = [len(pool.local_pages) for pool in pools]

    def check_groups(self, groups: Sequence[BlockGroup] | None) -> None:
        """Raises ValueError if these are not the groups of the pools."""
        count = len(self._pools)
        if groups is None and self._is_list:
            raise ValueError(
                f"groups is None, but the handler has a list of {count} layouts; pass a BlockGroup "
                "for each"
            )
        if groups is not None and not self._is_list:
            raise ValueError(
                "groups is for a handler with a list of layouts; leave it out, or make the handler "
                "from a list of one layout and a list of one pool"
            )
        if groups is not None:
            named = [group.num_pages for group in read_groups(groups)]
            if named != self.counts:
                raise ValueError(
                    f"the groups have {named} pages, their pools {self.counts}; make num_pages the "
                    "number of the pool's local_pages"
                )

    @property
    def ready(self) -> list[int]:
        """How many of these pages are ready by now, per pool."""
        return [pool.num_ready_pages for pool in self._pools]

    def in_pools(self, pages: Any) -> Int64Array | list[Int64Array]:
        """Converts the manager's page numbers to page ids of the pools."""
        split = self._split(pages=pages)
        return self.join([of_pool + pool.local_pages.start for pool, _, of_pool in split])

    def select(self, blocks: Sequence[array[int]], key_indices: Any) -> list[Int64Array]:
        """Selects the GPU blocks of the keys with these indices, per pool."""
        indices = key_indices if self._is_list else [key_indices]
        return list(map(_select, self._pools, blocks, indices))

    def pages_with(self, positions: Sequence[int], blocks: Sequence[Int64Array]) -> list[int]:
        """The positions of the pages that hold some blocks of a job.

        Args:
            positions (Sequence[int]): positions of the blocks, ascending. The blocks of all pools
                count in a row, and so do the pages.
            blocks: the blocks of the job, per pool. All pages are full, except that the last one of
                a pool may have fewer blocks.
        """
        pages: list[int] = []
        first_block, first_page = 0, 0
        for pool, count in zip(self._pools, map(len, blocks), strict=True):
            of_pool = range(first_block, first_block + count)
            pages += [
                first_page + (position - first_block) // pool.blocks_per_page
                for position in positions
                if position in of_pool
            ]
            first_block, first_page = of_pool.stop, first_page - (-count // pool.blocks_per_page)
        return list(dict.fromkeys(pages))

    def read(self, keys: Any, gpu_block_ids: Any) -> tuple[list[bytes], list[array[int]]]:
        """Reads the arguments of a call: the digests and the GPU blocks of each pool."""
        split = self._split(keys=keys, gpu_block_ids=gpu_block_ids)
        digests = [
            read_digests(self.name_of_keys(group), keys)
            for group, (_, _, keys, _) in enumerate(split)
        ]
        blocks = [
            _blocks_of(pool, name, len(of_pool) // DIGEST_BYTES, ids)
            for of_pool, (pool, name, _, ids) in zip(digests, split, strict=True)
        ]
        return digests, blocks

    def keys_on_gpu(
        self, digests: list[bytes], blocks: list[array[int]]
    ) -> tuple[list[bytes], list[array[int]]]:
        """What read() returned, without the keys that have a block of -1."""
        kept = list(map(_keys_on_gpu, self._pools, digests, blocks))
        return [digests for digests, _ in kept], [blocks for _, blocks in kept]

    def check_needed(self, blocks: list[array[int]], needed: range | list[range]) -> None:
        """Raises ValueError if a key of BlockManager.needed_blocks() has a block of -1."""
        several = needed if isinstance(needed, list) else [needed]
        for group, (pool, of_pool, keys) in enumerate(
            zip(self._pools, blocks, several, strict=True)
        ):
            first, end = keys.start * pool.blocks_per_page, keys.stop * pool.blocks_per_page
            if -1 in of_pool[first:end]:
                at = of_pool.index(-1, first)
                raise ValueError(
                    f"{self.name_of_blocks(group)}[{at}] is -1, but what follows the prefix needs "
                    "this block; pass a GPU block for each block of manager.needed_blocks(prefix)"
                )

    def keys(self, digests: list[bytes]) -> Any:
        """The keys in the form in which a caller passes them."""
        return digests if self._is_list else digests[0]

    def read_blocks(self, gpu_block_ids: Any) -> list[array[int]]:
        """The GPU blocks of each pool."""
        split = self._split(gpu_block_ids=gpu_block_ids)
        return [native.read_ids(name, ids) for _, name, ids in split]

    def only(self, group: int, value: Any) -> Any:
        """An argument that has `value` for one group and is empty for the others."""
        if not self._is_list:
            return value
        return [value if index == group else [] for index in range(len(self._pools))]

    def name_of_keys(self, group: int) -> str:
        """What errors call the argument with the keys of a group."""
        return f"keys[{group}]" if self._is_list else "keys"

    def name_of_blocks(self, group: int) -> str:
        """What errors call the argument with the GPU blocks of a group."""
        return f"gpu_block_ids[{group}]" if self._is_list else "gpu_block_ids"

    def _split(self, **arguments: Any) -> list[tuple[Any, ...]]:
        """For each pool: the pool, the name of its GPU blocks, and its part of each argument."""
        if not self._is_list:
            return [(self._pools[0], self.name_of_blocks(0), *arguments.values())]
        count = len(self._pools)
        for name, of_pools in arguments.items():
            if isinstance(of_pools, bytes | str) or not isinstance(of_pools, Sequence):
                raise TypeError(
                    f"{name} is {kind_of(of_pools)}; pass a list with an item for each group"
                )
            if len(of_pools) != count:
                raise ValueError(
                    f"{name} has {count_of(len(of_pools), 'item')} for {count_of(count, 'group')}; "
                    "pass one for each group"
                )
        names = map(self.name_of_blocks, range(count))
        return list(zip(self._pools, names, *arguments.values(), strict=True))

    def join(self, of_pools: list[Int64Array]) -> Int64Array | list[Int64Array]:
        """Joins the parts of all pools into the form in which the caller passes ids."""
        return of_pools if self._is_list else of_pools[0]


def _blocks_of(pool: HostPool, name: str, count: int, ids: Ids) -> array[int]:
    """The GPU blocks: blocks_per_page for each of `count` keys; the last may have fewer."""
    blocks: array[int] = native.read_ids(name, ids)
    per_page = pool.blocks_per_page
    if -(-len(blocks) // per_page) != count:
        raise ValueError(
            f"{name} has {count_of(len(blocks), 'id')} for {count_of(count, 'key')} of "
            f"{count_of(per_page, 'block')} each; pass one for each block of all keys, -1 for a "
            "block that is not on the GPU"
        )
    return blocks


def _check_blocks(name: str, count: int, blocks: array[int]) -> bool:
    """Checks that each block is one of the cache's `count` blocks, or -1.

    Returns:
        bool: whether one is -1.

    Raises:
        IndexError: one is neither.
    """
    numbers = np.frombuffer(blocks, np.uint64)  # a negative number is larger than any block's
    if not len(numbers) or numbers.max() < count:
        return False
    wrong = (numbers >= count) & (numbers != UINT64_MAX)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise IndexError(
            f"{name}[{at}] is {blocks[at]}; there are {count} GPU blocks, 0 to {count - 1}, and -1 "
            "is a block that is not on the GPU"
        )
    return True


def _check_distinct(name: str, blocks: array[int]) -> None:
    """Raises ValueError if a block occurs twice, such as a placeholder for missing ones."""
    numbers = np.sort(np.frombuffer(blocks, np.int64))
    twice = numbers[1:][(numbers[1:] == numbers[:-1]) & (numbers[1:] >= 0)]
    if len(twice):
        block = int(twice[0])
        first = blocks.index(block)
        second = blocks.index(block, first + 1)
        raise ValueError(
            f"{name}[{first}] and {name}[{second}] are both {block}, but no block has the contents "
            "of two; pass -1 for blocks that are not on the GPU"
        )


def _keys_on_gpu(pool: HostPool, digests: bytes, blocks: array[int]) -> tuple[bytes, array[int]]:
    """Leaves out the keys with a block of -1, and the blocks of these keys."""
    per_page = pool.blocks_per_page
    rows = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
    left_out = np.flatnonzero(np.frombuffer(blocks, np.int64) == -1) // per_page
    kept = np.delete(np.arange(len(rows)), left_out)
    return rows[kept].tobytes(), array("q", _select(pool, blocks, kept).tobytes())


def _check_distinct_keys(name: str, digests: bytes) -> None:
    """Raises ValueError if a key occurs twice; BlockManager.prepare_store() would, too."""
    first: dict[bytes, int] = {}
    for index in range(len(digests) // DIGEST_BYTES):
        key = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if (before := first.setdefault(key, index)) != index:
            raise ValueError(
                f"{name}[{index}] is the same key as {name}[{before}]; name a block once"
            )


def _select(pool: HostPool, blocks: array[int], key_indices: Any) -> Int64Array:
    """The GPU blocks of the keys with these indices."""
    numbers, per_page = np.frombuffer(blocks, np.int64), pool.blocks_per_page
    slots = np.asarray(key_indices, np.int64)[:, None] * per_page + np.arange(per_page)
    selected: Int64Array = numbers[slots[slots < len(numbers)]]
    return selected


class _Prompt(NamedTuple):
    """The arguments of a store, per pool.

    Attributes:
        digests (list[bytes]): of the keys whose blocks are on the GPU.
        blocks (list[array]): the GPU blocks of these keys.
        named (list[array]): all blocks that the caller has named; some may be -1.
    """

    digests: list[bytes]
    blocks: list[array[int]]
    named: list[array[int]]


class Preempted(NamedTuple):
    """A preempted request, from OffloadEngine.preempt(); ends with OffloadEngine.release().

    Attributes:
        jobs (list[Job]): the stores that still read the GPU blocks: earlier ones, and the new one
            unless the host has all blocks. The GPU blocks must not change until these have ended.
        lease (int): keeps the blocks on the host.
    """

    jobs: list[Job]
    lease: int


class OffloadEngine(NotCopyable):
    """What a scheduler calls to offload blocks by content: lookup(), load(), store() and poll().

    Combines a BlockManager with an OffloadHandler. A key stands for the contents of one page, that
    is, of `blocks_per_page` GPU blocks. Pools may be pinned in the background: pages are used as
    soon as they are ready.

    The engine assigns all pages of its handler: the handler's own store(), load() and poll() raise
    as long as the engine exists. Its gate(), cancel(), synchronize(), metrics() and rebind() may be
    used. A handler has one engine at a time. The engine holds the handler, but does not close it:
    close the handler when the engine is no longer used.

    Any thread may call any method. An engine cannot be copied or pickled.

    Args:
        handler (OffloadHandler): copies the blocks.
        groups (Sequence[BlockGroup] | None): for a handler with a list of layouts, one BlockGroup
            per layout; num_pages must be the number of the pool's local_pages.
        store_policy (str): "eager" stores at once; "lazy" stores blocks when evict() says that they
            leave the GPU cache.
        eviction_policy, store_threshold, events, clock: see BlockManager.

    Attributes:
        handler (OffloadHandler): the handler.
        manager (BlockManager): the bookkeeping. Its stats(), events(), touch(), order(), lease()
            and reset() may be used; leave reservations to the engine.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, the groups do not match the handler, or the handler
            has an engine already.
        RuntimeError: the handler is closed.
    """

    def __init__(
        self,
        handler: OffloadHandler,
        groups: Sequence[BlockGroup] | None = None,
        *,
        store_policy: Literal["eager", "lazy"] = "eager",
        eviction_policy: str = "lru",
        store_threshold: int = 1,
        events: bool | Collection[EventKind] = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not hasattr(handler, "pools"):
            raise TypeError(f"handler is {kind_of(handler)}; pass an OffloadHandler")
        if store_policy not in ("eager", "lazy"):
            raise ValueError(f"store_policy is {store_policy!r}; it can be eager or lazy")
        self.handler = handler
        self._pools = _Pools(handler.pools, handler._native.groups.is_list)
        self._pools.check_groups(groups)
        self._ready = self._pools.ready
        self.manager = BlockManager(
            self._pools.counts[0] if groups is None else groups,
            num_ready_pages=self._ready,
            eviction_policy=eviction_policy,
            store_threshold=store_threshold,
            events=events,
            clock=clock,
        )
        pools = handler.pools if store_policy == "lazy" else ()
        self._lazy = [LazyStorePolicy(pool.blocks_per_page) for pool in pools]  # empty if eager
        self._lock = threading.Lock()  # of _lazy and _open
        self._open = OpenJobs(handler)
        handler._assign_pages_to(self)

    def __repr__(self) -> str:
        return (
            f"OffloadEngine(store_policy='{'lazy' if self._lazy else 'eager'}', "
            f"handler={self.handler!r}, manager={self.manager!r})"
        )

    def lookup(self, keys: Keys | Sequence[Keys], *, again: bool = False) -> Lookup:
        """Finds the longest cached prefix.

        Args:
            keys, again: see BlockManager.lookup().
        """
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
        """Loads the blocks of the keys.

        Work that uses the blocks must wait for the job. If the load fails, poll() forgets its
        blocks, and lookups no longer find them. If it fails with rejected blocks
        (Result.rejected), the other blocks are loaded, and only those pages are forgotten.

        Args:
            keys: keys of a prompt's blocks, as in BlockManager.
            gpu_block_ids: a destination for each block of all keys. With `prefix`, -1 stands for a
                block that it leaves out. Without, a key that has a -1 is not loaded.
            prefix (int | None): only the blocks needed after a prefix of this length, in units,
                such as `Lookup.ready`: see BlockManager.needed_blocks(). None is all keys.
            after, layer_groups, expedited, gate, copy_engines_only, tag: see OffloadHandler.load().

        Returns:
            Job | None: None if a block is not ready.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError, MemoryError: see OffloadHandler.load()
                and BlockManager.prepare_load(). Nothing is held then.
        """
        # Here, because a wrong argument is refused also if nothing is copied.
        expedited = read_switch("expedited", expedited)
        copy_engines_only = read_switch("copy_engines_only", copy_engines_only)
        digests, blocks = self._pools.read(keys, gpu_block_ids)
        if self._check_gpu_blocks(blocks):
            if prefix is None:
                digests, blocks = self._pools.keys_on_gpu(digests, blocks)
            else:
                self._pools.check_needed(blocks, self.manager.needed_blocks(prefix))
        load = self.manager.prepare_load(self._pools.keys(digests), prefix)
        if load is None:
            self.handler._check_options(after, layer_groups, gate)
            return None
        return self._submit(
            load,
            blocks,
            named=(),
            after=after,
            layer_groups=layer_groups,
            expedited=expedited,
            gate=gate,
            copy_engines_only=copy_engines_only,
            tag=tag,
        )

    def store(
        self,
        keys: Keys | Sequence[Keys],
        gpu_block_ids: Ids | Sequence[Ids],
        *,
        after: After = None,
        copy_engines_only: bool = False,
        tag: object = None,
    ) -> Job | None:
        """Stores the blocks that the host does not have.

        The blocks must not change until the job has ended: see evict(). They can be loaded after
        poll() has reported it, except rejected ones (Result.rejected), which are not stored. With a
        lazy store policy the blocks are only recorded, for evict().

        The model computed new blocks from those before them. If a load into one of the named blocks
        fails that poll() has not reported when store() is called, the new blocks are forgotten too,
        unless poll() has reported this store by then. It has not if the store starts after the
        load, as behind `Job.wait`.

        Args:
            keys: keys of a prompt's blocks, in order.
            gpu_block_ids: the blocks of all keys, each once; -1 for a block that is not on the GPU,
                because a load with `prefix` left it out or it has left a window and was reused. A
                key with a -1 is not stored.
            after, copy_engines_only, tag: see OffloadHandler.store(). With a lazy store policy,
                evict() takes the first two, and its jobs have no tags.

        Returns:
            Job | None: None if nothing was stored. With a lazy store policy that is always so.
                Otherwise `manager.stats()` says why: `refused` has risen if there was not enough
                room, `skipped` if store_threshold left blocks out. If neither has, the host has all
                blocks, or is storing them.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError, MemoryError: see OffloadHandler.store()
                and BlockManager.prepare_store(). Nothing is held then.
        """
        copy_engines_only = read_switch("copy_engines_only", copy_engines_only)
        if self._lazy:
            if after is not None or copy_engines_only:
                raise TypeError(
                    'with store_policy="lazy", pass after and copy_engines_only to evict()'
                )
            self._record_computed(keys, gpu_block_ids)
            return None
        return self._store(
            self._read(keys, gpu_block_ids),
            after=after,
            copy_engines_only=copy_engines_only,
            tag=tag,
        )

    def evict(
        self,
        gpu_block_ids: Ids | Sequence[Ids],
        *,
        after: After = None,
        copy_engines_only: bool = False,
    ) -> list[Job]:
        """Returns the stores that must end before these GPU blocks are reused.

        Call it before blocks are reused; `Job.wait` orders that on a stream. With a lazy store
        policy it first stores the blocks and all blocks before them, except blocks that the host
        has no room for. If it raises, no block has left: call it again, and it continues.

        Args:
            gpu_block_ids: the blocks that leave; -1 is none.
            after, copy_engines_only: see OffloadHandler.store(), for a lazy store policy.

        Returns:
            list[Job]: the stores that were started, and earlier ones that still read these blocks.

        Raises:
            IndexError: the cache has no such block.
            TypeError, ValueError, RuntimeError, MemoryError: see OffloadHandler.store().
        """
        self.handler._native.check_process()  # a fork may have the lock, held forever
        copy_engines_only = read_switch("copy_engines_only", copy_engines_only)
        leaving = self._pools.read_blocks(gpu_block_ids)
        self._check_gpu_blocks(leaving)
        started: list[Job] = []
        for group, lazy in enumerate(self._lazy):
            with self._lock:
                chains = lazy.chains_of(leaving[group])
            for chain in chains:
                keys, ids = (self._pools.only(group, its) for its in chain)
                digests, blocks = self._pools.read(keys, ids)
                job = self._store(
                    _Prompt(digests, blocks, blocks),
                    after=after,
                    copy_engines_only=copy_engines_only,
                    tag=None,
                )
                if job is not None:
                    started.append(job)
        with self._lock:
            for group, lazy in enumerate(self._lazy):
                lazy.forget(leaving[group])
        return self._jobs_reading(leaving, started)

    def preempt(
        self,
        keys: Keys | Sequence[Keys],
        gpu_block_ids: Ids | Sequence[Ids],
        *,
        after: After = None,
        copy_engines_only: bool = False,
        tag: object = None,
    ) -> Preempted | None:
        """Stores all blocks of a request and keeps them on the host until release().

        To restore the request, call load(), then release(), which may follow at once: the load
        holds the pages until it has ended. If load() returns None and
        `lookup(keys, again=True).pending` is not 0, try again after a later poll(). Otherwise the
        blocks are lost, for example because their store failed: call release() and compute them
        again. poll() reports a load that fails later.

        Args:
            keys: keys of all blocks of the request, in order. PrefixHasher.partial_key() makes the
                last one if that block is partly filled. Pass the same keys to load().
            gpu_block_ids: GPU blocks of all keys, as in store(). Where one is -1, pass -1 to load()
                too.
            after, copy_engines_only, tag: see OffloadHandler.store().

        Returns:
            Preempted | None: None if there is not enough room. Each other result needs one
                release().
        """
        copy_engines_only = read_switch("copy_engines_only", copy_engines_only)
        prompt = self._read(keys, gpu_block_ids)
        self.handler._check_options(after)
        self._grow()
        store = self.manager.preempt(self._pools.keys(prompt.digests))
        if store is None:
            return None
        started = []
        try:
            if store.id:
                job = self._submit(
                    store,
                    prompt.blocks,
                    prompt.named,
                    after=after,
                    copy_engines_only=copy_engines_only,
                    tag=tag,
                )
                started.append(job)
        except BaseException:
            self.manager.release(store)
            raise
        return Preempted(self._jobs_reading(prompt.named, started), store.lease)

    def release(self, preempted: Preempted) -> bool:
        """Lets the blocks of a preempted request be evicted.

        Args:
            preempted (Preempted): from preempt().

        Returns:
            bool: False if they were not held any more.

        Raises:
            TypeError: preempted is something else.
        """
        if not isinstance(preempted, Preempted):
            raise TypeError(f"preempted is {kind_of(preempted)}; pass what preempt() returned")
        return self.manager.release(preempted.lease)

    def poll(self, timeout: float | None = 0.0) -> list[Result]:
        """Reports ended jobs, as OffloadHandler.poll(). Call it in every scheduler step.

        Each job is reported once, to one caller. Stored blocks can be loaded from now on. Blocks of
        failed jobs are forgotten; of a job with rejected blocks (Result.rejected) only the pages
        with these are, and all other blocks were stored or loaded. If a load was not done, the new
        blocks of every store() that named one of its blocks before this call, and was not reported
        before the load, are forgotten too: they may have been computed from blocks that were not
        loaded. Such a store is reported as done if its copy is. A store that starts after the load
        is never reported before it.

        Args:
            timeout (float | None): as in OffloadHandler.poll().
        """
        handler = self.handler
        handler._read_ended(self._end, timeout)
        # Nothing is called from here on, so that Ctrl-C comes before or after.
        results, handler._ended = handler._ended, []
        return results

    def _end(self, result: Result, entry: OpenJob) -> None:
        """Ends the reservation of a job that has ended. Called again if it was interrupted."""
        if entry.manager is not self.manager:
            return  # of an engine that the handler had before
        with self._lock:
            if entry.is_load and not result.ok:
                for recorded in self._open.spoil(entry):
                    for lazy, blocks in zip(self._lazy, recorded, strict=True):
                        lazy.forget(blocks)
            self._open.remove(entry)
        is_again, entry.is_ending = entry.is_ending, True
        try:
            if entry.is_spoiled:
                self.manager.fail(entry.reservation)
            elif result.ok or (result.state == "cancelled" and entry.is_load):
                self.manager.complete(entry.reservation)
            elif result.rejected:
                pages = self._pools.pages_with(result.rejected, entry.blocks)
                self.manager.complete(entry.reservation, pages)
            else:
                self.manager.fail(entry.reservation)
        except ValueError:  # it had ended when the call before was interrupted
            if not is_again:
                raise

    def _grow(self) -> None:
        """Lets the manager use the pages that are ready by now. Any thread may call."""
        if self._ready != self._pools.counts:
            ready = self._pools.ready
            self.manager.grow(ready)
            self._ready = ready

    def _record_computed(self, keys: Any, gpu_block_ids: Any) -> None:
        """Records the keys of the GPU blocks, for evict()."""
        self.handler._native.check_process()  # a fork may have the lock, held forever
        prompt = self._read(keys, gpu_block_ids)
        for group, digests in enumerate(prompt.digests):
            _check_distinct_keys(self._pools.name_of_keys(group), digests)
        with self._lock:
            self._open.record(prompt.named)
            for lazy, digests, blocks in zip(
                self._lazy, prompt.digests, prompt.blocks, strict=True
            ):
                lazy.record(digests, blocks)

    def _read(self, keys: Any, gpu_block_ids: Any) -> _Prompt:
        """Reads the arguments of a store. Checks all blocks: the handler sees only new ones."""
        digests, named = self._pools.read(keys, gpu_block_ids)
        some_left_out = self._check_gpu_blocks(named)
        for group, blocks in enumerate(named):
            _check_distinct(self._pools.name_of_blocks(group), blocks)
        if not some_left_out:
            return _Prompt(digests, named, named)
        return _Prompt(*self._pools.keys_on_gpu(digests, named), named)

    def _jobs_reading(self, blocks: Sequence[array[int]], started: Sequence[Job]) -> list[Job]:
        """The earlier stores that still read one of these blocks, and the ones just started."""
        with self._lock:
            reading = self._open.stores_reading(blocks)
        return [*(job for job in reading if job not in started), *started]

    def _check_gpu_blocks(self, several: Sequence[array[int]]) -> bool:
        """Whether one of the GPU blocks is -1. Raises IndexError if one does not exist."""
        return any(
            [  # a list: all are checked
                _check_blocks(self._pools.name_of_blocks(group), layout.num_blocks, blocks)
                for group, (layout, blocks) in enumerate(
                    zip(self.handler.layouts, several, strict=True)
                )
            ]
        )

    def _store(self, prompt: _Prompt, **options: Any) -> Job | None:
        """Stores the blocks that the host does not have; None if there are none, or no room.

        Args:
            prompt (_Prompt): all keys and blocks.
            **options: see _submit().
        """
        self._grow()
        store = self.manager.prepare_store(self._pools.keys(prompt.digests))
        if store is None or store.id == 0:
            self.handler._check_options(options["after"])
            return None
        return self._submit(store, prompt.blocks, prompt.named, **options)

    def _submit(
        self,
        reservation: Reservation,
        blocks: Sequence[array[int]],
        named: Sequence[array[int]],
        **options: Any,
    ) -> Job:
        """Submits the job that the pages are reserved for, and records it for poll().

        Ends the reservation if the job cannot be submitted.

        Args:
            reservation (Reservation): from the manager.
            blocks: the GPU blocks of all keys, per pool.
            named: of a store, all blocks that the caller has named, per pool.
            **options: of the handler's load() or store(), without ids.
        """
        is_load = isinstance(reservation, LoadReservation)
        channel = LOADS if is_load else STORES
        entry = None
        try:
            selected = self._pools.select(blocks, reservation.key_indices)
            ids = self._pools.join(selected), self._pools.in_pools(reservation.pages), 0
            entry = OpenJob(self.manager, reservation, selected)
            with self._lock:
                try:
                    self._open.add(entry, named)
                    return self.handler._submit(channel, ids, reserved=entry, **options)
                finally:
                    if not entry.is_submitted:
                        self._open.undo(entry)
        except BaseException:
            if entry is None or not entry.is_submitted:
                # Nothing was copied, so the pages of a load are still valid.
                (self.manager.complete if is_load else self.manager.fail)(reservation)
            raise
