"""On a GPU: a load in layer groups lets the forward pass start before all layers are loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_cache import NEW, OLD, GpuCache, Hold, only

from torch_kvswap.offload.handler import Job

pytestmark = pytest.mark.gpu

LAYERS = 16
ALL = list(range(16))  # blocks and pages: 256 MiB, which take some milliseconds


@pytest.fixture(scope="module")
def shared() -> Iterator[GpuCache]:
    with GpuCache(blocks=16, row=1 << 20, layers=LAYERS) as gpu:
        yield gpu


@pytest.fixture
def gpu(shared: GpuCache) -> GpuCache:
    """Layer i has OLD + i in the cache and NEW + i in the pages, below called its bytes."""
    rows = shared.host.pages.view(16, LAYERS, 1 << 20)
    for index, layer in enumerate(shared.layers):
        layer.fill_(OLD + index)
        rows[:, index].fill_(NEW + index)
    shared.seen = torch.zeros(LAYERS + 1, 16, dtype=torch.uint8, device="cuda:0")
    for stream in (shared.side, shared.consumer):
        with torch.cuda.stream(stream):
            look(shared, 0, 0)
    torch.cuda.synchronize()
    return shared


def look(gpu: GpuCache, layer: int, row: int) -> None:
    """Reads the last byte of each block of a layer on the current stream.

    Block by block with copies: a kernel starts much later where a sanitizer watches it.
    """
    for block in ALL:
        gpu.seen[row, block].copy_(gpu.layers[layer][block, -1])


def load(gpu: GpuCache, groups: int | None, blocks: list[int] = ALL) -> tuple[Hold, Job]:
    """Of all layers, held up, so that it is given to the device as a whole."""
    busy = gpu.hold_on(gpu.side)
    return busy, gpu.handler.load(
        page_ids=blocks, gpu_block_ids=blocks, after=busy, layer_groups=groups
    )


def seen(gpu: GpuCache) -> list[int]:
    gpu.release()
    torch.cuda.synchronize()
    return [only(row) for row in gpu.seen]


@pytest.mark.parametrize("groups", [LAYERS, 5, 1])
def test_a_layer_is_readable_before_the_load_ends(gpu: GpuCache, groups: int) -> None:
    busy, job = load(gpu, groups)
    with torch.cuda.stream(gpu.consumer):
        job.wait(gpu.consumer, layer_group=job.layer_group_of(0))
        look(gpu, 0, 0)
        look(gpu, LAYERS - 1, 1)  # as a control: who waits for the first layer has no other
        job.wait(gpu.consumer, layer_group=job.layer_group_of(LAYERS - 1))
        look(gpu, LAYERS - 1, 2)
    assert not busy.query()  # the host waited for nothing
    is_last_there = groups == 1
    last_layer = (NEW if is_last_there else OLD) + LAYERS - 1
    assert seen(gpu)[:3] == [NEW, last_layer, NEW + LAYERS - 1]
    gpu.handler.synchronize(job)
