"""Offloading by content: a BlockManager and an OffloadHandler behind one interface."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, Literal, NamedTuple

from torch_kvswap._C import Reservation
from torch_kvswap._native.arguments import (
    NotCopyable,
    kind_of,
    read_switch,
)
from torch_kvswap._native.ids import Ids
from torch_kvswap._native.log import log
from torch_kvswap.below.format import PageFormat
from torch_kvswap.below.read_store import read_store, without_store
from torch_kvswap.below.store import PageStore
from torch_kvswap.copy_method import AUTO, DEFAULT_STAGING_BYTES
from torch_kvswap.encoding.slot import EncodingName, VerifyName
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shape import check_layout
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.groups import Groups, in_tuples
from torch_kvswap.offload.handler import LOADS, STORES, Job, OffloadHandler
from torch_kvswap.offload.metrics import Metrics
from torch_kvswap.offload.streams import After
from torch_kvswap.prefix.block_groups import BlockGroup, describe_contents, read_layer_groups
from torch_kvswap.prefix.hashing import KEY_BYTES, Keys
from torch_kvswap.prefix.manager import BelowPolicy, BlockManager, BlockStats, Lookup, needed_blocks
from torch_kvswap.prefix.reader import ArgumentReader, Prompt
from torch_kvswap.prefix.remote_manager import RemoteManager
from torch_kvswap.prefix.remote_pools import RemotePools, describe, read_model
from torch_kvswap.prefix.session import Session
from torch_kvswap.prefix.tier import BelowStats, Tier
from torch_kvswap.results import Result

_PAUSE = 0.001  # seconds that poll() waits for what others may bring


class Stored(NamedTuple):
    """What PrefixCache.store() has done.

    Attributes:
        state (str): "storing" with the job; "present" if the host has all blocks, or is storing
            them for an earlier call; "full" if there is not enough room, so that no block is
            stored.
        job (Job | None): the copy, if the state is "storing".
        lease (Reservation | None): with hold=True, unless the state is "full": keeps the blocks of
            all keys without a -1 on the host until its let_go(), or until it is dropped.
    """

    state: Literal["storing", "present", "full"]
    job: Job | None = None
    lease: Reservation | None = None


def _check_distinct_pools(pools: Sequence[HostPool]) -> None:
    for later, pool in enumerate(pools):
        for earlier in range(later):
            if pools[earlier]._memory is pool._memory:
                raise ValueError(
                    f"host[{earlier}] and host[{later}] are the same pages, and a PrefixCache "
                    "assigns all pages of each; make a pool for each group"
                )


def _page_formats(
    pools: Sequence[HostPool], groups: Sequence[BlockGroup], model: object
) -> list[PageFormat]:
    """The formats of the pools' pages. Raises what a PrefixCache does for a wrong argument."""
    contents = describe_contents(groups, *read_model("below_model", model))
    formats = []
    for pool, of_group in zip(pools, contents, strict=True):
        if pool.num_parts > 1:
            raise ValueError(
                f"the pool has a part of each page for {pool.num_parts} ranks, but a second tier "
                "needs whole pages; make the pool without part"
            )
        if pool._shape.page_room < pool.page_bytes:
            raise ValueError(
                f"the pool has only {pool._shape.page_room} of each {pool.page_bytes} bytes of "
                "its memory, but a second tier needs whole pages; make it over memory where no "
                "bytes of others lie between the pages"
            )
        formats.append(PageFormat(pool, of_group))
    return formats


def _close_served(handler: OffloadHandler, manager: RemoteManager) -> None:
    """Waits for all jobs, leaves the server, and frees its memory here."""
    if handler._native.is_current_process:  # a forked child has none of them
        handler.close()
        manager._session.close()
        manager._pools.close()


