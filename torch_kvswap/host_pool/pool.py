"""Host pages for KV-cache blocks, pinned for the device of the cache."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_kvswap._native.arguments import (
    INT64_MIN,
    Int64Array,
    NotCopyable,
    bytes_text,
    kind_of,
    read_int,
    read_switch,
    read_timeout,
)
from torch_kvswap._native.loader import ForkGuard, native
from torch_kvswap._native.log import log
from torch_kvswap.encoding.slot import (
    RAW,
    Encoding,
    EncodingName,
    VerifyName,
    read_encoding,
    read_verify,
)
from torch_kvswap.host_pool import foreign
from torch_kvswap.host_pool.description import describe_page, difference
from torch_kvswap.host_pool.memory import (
    AllocatedMemory,
    DriverMemory,
    ForeignMemory,
    Mapping,
    TorchMemory,
    map_new,
    pinned_pages,
    pins_with_torch,
    registers,
)
from torch_kvswap.host_pool.pinning import ONE_CHUNK, Pinning, read_in_background
from torch_kvswap.host_pool.shape import PoolShape, check_layout, read_part
from torch_kvswap.host_pool.shared import ATTACH_ADVICE, PoolHandle
from torch_kvswap.layout import PagedLayout


class User(Protocol):
    """Uses the memory of a pool, as handlers and second tiers do: closed before it is freed.

    It outlives its handler or PrefixCache until nothing uses the memory any more.
    """

    def check_open(self) -> None: ...

    def close(self) -> None: ...


class _Memory:
    """The memory of a pool, shared with its views, and whether it is open and pinned.

    Unpinned at the latest when neither the pool nor a view of it is alive.
    """

    def __init__(
        self,
        mapping: Mapping | AllocatedMemory,
        shape: PoolShape,
        layout: PagedLayout,
        encoding: Encoding,
    ) -> None:
        self.process = ForkGuard()
        self.mapping = mapping
        # Of the layout that the pool was made for. Views may have smaller blocks.
        self.tensors, self.encoding = layout._describe(), encoding
        self.pages: Tensor | None = shape.view(mapping.tensor)
        # The native side reads it at each submission.
        self._ready_range = native.ReadyRange(shape.num_pages, ONE_CHUNK)
        self.pinning: Pinning | None = None
        # The value: whether it assigns all pages, so that no other one may write them.
        self.users: weakref.WeakKeyDictionary[User, bool] = weakref.WeakKeyDictionary()

    def make_pinning(self, shape: PoolShape, device: torch.device) -> Pinning:
        """Makes the object that pins the pages, and unpins them when this memory is dropped."""
        assert isinstance(self.mapping, Mapping)
        self.pinning = Pinning(self.mapping, device, shape, self._ready_range)
        weakref.finalize(self, self.pinning.finish, weakref.ref(self))
        return self.pinning

    def check_open(self) -> Tensor:
        """Returns the pages; raises RuntimeError if the pool is closed, if somebody else has freed
        its memory, or in a forked child."""
        self.process.check("host pool")
        if self.pages is None:
            raise RuntimeError("the host pool is closed; make a new one")
        if isinstance(self.mapping, ForeignMemory):
            self.mapping.check_kept()
        return self.pages

    def close(self) -> None:
        """Closes all users, then unpins and releases the memory."""
        self.process.check("host pool")
        with contextlib.ExitStack() as users:
            for user in list(self.users):
                users.callback(user.close)
        if self.pinning is not None:
            self.pinning.close()
        self.mapping.release()
        self.pages = None


class HostPool(NotCopyable):
    """Pinned host memory for the blocks of a cache, in pages of `blocks_per_page` blocks.

    A pool belongs to one process, unless it is made with shared=True or attach(). The memory has
    `nbytes = num_pages * page_bytes` bytes, plus some with shared=True or verify, and starts as
    zeros. Pinning commits it; pageable memory is committed when it is written. over() makes a pool
    on memory that exists.

    Several handlers may use one pool, unless a PrefixCache uses it. A context manager that closes
    the pool on exit. A dropped pool is closed, too, and the end of the process unpins it. Not
    thread safe, except num_ready_pages, is_ready and wait_ready(). A forked child cannot use the
    pool; in it, tensors taken from `pages` read as zeros unless the pool is shared.

    Pages for a cache on a device are pinned; if the driver refuses, a warning is logged, and they
    are pageable (is_pinned). They are on the NUMA node of a CUDA GPU, and on transparent huge pages
    where the kernel offers them. For devices other than CUDA, PyTorch allocates and pins them.

    Args:
        layout (PagedLayout): the cache whose blocks are stored here.
        num_pages (int): at least 1.
        blocks_per_page (int): blocks that are stored, found and evicted together; 1 suits most
            caches. docs/host_memory.md says when to take more.
        encoding (str): "raw" keeps blocks as they are; "lossless" encodes blocks of torch.bfloat16
            in slots of a smaller, fixed size, and decodes them bit for bit. A block that does not
            fit is rejected by its store. docs/encoding.md says what is gained.
        verify (str): "load" keeps checksums of the blocks in addition to the pages. A load
            fails with a CorruptedPageError if a block no longer matches what was stored, and with a
            BlocksRejectedError if its page was never stored. Blocks that the caller has written to
            `pages` count as never stored. docs/encoding.md says what checksums find.
        pin_in_background (bool): return when the first chunk is pinned; a thread pins the rest.
            Pages become usable from the front (num_ready_pages, wait_ready()). A job with a page
            that is not ready raises IndexError. Refused for a cache on the CPU.
        shared (bool): whether other processes of this machine can attach() to the pool. Each of
            them pins and uses all pages; the caller must make sure that no process reads or writes
            a page while another one writes it.
        part (tuple[int, int] | None): (rank, number of ranks), for a shared pool. A slot then has a
            block of each rank, each followed by its checksums. Transfers, `pages` and read_block()
            use the blocks of `rank`. page_bytes and slot_bytes cover all ranks.

    Attributes:
        device (torch.device): the device of the cache.
        num_pages (int): pages of the pool.
        blocks_per_page (int): blocks per page.
        slot_bytes (int): bytes per block, encoded or raw, with padding.
        page_bytes (int): bytes per page; with over(), the distance between pages.
        num_parts (int): ranks that have a part of each slot: see `part`.
        nbytes (int): bytes of all pages.
        encoding (str): "raw" or "lossless".
        verify (str): "off" or "load".

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number is out of range, an option is not possible for the device, the blocks
            cannot be encoded, or the machine does not have this much memory (NoRoomError, a kind
            of ValueError).
        RuntimeError: the kernel does not map the memory. Nothing stays mapped.
        OSError: shared=True, and the kernel refuses a file in memory.
    """

    def __init__(
        self,
        layout: PagedLayout,
        num_pages: int,
        blocks_per_page: int = 1,
        *,
        encoding: EncodingName = "raw",
        verify: VerifyName = "off",
        pin_in_background: bool = False,
        shared: bool = False,
        part: tuple[int, int] | None = None,
    ) -> None:
        slot_encoding = read_encoding(encoding)
        check_layout(layout)
        verify = read_verify(verify, layout.device)
        part = read_part(part)
        shape = PoolShape(layout, num_pages, blocks_per_page, slot_encoding, verify, part)
        shared = read_switch("shared", shared)
        if part is not None and not shared:
            raise ValueError(
                f"part is {part}, but shared is False, so that nobody has the others; pass "
                "shared=True, or leave part out"
            )
        in_background = read_in_background(pin_in_background, layout.device)
        mapping: Mapping | AllocatedMemory
        if shared:
            _warn_of_pageable(layout.device)
            mapping = map_new(shape.file_bytes, shape.page_bytes, shared=True)
        else:
            mapping = _map_private(layout.device, shape)
        self._open(layout, shape, mapping, slot_encoding)
        try:
            self._pin(in_background, is_new=True)
        except NotImplementedError as error:
            reason = str(error)
        else:
            return
        self._memory.close()
        log.info("the CUDA driver allocates the memory of a host pool: %s", reason)
        mapping = _allocate_pinned(
            "the CUDA driver",
            partial(DriverMemory, shape.mapped_bytes, shape.page_bytes, layout.device),
            *(layout.device, shape),
        )
        self._open(layout, shape, mapping, slot_encoding)

    @classmethod
    def attach(
        cls,
        layout: PagedLayout,
        handle: PoolHandle,
        *,
        pin_in_background: bool = False,
        rank: int = 0,
    ) -> HostPool:
        """Makes a pool on the memory of another process's pool.

        Pins all pages; if the driver refuses, logs a warning and uses pageable memory.

        Args:
            layout (PagedLayout): this process's cache. Its tensors must match those in the handle
                in order, type, axes and byte order. The handle decides the encoding and `verify`.
            handle (PoolHandle): from share() or PoolHandle.receive(); may be closed afterwards.
            pin_in_background (bool): see HostPool.
            rank (int): which part of the slots this process uses: see HostPool's `part`.

        Raises:
            TypeError: handle is not a PoolHandle, or an argument has a wrong type.
            ValueError: the handle is for other blocks, the layout's blocks cannot be encoded as the
                handle says, or an argument is out of range.
            RuntimeError: the kernel does not map the memory, or the handle is closed.
        """
        if not isinstance(handle, PoolHandle):
            raise TypeError(
                f"handle is {kind_of(handle)}; it must be the PoolHandle that share() or "
                "receive() returned"
            )
        slot_encoding = handle._encoding
        check_layout(layout)
        slot_encoding.slot_bytes(layout, ATTACH_ADVICE)
        verify = read_verify(handle.verify, layout.device)
        counts = handle.num_pages, handle.blocks_per_page
        rank = read_int("rank", rank, 0, max(handle.parts, 1) - 1)
        part = (rank, handle.parts) if handle.parts else None
        shape = PoolShape(layout, *counts, slot_encoding, verify, part)
        handle._check(shape, layout)
        in_background = read_in_background(pin_in_background, layout.device)
        _warn_of_pageable(layout.device)
        mapping = Mapping(shape.file_bytes, handle.fd)
        pool = cls.__new__(cls)
        pool._open(layout, shape, mapping, slot_encoding)
        pool._pin(in_background, is_new=False)
        return pool

    @classmethod
    def over(
        cls,
        memory: Tensor,
        layout: PagedLayout,
        blocks_per_page: int = 1,
        *,
        page_bytes: int | None = None,
        offset: int = 0,
        encoding: EncodingName = "raw",
        verify: VerifyName = "off",
        pin_in_background: bool = False,
    ) -> HostPool:
        """Makes a pool on memory that somebody else owns, such as a region that workers share.

        Page p begins at byte `offset + p * page_bytes`; the pool has all pages that fit. It reads
        and writes its blocks, and no byte between them. It never zeroes or frees the memory, and
        keeps it alive while the pool is open. It pins the memory from the first to the last page
        until it is closed, unless the owner has pinned it. docs/host_memory.md says what the owner
        has to know.

        Args:
            memory (Tensor): contiguous, on the CPU, of any type and shape.
            layout (PagedLayout): the cache whose blocks are stored here.
            blocks_per_page (int): a page has this number of slots, page_bytes / blocks_per_page
                bytes apart.
            page_bytes (int | None): distance between pages, at least HostPool.page_bytes_of(); None
                if the pages are adjacent.
            offset (int): byte of the memory at which the first page begins.
            encoding (str): see HostPool. Encoded slots begin at multiples of 16.
            verify (str): see HostPool. The checksums are this pool's: blocks that another process
                has written count as never stored.
            pin_in_background (bool): see HostPool.

        Raises:
            TypeError: memory is not a tensor, or an argument has a wrong type.
            ValueError: the memory is on a device, not contiguous, too small, read-only, pinned in
                part, or pinned by another HostPool; pages would overlap; see also HostPool.
        """
        slot_encoding = read_encoding(encoding)
        check_layout(layout)
        verify = read_verify(verify, layout.device)
        in_background = read_in_background(pin_in_background, layout.device)
        shape, mapping = foreign.find_pages(
            memory, offset, page_bytes, layout, blocks_per_page, slot_encoding, verify
        )
        if pins_with_torch(layout.device) and not mapping.tensor.is_pinned():
            _warn_of_pageable(layout.device)
        pool = cls.__new__(cls)
        pool._open(layout, shape, mapping, slot_encoding)
        pool._pin(in_background, is_new=False)
        return pool

    @staticmethod
    def page_bytes_of(
        layout: PagedLayout,
        blocks_per_page: int = 1,
        *,
        encoding: EncodingName = "raw",
        verify: VerifyName = "off",
        part: tuple[int, int] | None = None,
    ) -> int:
        """The `page_bytes` of a pool with these arguments: divide memory by it to get num_pages.

        Args:
            layout, blocks_per_page, encoding, verify, part: see HostPool.

        Returns:
            int: bytes per page.
        """
        slot_encoding, verify = read_encoding(encoding), read_verify(verify)
        shape = PoolShape(layout, 1, blocks_per_page, slot_encoding, verify, read_part(part))
        return shape.page_bytes

    def _open(
        self,
        layout: PagedLayout,
        shape: PoolShape,
        mapping: Mapping | AllocatedMemory,
        encoding: Encoding,
    ) -> None:
        """Initializes a pool of any kind."""
        self.device = layout.device
        self.num_pages, self.blocks_per_page = shape.num_pages, shape.blocks_per_page
        self.slot_bytes, self.num_parts = shape.slot_bytes, max(shape.parts, 1)
        self.page_bytes, self.nbytes = shape.page_bytes, shape.nbytes
        self.verify: VerifyName = shape.verify
        self._shape = shape
        self._memory = _Memory(mapping, shape, layout, encoding)
        self._set_encoding(layout, encoding)

    def _pin(self, in_background: bool, *, is_new: bool) -> None:
        """Places the pages if they are new, and pins them, unless their device needs no
        registration, or somebody else has pinned them.

        Raises:
            NotImplementedError: the driver registers no memory, and this one is not shared.
        """
        mapping = self._memory.mapping
        if not (registers(self.device) and isinstance(mapping, Mapping)):
            return
        if is_new:
            mapping.place(self.device)
        self._memory.make_pinning(self._shape, self.device).start(in_background)

    def _set_encoding(self, layout: PagedLayout, encoding: Encoding) -> None:
        """Sets the encoding of blocks of the layout in the slots."""
        self._encoding = encoding
        self.encoding: EncodingName = encoding.name
        self._tensors = layout._describe()
        # The slabs of the pages, with num_pages * blocks_per_page blocks. Slabs of encoded blocks
        # have the sizes of raw ones, and the address of their slot.
        self._slabs = self._shape.slabs(self._memory.mapping.tensor, layout, encoding)

    def __repr__(self) -> str:
        is_open = self._memory.pages is not None
        ready = f"{self._ready_range.end_page} of {self.num_pages} pages ready"
        verify = "" if self.verify == "off" else f", verify={self.verify!r}"
        return (
            f"HostPool(num_pages={self.num_pages}, blocks_per_page={self.blocks_per_page}, "
            f"page_bytes={self.page_bytes}, encoding={self.encoding!r}{verify}, "
            f"device={self.device}, {ready if is_open else 'closed'})"
        )

    def share(self) -> PoolHandle:
        """Makes a handle that other processes can attach to.

        Returns:
            PoolHandle: to be sent with PoolHandle.send(); closed by close(), or when it is dropped.

        Raises:
            ValueError: the pool belongs to one process.
            RuntimeError: the pool is closed.
        """
        self._memory.check_open()
        fd = self._memory.mapping.fd
        if fd is None:
            raise ValueError("this pool belongs to one process; make it with HostPool(shared=True)")
        shape = self.num_pages, self.blocks_per_page, self.page_bytes
        contents = self._memory.tensors, self._memory.encoding, self.verify
        return PoolHandle(fd, *shape, *contents, self._shape.parts)

    def view_for(
        self,
        layout: PagedLayout,
        *,
        encoding: EncodingName | None = None,
    ) -> HostPool:
        """Makes a view of the same pages for another group of layers.

        A page then holds blocks of one group or the other. The view keeps the memory alive, and
        closing the pool or a view closes all of them.

        Args:
            layout (PagedLayout): the other group, whose slots are not larger than this pool's.
            encoding (str | None): the encoding of its blocks; None keeps the pool's. They have
                checksums if the pool has.

        Raises:
            ValueError: the slots are larger, the blocks cannot be encoded, or they have more
                checksums than those of the pool.
            RuntimeError: the pool is closed.
        """
        self._memory.check_open()
        check_layout(layout)
        slot_encoding = self._memory.encoding if encoding is None else read_encoding(encoding)
        needed = slot_encoding.slot_bytes(layout, "pass encoding='raw' for this view")
        if needed > self._shape.block_room:
            encoded = "" if slot_encoding is RAW else f", encoded in {needed} bytes,"
            raise ValueError(
                f"blocks of {layout.block_bytes} bytes{encoded} do not fit into slots of "
                f"{self._shape.block_room} bytes; make the pool from the layout with the largest "
                "slots"
            )
        if slot_encoding is not RAW:
            foreign.check_slots(self._memory.mapping.address, self.slot_bytes, "leave encoding out")
        view = HostPool.__new__(HostPool)
        vars(view).update(vars(self))
        view._set_encoding(layout, slot_encoding)
        view._encoding_for_native(layout.sizes)  # says what is wrong with its checksums
        return view

    @property
    def pages(self) -> Tensor:
        """All pages: uint8 [num_pages, blocks_per_page, bytes of a block in its slot].

        These are `slot_bytes`, or less with `part`, which shows this rank's blocks, and in over(),
        whose slots may be larger. Use read_block() to decode encoded blocks.

        Views of it stay valid after close(). Before you access a page, wait on the host for the
        jobs that use it. Raises RuntimeError if the pool is closed.
        """
        return self._memory.check_open()

    def read_block(self, page: int, slot: int = 0) -> Tensor:
        """Copies a block out of a page, and decodes it if it is encoded, on the CPU.

        First wait on the host for the jobs that use the page.

        Args:
            page (int): 0 to num_pages - 1.
            slot (int): 0 to blocks_per_page - 1.

        Returns:
            Tensor: uint8, the fragments of the block, one after another.

        Raises:
            IndexError: the pool has no such page or slot, or its page is not ready.
            ValueError: the slot holds no encoded block: none was stored, or its store rejected it.
            RuntimeError: the pool is closed.
        """
        pages = self._memory.check_open()
        page, slot = read_int("page", page, INT64_MIN), read_int("slot", slot, INT64_MIN)
        self._ready_range.check(page, self.num_pages)
        if not 0 <= slot < self.blocks_per_page:
            raise IndexError(f"slot is {slot}; a page has slots 0 to {self.blocks_per_page - 1}")
        block = self._encoding.block_in(pages[page, slot], self._slabs.sizes)
        if block is None:
            raise ValueError(
                f"slot {slot} of page {page} holds no encoded block: its store was rejected, or "
                "nothing was stored there"
            )
        return block

    @property
    def _ready_range(self) -> native.ReadyRange:
        """The pages that can be used now, as the native side reads them; shared by all views."""
        return self._memory._ready_range

    @property
    def num_ready_pages(self) -> int:
        """How many pages, from the front, can be used now.

        Raises RuntimeError if the pool is closed.
        """
        self._memory.check_open()
        return self._ready_range.end_page

    @property
    def is_ready(self) -> bool:
        """Whether all pages can be used now.

        Raises RuntimeError if the pool is closed.
        """
        return self.num_ready_pages == self.num_pages

    def wait_ready(self, timeout: float | None = None, pages: int | None = None) -> bool:
        """Blocks until the first pages can be used. Any thread may wait.

        Args:
            timeout (float | None): seconds; None waits forever.
            pages (int | None): number of pages; None is all of them.

        Returns:
            bool: False if the timeout passed first.

        Raises:
            ValueError: `pages` is more than the pool has, or a number is negative.
            RuntimeError: pinning has stopped, because the driver refused, or the pool is closed.
        """
        self._memory.process.check("host pool")
        all_pages = self.num_pages
        wanted = all_pages if pages is None else read_int("pages", pages, 0, all_pages)
        timeout = read_timeout("timeout", timeout)
        pinning = self._memory.pinning
        in_time = pinning is None or pinning.wait(wanted, timeout)
        if in_time:
            self._memory.check_open()
        return in_time

    @property
    def is_pinned(self) -> bool:
        """Whether the driver reports all pages as pinned. False if the pool is closed."""
        memory = self._memory
        memory.process.check("host pool")
        if memory.pages is None or self._ready_range.end_page < self.num_pages:
            return False
        if not registers(self.device):
            return self._is_pinned_by_torch
        with contextlib.suppress(RuntimeError):  # the driver does not answer
            found, _ = pinned_pages(self.device, memory.mapping.address, self._shape)
            return found == self.num_pages
        return False

    def _describe(self, contents: dict[str, Any] | None = None) -> dict[str, Any]:
        """See describe_page()."""
        return describe_page(self._tensors, self._shape, self._encoding, contents)

    def _check_blocks(
        self,
        layout: PagedLayout,
        advice: str,
        names: tuple[str, str] = ("the cache", "the host pool"),
    ) -> None:
        """Raises ValueError if blocks of the layout are not what the pool has in its slots.

        The error calls the layout and the pool by `names`, and says `advice`.
        """
        cache, pool = names
        both = {"tensors": layout._describe()}, {"tensors": self._tensors}
        different = difference(*both, (f"in {cache}", f"in {pool}"))
        if different is not None:
            raise ValueError(f"{cache} does not fit {pool}: {different}; {advice}")

    def _encoding_for_native(self, sizes: Int64Array, group: int = 0) -> native.Encoding:
        """What the native side asks about the slots of blocks with these slabs.

        group: the place of the pool among those of the handler. Checksums know it.

        Raises:
            ValueError: no slot can hold such a block, or the table has no room for its checksums.
        """
        encoding = self._encoding.for_native(sizes)
        if self.verify == "off":
            return encoding
        return native.verified_encoding(encoding, sizes, self._checksums(group))

    def _read_checksums(self, page: int, group: int) -> bytes:
        """The checksums of a page's blocks in any slots; nothing if the pool has no checksums, or
        if they are in the page, with those of other ranks.

        The page has none if a store into it has not been reported, or if another group stored it.
        """
        if self.verify == "off" or self.num_parts > 1:
            return b""
        first = page * self.blocks_per_page
        return self._checksums(group).read(self._slabs.sizes, first, self.blocks_per_page)

    def _write_checksums(self, page: int, group: int, checksums: bytes) -> None:
        """The page has the blocks of another page of the group, with these _read_checksums()."""
        if self.verify == "off":
            return
        first = page * self.blocks_per_page
        if self.num_parts == 1:
            self._checksums(group).write(first, self.blocks_per_page, checksums)
            return
        for rank in range(self.num_parts):  # the checksums have come with the page
            table = self._shape.checksums(self._memory.mapping.address, group, rank)
            for slot in range(first, first + self.blocks_per_page):
                table.adopt(slot)

    def _checksums(self, group: int) -> native.ChecksumTable:
        return self._shape.checksums(self._memory.mapping.address, group)

    @property
    def _is_pinned_by_torch(self) -> bool:
        """Whether the pages are memory that torch has pinned."""
        return pins_with_torch(self.device) and self._memory.mapping.tensor.is_pinned()

    def _all_bytes(self) -> Tensor:
        """The memory, uint8 [bytes of all pages], of all ranks."""
        self._memory.check_open()
        return self._memory.mapping.tensor[: self.nbytes]

    def _slots(self) -> Tensor:
        """The memory, uint8 [slots of all pages, bytes of a slot]."""
        return self._memory.check_open().flatten(0, 1)

    def _check_new_user(self, assigns_pages: bool) -> None:
        """Raises ValueError if the pages belong to an open PrefixCache, or the new user is one and
        they have another open user.
        """
        for user, has_assigned in list(self._memory.users.items()):
            if not has_assigned and not assigns_pages:
                continue
            with contextlib.suppress(RuntimeError):
                user.check_open()
                kind = "PrefixCache" if has_assigned else "handler"
                raise ValueError(
                    f"the host pool has an open {kind}, and a PrefixCache assigns all pages of its "
                    "pools, which another handler would overwrite; close that first, or make "
                    "another pool"
                )

    def _register_user(self, user: User, assigns_pages: bool = False) -> None:
        """Makes close() close this user first. Holds only a weak reference to it."""
        self._memory.check_open()
        self._memory.users[user] = assigns_pages

    def close(self) -> None:
        """Closes the handlers of the pool and its views, then unpins and releases the memory.

        Closing a handler waits for its jobs. The memory is freed when the last tensor on it is
        gone, in all processes. Idempotent.
        """
        self._memory.close()

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _map_private(device: torch.device, shape: PoolShape) -> Mapping | AllocatedMemory:
    """Maps the memory of a pool of one process. Raises what _allocate_pinned() does."""
    if pins_with_torch(device):
        allocate = partial(TorchMemory, shape.nbytes, shape.page_bytes)
        return _allocate_pinned("torch", allocate, device, shape)
    return map_new(shape.mapped_bytes, shape.page_bytes, shared=False)


def _allocate_pinned(
    owner: str, allocate: Callable[[], AllocatedMemory], device: torch.device, shape: PoolShape
) -> Mapping | AllocatedMemory:
    """Allocates memory that the owner pins; pageable memory, with a warning, if it does not.

    Raises:
        ValueError: there is not enough memory.
    """
    try:
        return allocate()
    except RuntimeError as error:
        log.warning(
            "%s did not pin %s of host memory for %s: %s. The pages are pageable now, and copies "
            "are synchronous",
            *(owner, bytes_text(shape.nbytes), device, error),
        )
    return map_new(shape.mapped_bytes, shape.page_bytes, shared=False)


def _warn_of_pageable(device: torch.device) -> None:
    """Warns that nobody pins pages that torch has not allocated for this device."""
    if pins_with_torch(device):
        log.warning(
            "the memory of this pool cannot be pinned for %s: torch pins only memory that it "
            "allocates itself. The pages are pageable, and copies are synchronous",
            device,
        )
