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
def test_a_layer_can_be_read_before_the_whole_load_has_ended(gpu: GpuCache, groups: int) -> None:
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


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
@pytest.mark.parametrize("groups", [LAYERS, 5, 1])
def test_who_waits_for_each_layer_sees_the_bytes_of_each(
    gpu: GpuCache, groups: int, waits: bool
) -> None:
    busy, job = load(gpu, groups)
    with torch.cuda.stream(gpu.consumer):
        for layer in range(LAYERS):
            if waits:
                job.wait(layer_group=job.layer_group_of(layer))  # the current stream
            look(gpu, layer, layer)
    assert not busy.query()
    if not waits:
        gpu.consumer.synchronize()
    assert seen(gpu)[:LAYERS] == [(NEW if waits else OLD) + layer for layer in range(LAYERS)]
    gpu.handler.synchronize(job)


@pytest.mark.parametrize("groups", [None, LAYERS])
def test_waiting_for_the_job_is_waiting_for_all_of_its_layers(
    gpu: GpuCache, groups: int | None
) -> None:
    _, job = load(gpu, groups)
    with torch.cuda.stream(gpu.consumer):
        job.wait()
        for layer in range(LAYERS):
            look(gpu, layer, layer)
    assert seen(gpu)[:LAYERS] == [NEW + layer for layer in range(LAYERS)]
    for index, layer in enumerate(gpu.layers):
        assert only(layer) == NEW + index  # every byte


def test_only_the_blocks_that_are_named_change_in_every_group(gpu: GpuCache) -> None:
    _, job = load(gpu, 7, blocks=[3, 9])
    gpu.release()
    gpu.handler.synchronize(job)
    others = [block for block in ALL if block not in (3, 9)]
    for index, layer in enumerate(gpu.layers):
        assert only(layer[[3, 9]]) == NEW + index
        assert only(layer[others]) == OLD + index


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_a_layer_of_a_queued_load_is_waited_for_without_blocking_the_host(waits: bool) -> None:
    with GpuCache(layers=4) as gpu:
        busy = gpu.hold_on(gpu.side)
        for _ in range(100):  # more than are given to the device at once
            gpu.handler.load(page_ids=[0], gpu_block_ids=[0], after=busy)
        job = gpu.handler.load(page_ids=[1], gpu_block_ids=[1], after=(), layer_groups=4)
        with torch.cuda.stream(gpu.consumer):
            if waits:
                job.wait(layer_group=job.layer_group_of(0))
            gpu.look()
        assert not busy.query()
        if waits:
            gpu.release()
        gpu.consumer.synchronize()
        gpu.release()
        assert only(gpu.seen[1]) == (NEW if waits else OLD)


def test_the_layers_of_an_ended_load_are_not_waited_for(gpu: GpuCache) -> None:
    _, job = load(gpu, LAYERS)
    gpu.release()
    gpu.handler.synchronize(job)
    load(gpu, LAYERS)  # which may have the events of the first
    for layer in range(LAYERS):
        job.wait(gpu.consumer, layer_group=job.layer_group_of(layer))
    gpu.consumer.synchronize()  # the second load is still held
    gpu.release()
    gpu.handler.synchronize()


@pytest.mark.parametrize("groups", [0, -1, LAYERS + 1])
def test_a_load_has_at_least_one_and_no_more_groups_than_layers(gpu: GpuCache, groups: int) -> None:
    gpu.handler.synchronize()
    gpu.handler.poll()
    with pytest.raises(ValueError, match="layer_groups"):
        gpu.handler.load(page_ids=[0], gpu_block_ids=[0], layer_groups=groups)
    assert gpu.handler.poll() == []


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_is_none_is_refused(gpu: GpuCache, layer: int) -> None:
    job = gpu.handler.load(page_ids=[0], gpu_block_ids=[0], layer_groups=2)
    with pytest.raises((IndexError, ValueError), match=str(layer)):
        job.wait(layer_group=job.layer_group_of(layer))
    gpu.handler.synchronize(job)
