"""Host pages: memory of the exact size, registered with the CUDA driver."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol

import torch
from torch import Tensor

from torch_kvswap._native import abi
from torch_kvswap._native.arguments import NotCopyable, read_int, read_timeout
from torch_kvswap._native.loader import ForkGuard
from torch_kvswap.host_pool.memory import Mapping, is_pinned, map_handle, map_new
from torch_kvswap.host_pool.pages import Pages
from torch_kvswap.host_pool.pinning import (
    CHUNK_BYTES,
    Pinning,
    PinningOptions,
    Progress,
    read_pinning,
)
from torch_kvswap.host_pool.shared import PoolHandle, check_handle
from torch_kvswap.layout import PagedLayout


class User(Protocol):
    """An OffloadHandler: what has to be closed before the memory may go."""

    def close(self) -> None: ...


class _Memory:
    """The pages of a pool, which its views share: open or closed, pinned or not.

    They are unpinned when neither the pool nor a view of it lives any more, at the latest.
    """

    def __init__(self, mapping: Mapping, pages: Pages) -> None:
        self.process = ForkGuard()
        self.mapping = mapping
        self.pages: Tensor | None = pages.view(mapping.tensor)
        # The native side reads it at each job.
        self._ready_range = abi.ReadyRange(pages.local.start, pages.local.stop, 1 << 62)
        self.pinning: Pinning | None = None
        self.users: weakref.WeakSet[User] = weakref.WeakSet()

    def make_pinning(self, pages: Pages, device: torch.device) -> Pinning:
        self.pinning = Pinning(self.mapping, device, pages, self._ready_range)
        weakref.finalize(self, self.pinning.close)
        return self.pinning

    def check_open(self) -> Tensor:
        self.process.check("host pool")
        if self.pages is None:
            raise RuntimeError("the host pool is closed; make a new one")
        return self.pages

    def close(self) -> None:
        self.process.check("host pool")
        with contextlib.ExitStack() as users:
            for user in list(self.users):
                users.callback(user.close)
        if self.pinning is not None:
            self.pinning.close()
        if self.pages is not None:
            self.pages = None
            self.mapping.let_go()


class HostPool(NotCopyable):
    """Host pages of one process; create_shared() and attach() make pages of several processes.

    A page has `blocks_per_page` blocks one after another, each with all slabs of the layout. The
    memory has exactly num_pages * page_bytes bytes (`nbytes`) and starts as zeros. Pinning commits
    it; pageable memory is committed as it is written.

    Several handlers may use one pool. A pool that is dropped or left open at exit is closed. Not
    thread safe, except num_ready_pages and wait_ready(). A context manager. In a forked child only
    views can be used: of a pool of one process they are zeros there.

    Args:
        layout (PagedLayout): the cache whose blocks are stored here.
        num_pages (int): at least 1.
        blocks_per_page (int): at least 1.
        pinned (bool | None): None pins when the cache is on CUDA, and logs a warning where the
            driver refuses; True raises there; False asks for pageable memory.
        pin_in_background (bool): returns when the first chunk is pinned; a thread pins the others.
            Pages become usable from the front (`num_ready_pages`, `wait_ready`); a job with another
            page is refused with IndexError.
        on_progress: on_progress(ready, all) is called after each chunk by the thread that pins. It
            is held until all is pinned. If it raises, the pinning ends, and wait_ready() raises.
        huge_pages (bool | None): None takes the huge pages that the kernel makes when asked, True
            those that the machine has reserved, False none. `huge_bytes` says how much was got.
        numa_node (int | None): where pinned pages are placed; None is the node of the GPU.
        chunk_bytes (int): the most that the driver registers in one piece.

    Attributes:
        layout: the slabs of the pages, as num_pages * blocks_per_page blocks.
        local_pages (range): the pages that this process pins and can use.

    Raises:
        ValueError: a size is wrong, or the machine has no room for so much.
        RuntimeError: the driver does not pin. Nothing is left mapped.
    """

    def __init__(
        self,
        layout: PagedLayout,
        num_pages: int,
        blocks_per_page: int = 1,
        *,
        pinned: bool | None = None,
        pin_in_background: bool = False,
        on_progress: Progress | None = None,
        huge_pages: bool | None = None,
        numa_node: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        pages = Pages(layout, num_pages, blocks_per_page)
        pinning = read_pinning(
            layout, pinned, pin_in_background, on_progress, numa_node, chunk_bytes
        )
        mapping = map_new(pages.nbytes, huge_pages, shared=False)
        self._open(layout, pages, mapping, pinning, None)

    @classmethod
    def create_shared(
        cls,
        layout: PagedLayout,
        num_pages: int,
        blocks_per_page: int = 1,
        *,
        world: int,
        rank: int = 0,
        replicated: bool = False,
        pinned: bool | None = None,
        pin_in_background: bool = False,
        on_progress: Progress | None = None,
        huge_pages: bool | None = None,
        numa_node: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> HostPool:
        """Makes pages that other processes of this machine attach() to.

        Args:
            layout, num_pages, blocks_per_page, pinned, pin_in_background, on_progress, huge_pages,
                numa_node, chunk_bytes: see HostPool.
            world (int): processes that share the pages, this one included.
            rank (int): this process, 0 to world - 1. Each process pins and can use its part of the
                pages only.
            replicated (bool): each process pins and can use all pages. The caller orders them:
                none reads what another one still writes.

        Raises:
            ValueError, RuntimeError: see HostPool.
        """
        pages = Pages(layout, num_pages, blocks_per_page, rank, world, replicated)
        pinning = read_pinning(
            layout, pinned, pin_in_background, on_progress, numa_node, chunk_bytes
        )
        sharing = pages.world, pages.replicated, huge_pages is not False
        pool = cls.__new__(cls)
        mapping = map_new(pages.nbytes, huge_pages, shared=True)
        pool._open(layout, pages, mapping, pinning, sharing)
        return pool

    @classmethod
    def attach(
        cls,
        layout: PagedLayout,
        handle: PoolHandle,
        *,
        rank: int,
        pinned: bool | None = None,
        pin_in_background: bool = False,
        on_progress: Progress | None = None,
        numa_node: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> HostPool:
        """Takes part in the pages that another process has made with create_shared().

        Args:
            layout (PagedLayout): of this process, with blocks of the same size.
            handle (PoolHandle): from share() of that pool. It can be closed afterwards.
            rank (int): this process; no other has the same.
            pinned, pin_in_background, on_progress, chunk_bytes: see HostPool.
            numa_node: see HostPool. The pages of a replicated pool are placed by its maker.

        Raises:
            ValueError: the handle is of pages of another size, or an option cannot be had.
            RuntimeError: the driver does not pin, or the handle is closed.
        """
        shape = check_handle(handle).num_pages, handle.blocks_per_page
        pages = Pages(layout, *shape, rank, handle.world, handle.replicated)
        handle.check(pages)
        pinning = read_pinning(
            layout, pinned, pin_in_background, on_progress, numa_node, chunk_bytes
        )
        if pages.replicated:
            if numa_node is not None:
                raise ValueError(
                    f"numa_node is {numa_node}, but the process that made the replicated pool has "
                    "placed its pages; leave it out, or give it to create_shared()"
                )
            pinning = pinning._replace(places=False)
        sharing = pages.world, pages.replicated, handle.huge_pages
        pool = cls.__new__(cls)
        pool._open(layout, pages, map_handle(handle, pages.nbytes), pinning, sharing)
        return pool

    def _open(
        self,
        layout: PagedLayout,
        pages: Pages,
        mapping: Mapping,
        pinning: PinningOptions,
        sharing: tuple[int, bool, bool] | None,
    ) -> None:
        """What every way to make a pool ends with. sharing: what a PoolHandle says of it."""
        self.device = layout.device
        self.num_pages, self.blocks_per_page = pages.count, pages.blocks_per_page
        self.page_bytes, self.nbytes = pages.size, pages.nbytes
        self.local_pages = pages.local
        self.layout = pages.slabs(mapping.tensor, layout)
        self._sharing = sharing
        self._memory = _Memory(mapping, pages)
        if layout.device.type == "cuda" and pinning.pinned is not False:
            if pinning.places:
                mapping.place(layout.device, pinning.numa_node, pages.local_bytes)
            self._memory.make_pinning(pages, layout.device).start(pinning)

    def __repr__(self) -> str:
        pages = len(self.local_pages)
        is_open = self._memory.pages is not None
        return (
            f"HostPool(num_pages={self.num_pages}, blocks_per_page={self.blocks_per_page}, "
            f"page_bytes={self.page_bytes}, device={self.device}, "
            f"{f'{self.num_ready_pages} of {pages} pages ready' if is_open else 'closed'})"
        )

    def share(self) -> PoolHandle:
        """What other processes attach() to. Send it to them.

        Raises:
            ValueError: the pool is of one process.
        """
        self._memory.check_open()
        fd = self._memory.mapping.fd
        if self._sharing is None or fd is None:
            raise ValueError("this pool is of one process; make it with HostPool.create_shared()")
        shape = self.num_pages, self.blocks_per_page, self.page_bytes
        return PoolHandle(os.dup(fd), *shape, *self._sharing)

    def view_for(self, layout: PagedLayout) -> HostPool:
        """The same pages for another group of layers, whose blocks are no larger: a page has a
        block of one or the other. The view keeps the memory, and closing either closes both. Raises
        ValueError for larger blocks, RuntimeError when the pool is closed."""
        self._memory.check_open()
        slot_bytes = self.page_bytes // self.blocks_per_page
        sizes = Pages(layout, self.num_pages, self.blocks_per_page)
        if layout.block_bytes > slot_bytes:
            raise ValueError(
                f"blocks of {layout.block_bytes} bytes do not go into pages for blocks of "
                f"{slot_bytes}; make the pool from the layout with the largest blocks"
            )
        view = HostPool.__new__(HostPool)
        vars(view).update(vars(self))
        view.layout = sizes.slabs(self._memory.mapping.tensor, layout, slot_bytes)
        return view

    @property
    def pages(self) -> Tensor:
        """The memory, uint8 [num_pages, blocks_per_page, block_bytes]; a view stays valid after
        close(). Reading or writing it is ordered with no job: wait for them on the host first."""
        return self._memory.check_open()

    @property
    def _ready_range(self) -> abi.ReadyRange:
        """Which pages can be used now, as the native side reads it: one object for all views."""
        return self._memory._ready_range

    @property
    def num_ready_pages(self) -> int:
        """How many of local_pages, from the front on, can be used now."""
        return int(self._ready_range.last_page - self._ready_range.first_page)

    @property
    def is_ready(self) -> bool:
        return self.num_ready_pages == len(self.local_pages)

    def wait_ready(self, timeout: float | None = None, pages: int | None = None) -> bool:
        """Waits until this many pages of local_pages, all by default, can be used; False when that
        takes more than `timeout` seconds. Raises RuntimeError when they never will: the driver pins
        no more, or the pool is closed. Releases the GIL; any thread may wait."""
        self._memory.process.check("host pool")
        own = self.local_pages
        wanted = len(own) if pages is None else min(read_int("pages", pages), len(own))
        timeout = read_timeout("timeout", timeout)
        pinning = self._memory.pinning
        return pinning is None or pinning.wait(own.start + wanted, timeout)

    @property
    def is_pinned(self) -> bool:
        """Whether the driver says that all of local_pages are pinned."""
        memory = self._memory
        if memory.pages is None or not self.is_ready:
            return False
        if memory.pinning is not None:
            return memory.pinning.registration.is_known()
        return is_pinned(memory.pages[self.local_pages.start].data_ptr())

    @property
    def huge_bytes(self) -> int:
        """How many bytes of the memory the kernel has put on huge pages so far."""
        self._memory.check_open()
        return self._memory.mapping.huge_bytes

    def check_open(self) -> None:
        """Raises RuntimeError when the pool is closed, and in a forked child."""
        self._memory.check_open()

    def _register_user(self, user: User) -> None:
        """Lets close() close the handler first; keeps only a weak reference to it."""
        self._memory.check_open()
        self._memory.users.add(user)

    def close(self) -> None:
        """Closes the handlers that use the pool or a view of it, which waits for their jobs, then
        unpins and lets the memory go: it is freed when the last tensor on it is, in all processes.
        Idempotent."""
        self._memory.close()

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
