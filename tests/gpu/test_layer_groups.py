"""On a GPU: a load that moves group after group of layers lets the forward pass start early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rigs import NEW, OLD, Hold, Rig, only

from torch_kvswap.handler import Job

pytestmark = pytest.mark.gpu

LAYERS = 16
ALL = list(range(16))  # blocks and pages: 256 MiB, which take some milliseconds


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with Rig(blocks=16, row=1 << 20, layers=LAYERS) as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Rig:
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


def look(rig: Rig, layer: int, row: int) -> None:
    """Reads the last byte of each block of a layer on the current stream.

    Block by block with copies: a kernel starts much later where a sanitizer watches it.
    """
    for block in ALL:
        rig.seen[row, block].copy_(rig.layers[layer][block, -1])


def load(rig: Rig, groups: int | None, blocks: list[int] = ALL) -> tuple[Hold, Job]:
    """Of all layers, held up, so that it is given to the device as a whole."""
    busy = rig.hold_on(rig.side)
    return busy, rig.handler.load(blocks, blocks, after=busy, layer_groups=groups)


def seen(rig: Rig) -> list[int]:
    rig.release()
    torch.cuda.synchronize()
    return [only(row) for row in rig.seen]


@pytest.mark.parametrize("groups", [LAYERS, 5, 1])
def test_a_layer_can_be_read_before_the_whole_load_has_ended(rig: Rig, groups: int) -> None:
    busy, job = load(rig, groups)
    with torch.cuda.stream(rig.consumer):
        job.wait_layer(0, rig.consumer)
        look(rig, 0, 0)
        look(rig, LAYERS - 1, 1)  # as a control: who waits for the first layer has no other
        job.wait_layer(LAYERS - 1, rig.consumer)
        look(rig, LAYERS - 1, 2)
    assert not busy.query()  # the host waited for nothing
    is_last_there = groups == 1
    last_layer = (NEW if is_last_there else OLD) + LAYERS - 1
    assert seen(rig)[:3] == [NEW, last_layer, NEW + LAYERS - 1]
    rig.handler.wait(job)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
@pytest.mark.parametrize("groups", [LAYERS, 5, 1])
def test_who_waits_for_each_layer_sees_the_bytes_of_each(
    rig: Rig, groups: int, waits: bool
) -> None:
    busy, job = load(rig, groups)
    with torch.cuda.stream(rig.consumer):
        for layer in range(LAYERS):
            if waits:
                job.wait_layer(layer)  # the current stream
            look(rig, layer, layer)
    assert not busy.query()
    if not waits:
        rig.consumer.synchronize()
    assert seen(rig)[:LAYERS] == [(NEW if waits else OLD) + layer for layer in range(LAYERS)]
    rig.handler.wait(job)


@pytest.mark.parametrize("groups", [None, LAYERS])
def test_waiting_for_the_job_is_waiting_for_all_of_its_layers(rig: Rig, groups: int | None) -> None:
    _, job = load(rig, groups)
    with torch.cuda.stream(rig.consumer):
        job.wait_on()
        for layer in range(LAYERS):
            look(rig, layer, layer)
    assert seen(rig)[:LAYERS] == [NEW + layer for layer in range(LAYERS)]
    for index, layer in enumerate(rig.layers):
        assert only(layer) == NEW + index  # every byte


def test_only_the_blocks_that_are_named_change_in_every_group(rig: Rig) -> None:
    _, job = load(rig, 7, blocks=[3, 9])
    rig.release()
    rig.handler.wait(job)
    others = [block for block in ALL if block not in (3, 9)]
    for index, layer in enumerate(rig.layers):
        assert only(layer[[3, 9]]) == NEW + index
        assert only(layer[others]) == OLD + index


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_a_layer_of_a_queued_load_is_waited_for_without_blocking_the_host(waits: bool) -> None:
    with Rig(layers=4) as rig:
        busy = rig.hold_on(rig.side)
        for _ in range(100):  # more than are given to the device at once
            rig.handler.load([0], [0], after=busy)
        job = rig.handler.load([1], [1], after=(), layer_groups=4)
        with torch.cuda.stream(rig.consumer):
            if waits:
                job.wait_layer(0)
            rig.look()
        assert not busy.query()
        if waits:
            rig.release()
        rig.consumer.synchronize()
        rig.release()
        assert only(rig.seen[1]) == (NEW if waits else OLD)


def test_the_layers_of_an_ended_load_are_not_waited_for(rig: Rig) -> None:
    _, job = load(rig, LAYERS)
    rig.release()
    rig.handler.wait(job)
    load(rig, LAYERS)  # which may have the events of the first
    for layer in range(LAYERS):
        job.wait_layer(layer, rig.consumer)
    rig.consumer.synchronize()  # the second load is still held
    rig.release()
    rig.handler.wait()


@pytest.mark.parametrize("groups", [0, -1, LAYERS + 1])
def test_a_load_has_at_least_one_and_no_more_groups_than_layers(rig: Rig, groups: int) -> None:
    rig.handler.wait()
    rig.handler.finished()
    with pytest.raises(ValueError, match="layer_groups"):
        rig.handler.load([0], [0], layer_groups=groups)
    assert rig.handler.finished() == []


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_is_none_is_refused(rig: Rig, layer: int) -> None:
    job = rig.handler.load([0], [0], layer_groups=2)
    with pytest.raises((IndexError, ValueError), match=str(layer)):
        job.wait_layer(layer)
    rig.handler.wait(job)
