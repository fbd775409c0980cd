"""Handlers of host pages that are encoded, with a cache on the CPU."""

from __future__ import annotations

import pytest
import torch
from bf16_cache import Bf16Cache
from encoded_cache import EncodedCache
from encoded_fuzz import Fuzz
from fuzz import fuzz
from logged import logged

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.results import BlocksRejectedError


def outcome(cache: EncodedCache) -> tuple[str, tuple[int, ...]]:
    """State and rejected positions of the only job that has ended."""
    (result,) = cache.handler.poll()
    return result.state, result.rejected


def test_rejected_blocks_are_named_with_the_cause() -> None:
    with EncodedCache() as cache:
        cache.spoil(2, 9)
        cache.store([1, 2, 3, 9], [0, 1, 2, 3])
        cache.load([0, 1, 2], [5, 6, 7])
        store, load = cache.handler.poll()
        assert isinstance(store.error, BlocksRejectedError)
        assert [str(store.error), str(load.error)] == [
            "2 of 4 blocks do not fit into their slots (positions 1, 3)",
            "1 of 3 blocks is not in its host page (position 1): its store was rejected, or "
            "nothing was stored there",
        ]


def test_metrics_and_results_count_link_bytes() -> None:
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


def test_a_jobs_encoded_blocks_are_limited() -> None:
    most = 1 << 20
    tensors = [torch.zeros(2, 2048, dtype=torch.bfloat16)]
    layout = PagedLayout(tensors)
    # Memory that nothing touches.
    pool = HostPool(layout, 1, most + 1, encoding="lossless")
    with OffloadHandler(layout, pool) as handler:
        ids = torch.zeros(most + 1, dtype=torch.int64)
        with pytest.raises(ValueError, match=f"the job has {most + 1} blocks for host pages"):
            handler.store(gpu_block_ids=ids, page_ids=[0])
        assert handler.poll() == []


@pytest.mark.parametrize("layer_groups", [1, 2])
@pytest.mark.parametrize("tile", range(4))
def test_a_load_writes_nothing_of_a_damaged_slot(tile: int, layer_groups: int) -> None:
    with EncodedCache(layers=4) as cache:
        before = [cache.block(block) for block in range(16)]
        cache.store([0, 1], [0, 1])
        cache.pools[0].pages[1, 0, 16 + 8 * tile] = 0  # its lowest exponent, which is at least 1
        cache.handler.poll()
        cache.load([0, 1], [7, 8], layer_groups=layer_groups)
        assert outcome(cache) == ("failed", (1,))
        assert cache.is_same(7, before[0])
        assert cache.is_same(8, before[8])


def many_stores(rejects: int, blocks: int = 1000) -> list[str]:
    cache = Bf16Cache(2)
    cache.fill(0, None)
    pool = HostPool(cache.layout, 50, encoding="lossless")
    with OffloadHandler(cache.layout, pool) as handler, logged() as messages:
        for number in range(rejects):
            handler.store(gpu_block_ids=[0], page_ids=[number % 50])
        for _ in range(0, blocks - rejects - 1, 49):
            count = min(49, blocks - 1 - handler.metrics().stores.blocks)
            handler.store(gpu_block_ids=[1] * count, page_ids=range(count))
        handler.poll()
        assert handler.metrics().stores.blocks == blocks - 1
        assert messages == []
        handler.store(gpu_block_ids=[0], page_ids=[0])
        handler.poll()
        handler.store(gpu_block_ids=[0], page_ids=[0])
        handler.poll()
    return messages


def test_many_rejects_are_warned_of_once() -> None:
    assert many_stores(8) == []
    assert many_stores(10) == [
        "11 of 1000 encoded blocks do not fit into their slots and were rejected; make the host "
        "pool with encoding='raw'"
    ]


def test_raw_blocks_do_not_count_as_rejects() -> None:
    with (
        EncodedCache(encodings=("lossless", "raw"), per_page=1000, layers=1) as cache,
        logged() as messages,
    ):
        cache.spoil(0)
        cache.store([[0] * 11, [1] * 1000], [[0], [0]])
        cache.handler.poll()
        assert messages == [], "only 11 of these blocks are encoded"
        for _ in range(4):
            cache.store([[], [1] * 1000], [[], [0]])
        cache.store([[1] * 989, []], [[0], []])
        cache.store([[0], []], [[0], []])
        cache.handler.poll()
    assert messages == [
        "12 of 1001 encoded blocks do not fit into their slots and were rejected; make the host "
        "pool with encoding='raw'"
    ]


def test_random_jobs_leave_the_bits_of_a_model() -> None:
    counts = fuzz(lambda seed: Fuzz(None, seed), 6)
    assert counts["done"] > counts["failed"] > 0
    assert counts["rejected"] > 0
    assert min(counts[f"loaded {group}"] for group in range(3)) > 0
