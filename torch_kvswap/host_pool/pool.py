"""Host pages: memory of the exact size, registered with the CUDA driver."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_kvswap._native import abi
from torch_kvswap._native.arguments import NotCopyable, read_int, read_timeout
from torch_kvswap._native.loader import ForkGuard
from torch_kvswap.host_pool.memory import MOST_NODES, Mapping, is_pinned, map_pool
from torch_kvswap.host_pool.pages import Pages
from torch_kvswap.host_pool.pinning import Pinning, Progress, check_pinned
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
    """Host pages, each with `blocks_per_page` blocks one after another, each block with all slabs.

    layout: the cache whose blocks come here. num_pages, blocks_per_page: at least 1. pinned: None
    pins when the cache is on CUDA, and warns where the driver does not; True raises there; False
    asks for pageable memory. The memory has exactly num_pages * page_bytes bytes (`nbytes`) and
    starts as zeros; pinning commits it, pageable memory is committed as it is written.

    pin_in_background: returns when the first chunk is pinned; a thread pins the others. Pages
    become usable from the front (`num_ready_pages`, `wait_ready`); a job with another page is
    refused with IndexError. on_progress(ready, all) is called after each chunk, by the thread that
    pins, and is held until all is pinned; an exception of it ends the pinning, and wait_ready()
    raises. huge_pages: None takes what the kernel makes when asked, True what the machine has
    reserved, False none (`huge_bytes` is what was got). numa_node: None is that of the GPU.
    chunk_bytes: what the driver registers in one piece, at most.

    world: processes of this machine that share the memory; one makes it, the others attach() to
    what share() returns. Each pins the pages `local_pages`, its part by `rank`, and can use those
    only; replicated: each pins and can use all, and the caller sees to it that nobody reads what
    another one still writes.

    The attribute `layout` has the slabs of the pages: num_pages * blocks_per_page blocks. Several
    handlers may use one pool. A pool that is dropped or left open at exit is closed. Not thread
    safe, but for num_ready_pages and wait_ready. A context manager. In a forked child only views
    can be used: of a pool of one process they are zeros there. Raises ValueError for a wrong size
    and for more than the machine has room for, RuntimeError when the driver does not pin: then
    nothing is left mapped.
    """

    def __init__(
        self,
        layout: PagedLayout,
        num_pages: int,
        blocks_per_page: int = 1,
        pinned: bool | None = None,
        *,
        pin_in_background: bool = False,
        on_progress: Progress | None = None,
        huge_pages: bool | None = None,
        numa_node: int | None = None,
        chunk_bytes: int = 1 << 30,
        rank: int = 0,
        world: int = 1,
        replicated: bool = False,
        handle: PoolHandle | None = None,
    ) -> None:
        pages = Pages(layout, num_pages, blocks_per_page, rank, world, replicated)
        chunk_bytes = check_pinned(layout, pinned, chunk_bytes)
        if numa_node is not None:
            numa_node = read_int("numa_node", numa_node, 0, MOST_NODES - 1)
        if on_progress is not None and not callable(on_progress):
            raise TypeError(f"on_progress is a {type(on_progress).__name__}; it must be callable")
        if handle is not None:
            check_handle(handle).check(pages, world, replicated)
        self.device = layout.device
        self.num_pages, self.blocks_per_page = pages.count, pages.blocks_per_page
        self.page_bytes, self.nbytes = pages.size, pages.nbytes
        self.local_pages = pages.local
        self._shares = world, replicated
        mapping = map_pool(pages.nbytes, world > 1, huge_pages, handle)
        self.layout = pages.slabs(mapping.tensor, layout)
        self._memory = _Memory(mapping, pages)
        if layout.device.type == "cuda" and pinned is not False:
            if handle is None or not replicated:  # what all of them pin, its maker has placed
                mapping.place(layout.device, numa_node, pages.local_bytes)
            pinning = self._memory.make_pinning(pages, layout.device)
            pinning.start(pinned is True, pin_in_background, chunk_bytes, on_progress)

    @classmethod
    def attach(
        cls, layout: PagedLayout, handle: PoolHandle, rank: int, world: int, **options: Any
    ) -> HostPool:
        """A pool on the memory of another process, for pages of the same size. options: as of
        HostPool. Raises ValueError when the handle is of other pages or of another world."""
        check_handle(handle)
        options |= {"rank": rank, "world": world, "replicated": handle.replicated}
        return cls(layout, handle.num_pages, handle.blocks_per_page, handle=handle, **options)

    def share(self) -> PoolHandle:
        """What other processes attach to; send it to them. Raises ValueError for a pool that was
        made for one process."""
        self._memory.check_open()
        fd = self._memory.mapping.fd
        if fd is None:
            raise ValueError("this pool is of one process; make it with world=, how many share it")
        shape = self.num_pages, self.blocks_per_page, self.page_bytes
        return PoolHandle(os.dup(fd), *shape, *self._shares)

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
