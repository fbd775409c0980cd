"""Host memory of the exact size: mapped, placed and touched by the native side."""

from __future__ import annotations

import ctypes
import fcntl
import os
import weakref

import torch
from torch import Tensor

from torch_kvswap._native import loader
from torch_kvswap._native.loader import ForkGuard
from torch_kvswap._native.log import log, warn_once
from torch_kvswap.host_pool import system
from torch_kvswap.host_pool.pages import SYSTEM_PAGE
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.host_pool.system import check_room

MOST_NODES = 1024  # NUMA nodes that the kernel's masks of csrc/host_memory.cpp have room for
_ALIGNMENT = 2 << 20  # of huge pages
_MOST_THREADS = 16  # a guess at what fills the memory bus; benchmarks/host_memory.py measures it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Mapping:
    """Zeros. They stay mapped while `tensor`, uint8 [nbytes] from `address` on, or a view of it
    lives.

    fd: a file of create_file() to map, of which this object becomes the owner; None maps private
    memory, which a forked child has as zeros of its own. huge_pages: False takes none of those that
    the kernel makes when asked. Raises RuntimeError when the kernel does not map it.
    """

    def __init__(self, nbytes: int, fd: int | None = None, huge_pages: bool | None = None) -> None:
        self.nbytes = nbytes
        self.fd = fd
        if fd is not None:
            self._close_file = weakref.finalize(self, os.close, fd)
            status = os.fstat(fd)
            mapped = status.st_size
            unit = status.st_blksize  # that of its huge pages, if it has any
        else:
            mapped, unit = -(-nbytes // SYSTEM_PAGE) * SYSTEM_PAGE, SYSTEM_PAGE
        wants_huge = huge_pages is not False
        file = -1 if fd is None else fd
        address: int = loader.call(
            "kvswap_host_map", file, mapped, max(_ALIGNMENT, unit), wants_huge
        )
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        unmap = loader.library().kvswap_host_unmap
        # At exit copies may still run.
        weakref.finalize(memory, unmap, address, mapped).atexit = False
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.address, self._last = address, address + mapped
        # Whatever its setting for shared memory, the kernel joins small pages when told to.
        self._collapse = fd is not None and wants_huge and unit == SYSTEM_PAGE
        if huge_pages is None and fd is None and nbytes >= _ALIGNMENT:
            _warn_of_small_pages()
        self._cpus: list[int] = []

    @property
    def huge_bytes(self) -> int:
        """How many of the bytes the kernel has put on huge pages, so far."""
        return min(self.nbytes, system.huge_bytes(self.address, self._last))

    def let_go(self) -> None:
        """The memory goes with the last view of it, and this object is of no more use."""
        del self.tensor
        if self.fd is not None:
            self._close_file()

    def place(self, device: torch.device, numa_node: int | None, own: range) -> None:
        """Takes these bytes, once they are touched, from a NUMA node while it has some; None is
        that of the GPU."""
        node = _node_of(device) if numa_node is None else numa_node
        if node is None:
            return
        address = self.address + own.start
        if not loader.library().kvswap_host_bind(address, len(own), node):
            # Containers forbid it. But a page comes from the node of the CPU that touches it.
            self._cpus = system.cpus_of(node)

    def touch(self, first: int, last: int) -> None:
        """Gives memory to the bytes from `first` to `last`, by several threads, without changing
        them. Raises RuntimeError when there is none."""
        held = self.tensor  # the pool may be closed meanwhile, by what follows the pinning
        cpus = (ctypes.c_int32 * len(self._cpus))(*self._cpus)
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        address = self.address + first
        how = threads, self._collapse, cpus, len(cpus)
        loader.call("kvswap_host_touch", address, last - first, *how)
        del held


def _warn_of_small_pages() -> None:
    if not system.offers_huge_pages(shared=False):
        warn_once(
            "this kernel makes no huge pages (/sys/kernel/mm/transparent_hugepage/enabled): host "
            "memory takes longer to pin; set it to madvise, or reserve huge pages and pass "
            "huge_pages=True"
        )


def map_new(nbytes: int, huge_pages: bool | None, *, shared: bool) -> Mapping:
    """Memory of a new pool: a file if other processes are to map it too.

    Raises:
        ValueError: the machine has no room for it.
    """
    check_room(nbytes, reserved=huge_pages is True)
    fd = create_file(nbytes, huge_pages is True) if shared or huge_pages is True else None
    return Mapping(nbytes, fd, huge_pages)


def map_handle(handle: PoolHandle, nbytes: int) -> Mapping:
    """The memory behind a handle. The pages are huge where those of its maker may be."""
    return Mapping(nbytes, os.dup(handle.fd), None if handle.huge_pages else False)


def _node_of(device: torch.device) -> int | None:
    numbers = (ctypes.c_int32 * 3)()
    if not loader.library().kvswap_device_pci_address(device.index, numbers):
        return None  # then any will do
    domain, bus, number = numbers
    return system.numa_node_of(f"{domain:04x}:{bus:02x}:{number:02x}.0")


def create_file(nbytes: int, huge_pages: bool) -> int:
    """A file of this size that has no name, so that nothing of it is left when the last process
    that has it ends, however it ends. Nobody can change its size. huge_pages: True takes reserved
    ones. Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
    size = system.reserved_huge_pages().size if huge_pages else SYSTEM_PAGE
    fd = os.memfd_create("torch_kvswap", flags)
    try:
        os.ftruncate(fd, -(-nbytes // size) * size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


class Registration:
    """Pieces of a memory, which must not be unmapped while they are registered: this holds it until
    remove().

    Not by torch's runtime: a failure would be handed to the thread's next kernel launch, and a CUDA
    graph that another thread captures would be spoilt.
    """

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._address = memory.data_ptr()
        self._held: Tensor | None = memory
        self._device = device
        self._process = ForkGuard()
        self._bytes: dict[int, int] = {}  # by address

    def add(self, first: int, last: int) -> str | None:
        """Registers the bytes from `first` to `last` in one piece; why the driver refuses, or
        None."""
        native = loader.library()
        address = self._address + first
        if not native.kvswap_host_register(self._device.index, address, last - first):
            reason: str = native.kvswap_last_error().decode()
            return reason
        self._bytes[address] = last - first
        return None

    def is_known(self) -> bool:
        """Whether there is something, and the driver says that all of it is pinned."""
        addresses = list(self._bytes)
        return bool(addresses) and all(is_pinned(address, self._device) for address in addresses)

    def remove(self) -> None:
        """Unregisters all pieces. A fork has the memory, but not the registrations."""
        native, kept, reason = loader.library(), 0, ""
        while self._process.is_current and self._bytes:
            address, nbytes = self._bytes.popitem()
            if not native.kvswap_host_unregister(self._device.index, address):
                kept, reason = kept + nbytes, native.kvswap_last_error().decode()
        self._held = None
        if kept:
            log.warning(
                "the driver did not unpin %d bytes of host memory: %s; they stay locked until the "
                "process ends",
                *(kept, reason),
            )


def is_pinned(address: int, device: torch.device | None = None) -> bool:
    """Whether the driver says so, asked in the context of a GPU or, which does not initialise CUDA,
    in that of the thread."""
    index = -1 if device is None else device.index
    return bool(loader.library().kvswap_host_is_pinned(index, address) == 1)
