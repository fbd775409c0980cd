"""On a GPU: the order of encoded copies, and which blocks they reject."""

from __future__ import annotations

import pytest
import torch
from encoded_cache import METHODS, EncodedCache
from encoded_fuzz import Fuzz

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


def test_memory_of_gpu_and_host_is_freed() -> None:
    EncodedCache(device="cuda:0").handler.close()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(5):
        with EncodedCache(device="cuda:0", staging_bytes=2 << 30) as cache:
            cache.store([1], [0]).synchronize(60)
    torch.cuda.empty_cache()
    # Other processes may use the GPU, too.
    assert torch.cuda.mem_get_info()[0] >= free - (5 << 30)
