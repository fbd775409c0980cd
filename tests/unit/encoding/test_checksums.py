"""Checksums of blocks on the CPU: what they are, what they find, and what becomes of the job."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checksum_model import checksums_of, tag_of
from damage import HEAD, Damage, rows_of
from encoded_cache import EncodedCache
from error_text import error_text
from expecttest import assert_expected_inline
from logged import logged

from torch_kvswap import (
    BlocksRejectedError,
    CorruptedPageError,
    HostPool,
    OffloadHandler,
    PagedLayout,
)
from torch_kvswap.encoding.slot import read_verify
from torch_kvswap.reference import ReferenceHandler

SLAB_VALUES = 6144  # of two tiles, the last one smaller


def layout(*sizes: int, blocks: int = 6) -> PagedLayout:
    """Slabs of random bytes."""
    generator = torch.Generator().manual_seed(3)
    return PagedLayout(
        [torch.randint(256, (blocks, size), generator=generator).byte() for size in sizes]
    )


def stored(**options: object) -> tuple[PagedLayout, HostPool, OffloadHandler]:
    """Blocks 0 and 1 of two layers in pages 4 and 5."""
    cache = layout(3000, 512)
    pool = HostPool(cache, 8, verify="load", **options)
    handler = OffloadHandler(cache, pool)
    handler.store(gpu_block_ids=[0, 1], page_ids=[4, 5]).synchronize()
    return cache, pool, handler


@pytest.mark.parametrize("sizes", [(1,), (16, 1024, 1025), (8192,), (8193, 24576), (20001, 7)])
def test_the_table_has_the_documented_checksums(sizes: tuple[int, ...]) -> None:
    cache = layout(*sizes)
    pool = HostPool(cache, 3, 2, verify="load")
    with OffloadHandler(cache, pool) as handler:
        handler.store(gpu_block_ids=[5], page_ids=[1]).synchronize()
        handler.store(gpu_block_ids=[2, 4], page_ids=[1]).synchronize()
    rows = rows_of(pool)
    assert rows[0, :8].view(np.uint64)[0] == 3  # stores of blocks
    for slot, block, store in ((2, 2, 2), (3, 4, 3)):
        expected = checksums_of([bytes(tensor[block].numpy()) for tensor in cache.tensors])
        (tag, number, *_) = rows[1 + slot, :HEAD].view(np.uint64)
        assert (tag, number) == (tag_of(slot, store), store)
        found = rows[1 + slot, HEAD:].view(np.uint64)[: len(expected)]
        assert [int(one) ^ tag_of(slot, store) for one in found] == expected
    assert not rows[1].any()


@pytest.mark.parametrize("encoding", ["raw", "lossless"])
@pytest.mark.parametrize("layer_groups", [1, 3])
@pytest.mark.parametrize("rows", [False, True])
def test_no_damage_goes_unnoticed(encoding: str, layer_groups: int, rows: bool) -> None:
    sizes = {"values": SLAB_VALUES, "encodings": [encoding], "verify": "load", "rows": rows}
    with EncodedCache(**sizes) as cache:
        seen = Damage(cache, seed=1).run(600, layer_groups=layer_groups)
    assert set(seen) <= {"noticed", "harmless"}
    assert seen["noticed"] > 560


def test_the_error_names_block_page_and_checksums() -> None:
    cache, pool, handler = stored()
    row = rows_of(pool)[1 + 5, HEAD:].view(np.uint64)
    expected = checksums_of([bytes(tensor[1].numpy()) for tensor in cache.tensors])
    assert int(row[1]) ^ tag_of(5, 2) == expected[1]
    pool.pages[5, 0, 3511] ^= 1  # the last byte
    with handler, logged() as warnings:
        job = handler.load(page_ids=[4, 5], gpu_block_ids=[2, 3])
        text = error_text(job.synchronize)
        found = checksums_of([bytes(tensor[3].numpy()) for tensor in cache.tensors])
        assert text.replace("\n", " ") == (
            "CorruptedPageError: load 1 failed: 1 of 2 blocks is not what was stored (position 1): "
            f"GPU block 3, page 5: bytes 0 to 511 of slab 1 have the checksum {found[1]:#x} instead "
            f"of {expected[1]:#x}"
        )
        assert not warnings
        store, load = handler.poll()
        assert store.ok
        assert warnings == [f"load 1 failed: {load.error}"]
    assert type(load.error) is CorruptedPageError
    assert (load.rejected, load.error.rejected) == ((1,), (1,))
    assert bytes(cache.tensors[0][2].numpy()) == bytes(cache.tensors[0][0].numpy())
    metrics = handler.metrics().loads
    assert (metrics.failed, metrics.blocks) == (1, 2)
    assert (metrics.rejected_blocks, metrics.corrupted_blocks, metrics.encoded_blocks) == (0, 1, 0)


def test_an_unstored_page_is_not_loaded() -> None:
    _, pool, handler = stored()
    pool.pages[1] = 7  # by the caller, who makes no checksums
    with handler:
        job = handler.load(page_ids=[1, 2, 4], gpu_block_ids=[1, 2, 3])
        assert_expected_inline(
            error_text(job.synchronize),
            """\
