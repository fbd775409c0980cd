"""Pages move with the checksums of their blocks, whichever of their slots have one."""

from __future__ import annotations

import torch

from torch_kvswap import HostPool, OffloadHandler, PagedLayout


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
