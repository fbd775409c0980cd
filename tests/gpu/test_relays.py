"""Transfers that the links of other GPUs take part in. They need two GPUs that access each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_cache import Hold
from patience import PATIENCE
from torch import Tensor

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap._native.loader import native
from torch_kvswap.offload.relays import LEAST_GAIN, measured_gain

pytestmark = pytest.mark.gpu

BLOCKS, LAYERS, ROW = 96, 4, 1 << 20  # 384 MiB
LARGE = list(range(8, 72))  # 256 MiB: relays take part
WAITS = pytest.mark.parametrize("after", ["waits", "control"])


class RelayedCache:
    """A cache on cuda:0, its pool, and a handler with cuda:1 as a relay.

    Block b and page p hold numbers that say which block or page they are, and where in it.
    """

    def __init__(self) -> None:
        words = ROW // 8
        self.tensors = [
            torch.arange(BLOCKS * words, device="cuda:0").view(BLOCKS, words) + (layer << 40)
            for layer in range(LAYERS)
        ]
        self.layout = PagedLayout(self.tensors)
        self.host = HostPool(self.layout, num_pages=BLOCKS)
        self.pages = self.host.pages.view(torch.int64).view(BLOCKS, LAYERS, words)
        self.pages.copy_(-1 - torch.arange(self.pages.numel()).view_as(self.pages))
        self.handler = OffloadHandler(self.layout, self.host, relays=[1])
        self.side = torch.cuda.Stream("cuda:0")
        torch.cuda.synchronize(0)

    def blocks(self) -> Tensor:
        """[BLOCKS, LAYERS, words], on the host."""
        return torch.stack([tensor.cpu() for tensor in self.tensors], 1)

    def relayed(self) -> int:
        metrics = self.handler.metrics()
        return sum(sum(of.relayed_bytes.values()) for of in (metrics.stores, metrics.loads))


@pytest.fixture
def relayed() -> Iterator[RelayedCache]:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, here are {torch.cuda.device_count()}")
    torch.cuda.set_device(0)
    try:
        native.enable_peer_access(0, 1)
    except RuntimeError as error:
        pytest.skip(str(error))
    if (gain := measured_gain(0, 1)) < LEAST_GAIN:
        pytest.skip(f"with cuda:1 as a relay cuda:0 is only {gain} times as fast")
    cache = RelayedCache()
    with cache.host:
        assert list(cache.handler.metrics().loads.relayed_bytes) == [1]
        yield cache


def test_relayed_bytes_arrive_on_gpus(relayed: RelayedCache) -> None:
    pages = [(7 * block) % BLOCKS for block in LARGE]
    blocks, slots = relayed.blocks(), relayed.pages.clone()
    relayed.handler.synchronize(relayed.handler.store(gpu_block_ids=LARGE, page_ids=pages))
    slots[pages] = blocks[LARGE]
    assert torch.equal(relayed.pages, slots)
    targets = [(5 * block + 3) % BLOCKS for block in LARGE]
    relayed.handler.synchronize(relayed.handler.load(page_ids=pages, gpu_block_ids=targets))
    blocks[targets] = slots[pages]
    assert torch.equal(relayed.blocks(), blocks)
    assert relayed.relayed() > 2 * len(LARGE) * LAYERS * ROW // 4


@WAITS
def test_a_relayed_store_waits_for_the_stream(relayed: RelayedCache, after: str) -> None:
    relayed.tensors[0].fill_(1)  # the first launch of a kernel waits for the device
    torch.cuda.synchronize(0)
    with torch.cuda.stream(relayed.side):
        hold = Hold()
        relayed.tensors[0].fill_(2)
        store = relayed.handler.store(
            gpu_block_ids=LARGE, page_ids=LARGE, after=None if after == "waits" else ()
        )
    if after == "control":
        relayed.handler.synchronize(store, timeout=PATIENCE)
    else:
        assert not store.query()
    hold.release()
    relayed.handler.synchronize(store, timeout=PATIENCE)
    assert relayed.pages[LARGE, 0].unique().tolist() == [1 if after == "control" else 2]


@WAITS
def test_a_stream_waits_for_a_relayed_load(relayed: RelayedCache, after: str) -> None:
    seen = relayed.tensors[0][LARGE].clone()
    old = seen.cpu()
    consumer = torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(relayed.side):
        hold = Hold()
        load = relayed.handler.load(page_ids=LARGE, gpu_block_ids=LARGE)
    with torch.cuda.stream(consumer):
        if after == "waits":
            load.wait()
        seen.copy_(relayed.tensors[0][LARGE[0] : LARGE[-1] + 1])
    if after == "control":
        consumer.synchronize()
    hold.release()
    consumer.synchronize()
    relayed.handler.synchronize(load, timeout=PATIENCE)
    wanted = relayed.pages[LARGE, 0] if after == "waits" else old
    assert torch.equal(seen.cpu(), wanted)


def test_relayed_jobs_that_share_blocks_keep_their_order(relayed: RelayedCache) -> None:
    blocks, slots = relayed.blocks(), relayed.pages.clone()
    generator = torch.Generator().manual_seed(5)
    for number in range(40):
        count = 64 if number % 3 else 2  # small ones go over the own link only
        gpu, host = (torch.randperm(BLOCKS, generator=generator)[:count] for _ in range(2))
        if number % 2:
            relayed.handler.store(gpu_block_ids=gpu, page_ids=host, after=())
            slots[host] = blocks[gpu]
        else:
            relayed.handler.load(page_ids=host, gpu_block_ids=gpu, after=())
            blocks[gpu] = slots[host]
    relayed.handler.synchronize(timeout=PATIENCE)
    assert torch.equal(relayed.pages, slots)
    assert torch.equal(relayed.blocks(), blocks)
