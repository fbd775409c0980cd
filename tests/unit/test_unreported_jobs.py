"""How much memory a handler keeps for ended jobs whose results nobody has fetched."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from torch_kvswap import HostPool, OffloadHandler, PagedLayout

JOBS = 20_000
MOST_BYTES = 160  # of a job; there is nothing else to keep than its result


class Mallinfo2(ctypes.Structure):
    _fields_ = (
        ("of_arenas_and_maps", ctypes.c_size_t * 7),
        ("uordblks", ctypes.c_size_t),
        ("of_free_blocks", ctypes.c_size_t * 2),
    )


def bytes_in_use() -> int:
    """Of what malloc has given out."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("a C library without mallinfo2")
    libc.mallinfo2.restype = Mallinfo2
    gc.collect()
    return int(libc.mallinfo2().uordblks)


@pytest.mark.parametrize("blocks", [1, 64])
def test_a_done_job_keeps_only_its_result(blocks: int) -> None:
    layout = PagedLayout([torch.zeros(64, 8, dtype=torch.uint8)])
    ids = list(range(blocks))
    with OffloadHandler(layout, HostPool(layout, num_pages=64)) as handler:
        for _ in range(100):
            handler.store(gpu_block_ids=ids, page_ids=ids)
        before = bytes_in_use()
        for _ in range(JOBS):
            handler.store(gpu_block_ids=ids, page_ids=ids)
        after = bytes_in_use()
        assert (after - before) / JOBS < MOST_BYTES
        reported = handler.poll()
        assert [result.job_id for result in reported] == list(range(100 + JOBS))
        del reported
        assert bytes_in_use() - before < MOST_BYTES * JOBS / 10
