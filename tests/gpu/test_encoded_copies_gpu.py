"""On a GPU: the order of encoded copies, and which blocks they reject."""

from __future__ import annotations

import pytest
import torch
from encoded_cache import METHODS, EncodedCache
from encoded_fuzz import Fuzz
from gpu_cache import Hold

from torch_kvswap.results import BlocksRejectedError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("values", [2048, 20480])
def test_random_jobs_leave_the_bits_of_a_model(
    values: int, seed: int, method: str, shares: bool
) -> None:
    options = {"device": "cuda:0", "values": values, "copy_method": method}
    counts = Fuzz(None, seed, shares=shares, rounds=12, **options).run()
    assert counts["done"] > counts["failed"] > 0
    assert counts["rejected"] > 0
    assert counts["compared"] > 0


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_store_encodes_what_its_stream_has_written(method: str, waits: bool) -> None:
    with EncodedCache(device="cuda:0", copy_method=method) as cache:
        cache.load([0], [3])  # all kernels are loaded
        with pytest.raises(BlocksRejectedError):
            cache.handler.synchronize()
        zeros = torch.zeros_like(cache.tensors[0][0][1])
        cache.synchronize()
        with Hold():
            for layer in cache.tensors[0]:
                layer[1].copy_(zeros)
            job = cache.store([1], [0], after=None if waits else ())
            if not waits:  # the control: it does not wait for the stream
                job.synchronize(60)
            assert job.query() is not waits
        job.synchronize(60)
        cache.load([0], [2]).synchronize(60)
        assert bool(cache.block(2).any()) is not waits


def test_memory_of_gpu_and_host_is_freed() -> None:
    EncodedCache(device="cuda:0").handler.close()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(5):
        with EncodedCache(device="cuda:0", staging_bytes=64 << 20) as cache:
            cache.store([1], [0]).synchronize(60)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free - (16 << 20)