BlocksRejectedError: load 1 failed: 2 of 3 blocks are not in their host pages (positions
0, 1): no stores have left them there""",
        )
        assert job.result is not None
        assert type(job.result.error) is BlocksRejectedError
        assert job.result.rejected == (0, 1)


@pytest.mark.parametrize("slabs", [(8192,), (4096, 4096)])
def test_a_page_of_another_group_is_corrupted(slabs: tuple[int, ...]) -> None:
    first, second = layout(4096, 4096), layout(*slabs)
    pool = HostPool(first, 4, verify="load")
    view = pool.view_for(second)
    with OffloadHandler([first, second], [pool, view]) as handler, logged():
        handler.store(gpu_block_ids=[[0], []], page_ids=[[1], []]).synchronize()
        with pytest.raises(CorruptedPageError, match="the slot has a block of group 0"):
            handler.load(page_ids=[[], [1]], gpu_block_ids=[[], [2]]).synchronize()
        handler.store(gpu_block_ids=[[], [0]], page_ids=[[], [1]]).synchronize()
        handler.load(page_ids=[[], [1]], gpu_block_ids=[[], [2]]).synchronize()
    assert torch.equal(second.tensors[0][0], second.tensors[0][2])


def test_processes_that_share_a_pool_share_its_checksums() -> None:
    cache, pool, handler = stored(shared=True)
    attached = HostPool.attach(cache, pool.share())
    assert attached.verify == "load"
    with OffloadHandler(cache, attached) as other, handler, logged():
        other.load(page_ids=[5], gpu_block_ids=[2]).synchronize()
        assert torch.equal(cache.tensors[0][1], cache.tensors[0][2])
        other.store(gpu_block_ids=[3], page_ids=[5]).synchronize()
        handler.load(page_ids=[5], gpu_block_ids=[2]).synchronize()
        assert torch.equal(cache.tensors[0][3], cache.tensors[0][2])
        pool.pages[5, 0, 0] ^= 1
        for each in (handler, other):
            with pytest.raises(CorruptedPageError):
                each.load(page_ids=[5], gpu_block_ids=[2]).synchronize()


@pytest.mark.parametrize("is_late", [True, False])
def test_waits_on_a_stream_leave_failures_to_poll(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the job has failed by then."""
    if is_late:
        monkeypatch.setenv("KVSWAP_LATE_CPU", "1")
    cache, pool, handler = stored()
    with handler, logged():
        pool.pages[4, 0, 0] ^= 1
        job = handler.load(page_ids=[4, 5], gpu_block_ids=[2, 3], layer_groups=2, tag="mine")
        assert (job.result is None) == is_late
        job.wait(layer_group=0)
        job.wait()
        failed = handler.poll()[-1]
        assert (failed.tag, failed.state, failed.rejected) == ("mine", "failed", (0,))
        job.wait()
        assert all(torch.equal(layer[3], layer[1]) for layer in cache.tensors)
        with pytest.raises(CorruptedPageError):
            job.synchronize()


def test_what_cannot_be_verified_is_refused() -> None:
    cache, pool, handler = stored()
    handler.close()
    assert_expected_inline(
        error_text(lambda: HostPool(cache, 4, verify="always")),
        """ValueError: verify is 'always'; it must be 'off' or 'load'""",
    )
    assert_expected_inline(
        error_text(lambda: pool.view_for(layout(1, 1, 1, 1, 1, 1))),
        """\
ValueError: the checksums of a block take 128 bytes, and the pool has room for 64: it
was made from a layout with fewer or smaller slabs; make the pool from the layout with
the most checksums, or with verify='off'""",
    )
    assert_expected_inline(
        error_text(lambda: ReferenceHandler(cache, pool)),
        """\
ValueError: the pool has verify='load', and no op makes checksums; make it with
verify='off'""",
    )


def test_a_device_without_kernels_is_refused() -> None:
    assert_expected_inline(
        error_text(lambda: read_verify("load", torch.device("xpu:1"))),
        """\
ValueError: verify='load' needs kernels of this library, which xpu:1 does not have; use
verify='off'""",
    )


# Pages move with the checksums of their blocks, whichever of their slots have one.


def test_checksums_move_with_a_partly_empty_page() -> None:
    tensor = torch.randint(256, (8, 20_000), dtype=torch.uint8)
    layout = PagedLayout([tensor])
    pool = HostPool(layout, 3, 2, verify="load")
    with OffloadHandler(layout, pool) as handler:
        handler.store(
            gpu_block_ids=[2, 3], page_ids=[2]
        )  # what these slots had before does not count
        handler.store(gpu_block_ids=[1], page_ids=[0])
        handler.synchronize()
        pool.pages[2] = pool.pages[0]
        pool._write_checksums(2, 0, pool._read_checksums(0, 0))
        full = handler.load(page_ids=[2], gpu_block_ids=[5])
        empty = handler.load(page_ids=[2], gpu_block_ids=[6, 7])
        handler.poll()
    assert full.result is not None
    assert empty.result is not None
    assert (full.result.ok, empty.result.rejected) == (True, (1,))
    assert torch.equal(tensor[5], tensor[1])
    assert "no store has left one there" in str(empty.result.error)


def test_a_page_of_another_group_has_no_checksums() -> None:
    layouts = [PagedLayout([torch.randint(256, (2, 64), dtype=torch.uint8)]) for _ in range(2)]
    pool = HostPool(layouts[0], 2, verify="load")
    with OffloadHandler(layouts, [pool, pool.view_for(layouts[1])]) as handler:
        handler.store(gpu_block_ids=[[], [0]], page_ids=[[], [0]]).synchronize()
        assert not any(pool._read_checksums(0, 0)[:8])
        pool.pages[1] = pool.pages[0]
        pool._write_checksums(1, 1, pool._read_checksums(0, 1))
        handler.load(page_ids=[[], [1]], gpu_block_ids=[[], [1]]).synchronize()
    assert torch.equal(*layouts[1].tensors[0])
