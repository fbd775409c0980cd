"""Pools on memory of somebody else: only their blocks are read and written, whatever lies between."""

from __future__ import annotations

import gc
import mmap
import re
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from bf16_cache import BLOCK_BYTES, Bf16Cache
from error_text import one_line
from expecttest import assert_expected_inline
from fake_procfs import write
from host_pools import in_chunks, registered, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import logged
from simulated_cache import needs_kernels
from simulated_driver import HOST, Driver, place, simulated

from torch_kvswap import (
    BlocksRejectedError,
    CorruptedPageError,
    HostPool,
    OffloadHandler,
    PagedLayout,
    PrefixCache,
)
from torch_kvswap._native.loader import native
from torch_kvswap.host_pool import system
from torch_kvswap.host_pool.pinning import ONE_CHUNK

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
LAYERS, LAYER = 3, 512
BLOCK = LAYERS * LAYER
PAGE = mmap.PAGESIZE


def cache(blocks: int = 8, layers: int = LAYERS, layer_bytes: int = LAYER) -> PagedLayout:
    """Blocks of random bytes."""
    rows = torch.randint(1, 256, (layers, blocks, layer_bytes), dtype=torch.uint8)
    return PagedLayout(list(rows))


def block(layout: PagedLayout, number: int) -> torch.Tensor:
    return torch.cat([tensor[number].flatten() for tensor in layout.tensors])


class Region:
    """A mapping of the kernel, as an engine shares it between its workers, and a tensor on it."""

    def __init__(self, nbytes: int) -> None:
        self.mapped = mmap.mmap(-1, nbytes)
        self.tensor: torch.Tensor = torch.frombuffer(memoryview(self.mapped), dtype=torch.int8)

    def bytes(self) -> torch.Tensor:
        return self.tensor.view(torch.uint8)


