"""On a GPU: checksums of blocks, what they find, and when a stream knows."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from checksum_model import checksums_of, tag_of
from damage import HEAD, Damage, rows_of
from encoded_cache import METHODS, EncodedCache
from encoded_fuzz import Fuzz
from logged import logged
from patience import in_time

from torch_kvswap import (
    CorruptedPageError,
    HostPool,
    OffloadHandler,
    PagedLayout,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_hang")]

ENCODINGS = ("raw", "lossless")
# Bytes of a block in each slab.
SIZES = {
    "2 KiB": [2048] * 20,
    "8 KiB": [8192] * 9,
    "12 KiB": [12 << 10] * 5,
    "2 MiB": [2 << 20],
    "mixed": [4096, 64, 40 << 10, 16, 2048],
    "odd": [8191, 1, 3, 20001],
    "divided by 4": [8196, 4, 12 << 10],
}


@pytest.mark.parametrize("method", [*METHODS, "strided"])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_table_has_the_checksums_of_the_model(sizes: str, method: str) -> None:
    blocks = 300  # more than a launch has
    if max(SIZES[sizes]) > 1 << 20:
        blocks = 12
    tensors = [
        torch.randint(256, (blocks, size), dtype=torch.uint8, device="cuda:0")
        for size in SIZES[sizes]
    ]
    layout = PagedLayout(tensors)
    pool = HostPool(layout, blocks, verify="load")
    with OffloadHandler(layout, pool, copy_method=method) as handler:
        order = torch.randperm(blocks).tolist()
        handler.store(gpu_block_ids=order, page_ids=range(blocks)).synchronize(60)
        rows = rows_of(pool)
        stored = [tensor.cpu().numpy() for tensor in tensors]
        for slot in {0, 1, 7, blocks - 1}:
            row = rows[1 + slot]
            tag, store, *_ = (int(word) for word in row[:HEAD].view(np.uint64))
            assert tag == tag_of(slot, store)
            expected = checksums_of([bytes(tensor[order[slot]]) for tensor in stored])
            found = row[HEAD:].view(np.uint64)[: len(expected)]
            assert [int(word) ^ tag for word in found] == expected
        for tensor in tensors:
            tensor.zero_()
        handler.load(gpu_block_ids=order, page_ids=range(blocks)).synchronize(60)
        for tensor, before in zip(tensors, stored, strict=True):
            assert np.array_equal(tensor.cpu().numpy(), before)


@pytest.mark.parametrize("layer_groups", [1, 3])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("encoding", "method"), [*product(ENCODINGS, METHODS), ("raw", "strided")])
def test_no_damage_goes_unnoticed(
    encoding: str, method: str, layer_groups: int, rows: bool
) -> None:
    sizes = {"values": 6144, "encodings": [encoding], "verify": "load", "rows": rows}
    with EncodedCache(device="cuda:0", copy_method=method, **sizes) as cache:
        seen = Damage(cache, seed=5).run(1500, layer_groups=layer_groups)
    assert set(seen) <= {"noticed", "harmless"}
    assert seen["noticed"] > 1400


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("values", [2048, 20480])
def test_random_jobs_find_nothing_but_what_is_wrong(values: int, method: str, shares: bool) -> None:
    options = {"device": "cuda:0", "values": values, "copy_method": method, "verify": "load"}
    counts = Fuzz(None, 11, shares=shares, rounds=12, **options).run()
    assert counts["done"] > 0
    assert counts["rejected"] > 0
    assert counts["compared"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_corrupted_load_is_not_done_on_host(
    method: str,
) -> None:
    options: dict[str, Any] = {"encodings": ["raw"], "verify": "load", "copy_method": method}
    with EncodedCache(device="cuda:0", **options) as cache, logged():
        cache.store([0], [0], after=None).synchronize(60)
        cache.pools[0].pages[0, 0, 0] ^= 1
        seen = torch.zeros_like(cache.tensors[0][0][1])
        for _ in range(2):
            seen.zero_()
            load = cache.load([0], [1], after=None, layer_groups=3)
            for layer_group in range(3):
                load.wait(layer_group=layer_group)
            seen.copy_(cache.tensors[0][0][1])
            event = torch.cuda.current_stream().record_event()
            assert in_time(event.query)
            with pytest.raises(CorruptedPageError):
                load.synchronize(60)
            flipped = seen.view(torch.int16).cpu() ^ cache.tensors[0][0][0].view(torch.int16).cpu()
            assert flipped.count_nonzero() == 1
