"""recommend_encoding() looks at blocks and counts what the codec would."""

from __future__ import annotations

import pytest
import torch
from bf16_blocks import with_escapes
from bf16_cache import SIZES, Bf16Cache
from error_text import error_text
from expecttest import assert_expected_inline
from slot_model import SlotModel

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.encoding import recommend_encoding

ROOM = {width: SlotModel(SIZES, width).max_escapes for width in (12.125, 12.5)}


def with_blocks_of(*escapes: int) -> Bf16Cache:
    """A cache with so many escapes in each block."""
    cache = Bf16Cache(len(escapes))
    for block, count in enumerate(escapes):
        cache.write(block, with_escapes(SIZES, count, block))
    return cache


def test_the_narrowest_sufficient_slots_are_recommended() -> None:
    found = recommend_encoding(with_blocks_of(0, 3, ROOM[12.125]).layout, [0, 1, 2])
    assert (found.encoding, found.bits_per_value) == ("lossless", 12.125)
    assert found.escapes == (0, 3, ROOM[12.125])
    assert found.rejected == {12.125: 0, 12.5: 0}
    assert_expected_inline(
        str(found),
        """lossless with 12.125 bits per value; rejected of 3 blocks: with 12.125 bits 0.0%, with 12.5 bits 0.0%; a block of 6144 values has 6.3 escapes on average and 16 at most""",
    )


def test_wider_slots_are_recommended_for_one_escape_more() -> None:
    found = recommend_encoding(with_blocks_of(0, ROOM[12.125] + 1).layout, [0, 1])
    assert (found.encoding, found.bits_per_value) == ("lossless", 12.5)
    assert found.rejected == {12.125: 0.5, 12.5: 0}


def test_raw_pages_are_recommended_if_nothing_fits() -> None:
    found = recommend_encoding(with_blocks_of(0, ROOM[12.5] + 1).layout, [1, 1, 0])
    assert (found.encoding, found.bits_per_value) == ("raw", None)
    assert found.rejected == {12.125: 2 / 3, 12.5: 2 / 3}
    assert_expected_inline(
        str(found),
        """raw; rejected of 3 blocks: with 12.125 bits 66.7%, with 12.5 bits 66.7%; a block of 6144 values has 75.3 escapes on average and 113 at most""",
    )


def test_one_block_of_a_hundred_may_be_rejected() -> None:
    cache = with_blocks_of(0, ROOM[12.125] + 1)
    assert recommend_encoding(cache.layout, [0] * 99 + [1]).bits_per_value == 12.125
    assert recommend_encoding(cache.layout, [0] * 98 + [1]).bits_per_value == 12.5


def test_it_counts_what_a_store_rejects() -> None:
    cache = with_blocks_of(*range(0, 3 * ROOM[12.125], 7))
    blocks = range(cache.layout.num_blocks)
    found = recommend_encoding(cache.layout, blocks)
    for width in ROOM:
        pool = HostPool(cache.layout, len(blocks), encoding="lossless", bits_per_value=width)
        with OffloadHandler(cache.layout, pool) as handler:
            job = handler.store(gpu_block_ids=blocks, page_ids=blocks)
            assert job.result is not None
            assert len(job.result.rejected) == round(found.rejected[width] * len(blocks))


def test_blocks_are_read_in_memory_order() -> None:
    """A block whose dimensions are permuted has the windows of the codec, not others."""
    values = torch.ones(4, 64, 32, dtype=torch.bfloat16)
    values[1, :2] = 2.0**100  # 64 values in a row
    permuted = values.permute(0, 2, 1)
    whole = [recommend_encoding(PagedLayout([one]), [1]).escapes for one in (values, permuted)]
    assert whole == [(64,), (64,)]
    large = torch.ones(2, 1 << 10, 1 << 5, dtype=torch.bfloat16)  # two tiles
    large[1, : 1 << 9] = 2.0**100
    permuted = large.permute(0, 2, 1)
    assert recommend_encoding(PagedLayout([permuted], block_dim=0), [1]).escapes == (0,)


@pytest.mark.parametrize("offset", [0, 1])
def test_views_of_bytes_are_read_at_any_address(offset: int) -> None:
    values = torch.ones(4, 2048, dtype=torch.bfloat16)
    values[1, :5] = 2.0**100
    memory = torch.zeros(values.nbytes + 1, dtype=torch.uint8)
    views = memory[offset:][: values.nbytes].view(4, -1)
    views.copy_(values.view(torch.uint8))
    layout = PagedLayout([views], dtype=torch.bfloat16)
    assert recommend_encoding(layout, [0, 1]).escapes == (0, 5)


def test_unencodable_blocks_stay_raw_with_a_reason() -> None:
    found = recommend_encoding(PagedLayout([torch.zeros(4, 64, dtype=torch.float16)]), [0])
    assert (found.encoding, found.bits_per_value, found.escapes) == ("raw", None, ())
    assert (found.rejected, found.escapes) == ({}, ())
    assert_expected_inline(
        found.text,
        """raw: encoding='lossless' is for torch.bfloat16, but the layout is of torch.float16; use encoding='raw'""",
    )


def test_small_blocks_get_the_wide_slots() -> None:
    found = recommend_encoding(PagedLayout([torch.ones(4, 512, dtype=torch.bfloat16)]), [0])
    assert (found.bits_per_value, found.rejected) == (12.5, {12.5: 0})


def test_wrong_blocks_are_refused() -> None:
    layout = Bf16Cache(4).layout
    assert_expected_inline(
        error_text(recommend_encoding, layout, [0, 4]),
        """IndexError: sample_block_ids[1] is 4; the cache has blocks 0 to 3""",
    )
    assert_expected_inline(
        error_text(recommend_encoding, layout, []),
        """ValueError: sample_block_ids is empty; name blocks that requests have filled""",
    )
    assert_expected_inline(
        error_text(recommend_encoding, "x", [0]),
        """TypeError: layout is a str; pass a PagedLayout""",
    )
