"""Host memory of a pool: mapped, placed, touched and registered by the native side."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from torch_kvswap._native.descriptors import Descriptors
from torch_kvswap._native.keep_alive import allow_free, keep_alive
from torch_kvswap._native.loader import ForkGuard, native
from torch_kvswap._native.log import log
from torch_kvswap.devices.kind import is_native
from torch_kvswap.host_pool import system
from torch_kvswap.host_pool.shape import SYSTEM_PAGE, PoolShape
from torch_kvswap.host_pool.system import check_room

_MAX_THREADS = 16  # enough to saturate memory bandwidth
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Owner:
    """Frees the memory that a call returns when the last tensor() on it is gone.

    From the call until the address is stored here no KeyboardInterrupt comes: it is one call of a C
    function.

    Args:
        free: takes the address.
        call, arguments: what returns the address.
    """

    def __init__(
        self, free: Callable[[int], object], call: Callable[..., int], *arguments: object
    ) -> None:
        self._addresses: list[int] = []
        # Not at exit, when copies may still run.
        weakref.finalize(self, _free_all, free, self._addresses).atexit = False
        self._addresses.extend(map(call, *([argument] for argument in arguments)))

    @property
    def address(self) -> int:
        """What the call has returned."""
        (address,) = self._addresses
        return address

    def tensor(self, first: int, nbytes: int) -> Tensor:
        """The bytes from this address on, as uint8."""
        memory = (ctypes.c_ubyte * nbytes).from_address(first)
        memory.owner = self  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)


def _free_all(free: Callable[[int], object], addresses: list[int]) -> None:
    for address in addresses:
        free(address)


class Mapping:
    """Zeroed memory of `nbytes`, mapped until `tensor` (uint8) and every view of it are gone.

    Maps the file of `fd`, from create_file(), and keeps a descriptor of its own. Without `fd` it
    maps private memory, which a forked child sees as zeros.

    Raises:
        RuntimeError: the kernel does not map the memory.
    """

    is_foreign = False  # made by somebody else
    table: Mapping | None = None  # memory of their own for checksums; None: they are in this one
    pinned_pieces = 0  # in which its owner has pinned it; 0 if the pool pins it
    _file: Descriptors | None = None

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        if fd is not None:
            self._file = Descriptors(os.dup, fd)
            mapped = os.fstat(fd).st_size
        else:
            mapped = -(-nbytes // SYSTEM_PAGE) * SYSTEM_PAGE
        unmap = partial(native.unmap_host, nbytes=mapped)
        owner = _Owner(unmap, native.map_host, -1 if fd is None else fd, mapped)
        self.address = owner.address
        self.tensor = owner.tensor(self.address, nbytes)
        self._cpus: list[int] = []

    @property
    def fd(self) -> int | None:
        """The descriptor of the file; None for private memory."""
        return None if self._file is None else self._file.fd

    def release(self) -> None:
        """Drops the tensor and closes the file. The memory is unmapped with its last view."""
        vars(self).pop("tensor", None)  # it may be called again
        if self._file is not None:
            self._file.close()

    def place(self, device: torch.device) -> None:
        """Places the pages on the NUMA node of a GPU when they are touched, while it has memory."""
        node = _node_of(device)
        if node is None:
            return
        if not native.bind_host(self.address, self.nbytes, node):
            # Containers forbid binding. But a page comes from the node of the CPU that touches it.
            self._cpus = system.cpus_of(node)

    def touch(self, first: int, last: int) -> None:
        """Commits the bytes from `first` to `last` with several threads, without changing them.

        Raises RuntimeError if there is not enough memory.
        """
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        address = self.address + first
        # From Linux 6.1 on also where the setting for shared memory is "never".
        collapse = self._file is not None
        native.touch_host(address, last - first, threads, collapse, self._cpus)


class ForeignMemory(Mapping):
    """A Mapping that somebody else has made: it is neither placed nor zeroed nor unmapped here.

    Args:
        tensor (Tensor): uint8, from the first to the last byte of the pages.
        table_bytes (int): of checksums, which get memory of their own: `table`.
        pinned_pieces (int): in which its owner has pinned it; 0 if the pool pins it.
    """

    is_foreign = True

    def __init__(self, tensor: Tensor, table_bytes: int, pinned_pieces: int) -> None:
        self.tensor, self.address, self.nbytes = tensor, tensor.data_ptr(), tensor.numel()
        self._storage_bytes = tensor.untyped_storage().nbytes()
        self._cpus = []
        self.table = Mapping(table_bytes) if table_bytes else None
        self.pinned_pieces = pinned_pieces

    def check_kept(self) -> None:
        """Raises RuntimeError if its owner has freed or resized it."""
        nbytes = self.tensor.untyped_storage().nbytes()
        if nbytes != self._storage_bytes or self.tensor.data_ptr() != self.address:
            raise RuntimeError(
                f"the memory of the host pool had {self._storage_bytes} bytes, but its owner has "
                f"freed it or resized it to {nbytes}; close the pool first"
            )

    def release(self) -> None:
        """Drops the tensor. The table stays until nobody has this object, as a second tier may."""
        vars(self).pop("tensor", None)  # it may be called again


class AllocatedMemory:
    """Zeroed memory that its owner allocates and pins: it takes the place of a Mapping."""

    fd: int | None = None
    tensor: Tensor
    address: int
    nbytes: int

    def release(self) -> None:
        """Drops the tensor. The memory is freed with its last view."""
        vars(self).pop("tensor", None)  # it may be called again


class TorchMemory(AllocatedMemory):
    """Memory that torch has pinned, for devices that cannot register memory.

    Torch may allocate more than was asked for: the allocators of some devices round up to a power
    of two.

    Raises:
        ValueError: the machine does not have this much memory.
        RuntimeError: torch cannot pin memory for this device.
    """

    def __init__(self, nbytes: int, page_bytes: int) -> None:
        check_room(nbytes, page_bytes)
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.tensor = memory.zero_()
        if not self.tensor.is_pinned():
            raise RuntimeError("torch has allocated memory that is not pinned")
        self.address, self.nbytes = self.tensor.data_ptr(), nbytes


class DriverMemory(AllocatedMemory):
    """Memory that the CUDA driver has allocated and pinned, where it registers none of the process.
    A forked child must not touch it.

    Raises:
        ValueError: the machine does not have this much memory.
        RuntimeError: the driver does not allocate this much in one piece.
    """

    def __init__(self, nbytes: int, page_bytes: int, device: torch.device) -> None:
        check_room(nbytes, page_bytes)  # the driver touches all of it
        free = partial(_free, ForkGuard(), device.index)
        owner = _Owner(free, native.allocate_host, device.index, nbytes + SYSTEM_PAGE)
        self.address = -(-owner.address // SYSTEM_PAGE) * SYSTEM_PAGE
        self.tensor, self.nbytes = owner.tensor(self.address, nbytes).zero_(), nbytes


def _free(process: ForkGuard, device: int, address: int) -> None:
    if process.is_current and (problem := _problem_of(native.free_host, device, address)):
        log.warning(
            "the driver did not free host memory: %s; it stays locked until the process ends",
            problem,
        )


def map_new(nbytes: int, page_bytes: int, *, shared: bool) -> Mapping:
    """Maps the memory of a new pool: a file if other processes will map it too (`shared`).

    Raises:
        ValueError: the machine does not have this much memory.
    """
    check_room(nbytes, page_bytes)
    if not shared:
        return Mapping(nbytes)
    with contextlib.closing(create_file(nbytes)) as file:
        return Mapping(nbytes, file.fd)


def _node_of(device: torch.device) -> int | None:
    """The NUMA node of a GPU; None if it is unknown, when any node will do."""
    try:
        return system.numa_node_of(native.pci_address(device.index))
    except RuntimeError:
        return None


def create_file(nbytes: int) -> Descriptors:
    """Creates an unnamed memory file of a fixed size, rounded up to whole pages of the system.

    It is freed when the last process that has it ends, even if that process is killed. No process
    can change its size. The size of /dev/shm does not limit it. Its memory is not reserved here,
    which takes as long as touching it with one thread: touch() reports what is missing.

    Raises:
        OSError: the kernel does not create the file.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    file = Descriptors(os.memfd_create, "torch_kvswap", flags)
    os.ftruncate(file.fd, -(-nbytes // SYSTEM_PAGE) * SYSTEM_PAGE)
    fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, _SEALS)
    return file


class Registration:
    """Registers parts of a memory with the CUDA driver.

    It stays alive, with the memory, until remove() has ended, because registered memory must not be
    unmapped, and a thread may touch the part that is registered next. Does not use torch's CUDA
    runtime: it would report a failure at the thread's next kernel launch, and would break a CUDA
    graph that another thread is capturing.
    """

    _all: ClassVar[weakref.WeakSet[Registration]] = weakref.WeakSet()

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self._address = mapping.address
        self._held = [mapping.tensor, mapping.table and mapping.table.tensor]
        self._device = device
        self._process = ForkGuard()
        self._bytes: dict[int, int] = {}  # key: address

    def add(self, first: int, last: int) -> str | None:
        """Registers the bytes from `first` to `last` in one call.

        Returns:
            str | None: why the driver refused, or None.

        Raises:
            NotImplementedError: the driver registers no memory, of any size.
        """
        address = self._address + first
        keep_alive(self)
        self._all.add(self)
        self._bytes[address] = last - first
        try:
            native.register_host(self._device.index, address, last - first)
        except RuntimeError as error:
            del self._bytes[address]
            if isinstance(error, NotImplementedError):
                raise
            return str(error)
        return None

    @classmethod
    def overlaps(cls, first: int, last: int) -> bool:
        """Whether any of this process has registered a byte between two addresses."""
        registered = (each for one in list(cls._all) for each in list(one._bytes.items()))
        return any(begin < last and first < begin + nbytes for begin, nbytes in registered)

    def remove(self) -> None:
        """Unregisters everything. Does nothing in a forked child, which has no registrations."""
        locked, reason = 0, ""
        if self._process.is_current:
            for address, nbytes in list(self._bytes.items()):
                if problem := _problem_of(native.unregister_host, self._device.index, address):
                    locked, reason = locked + nbytes, problem
                self._bytes.pop(address, None)
        self._held = []
        allow_free(self)
        if locked:
            log.warning(
                "the driver did not unpin %d bytes of host memory: %s; they stay locked until the "
                "process ends",
                *(locked, reason),
            )


def pinned_pages(device: torch.device, address: int, shape: PoolShape) -> tuple[int, int]:
    """How many pages, from the front, the driver reports as pinned, each in one piece, and in how
    many pieces.

    Args:
        address (int): of the first page.
    """
    page = pieces = 0
    while page < shape.num_pages:
        begin = address + page * shape.page_bytes
        end = native.pinned_until(device.index, begin)
        if not end:
            break
        pieces += 1
        inside = (end - begin - shape.page_room) // shape.page_bytes + 1
        if inside < 1:
            break
        page += inside
    return min(page, shape.num_pages), pieces


def _problem_of(call: Callable[..., object], *arguments: object) -> str | None:
    """Why the call has failed; None if it has not."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error) or type(error).__name__
    return None


def pins_with_torch(device: torch.device) -> bool:
    """Whether torch allocates and pins host memory for this device.

    Where it does, existing memory cannot be registered.
    """
    return not is_native(device.type)


def registers(device: torch.device) -> bool:
    """Whether host memory for this device is registered with its driver."""
    return device.type != "cpu" and not pins_with_torch(device)
