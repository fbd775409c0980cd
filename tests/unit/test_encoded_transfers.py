"""Encoded stores and loads of a cache on the CPU: bytes come back, rejected blocks are named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bf16_blocks import SMOLLM2_SIZES, real_page
from bf16_cache import BLOCK_BYTES, FITS, SIZES, Bf16Cache
from encoded_cache import EncodedCache
from encoded_fuzz import Fuzz
from error_text import error_text
from expecttest import assert_expected_inline
from fuzz import fuzz
from logged import logged
from slot_model import SlotModel

from torch_kvswap import BlocksRejectedError, HostPool, OffloadHandler, PagedLayout
from torch_kvswap.encoding.slot import WIDTHS

SLOT_BYTES = SlotModel(SIZES, 12.5).slot_bytes


class Encoded:
    """A cache with a handler on encoded pages."""

    def __init__(self, num_blocks: int = 16, num_pages: int = 8, per_page: int = 1) -> None:
        self.cache = Bf16Cache(num_blocks)
        self.pool = HostPool(
            self.cache.layout, num_pages, per_page, encoding="lossless", bits_per_value=12.5
        )
        self.handler = OffloadHandler(self.cache.layout, self.pool)


@pytest.fixture
def encoded() -> Iterator[Encoded]:
    one = Encoded()
    with one.handler:
        yield one


@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("per_page", [1, 3])
def test_blocks_come_back_bit_for_bit(kind: str, per_page: int) -> None:
    one = Encoded(per_page=per_page)
    for block in range(5):
        one.cache.fill(block, kind, block)
    expected = [one.cache.bytes_of(block) for block in range(5)]
    pages, first = ([5, 2], 1) if per_page == 3 else ([5, 2, 7, 1, 0], 0)
    with one.handler as handler:
        handler.store(gpu_block_ids=range(5), page_ids=pages, first_slot=first)
        handler.load(page_ids=pages, gpu_block_ids=range(9, 14), first_slot=first)
        handler.synchronize()
        assert [one.cache.bytes_of(block) for block in range(9, 14)] == expected
        store, load = handler.poll()
    for result in (store, load):
        assert (result.ok, result.rejected, result.copy_method) == (True, (), "host")
        assert (result.nbytes, result.link_bytes) == (5 * BLOCK_BYTES, 5 * SLOT_BYTES)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_keys_and_values_of_a_real_model_come_back(width: float) -> None:
    page = real_page()
    cache = torch.zeros(len(SMOLLM2_SIZES), 4, SMOLLM2_SIZES[0] // 2, dtype=torch.bfloat16)
    for slab, values in enumerate(page):
        cache[slab, 1] = torch.from_numpy(values.view("int16").copy()).view(torch.bfloat16)
    layout = PagedLayout([cache], block_dim=1)
    pool = HostPool(layout, 2, encoding="lossless", bits_per_value=width)
    with OffloadHandler(layout, pool) as handler:
        handler.store(gpu_block_ids=[1], page_ids=[0]).synchronize()
        handler.load(page_ids=[0], gpu_block_ids=[3]).synchronize()
    assert torch.equal(cache[:, 3].view(torch.int16), cache[:, 1].view(torch.int16))


@pytest.mark.parametrize("layer_groups", [1, 2])
@pytest.mark.parametrize("tile", range(len(SIZES)))
def test_a_load_writes_nothing_of_a_slot_with_one_damaged_entry(
    encoded: Encoded, tile: int, layer_groups: int
) -> None:
    cache, handler = encoded.cache, encoded.handler
    for block in (0, 1):
        cache.fill(block, "normal", block)
    for block in (7, 8):
        cache.fill(block, "one value")
    before = cache.bytes_of(8)
    handler.store(gpu_block_ids=[0, 1], page_ids=[0, 1])
    encoded.pool.pages[1, 0, 16 + 8 * tile] = 0  # its lowest exponent, which is at least 1
    job = handler.load(page_ids=[0, 1], gpu_block_ids=[7, 8], layer_groups=layer_groups)
    with pytest.raises(BlocksRejectedError) as caught:
        job.synchronize()
    assert caught.value.rejected == (1,)
    assert (cache.bytes_of(7), cache.bytes_of(8)) == (cache.bytes_of(0), before)


def test_a_rebound_cache_is_encoded_too(encoded: Encoded) -> None:
    other = Bf16Cache(4)
    other.fill(1, "normal")
    encoded.handler.rebind(other.layout)
    encoded.handler.store(gpu_block_ids=[1], page_ids=[0]).synchronize()
    encoded.handler.load(page_ids=[0], gpu_block_ids=[2]).synchronize()
    assert other.bytes_of(2) == other.bytes_of(1)
    halves = [torch.zeros(2, 4, 16, heads * 64, dtype=torch.float16) for heads in (2, 1)]
    assert_expected_inline(
        error_text(encoded.handler.rebind, PagedLayout(halves, block_dim=1)),
        """\
ValueError: encoding='lossless' is for torch.bfloat16, but the cache is of
torch.float16; make the pool from this layout with encoding='raw'""",
    )


def test_raw_blocks_cross_the_link_as_they_are() -> None:
    cache = Bf16Cache()
    with OffloadHandler(cache.layout, HostPool(cache.layout, 4)) as handler:
        handler.store(gpu_block_ids=[1, 2], page_ids=[1, 2]).synchronize()
        (result,) = handler.poll()
        assert result.link_bytes == result.nbytes == 2 * BLOCK_BYTES
        stores = handler.metrics().stores
        assert (stores.link_bytes, stores.blocks, stores.rejected_blocks) == (2 * BLOCK_BYTES, 2, 0)


# The warning


def many_stores(width: float, rejects: int, blocks: int = 1000) -> list[str]:
    cache = Bf16Cache(2)
    cache.fill(0, None)
    pool = HostPool(cache.layout, 50, encoding="lossless", bits_per_value=width)
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


@pytest.mark.parametrize(
    ("width", "remedy"),
    [
        (
            12.125,
            "what recommend_encoding() says of your cache: bits_per_value=12.5 or encoding='raw'",
        ),
        (12.5, "encoding='raw'"),
    ],
)
def test_many_rejects_are_warned_of_once_with_what_is_better(width: float, remedy: str) -> None:
    assert many_stores(width, 10) == [
        f"11 of 1000 encoded blocks do not fit into slots of {width} bits a value and were "
        f"rejected; make the host pool with {remedy}"
    ]


def test_few_rejects_are_not_warned_of() -> None:
    assert many_stores(12.125, 8) == []


def test_blocks_of_raw_groups_do_not_count_for_the_warning() -> None:
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
        "12 of 1001 encoded blocks do not fit into slots of 12.125 bits a value and were "
        "rejected; make the host pool with what recommend_encoding() says of your cache: "
        "bits_per_value=12.5 or encoding='raw'"
    ]


# Random jobs


def test_random_jobs_leave_the_bits_of_a_model() -> None:
    counts = fuzz(lambda seed: Fuzz(None, seed), 6)
    assert counts["done"] > counts["failed"] > 0
    assert counts["rejected"] > 0
    assert min(counts[f"loaded {group}"] for group in range(3)) > 0
