"""Handlers of host pages that are encoded, with a cache on the CPU."""

from __future__ import annotations

import pytest
import torch
from encoded_cache import EncodedCache
from error_text import error_text
from expecttest import assert_expected_inline

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.results import BlocksRejectedError


def outcome(cache: EncodedCache) -> tuple[str, tuple[int, ...]]:
    """State and rejected positions of the only job that has ended."""
    (result,) = cache.handler.poll()
    return result.state, result.rejected


def test_raw_and_encoded_groups_are_copied_by_one_job() -> None:
    with EncodedCache(encodings=("raw", "lossless", "lossless"), layers=2) as cache:
        before = [[cache.block(block, group) for block in range(16)] for group in range(3)]
        cache.store([[1, 2], [3], [4, 5, 6]], [[0, 1], [2], [3, 4, 5]])
        assert outcome(cache) == ("done", ())
        cache.load([[1, 0], [2], [5, 3, 4]], [[8, 9], [10], [11, 12, 13]], layer_groups=3)
        assert outcome(cache) == ("done", ())
        for group, (target, source) in [
            *[(0, (8, 2)), (0, (9, 1)), (1, (10, 3))],
            *[(2, (11, 6)), (2, (12, 4)), (2, (13, 5))],
        ]:
            assert cache.is_same(target, before[group][source], group)


def test_a_store_rejects_the_blocks_that_do_not_fit_and_stores_the_others() -> None:
    with EncodedCache() as cache:
        cache.spoil(2, 9)
        before = [cache.block(block) for block in range(16)]
        cache.store([1, 2, 3, 9], [0, 1, 2, 3])
        (result,) = cache.handler.poll()
        assert (result.state, result.rejected) == ("failed", (1, 3))
        assert isinstance(result.error, BlocksRejectedError)
        assert str(result.error) == (
            "2 of 4 blocks do not fit into slots of 12.125 bits a value (positions 1, 3)"
        )
        cache.load([0, 2], [5, 6])
        assert outcome(cache) == ("done", ())
        assert cache.is_same(5, before[1])
        assert cache.is_same(6, before[3])


def test_a_load_rejects_what_its_store_has_rejected_and_loads_the_rest() -> None:
    with EncodedCache() as cache:
        cache.spoil(2)
        before = [cache.block(block) for block in range(16)]
        cache.store([1, 2, 3], [0, 1, 2])
        cache.handler.poll()
        cache.load([0, 1, 2], [5, 6, 7], layer_groups=2)
        (result,) = cache.handler.poll()
        assert (result.state, result.rejected) == ("failed", (1,))
        assert str(result.error) == (
            "1 of 3 blocks is not in its host page (position 1): its store was rejected, or "
            "nothing was stored there"
        )
        assert cache.is_same(5, before[1])
        assert cache.is_same(6, before[6])  # nothing of it was written
        assert cache.is_same(7, before[3])


def test_a_rejected_slot_can_be_stored_again() -> None:
    with EncodedCache() as cache:
        cache.spoil(2)
        before = cache.block(3)
        cache.store([2], [0])
        assert outcome(cache) == ("failed", (0,))
        cache.store([3], [0])
        assert outcome(cache) == ("done", ())
        cache.load([0], [5])
        assert outcome(cache) == ("done", ())
        assert cache.is_same(5, before)


def test_a_rejected_store_leaves_nothing_of_what_the_slot_held_before() -> None:
    with EncodedCache() as cache:
        cache.store([3], [0])
        cache.spoil(3)
        cache.store([3], [0])
        assert [result.state for result in cache.handler.poll()] == ["done", "failed"]
        cache.load([0], [5])
        assert outcome(cache) == ("failed", (0,))


def test_positions_count_through_the_lists_of_all_groups() -> None:
    with EncodedCache(encodings=("lossless", "raw", "lossless"), layers=1) as cache:
        cache.spoil(2, group=0)
        cache.spoil(2, group=1)  # raw: it fits
        cache.spoil(6, group=2)
        cache.store([[1, 2], [2], [4, 5, 6]], [[0, 1], [2], [3, 4, 5]])
        assert outcome(cache) == ("failed", (1, 5))


