"""One handler for groups of layers that share memory or pages. Random groups and jobs are in
test_fuzz_gpu.py and tests/sim/test_fuzz.py.
"""

from __future__ import annotations

import pytest
import torch
from gpu_cache import only

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_groups_that_share_memory_share_blocks(device: str) -> None:
    """As those of vLLM's hybrid models do."""
    rows = torch.full((8, 1 << 16), 17, dtype=torch.uint8, device=device)
    layouts = [PagedLayout([rows]), PagedLayout([rows.view(8, 256, 256)])]
    hosts = [HostPool(layout, num_pages=8) for layout in layouts]
    for value, host in zip((42, 43), hosts, strict=True):
        host.pages.fill_(value)
    with OffloadHandler(layouts, hosts) as handler:
        handler.load(page_ids=[[], [1]], gpu_block_ids=[[], [5]])
        handler.store(gpu_block_ids=[[5], []], page_ids=[[2], []])
        handler.synchronize()
        assert only(hosts[0].pages[2]) == 43
        assert only(rows[5]) == 43
        handler.synchronize(handler.load(page_ids=[[1], [3]], gpu_block_ids=[[5], [4]]))
    assert only(rows[5]) == 42
    assert only(rows[4]) == 43
    assert only(rows[[0, 1, 2, 3, 6, 7]]) == 17
    assert only(hosts[1].pages) == 43


def test_groups_of_other_sizes_share_a_pool(device):
    """Block 2 of either goes to page 1 and 3, and comes back as it was; nothing else is written."""
    tensors = [torch.randint(256, (6, size), dtype=torch.uint8).to(device) for size in (96, 40, 24)]
    layouts = [PagedLayout(tensors[:1]), PagedLayout(tensors[1:])]
    pool = HostPool(layouts[0], num_pages=4, blocks_per_page=2)
    before = pool.pages.random_(256).clone()
    pools = [pool.view_for(layout) for layout in layouts]
    assert [one.nbytes for one in pools] == [4 * 2 * 96] * 2
    with OffloadHandler(layouts, pools) as handler:
        handler.synchronize(
            handler.store(gpu_block_ids=[[2], [2]], page_ids=[[1], [3]], first_slot=[0, 1])
        )
        before[1, 0] = tensors[0][2].cpu()
        before[3, 1, :64] = torch.cat([tensors[1][2], tensors[2][2]]).cpu()
        assert torch.equal(pool.pages, before)
        expected = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor[2] = 0
        handler.synchronize(
            handler.load(page_ids=[[1], [3]], gpu_block_ids=[[2], [2]], first_slot=[0, 1])
        )
    assert all(map(torch.equal, tensors, expected))
    pool.close()
