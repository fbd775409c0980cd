"""One handler for a hybrid model: each group of layers has its own blocks and ids."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from gpu_cache import only
from torch import Tensor

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.reference import ReferenceHandler


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Hybrid:
    """Full attention (K and V split, 2 blocks a page), sliding window (MLA), and Mamba states.

    Random bytes everywhere; a reference handler for each group, with a cache and a pool of its own
    on the CPU, does what a handler of all groups is asked for.
    """

    def __init__(self, device: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randint(256, shape, dtype=torch.uint8, generator=generator)

        # Block dimension, blocks of a page, pages, and the tensors.
        groups: list[tuple[int, int, int, list[Tensor]]] = [
            (1, 2, 5, [noise(2, 9, 16), noise(2, 9, 16)]),
            (0, 3, 4, [noise(6, 24), noise(6, 10)]),
            (0, 1, 3, [noise(4, 333)]),  # a state of odd size for each request
        ]
        self.layouts, self.hosts, self.references = [], list[HostPool](), list[ReferenceHandler]()
        for block_dim, per_page, num_pages, tensors in groups:
            expected = PagedLayout(tensors, block_dim)
            pages = HostPool(expected, num_pages, per_page)
            pages.pages.copy_(noise(*pages.pages.shape))
            self.references.append(ReferenceHandler(expected, pages))
            layout = PagedLayout([t.to(device, copy=True) for t in tensors], block_dim)
            self.layouts.append(layout)
            self.hosts.append(HostPool(layout, num_pages, per_page))
            self.hosts[-1].pages.copy_(pages.pages)
        self.handler = OffloadHandler(self.layouts, self.hosts)

    def store(
        self, group: int, blocks: Sequence[int], pages: Sequence[int], first: int = 0
    ) -> None:
        reference = self.references[group]
        reference.store(gpu_block_ids=blocks, page_ids=pages, first_slot=first).synchronize()

    def load(self, group: int, blocks: Sequence[int], pages: Sequence[int], first: int = 0) -> None:
        reference = self.references[group]
        reference.load(page_ids=pages, gpu_block_ids=blocks, first_slot=first).synchronize()

    def check(self) -> None:
        self.handler.synchronize()
        for host, reference in zip(self.hosts, self.references, strict=True):
            assert torch.equal(host.pages, reference.host.pages)
        self.check_blocks()

    def check_blocks(self) -> None:
        for layout, reference in zip(self.layouts, self.references, strict=True):
            for mine, theirs in zip(layout.tensors, reference.gpu.tensors, strict=True):
                assert torch.equal(mine.cpu(), theirs)

    def __enter__(self) -> Hybrid:
        return self

    def __exit__(self, *_: object) -> None:
        self.handler.close()
        for host in self.hosts:
            host.close()


@pytest.fixture
def hybrid(device: str) -> Iterator[Hybrid]:
    with Hybrid(device) as hybrid:
        yield hybrid


# Bytes


@pytest.mark.parametrize("seed", range(4))
def test_random_jobs_of_all_groups_do_what_the_reference_does(device: str, seed: int) -> None:
    rng = random.Random(seed)
    with Hybrid(device, seed) as hybrid:
        for _ in range(15):
            first, blocks, pages = [], [], []
            for layout, host in zip(hybrid.layouts, hybrid.hosts, strict=True):
                first.append(rng.randrange(host.blocks_per_page))
                most = min(layout.num_blocks, host.num_pages * host.blocks_per_page - first[-1])
                count = rng.choice([0, rng.randint(0, most)])
                needed = -(-(first[-1] + count) // host.blocks_per_page) if count else 0
                blocks.append(rng.sample(range(layout.num_blocks), count))
                pages.append(rng.sample(range(host.num_pages), needed))
            if rng.random() < 0.5:
                job = hybrid.handler.store(gpu_block_ids=blocks, page_ids=pages, first_slot=first)
                for group in range(3):
                    hybrid.store(group, blocks[group], pages[group], first[group])
            else:
                options = {"layer_groups": 2} if rng.random() < 0.3 else {}
                options |= {"expedited": True} if rng.random() < 0.3 else {}
                job = hybrid.handler.load(
                    page_ids=pages, gpu_block_ids=blocks, first_slot=first, **options
                )
                for group in range(3):
                    hybrid.load(group, blocks[group], pages[group], first[group])
            job.wait()
        hybrid.check()


def test_all_layers_of_all_groups_are_there_when_the_last_of_them_is_waited_for(
    hybrid: Hybrid,
) -> None:
    # Layers are counted through the groups: 2 of attention, 2 of the sliding window, 1 state.
    targets, pages = [[1, 8], [0, 3], [0]], [[4], [3], [2]]
    job = hybrid.handler.load(page_ids=pages, gpu_block_ids=targets, layer_groups=5)
    for layer in range(5):
        job.wait(layer_group=job.layer_group_of(layer))
    for group in range(3):
        hybrid.load(group, targets[group], pages[group])
    if hybrid.layouts[0].device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    hybrid.check_blocks()
    hybrid.check()


def test_a_handler_of_one_group_in_a_list_takes_lists_of_ids(device: str) -> None:
    rows = torch.arange(32, dtype=torch.uint8, device=device).view(4, 8)
    layout = PagedLayout([rows])
    with HostPool(layout, num_pages=2) as host, OffloadHandler([layout], [host]) as handler:
        handler.synchronize(handler.store(gpu_block_ids=[[3]], page_ids=[[1]]))
        assert host.pages[1, 0].tolist() == list(range(24, 32))
        handler.synchronize(handler.load(page_ids=[[1]], gpu_block_ids=[torch.tensor([0])]))
        assert rows[0].tolist() == list(range(24, 32))


# Groups that share memory, as those of vLLM's hybrid models do: block 5 is the same bytes in both


class Shared:
    """Two groups over one tensor, a page of each with bytes of its own."""

    def __init__(self, device: str) -> None:
        self.rows = torch.full((8, 1 << 16), 17, dtype=torch.uint8, device=device)
        self.layouts = [PagedLayout([self.rows]), PagedLayout([self.rows.view(8, 256, 256)])]
        self.hosts = [HostPool(layout, num_pages=8) for layout in self.layouts]
        for value, host in zip((42, 43), self.hosts, strict=True):
            host.pages.fill_(value)
        self.handler = OffloadHandler(self.layouts, self.hosts)

    def another_handler(self) -> OffloadHandler:
        """Handlers do not know of each other: a control."""
        return OffloadHandler(self.layouts, self.hosts)

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *_: object) -> None:
        self.handler.close()
        for host in self.hosts:
            host.close()


def test_groups_that_share_memory_read_and_write_the_same_blocks(device: str) -> None:
    with Shared(device) as shared:
        handler = shared.handler
        handler.load(page_ids=[[], [1]], gpu_block_ids=[[], [5]])
        handler.store(gpu_block_ids=[[5], []], page_ids=[[2], []])
        handler.synchronize()
        assert only(shared.hosts[0].pages[2]) == 43
        assert only(shared.rows[5]) == 43
        handler.synchronize(handler.load(page_ids=[[1], [3]], gpu_block_ids=[[5], [4]]))
        assert only(shared.rows[5]) == 42
        assert only(shared.rows[4]) == 43
        assert only(shared.rows[[0, 1, 2, 3, 6, 7]]) == 17
        assert only(shared.hosts[1].pages) == 43


def test_groups_of_other_block_sizes_can_share_the_pages_of_one_pool(device):
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


def test_a_load_of_a_page_waits_for_the_store_of_another_group_that_shares_the_pool():
    layouts = [PagedLayout([torch.zeros(4, size, dtype=torch.uint8)]) for size in (64, 32)]
    pool = HostPool(layouts[0], 4)
    shared = OffloadHandler(layouts, [pool.view_for(layout) for layout in layouts])
    apart = OffloadHandler(layouts, [HostPool(layout, 4) for layout in layouts])
    spaces = [
        [group.slot_space for group in handler._native.groups.layouts_for_native]
        for handler in (shared, apart)
    ]
    assert spaces[0][0] == spaces[0][1]
    assert spaces[1][0] != spaces[1][1]
