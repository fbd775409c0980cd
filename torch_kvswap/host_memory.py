"""Host pages: memory of the exact size, registered with the CUDA driver."""

from __future__ import annotations

import contextlib
import mmap
import operator
import os
import warnings
import weakref
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torch_kvswap import _extension
from torch_kvswap.layout import PagedLayout, Planes
from torch_kvswap.process import Process


class User(Protocol):
    """An OffloadHandler: what has to be closed before the memory may go."""

    def close(self) -> None: ...


class HostPool:
    """Host pages, each with `blocks_per_page` blocks one after another, each block with all planes.

    layout: the cache whose blocks come here. num_pages, blocks_per_page: at least 1. pinned: None
    pins when the cache is on CUDA, False asks for pageable memory. The memory has exactly
    num_pages * page_bytes bytes (`nbytes`) and starts as zeros; pinning commits it, pageable
    memory is committed as it is written.

    The attribute `layout` has the planes of the pages: num_pages * blocks_per_page blocks. Several
    handlers may use one pool. A pool that is dropped or left open at exit is closed. Not thread
    safe. A context manager. Raises ValueError for a wrong size, RuntimeError when the driver does
    not pin: then nothing is left mapped.
    """

    def __init__(
        self,
        layout: PagedLayout,
        num_pages: int,
        blocks_per_page: int = 1,
        pinned: bool | None = None,
    ) -> None:
        if not isinstance(layout, Planes):
            raise TypeError(f"a host pool is made from a PagedLayout, not {type(layout).__name__}")
        num_pages, blocks_per_page = operator.index(num_pages), operator.index(blocks_per_page)
        if num_pages < 1 or blocks_per_page < 1:
            raise ValueError(
                f"num_pages={num_pages}, blocks_per_page={blocks_per_page}: both must be at least 1"
            )
        on_cuda = layout.device.type == "cuda"
        if pinned and not on_cuda:
            raise ValueError(
                f"pinned=True needs a cache on CUDA, this one is on {layout.device}; leave it out"
            )
        self.device = layout.device
        self.num_pages = num_pages
        self.blocks_per_page = blocks_per_page
        self.page_bytes = blocks_per_page * layout.block_bytes
        self.nbytes = num_pages * self.page_bytes
        memory = _map(self.nbytes)
        self.layout = _planes(memory, layout, num_pages * blocks_per_page)
        self._pages: Tensor | None = memory.view(num_pages, blocks_per_page, layout.block_bytes)
        self._handlers: weakref.WeakSet[User] = weakref.WeakSet()
        self._process = Process()
        self._unpin = None
        if on_cuda and pinned is not False:
            _register(memory, layout.device)
            # Holds the memory, which must not be unmapped while it is registered.
            self._unpin = weakref.finalize(self, _unregister, memory, layout.device, self._process)

    @property
    def pages(self) -> Tensor:
        """The memory, uint8 [num_pages, blocks_per_page, block_bytes]; a view stays valid after
        close(). Reading or writing it is ordered with no job: wait for them on the host first."""
        if self._pages is None:
            raise RuntimeError("the host pool is closed; make a new one")
        return self._pages

    @property
    def is_pinned(self) -> bool:
        """Whether the driver says that the memory is pinned."""
        return self._pages is not None and self._pages.is_pinned()

    def attach(self, handler: User) -> None:
        """Lets close() close the handler first; keeps only a weak reference to it."""
        if self._pages is None:
            raise RuntimeError("the host pool is closed; make a new one")
        self._handlers.add(handler)

    def close(self) -> None:
        """Closes the handlers that use the pool, which waits for their jobs, then unpins and lets
        the memory go: it is freed when the last view of it is. Idempotent."""
        self._process.check("host pool")
        with contextlib.ExitStack() as handlers:
            for handler in list(self._handlers):
                handlers.callback(handler.close)
        if self._unpin is not None:
            self._unpin()
        self._pages = None

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _map(nbytes: int) -> Tensor:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > installed:
        raise ValueError(
            f"the pages need {nbytes} bytes of host memory, this machine has {installed}; "
            "ask for fewer pages"
        )
    # A shared mapping (Python's default), so that a fork copies no pinned page on write. It is
    # never closed: the last view of the tensor unmaps it.
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _planes(memory: Tensor, layout: PagedLayout, num_blocks: int) -> Planes:
    """A block on the host is its planes one after another."""
    return Planes(
        bases=memory.data_ptr() + np.cumsum(layout.sizes) - layout.sizes,
        strides=np.full_like(layout.sizes, layout.block_bytes),
        sizes=layout.sizes,
        num_blocks=num_blocks,
    )


def _register(memory: Tensor, device: torch.device) -> None:
    # Not by torch's runtime: a failure would be handed to the thread's next kernel launch, and a
    # CUDA graph that another thread captures would be spoilt.
    native = _extension.library()
    if not native.kvswap_host_register(device.index, memory.data_ptr(), memory.nbytes):
        raise RuntimeError(
            f"the driver did not pin {memory.nbytes} bytes of host memory for {device}: "
            f"{native.kvswap_last_error().decode()}; ask for fewer pages, raise "
            "the limit on locked memory (ulimit -l), or pass pinned=False for pageable memory"
        )


def _unregister(memory: Tensor, device: torch.device, process: Process) -> None:
    if not process.is_current:  # a fork has the mapping, but not the registration
        return
    native = _extension.library()
    if not native.kvswap_host_unregister(device.index, memory.data_ptr()):
        warnings.warn(
            f"the driver did not unpin {memory.nbytes} bytes of host memory: "
            f"{native.kvswap_last_error().decode()}; they stay locked until the process ends",
            RuntimeWarning,
            stacklevel=2,
        )
