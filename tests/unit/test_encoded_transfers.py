"""Encoded stores and loads of a cache on the CPU: bytes come back, rejected blocks are named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bf16_blocks import SMOLLM2_SIZES, real_page
from bf16_cache import BLOCK_BYTES, FITS, SIZES, Bf16Cache
from encoded_cache import EncodedCache
from error_text import error_text
from expecttest import assert_expected_inline
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


def test_a_store_names_the_blocks_that_do_not_fit_and_stores_the_others(encoded: Encoded) -> None:
    cache, handler = encoded.cache, encoded.handler
    for block, kind in enumerate(["normal", None, "zeros", None, "normal"]):
        cache.fill(block, kind, block)
    job = handler.store(gpu_block_ids=[0, 1, 2, 3, 4], page_ids=[0, 1, 2, 3, 4])
    with pytest.raises(BlocksRejectedError) as caught:
        job.synchronize()
    assert_expected_inline(
        str(caught.value),
        """store 0 failed: 2 of 5 blocks do not fit into slots of 12.5 bits a value (positions 1, 3)""",
    )
    assert caught.value.rejected == (1, 3)
    (result,) = handler.poll()
    assert (result.state, result.rejected) == ("failed", (1, 3))
    assert isinstance(result.error, BlocksRejectedError)
    handler.load(page_ids=[4, 0, 2], gpu_block_ids=[9, 8, 7]).synchronize()
    assert [cache.bytes_of(block) for block in (9, 8, 7)] == [
        cache.bytes_of(block) for block in (4, 0, 2)
    ]


def test_a_load_writes_nothing_where_no_block_was_stored(encoded: Encoded) -> None:
    cache, handler = encoded.cache, encoded.handler
    cache.fill(0, "normal")
    cache.fill(1, None)
    handler.store(gpu_block_ids=[0, 1], page_ids=[0, 1])
    for block in (7, 8, 9):
        cache.fill(block, "one value")
    before = cache.bytes_of(8)
    job = handler.load(page_ids=[0, 1, 6], gpu_block_ids=[7, 8, 9])
    with pytest.raises(BlocksRejectedError) as caught:
        job.synchronize()
    assert_expected_inline(
        str(caught.value),
        """load 1 failed: 2 of 3 blocks are not in their host pages (positions 1, 2): their stores were rejected, or nothing was stored there""",
    )
    assert caught.value.rejected == (1, 2)
    assert cache.bytes_of(7) == cache.bytes_of(0)
    assert cache.bytes_of(8) == cache.bytes_of(9) == before


def test_layer_groups_bring_the_same_bytes(encoded: Encoded) -> None:
    cache, handler = encoded.cache, encoded.handler
    cache.fill(2, "outlier channels")
    handler.store(gpu_block_ids=[2], page_ids=[3])
    job = handler.load(page_ids=[3], gpu_block_ids=[5], layer_groups=2)
    job.synchronize()
    assert cache.bytes_of(5) == cache.bytes_of(2)


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


def test_groups_can_be_encoded_or_raw_and_share_pages() -> None:
    cache = Bf16Cache(8)
    states = torch.randn(8, 600)
    layouts = [cache.layout, PagedLayout([states])]
    pool = HostPool(cache.layout, 6, 2, encoding="lossless", bits_per_value=12.5)
    pools = [pool, pool.view_for(layouts[1], encoding="raw")]
    cache.fill(1, "normal")
    cache.fill(2, None)
    expected = states[3].clone()
    with OffloadHandler(layouts, pools) as handler:
        blocks, pages = [[1, 2], [3]], [[4], [0]]
        job = handler.store(gpu_block_ids=blocks, page_ids=pages)
        with pytest.raises(BlocksRejectedError):
            job.synchronize()
        result = job.result
        assert result is not None
        assert isinstance(result.error, BlocksRejectedError)
        assert result.rejected == result.error.rejected == (1,)
        assert result.nbytes == 2 * BLOCK_BYTES + 2400
        assert result.link_bytes == 2 * SLOT_BYTES + 2400
        handler.poll()
        job = handler.load(page_ids=[[4], [0]], gpu_block_ids=[[5], [7]])
        job.synchronize()
    assert cache.bytes_of(5) == cache.bytes_of(1)
    assert torch.equal(states[7], expected)


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


def test_the_metrics_count_bytes_blocks_and_rejects(encoded: Encoded) -> None:
    encoded.cache.fill(0, None)
    handler = encoded.handler
    handler.store(gpu_block_ids=[0, 1], page_ids=[0, 1])
    handler.store(gpu_block_ids=[1, 2], page_ids=[1, 2])
    handler.load(page_ids=[1, 2], gpu_block_ids=[5, 6])
    stores, loads = handler.metrics().stores, handler.metrics().loads
    assert (stores.done, stores.failed, stores.blocks, stores.rejected_blocks) == (1, 1, 4, 1)
    assert (stores.bytes, stores.link_bytes) == (2 * BLOCK_BYTES, 2 * SLOT_BYTES)
    assert (loads.blocks, loads.rejected_blocks, loads.link_bytes) == (2, 0, 2 * SLOT_BYTES)
    text = handler.metrics().prometheus()
    assert 'kvswap_rejected_blocks_total{direction="store",channel="stores"} 1' in text
    assert f'kvswap_link_bytes_total{{direction="load",channel="loads"}} {2 * SLOT_BYTES}' in text


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


def run_random_jobs(seed: int, change: Any = None) -> None:
    """Compares a handler with a model: what each block and each slot holds, if anything."""
    rng = random.Random(seed)
    per_page, pages = rng.randint(1, 3), rng.randint(2, 6)
    one = Encoded(num_blocks=12, num_pages=pages, per_page=per_page)
    blocks = {block: one.cache.bytes_of(block) for block in range(12)}
    slots: dict[int, bytes | None] = dict.fromkeys(range(pages * per_page))
    fits = dict.fromkeys(blocks, True)
    with one.handler as handler:
        for step in range(60):
            if rng.random() < 0.4:
                block = rng.randrange(12)
                kind = rng.choice([*FITS, None, None])
                one.cache.fill(block, kind, seed * 100 + step)
                blocks[block], fits[block] = one.cache.bytes_of(block), kind is not None
                continue
            count = rng.randint(1, min(5, pages * per_page))
            first = rng.randrange(per_page)
            needed = -(-(first + count) // per_page)
            if needed > pages:
                continue
            of_job = rng.sample(range(12), count)
            page_ids = rng.sample(range(pages), needed)
            places = [
                page_ids[at // per_page] * per_page + at % per_page
                for at in range(first, first + count)
            ]
            options = {"gpu_block_ids": of_job, "page_ids": page_ids, "first_slot": first}
            rejected = []
            if rng.random() < 0.5:
                job = handler.store(**options)  # type: ignore[arg-type]
                for position, (block, place) in enumerate(zip(of_job, places, strict=True)):
                    slots[place] = blocks[block] if fits[block] else None
                    if not fits[block]:
                        rejected.append(position)
            else:
                job = handler.load(**options, layer_groups=rng.randint(1, 2))  # type: ignore[arg-type]
                for position, (block, place) in enumerate(zip(of_job, places, strict=True)):
                    found = slots[place]
                    if found is None:
                        rejected.append(position)
                    else:
                        blocks[block], fits[block] = found, True
            if change is not None:
                change(one, rng)
            assert job.query()
            assert job.result is not None
            assert job.result.rejected == tuple(rejected)
            handler.poll()
            assert {block: one.cache.bytes_of(block) for block in blocks} == blocks
    for place, held in slots.items():
        if held is not None:
            page, slot = divmod(place, per_page)
            assert one.pool.read_block(page, slot).numpy().tobytes() == held


@pytest.mark.parametrize("seed", range(6))
def test_random_jobs_do_what_the_model_does(seed: int) -> None:
    run_random_jobs(seed)


def test_the_model_notices_a_bit_that_changes() -> None:
    def flip(one: Encoded, rng: random.Random) -> None:
        one.pool.pages[rng.randrange(one.pool.num_pages), 0, -1] ^= 1

    with pytest.raises(AssertionError):
        run_random_jobs(0, flip)
