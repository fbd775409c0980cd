"""Pages in memory that somebody else owns."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvswap._native.arguments import count_of, kind_of, read_int
from torch_kvswap.encoding.slot import RAW, SLOT_ALIGNMENT, Encoding, VerifyName
from torch_kvswap.host_pool.memory import ForeignMemory, Registration, pinned_pages, registers
from torch_kvswap.host_pool.shape import SYSTEM_PAGE, PoolShape
from torch_kvswap.host_pool.system import first_unwritable
from torch_kvswap.layout import PagedLayout


def find_pages(
    memory: object,
    offset: object,
    page_bytes: object,
    layout: PagedLayout,
    blocks_per_page: int,
    encoding: Encoding,
    verify: VerifyName,
) -> tuple[PoolShape, ForeignMemory]:
    """Finds the pages of a pool in the memory: see HostPool.over().

    Raises:
        TypeError, ValueError: see there.
    """
    flat = _read_memory(memory)
    dense = PoolShape(layout, 1, blocks_per_page, encoding, verify)
    slots, least = dense.blocks_per_page, dense.page_bytes
    distance = least if page_bytes is None else read_int("page_bytes", page_bytes, 1)
    if distance < least:
        raise ValueError(
            f"page_bytes is {distance}, but pages have {least} bytes and would overlap; pass "
            f"{least} or more"
        )
    if distance % slots:
        raise ValueError(
            f"page_bytes is {distance}, but the {slots} slots of a page lie at equal distances; "
            f"pass a multiple of {slots}"
        )
    offset = read_int("offset", offset, 0)
    room = distance - distance // slots + dense.slot_bytes  # of a page
    left = flat.numel() - offset
    if left < room:
        raise ValueError(
            f"memory of {flat.numel()} bytes has {max(left, 0)} from offset {offset}, but a page "
            f"has {room}; pass more memory, or a smaller offset"
        )
    num_pages = (left - room) // distance + 1
    pages = flat[offset : offset + (num_pages - 1) * distance + room]
    first = pages.data_ptr()
    starts, spans = layout.bases, (layout.num_blocks - 1) * layout.strides + layout.sizes
    meets = (starts < first + pages.numel()) & (first < starts + spans)
    if layout.device.type == "cpu" and meets.any():
        index = layout._tensor_of_slab[meets.argmax()]
        raise ValueError(
            f"the pages are bytes {offset} to {offset + pages.numel()} of memory, which has "
            f"tensors[{index}] of the cache too, and stores would overwrite it; pass other memory"
        )
    if encoding is not RAW:
        check_slots(first, distance // slots, "pass encoding='raw'")
    if (at := first_unwritable(first, first + pages.numel())) is not None:
        raise ValueError(
            f"the pages are bytes {offset} to {offset + pages.numel()} of memory, of which byte "
            f"{offset + at - first} cannot be written; map the memory for writing"
        )
    shape = PoolShape(
        *(layout, num_pages, slots, encoding, verify),
        page_bytes=distance,
        lead=first % SYSTEM_PAGE,
    )
    mapping = ForeignMemory(pages, shape.table_bytes, _pinned_pieces(pages, shape, layout.device))
    if mapping.table is not None:
        shape.table_begin = mapping.table.address - mapping.address
    return shape, mapping


def check_slots(first: int, slot_bytes: int, advice: str) -> None:
    """Raises ValueError if slots at these places cannot have encoded blocks."""
    if first % SLOT_ALIGNMENT or slot_bytes % SLOT_ALIGNMENT:
        raise ValueError(
            f"the slots of this pool begin at address {first:#x} and are {slot_bytes} bytes apart, "
            f"but encoded blocks need multiples of {SLOT_ALIGNMENT}; {advice}"
        )


def _read_memory(memory: object) -> Tensor:
    """The memory as uint8 of one dimension."""
    remedy = "pass a contiguous tensor on the CPU"
    if not isinstance(memory, Tensor):
        from_buffer = ", such as torch.frombuffer(memory, dtype=torch.uint8)"
        raise TypeError(f"memory is {kind_of(memory)}; {remedy}{from_buffer}")
    if memory.device.type != "cpu" or memory.layout != torch.strided:
        raise ValueError(f"memory is a {memory.layout} tensor on {memory.device}; {remedy}")
    if not memory.is_contiguous():
        raise ValueError(
            f"memory has the shape {list(memory.shape)} and the strides {list(memory.stride())}; "
            f"{remedy}"
        )
    return memory.detach().view(-1).view(torch.uint8)


def _pinned_pieces(pages: Tensor, shape: PoolShape, device: torch.device) -> int:
    """In how many pieces the owner of the pages has pinned them; 0 if they are not pinned.

    Raises:
        ValueError: some of them are, or another pool has pinned them.
    """
    if not registers(device):
        return 0
    first, last = pages.data_ptr(), pages.data_ptr() + pages.numel()
    if Registration.overlaps(first, last):
        raise ValueError(
            f"another HostPool has pinned memory from {first:#x} to {last:#x}, and unpins it when "
            "it is closed; use its view_for(), or pin the memory before you make the first pool"
        )
    found, pieces = pinned_pages(device, first, shape)
    if pieces and found < shape.num_pages:
        raise ValueError(
            f"of the {count_of(shape.num_pages, 'page')} in the memory the first {found} are "
            f"pinned, but not all of page {found}, at {first + found * shape.page_bytes:#x}, in "
            "one registration; pin all pages so, or none"
        )
    return pieces