class PrefixCache(NotCopyable):
    """Keeps the blocks of prompts in host memory, and finds them again by their tokens.

    Combines a BlockManager with an OffloadHandler of its own. A key stands for the contents of one
    page, that is, of `blocks_per_page` GPU blocks. Keys are what a BlockManager takes, except int:
    otherwise a list of tokens could be mistaken for keys. A prefix cache assigns all pages of its
    pools: they take no other handler until it is closed or dropped. Pools may be pinned in the
    background; pages are used as soon as they are ready.

    Any thread may call any method. A prefix cache cannot be copied or pickled.

    Lifetime: a context manager that closes it on exit; see OffloadHandler.

    Args:
        gpu, host: the cache and its host pools; see OffloadHandler.
        groups (Sequence[BlockGroup] | None): for a list of layouts, one BlockGroup per layout;
            num_pages must be the pool's.
        eviction_policy: see BlockManager.
        copy_method, staging_bytes, relays: see OffloadHandler.
        below (str | os.PathLike | PageStore | None): a second tier, which other processes may
            share: `"file:PATH"` or a pathlib.Path, `"valkey://HOST:PORT"`,
            `"mooncake://HOST:PORT"`, or a PageStore, which close() closes. If the constructor
            raises, the PageStore stays open. Pages are written without waiting for their eviction.
            Needs the package xxhash. See docs/below.md.
        below_model (str | tuple[str, int, int] | None): names the model, its revision, and the
            order of axes of equal size; required with `below`, even if the keys cover the same. For
            a part of the model, (name, rank of this process, number of ranks). See docs/below.md.
        below_policy (str): "reused" writes pages that were loaded or touched since they were
            stored; "all" writes all.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, the groups do not match the pools, or a pool has
            another open handler.
        RuntimeError: a pool is closed, or a tensor of a layout has moved.
        ImportError: `below` needs the package xxhash.
        OSError: the folder of `below` cannot be made.
    """

    _manager: BlockManager | RemoteManager

    def __init__(
        self,
        gpu: PagedLayout | Sequence[PagedLayout],
        host: HostPool | Sequence[HostPool],
        groups: Sequence[BlockGroup] | None = None,
        *,
        eviction_policy: str = "lru",
        copy_method: str = AUTO,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        relays: Sequence[int] = (),
        below: str | os.PathLike[str] | PageStore | None = None,
        below_model: str | tuple[str, int, int] | None = None,
        below_policy: BelowPolicy = "reused",
    ) -> None:
        # Everything else is refused before the handler takes staging memory.
        of_handler = Groups(*in_tuples(gpu, host))
        is_list, pools = isinstance(gpu, Sequence), of_handler.pools
        of_layers = read_layer_groups(groups, [pool.num_pages for pool in pools], is_list)
        _check_distinct_pools(pools)
        formats: list[PageFormat] = []
        if below is None:
            unused = below_model is not None, below_policy != "reused"
            if given := list(compress(("below_model", "below_policy"), unused)):
                raise without_store(given)
        else:
            open_store = read_store(below)
            formats = _page_formats(pools, of_layers, below_model)
        ready = [pool.num_ready_pages for pool in pools]
        self._manager = BlockManager(
            of_layers,
            num_ready_pages=ready,
            eviction_policy=eviction_policy,
            below_policy=None if below is None else below_policy,
            may_be_dropped=True,
        )
        self._are_ready = ready == [pool.num_pages for pool in pools]
        self._open(of_handler, is_list, of_layers, copy_method, staging_bytes, relays)
        if below is not None:
            self._open_below(below, open_store, formats, self._manager)

    def _open(
        self,
        of_handler: Groups,
        is_list: bool,
        of_layers: Sequence[BlockGroup],
        copy_method: str,
        staging_bytes: int,
        relays: Sequence[int],
    ) -> None:
        """Initializes a prefix cache of any kind. is_list: the caller passes lists."""
        self._is_list = is_list
        self._reader = ArgumentReader(of_handler.pools, of_layers, is_list)
        self._below: Tier | None = None
        self._was_polled = False  # or was warned of it
        self._was_too_small = False  # the host, as was warned
        self._handler = OffloadHandler.__new__(OffloadHandler)
        options = copy_method, staging_bytes
        self._handler._open(of_handler, *options, assigns_pages=True, relays=relays)

    @classmethod
    def connect(
        cls,
        path: str,
        gpu: PagedLayout | Sequence[PagedLayout],
        groups: Sequence[BlockGroup] | None = None,
        *,
        model: str | tuple[str, int, int],
        blocks_per_page: int = 1,
        encoding: EncodingName = "raw",
        verify: VerifyName = "off",
        copy_method: str = AUTO,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        relays: Sequence[int] = (),
    ) -> PrefixCache:
        """Makes a prefix cache on the pages of a server, which engines of this machine share.

        The server, `python -m torch_kvswap serve`, has the memory, the index and the second tier:
        see docs/serve.md. This process pins all of the memory, as HostPool.attach() does. Caches,
        groups, model, blocks_per_page, encoding and verify of all engines must be equal; the first
        engine to connect decides.

        Without the server, lookups find nothing and stores are dropped. When it is back, `pools`
        are new.

        Args:
            path (str): of the server's socket.
            gpu: the cache; see OffloadHandler.
            groups (Sequence[BlockGroup] | None): for a list of layouts, one BlockGroup per layout;
                all pages together must fit into the server's memory. None lets the server decide
                the number of pages.
            model (str | tuple[str, int, int]): see below_model of PrefixCache.
            blocks_per_page, encoding, verify: of the pages; see HostPool.
            copy_method, staging_bytes, relays: see PrefixCache.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: an argument is out of range, or the server refuses this cache; the message
                says why.
            OSError: no server answers at the path.
            RuntimeError: the kernel does not map the memory, or a tensor of a layout has moved.
        """
        is_list = isinstance(gpu, Sequence)
        layouts = list(gpu) if isinstance(gpu, Sequence) else [gpu]
        for group, layout in enumerate(layouts):
            check_layout(layout, f"gpu[{group}]" if is_list else "gpu")
        of_layers = read_layer_groups(groups, [0] * len(layouts), is_list)
        how: dict[str, Any] = {
            "blocks_per_page": blocks_per_page,
            "encoding": encoding,
            "verify": verify,
        }
        cache = describe(layouts, groups, *read_model("model", model), **how)
        served = RemotePools(layouts, how)
        session = Session(path, cache, served)
        session.join()
        with contextlib.ExitStack() as undo:
            undo.callback(served.close)
            undo.callback(session.close)
            of_handler = Groups(layouts, served.pools)
            made = cls.__new__(cls)
            made._manager = RemoteManager(session, served, of_layers)
            made._are_ready = True
            made._open(of_handler, is_list, of_layers, copy_method, staging_bytes, relays)
            undo.callback(made._handler.close)
            served.handler = made._handler
            session.start()
            undo.pop_all()
        weakref.finalize(made, _close_served, made._handler, made._manager)
        return made

    def _open_below(
        self,
        below: str | os.PathLike[str] | PageStore,
        open_store: Callable[[], PageStore],
        formats: Sequence[PageFormat],
        manager: BlockManager,
    ) -> None:
        """Opens the store, or closes the handler and raises."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._handler.close)
            store = open_store()
            if store is not below:  # else it stays its caller's
                undo.callback(store.close)
            mark_written = self._handler._native.mark_written
            tier = Tier(store, formats, manager, mark_written)
            weakref.finalize(self, tier.close)
            tier.start()
            self._below = tier
            undo.pop_all()
        for pool in self.pools:
            # The store may use the pages for longer than the handler, if it does not close.
            pool._register_user(tier, assigns_pages=True)

    def __repr__(self) -> str:
        return f"PrefixCache(handler={self._handler!r}, manager={self._manager!r})"

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        """The layouts of the cache; after rebind(), the new ones."""
        return self._handler.layouts

    @property
    def pools(self) -> tuple[HostPool, ...]:
        """The host pools, one per layout."""
        return self._handler.pools

    def lookup(
        self, keys: Keys | Sequence[Keys], *, again: bool = False, hold: bool = False
    ) -> Lookup:
        """Finds the longest cached prefix in host memory.

        A second tier is asked for missing keys in the background: `asking` counts them until poll()
        has the answer. Blocks that the tier has are then read, and are pending.

        Args:
            keys, again: see BlockManager.lookup().
            hold (bool): what is `ready` is not evicted as long as `lease` lives. A load() finds it
                unless the manager is reset, a server is lost, or another load of it fails.

        Raises:
            RuntimeError: the prefix cache or one of its pools is closed, or the device is lost.
        """
        self._handler._native.check_open()
        group_keys = self._reader.read_keys(keys)
        found = self._manager.lookup(group_keys, again=again, hold=hold)
        return found if self._below is None else self._below.ask(found, group_keys)

    def load(
        self,
        keys: Keys | Sequence[Keys],
        gpu_block_ids: Ids | Sequence[Ids],
        prefix: int | None = None,
        *,
        after: After = None,
        layer_groups: int | None = None,
        expedited: bool = False,
        tag: object = None,
    ) -> Job | None:
        """Loads the blocks of the keys.

        Work that uses the blocks must wait for the job. If the load fails, poll() forgets its
        blocks, and lookups no longer find them. If it fails with rejected blocks
        (Result.rejected), the other blocks are loaded, and only those pages are forgotten.

        Args:
            keys: keys of a prompt's blocks, as in BlockManager.
            gpu_block_ids: a GPU block for each block of all keys. With `prefix`, those beyond it
                are ignored. Without it, a key with a -1 is not loaded.
            prefix (int | None): only the blocks needed after a prefix of this length, in units,
                such as `Lookup.ready`: see BlockManager.needed_blocks(). None is all keys.
            after, layer_groups, expedited, tag: see OffloadHandler.load().

        Returns:
            Job | None: None if a block is not ready.

        Raises what OffloadHandler.load() and BlockManager.prepare_load() do.
        """
        prompt = self._reader.read(keys, gpu_block_ids, self.layouts, prefix)
        return self._load(prompt, after, layer_groups, expedited, tag)

    def store(
        self,
        keys: Keys | Sequence[Keys],
        gpu_block_ids: Ids | Sequence[Ids],
        *,
        hold: bool = False,
        after: After = None,
        tag: object = None,
    ) -> Stored:
        """Stores the blocks that the host does not have.

        The blocks must not change until the job has ended: see jobs_using(). They can be loaded
        after poll() has reported it, except rejected ones (Result.rejected), which are not stored.

        New blocks are computed from the blocks before them. So the store waits for running loads
        into any of `gpu_block_ids`, and poll() reports it after them. If such a load fails, and
        poll() had not reported it when store() was called, the store fails with a
        SourceFailedError.

        Args:
            keys: keys of a prompt's blocks, in order.
            gpu_block_ids: the blocks of all keys, each once. Pass -1 for a block that is not on the
                GPU: a load with `prefix` left it out, or it has left a window. A key with a -1 is
                not stored.
            hold (bool): for a preempted request. The host keeps the blocks of all keys without a -1
                as long as `lease` lives: new ones, stored ones, and those on their way there.
            after, tag: see OffloadHandler.store().

        Returns:
            Stored: the job that copies them, or why there is none.

        Raises what OffloadHandler.store() and BlockManager.prepare_store() do.
        """
        prompt = self._reader.read_distinct(keys, gpu_block_ids, self.layouts)
        self._grow()
        reserved = self._manager.prepare_store(prompt.keys, hold=hold)
        try:
            if reserved is not None and reserved.id:
                job = self._submit_store(reserved, prompt, after, tag)
                return Stored("storing", job, reserved.lease)
            self._handler._check_options(after)
        except BaseException:
            if reserved is not None and reserved.lease is not None:
                reserved.lease.let_go()
            raise
        if reserved is None:
            self._warn_of_no_room(prompt.keys)
            return Stored("full")
        return Stored("present", None, reserved.lease)

    @property
    def unit_tokens(self) -> int:
        """Tokens per unit of a prefix's length."""
        return self._manager.unit_tokens

    def needed_blocks(self, prefix: int) -> range | list[range]:
        """The blocks that load() loads for a prefix. See BlockManager.needed_blocks()."""
        needed = needed_blocks(self._manager.groups, prefix)
        return needed if self._is_list else needed[0]

    def touch(self, keys: Keys | Sequence[Keys]) -> None:
        """Counts a use of the blocks. See BlockManager.touch()."""
        self._manager.touch(self._reader.read_keys(keys))

    def order(self, keys: Keys | Sequence[Keys], *, renew: bool = False) -> None:
        """Orders the eviction of a prompt. See BlockManager.order()."""
        self._manager.order(self._reader.read_keys(keys), renew=renew)

    def reset(self) -> None:
        """Forgets all blocks, with a server also those of other engines. See BlockManager.reset().

        If the server does not answer, it forgets them when it is joined again.
        """
        self._manager.reset()

    def stats(self, group: int = 0) -> BlockStats:
        """The statistics of a group. See BlockManager.stats().

        With a server they are of all engines, but `refused` also counts the stores of this engine
        that found no server; all other numbers are 0 without one.
        """
        return self._manager.stats(group)

    def jobs_using(self, gpu_block_ids: Ids | Sequence[Ids]) -> list[Job]:
        """Returns the jobs that have not ended and read or write one of these GPU blocks.

        Wait for these jobs before the blocks are reused; `Job.wait` orders that on a stream.

        Args:
            gpu_block_ids: the blocks that are reused; -1 means no block.

        Returns:
            list[Job]: in order of submission.

        Raises:
            IndexError: the cache has no such block.
        """
        blocks, _ = self._reader.read_blocks(gpu_block_ids, self.layouts)
        return self._handler.jobs_using(blocks)

    def poll(self, timeout: float | None = 0.0) -> list[Result]:
        """Reports ended jobs, as OffloadHandler.poll(). Call it in every scheduler step.

        Each job is reported once, to one caller. Stored blocks, and blocks that a second tier has
        read, can be loaded from now on. Blocks of failed jobs are forgotten; if a job rejected some
        blocks (Result.rejected), only these. If a load failed or was cancelled, every store()
        before this call that named one of its blocks fails too: its new blocks may have been
        computed from blocks that were not loaded.

        Args:
            timeout (float | None): as in OffloadHandler.poll(). Without jobs, but with a second
                tier or a server, it waits a millisecond at most: look up again, because they may
                have brought something.
        """
        self._was_polled = True
        results = self._handler.poll(timeout)
        self._grow()  # what a second tier has is read into these pages, perhaps without any store()
        has_others = self._below is not None or isinstance(self._manager, RemoteManager)
        if has_others and timeout != 0 and not results:
            time.sleep(_PAUSE if timeout is None else min(timeout, _PAUSE))
        if isinstance(self._manager, RemoteManager):
            self._manager._session.poll()
        if self._below is not None:
            self._below.poll(some_ended=bool(results))
        return results

    def synchronize(
        self, jobs: Job | Iterable[Job] | None = None, timeout: float | None = None
    ) -> None:
        """Blocks the host until jobs have ended. See OffloadHandler.synchronize()."""
        self._handler.synchronize(jobs, timeout)

    def cancel(self, job: Job) -> bool:
        """Cancels a job that has not ended. See OffloadHandler.cancel()."""
        return self._handler.cancel(job)

    def metrics(self) -> Metrics:
        """Returns counters, gauges and histograms of the jobs. See OffloadHandler.metrics()."""
        return self._handler.metrics()

    def rebind(self, gpu: PagedLayout | Sequence[PagedLayout]) -> None:
        """Waits for all jobs, then continues with a cache at other addresses.

        Pages on the host stay. See OffloadHandler.rebind().
        """
        self._handler._native.check_process()  # a fork may have the lock, held forever
        if not self._is_list and not isinstance(gpu, PagedLayout):
            raise TypeError(f"gpu is {kind_of(gpu)}; pass a PagedLayout, as before")
        handler, manager = self._handler, self._manager
        rebind = manager._pools.rebind if isinstance(manager, RemoteManager) else handler.rebind
        rebind(gpu if self._is_list else [gpu])  # type: ignore[list-item]

    def below_stats(self) -> BelowStats:
        """Returns what was moved to and from the second tier.

        Raises RuntimeError if there is none.
        """
        if self._below is None:
            if isinstance(self._manager, RemoteManager):
                raise RuntimeError(
                    "below_stats() is not available with a server, which has the second tier"
                )
            raise RuntimeError("this prefix cache has no second tier; make it with `below=`")
        return self._below.stats()

    def close(self) -> None:
        """Refuses new jobs, waits for all jobs, and closes a second tier.

        Pages that are not in the tier yet are not written any more. See OffloadHandler.close().
        """
        if self._below is not None:
            self._below.close()
        if isinstance(self._manager, RemoteManager):
            _close_served(self._handler, self._manager)
        self._handler.close()

    def __enter__(self) -> PrefixCache:
        self._handler.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grow(self) -> None:
        """Lets the manager use the pages that are ready by now. Any thread may call."""
        if not self._are_ready and isinstance(self._manager, BlockManager):
            # Not num_ready_pages, which raises for a closed pool: poll() still has results then.
            ready = [pool._ready_range.end_page for pool in self.pools]
            self._manager.grow(ready)
            self._are_ready = ready == [pool.num_pages for pool in self.pools]

    def _load(
        self,
        prompt: Prompt,
        after: After,
        layer_groups: int | None,
        expedited: bool,
        tag: object,
    ) -> Job | None:
        """Loads the blocks of a prompt, if all are ready."""
        # Here, because a wrong argument is refused also if nothing is copied.
        expedited = read_switch("expedited", expedited)
        reserved = self._manager.prepare_load(prompt.keys)
        if reserved is None:
            self._handler._check_options(after, layer_groups)
            return None
        try:
            if isinstance(self._manager, RemoteManager):  # perhaps since a store of ours failed
                self._handler._native.mark_written(reserved.pages)
            return self._handler._submit(
                LOADS,
                (prompt.blocks, reserved.pages, 0),
                after=after,
                layer_groups=layer_groups,
                expedited=expedited,
                tag=tag,
                reserved=reserved,
            )
        finally:
            reserved.let_go()

    def _submit_store(self, reserved: Any, prompt: Prompt, after: After, tag: object) -> Job:
        """Stores the blocks of a prompt into the pages that are reserved for them."""
        try:
            return self._handler._submit(
                STORES,
                (self._reader.select(prompt.blocks, reserved.key_indices), reserved.pages, 0),
                after=after,
                tag=tag,
                reserved=reserved,
                computed_in=prompt.named,
            )
        finally:
            reserved.let_go()

    def _warn_of_no_room(self, keys: Sequence[bytes]) -> None:
        """Warns, once each, if the blocks are more than the host has pages, and if all pages belong
        to stores that wait for a first poll(). The caller has found no room."""
        for of_group, pool in zip(keys, self.pools, strict=True):
            blocks = len(of_group) // KEY_BYTES
            if blocks > pool.num_pages and not self._was_too_small:
                self._was_too_small = True
                log.warning(
                    "%d blocks at once are more than the %d pages of the host: none of them is "
                    "stored; make the host pool larger",
                    *(blocks, pool.num_pages),
                )
        if self._was_polled:
            return
        for group in range(len(self.pools)):
            stats = self._manager.stats(group)
            if 0 < stats.pages == stats.filling_pages:
                self._was_polled = True
                log.warning(
                    "no room to store blocks: poll() was never called, and all %d pages belong to "
                    "stores that it has to report; call it in every scheduler step",
                    stats.pages,
                )
                return