@given(
    layer_bytes=st.integers(1, 40),
    per_page=st.integers(1, 3),
    gap=st.integers(0, 30),
    offset=st.integers(0, 50),
    tail=st.integers(0, 100),
    verify=st.sampled_from(["off", "load"]),
)
@settings(max_examples=60, deadline=None)
def test_just_the_blocks_are_written_at_any_stride(
    layer_bytes: int, per_page: int, gap: int, offset: int, tail: int, verify: str
) -> None:
    layout = cache(layer_bytes=layer_bytes)
    nbytes = LAYERS * layer_bytes
    distance = nbytes + gap
    page_bytes = per_page * distance
    before = torch.randint(256, (offset + 4 * page_bytes - gap + tail,), dtype=torch.uint8)
    memory = before.clone()
    pool = HostPool.over(
        memory, layout, per_page, page_bytes=page_bytes, offset=offset, verify=verify
    )
    assert (pool.num_pages, pool.page_bytes) == (4 + tail // page_bytes, page_bytes)
    with OffloadHandler(layout, pool) as handler:
        handler.store(gpu_block_ids=list(range(2 * per_page)), page_ids=[3, 1]).synchronize()
        expected = before.clone()
        for number in range(2 * per_page):
            page, slot = [3, 1][number // per_page], number % per_page
            begin = offset + page * page_bytes + slot * distance
            expected[begin : begin + nbytes] = block(layout, number)
            assert torch.equal(pool.read_block(page, slot), block(layout, number))
        assert torch.equal(memory, expected)
        stored = block(layout, 0)
        handler.load(page_ids=[3], gpu_block_ids=list(range(7, 7 - per_page, -1))).synchronize()
        assert torch.equal(block(layout, 7), stored)
    pool.close()
    assert torch.equal(memory, expected)


def test_the_memory_lives_until_the_pool_is_closed() -> None:
    region, layout = Region(4 * BLOCK), cache()
    mapped = region.mapped
    pool = HostPool.over(region.tensor, layout, verify="load")
    handler = OffloadHandler(layout, pool)
    del region
    gc.collect()
    with pytest.raises(BufferError):
        mapped.close()
    handler.store(gpu_block_ids=[1], page_ids=[3]).synchronize()
    assert torch.equal(pool.pages[3, 0], block(layout, 1))
    pool.close()
    mapped.close()


def test_a_dropped_pool_lets_the_memory_go() -> None:
    memory = torch.zeros(4 * BLOCK, dtype=torch.uint8)
    storage = weakref.ref(memory.untyped_storage())
    pool = HostPool.over(memory, cache())
    del memory
    assert pool.pages.shape == (4, 1, BLOCK)
    del pool
    gc.collect()
    assert storage() is None


def test_checksums_find_what_others_wrote_and_are_private() -> None:
    layout, memory = cache(), torch.zeros(4 * BLOCK, dtype=torch.uint8)
    pools = [HostPool.over(memory, layout, verify="load") for _ in range(2)]
    with OffloadHandler(layout, pools[0]) as one, OffloadHandler(layout, pools[1]) as other:
        one.store(gpu_block_ids=[1, 2], page_ids=[0, 1]).synchronize()
        with pytest.raises(BlocksRejectedError):  # never stored by this pool
            other.load(page_ids=[0], gpu_block_ids=[5]).synchronize()
        memory[BLOCK] ^= 1
        with pytest.raises(CorruptedPageError):
            one.load(page_ids=[0, 1], gpu_block_ids=[5, 6]).synchronize()
        assert torch.equal(block(layout, 5), block(layout, 1))


def test_encoded_blocks_fit_into_larger_cells() -> None:
    made = Bf16Cache()
    for number in range(4):
        made.fill(number, "normal", number)

    def stored(number: int) -> torch.Tensor:
        return torch.cat([slab.flatten() for slab in made.slabs(number)]).view(torch.uint8)

    before = torch.randint(256, (6, BLOCK_BYTES), dtype=torch.uint8)
    memory = before.clone()
    pool = HostPool.over(memory, made.layout, page_bytes=BLOCK_BYTES, encoding="lossless")
    least = HostPool.page_bytes_of(made.layout, encoding="lossless")
    with OffloadHandler(made.layout, pool) as handler:
        handler.store(gpu_block_ids=[0, 1, 2, 3], page_ids=[3, 2, 1, 0]).synchronize()
        handler.load(page_ids=[3, 2, 1, 0], gpu_block_ids=[9, 8, 7, 6]).synchronize()
    for number in range(4):
        assert torch.equal(stored(9 - number), stored(number))
        assert torch.equal(pool.read_block(3 - number), stored(number))
    assert torch.equal(memory[:, least:], before[:, least:])
    assert torch.equal(memory[4:], before[4:])


def test_a_store_below_takes_no_bytes_of_others() -> None:
    memory = torch.zeros(8 * PAGE, dtype=torch.uint8)
    pool = HostPool.over(memory, cache(), page_bytes=PAGE)
    with pytest.raises(ValueError, match=f"only {BLOCK} of each {PAGE} bytes"):
        PrefixCache(cache(), pool, below="file:/nowhere", below_model="m")


def test_memory_must_be_writable_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["1000-2000 r--p", "2000-3000 rw-p", "3000-4000 rw-s", "4000-5000 r--s"]
    write(tmp_path, "proc/self/maps", "".join(f"{line} 0 00:00 0 /name\n" for line in lines))
    monkeypatch.setattr(system, "ROOT", tmp_path)
    assert system.first_unwritable(0x2800, 0x4000) is None
    assert system.first_unwritable(0x2800, 0x4001) == 0x4000
    assert system.first_unwritable(0x1FFF, 0x3000) == 0x1FFF


def test_wrong_memory_is_refused_with_what_to_do() -> None:
    layout, memory = cache(), torch.zeros(4 * BLOCK, dtype=torch.uint8)
    read_only = mmap.mmap(-1, 2 * PAGE, prot=mmap.PROT_READ)
    with pytest.warns(UserWarning, match="not writable"):
        unwritable = torch.frombuffer(read_only, dtype=torch.uint8)
    bf16 = Bf16Cache().layout

    def refused(of: object, *, of_layout: PagedLayout = layout, **options: object) -> str:
        text = one_line(HostPool.over, of, of_layout, **options)
        return textwrap.fill(re.sub("0x[0-9a-f]+", "0x...", text), 88)

    texts = [
        refused(bytearray(8)),
        refused(memory.to("meta")),
        refused(memory.view(4, -1)[:, :-1]),
        refused(memory, page_bytes=BLOCK - 1),
        refused(memory, page_bytes=2 * BLOCK + 1, blocks_per_page=2),
        refused(memory, offset=-1),
        refused(memory, offset=3 * BLOCK + 1),
        refused(memory, offset=5 * BLOCK),
        refused(memory, page_bytes=16.0),
        refused(torch.zeros(BLOCK_BYTES), of_layout=bf16, encoding="lossless", offset=8),
        refused(unwritable),
        refused(memory, pin_in_background=True),
    ]
    assert_expected_inline(
        "\n".join(texts),
        """\
TypeError: memory is a bytearray; pass a contiguous tensor on the CPU, such as
torch.frombuffer(memory, dtype=torch.uint8)
ValueError: memory is a torch.strided tensor on meta; pass a contiguous tensor on the
CPU
ValueError: memory has the shape [4, 1535] and the strides [1536, 1]; pass a contiguous
tensor on the CPU
ValueError: page_bytes is 1535, but pages have 1536 bytes and would overlap; pass 1536
or more
ValueError: page_bytes is 3073, but the 2 slots of a page lie at equal distances; pass a
multiple of 2
ValueError: offset is -1; it must be 0 or more
ValueError: memory of 6144 bytes has 1535 from offset 4609, but a page has 1536; pass
more memory, or a smaller offset
ValueError: memory of 6144 bytes has 0 from offset 7680, but a page has 1536; pass more
memory, or a smaller offset
TypeError: page_bytes is a float; it must be an integer
ValueError: the slots of this pool begin at address 0x... and are 9312 bytes apart, but
encoded blocks need multiples of 16; pass encoding='raw'
ValueError: the pages are bytes 0 to 7680 of memory, of which byte 0 cannot be written;
map the memory for writing
ValueError: pin_in_background=True needs a cache on a device, this one is on cpu, where
pages are not pinned; leave it out""",
    )


@simulated
@pytest.mark.parametrize("rank", [0, 1])
def test_the_span_is_registered_in_chunks_between_rows(driver: Driver, rank: int) -> None:
    layout = place(driver, cache())
    row, region = 4 * PAGE, Region(20 * PAGE * 4)
    driver.log()
    cell = PAGE + 100  # cells share pages of the system
    with in_chunks_over(8 * row, region, layout, page_bytes=row, offset=rank * cell) as pool:
        assert pool.is_pinned
        sizes = registered(driver)
        last = 4 * row - row + rank * cell % PAGE + BLOCK
        assert sizes == [8 * row, 8 * row, last]
        with OffloadHandler(layout, pool) as handler:
            blocks = list(range(8))
            handler.store(gpu_block_ids=blocks, page_ids=range(4, 12)).synchronize()
        for number in blocks:
            assert torch.equal(pool.read_block(4 + number), block(layout, number))
    assert not native.pinned_until(0, region.tensor.data_ptr())


@needs_kernels
@simulated
def test_unaligned_dense_pages_are_one_registration(driver: Driver) -> None:
    layout, region = place(driver, cache()), Region(64 * PAGE)
    driver.log()
    with in_chunks_over(8 * PAGE, region, layout, offset=8, verify="load") as pool:
        assert pool.is_pinned
        sizes = registered(driver)
        assert sizes == [pool._shape.table_bytes, 8 + pool.num_pages * BLOCK]
        round_trip(layout, pool, copy_method="kernel")


@simulated
def test_memory_pinned_by_its_owner_is_left_alone(driver: Driver) -> None:
    layout, region = place(driver, cache()), Region(16 * PAGE)
    driver.adopt(region.bytes(), HOST)
    driver.log()
    with HostPool.over(region.tensor, layout, page_bytes=PAGE) as pool:
        assert (pool.is_pinned, pool.is_ready) == (True, True)
        assert pool._ready_range.chunk_blocks == ONE_CHUNK  # no seam splits a copy
        round_trip(layout, pool)
    assert "register " not in driver.log()


@simulated
def test_no_copy_crosses_the_registrations_of_the_owner(driver: Driver) -> None:
    layout, region = place(driver, cache()), Region(16 * PAGE)
    first = region.tensor.data_ptr()
    for begin, end in ((0, 3), (3, 16)):
        pages = first + begin * PAGE, (end - begin) * PAGE
        driver.cuda.check("cuMemHostRegister", *pages, 1)
    with HostPool.over(region.tensor, layout, page_bytes=PAGE) as pool:
        assert pool.is_pinned
        round_trip(layout, pool)
    for begin in (0, 3):
        driver.cuda.check("cuMemHostUnregister", first + begin * PAGE)


@simulated
def test_pages_that_are_pinned_in_part_are_refused(driver: Driver) -> None:
    layout, region = place(driver, cache()), Region(16 * PAGE)
    first = region.tensor.data_ptr()
    driver.cuda.check("cuMemHostRegister", first, 3 * PAGE + 100, 1)
    said = one_line(HostPool.over, region.tensor, layout, page_bytes=PAGE)
    driver.cuda.check("cuMemHostUnregister", first)
    assert_expected_inline(
        textwrap.fill(said.replace(hex(first + 3 * PAGE), "0x...3000"), 88),
        """\
ValueError: of the 16 pages in the memory the first 3 are pinned, but not all of page 3,
at 0x...3000, in one registration; pin all pages so, or none""",
    )


@simulated
def test_two_pools_never_share_a_registration(driver: Driver) -> None:
    layout, region = place(driver, cache()), Region(16 * PAGE)
    first = HostPool.over(region.tensor, layout, page_bytes=PAGE)
    HostPool.over(Region(16 * PAGE).tensor, layout, page_bytes=PAGE).close()
    with pytest.raises(ValueError, match="another HostPool has pinned memory"):
        HostPool.over(region.tensor, layout, page_bytes=PAGE, offset=BLOCK)
    first.close()
    with HostPool.over(region.tensor, layout, page_bytes=PAGE, offset=BLOCK) as pool:
        assert pool.is_pinned


@simulated
@pytest.mark.parametrize("refusal", ["limit", "machine"])
def test_refused_memory_is_pageable_with_a_warning(driver: Driver, refusal: str) -> None:
    layout, region = place(driver, cache()), Region(16 * PAGE)
    if refusal == "limit":
        driver.limit_registration(in_one=PAGE)
    else:
        driver.refuse_registration()
    with logged() as text, HostPool.over(region.tensor, layout, page_bytes=PAGE) as pool:
        assert not pool.is_pinned
        round_trip(layout, pool)
    assert "pin the memory before you make the pool. The pages are pageable now" in text[0]


@simulated
def test_refused_checksums_of_pinned_pages_are_an_error(driver: Driver) -> None:
    layout, region = place(driver, cache()), Region(16 * PAGE)
    driver.adopt(region.bytes(), HOST)
    driver.refuse_registration()
    with pytest.raises(RuntimeError, match=r"did not pin their checksums: .*; use verify='off'"):
        HostPool.over(region.tensor, layout, page_bytes=PAGE, verify="load")


@pytest.mark.gpu
@pytest.mark.parametrize("owner", ["the pool", "its owner"])
def test_a_gpu_copies_to_and_from_a_region(owner: str) -> None:
    layout = PagedLayout([torch.randint(256, (8, 1 << 18), device="cuda:0").byte()])
    row, cell = 3 << 18, (1 << 18) + 100
    region = Region(64 * row)
    first, nbytes = region.tensor.data_ptr(), region.tensor.numel()
    torch.cuda.init()
    if owner == "its owner":
        assert int(torch.cuda.cudart().cudaHostRegister(first, nbytes, 0)) == 0
    options = {"page_bytes": row, "offset": cell, "verify": "load"}
    with in_chunks_over(16 << 20, region, layout, **options) as pool:
        assert pool.is_pinned
        round_trip(layout, pool, copy_method="kernel")
        round_trip(layout, pool, copy_method="staged")
    if owner == "its owner":
        assert int(torch.cuda.cudart().cudaHostUnregister(first)) == 0
    assert not native.pinned_until(0, first)


def in_chunks_over(chunk_bytes: int, region: Region, *shape: object, **options: object) -> HostPool:
    return in_chunks(chunk_bytes, region.tensor, *shape, make=HostPool.over, **options)


def test_memory_that_its_owner_frees_is_not_used() -> None:
    layout, memory = PagedLayout([torch.zeros(8, 4096, dtype=torch.uint8)]), torch.zeros(4 * 4096)
    pool = HostPool.over(memory, layout)
    with OffloadHandler(layout, pool) as handler:
        handler.store(gpu_block_ids=[1], page_ids=[1]).synchronize()
        memory.untyped_storage().resize_(0)
        for call in (
            lambda: handler.store(gpu_block_ids=[1], page_ids=[1]),
            lambda: handler.load(page_ids=[1], gpu_block_ids=[1]),
            lambda: pool.read_block(1),
        ):
            with pytest.raises(RuntimeError, match="its owner has freed it or resized it to 0"):
                call()


def test_memory_of_the_cache_is_refused() -> None:
    layers = list(torch.zeros(2, 8, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"which has tensors\[1\] of the cache too"):
        HostPool.over(layers[1], PagedLayout(layers))