def test_a_store_of_a_block_that_a_load_has_rejected_fails_until_that_load_is_reported() -> None:
    with EncodedCache() as cache:
        cache.load([3], [5])
        cache.store([5], [0])
        first, second = cache.handler.poll()
        assert first.rejected == (0,)
        assert (second.state, second.rejected) == ("failed", ())
        assert "load 0 failed: 1 of 1 block is not in its host page" in str(second.error)
        cache.store([5], [0])
        assert outcome(cache) == ("done", ())


def test_metrics_and_results_count_blocks_and_bytes_on_the_link() -> None:
    with EncodedCache(encodings=("lossless", "raw"), layers=3) as cache:
        slot, raw = cache.pools[0].slot_bytes, cache.layouts[1].block_bytes
        cache.store([[1, 2], [3]], [[0, 1], [2]])
        cache.spoil(4)
        cache.store([[4, 5], []], [[2, 3], []])
        done, failed = cache.handler.poll()
        assert done.nbytes == 3 * raw
        assert done.link_bytes == 2 * slot + raw
        assert failed.link_bytes == 2 * slot
        stores = cache.handler.metrics().stores
        assert (stores.done, stores.failed) == (1, 1)
        assert (stores.blocks, stores.encoded_blocks, stores.rejected_blocks) == (5, 4, 1)
        assert (stores.bytes, stores.link_bytes) == (3 * raw, 2 * slot + raw)
        cache.load([[0], [2]], [[8], [9]], layer_groups=6)
        (loaded,) = cache.handler.poll()
        metadata = slot - 3 * cache.tensors[0][0].shape[1] * 3 // 2
        assert loaded.link_bytes == slot + 2 * metadata + raw  # one for each group of layers


def test_copy_engines_cannot_encode() -> None:
    with EncodedCache(encodings=("raw", "lossless"), layers=1) as cache:
        assert_expected_inline(
            error_text(cache.store, [[1], [2]], [[1], [2]], copy_method="copy_engines"),
            """\
ValueError: copy_method='copy_engines': the host pages of page_ids[1] have
encoding='lossless', and copy engines cannot encode or decode blocks; leave it out, or
use a pool with encoding='raw'""",
        )
        cache.store([[1], []], [[1], []], copy_method="copy_engines")
        assert outcome(cache) == ("done", ())


def test_a_job_has_no_more_encoded_blocks_than_there_are_states() -> None:
    most = 1 << 20
    tensors = [torch.zeros(2, 512, dtype=torch.bfloat16)]
    layout = PagedLayout(tensors)
    # Memory that nothing touches.
    pool = HostPool(layout, 1, most + 1, encoding="lossless", bits_per_value=12.5)
    with OffloadHandler(layout, pool) as handler:
        ids = torch.zeros(most + 1, dtype=torch.int64)
        with pytest.raises(ValueError, match=f"the job has {most + 1} blocks for host pages"):
            handler.store(gpu_block_ids=ids, page_ids=[0])
        assert handler.poll() == []


def test_a_view_has_encoded_slots_that_are_smaller_than_the_pools() -> None:
    large = PagedLayout([torch.randn(8, 2048).bfloat16() for _ in range(4)])
    tensors = [torch.randn(8, 2048).bfloat16() for _ in range(3)]
    small = PagedLayout(tensors)
    pool = HostPool(large, 6, 2, encoding="lossless")
    before = [tensor.clone() for tensor in tensors]
    with OffloadHandler([large, small], [pool, pool.view_for(small)]) as handler:
        handler.store(gpu_block_ids=[[1, 2], [3, 4]], page_ids=[[0], [1]])
        handler.load(page_ids=[[], [1]], gpu_block_ids=[[], [6, 7]], layer_groups=2)
        handler.synchronize()
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[[6, 7]].view(torch.int16), old[[3, 4]].view(torch.int16))
