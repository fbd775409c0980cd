"""A block with the same stride between its layers is copied with one 3-D copy of the driver."""

from __future__ import annotations

import mmap
import os
import re
from itertools import pairwise

import pytest
import torch
from expecttest import assert_expected_inline
from simulated_driver import DEVICE, Driver, on_device, simulated

from torch_kvswap import HostPool, OffloadHandler, PagedLayout

BLOCKS = 7
MAPPING = 2 << 20  # the least that PyTorch maps, and unmaps, in an expandable segment


def moved(driver: Driver, layout: PagedLayout, copy_method: str = "auto") -> str:
    """Stores two blocks and loads them elsewhere, compares all bytes; what the driver copied."""
    host = HostPool(layout, num_pages=3)
    expected = [tensor.clone() for tensor in layout.tensors]
    with OffloadHandler(layout, host, copy_method=copy_method) as handler:
        driver.log()
        handler.synchronize(handler.store(gpu_block_ids=[1, 4], page_ids=[2, 0]))
        for tensor in expected:
            tensor[6] = tensor[1]
            tensor[0] = tensor[4]
        handler.synchronize(handler.load(page_ids=[2, 0], gpu_block_ids=[6, 0]))
        for tensor, wanted in zip(layout.tensors, expected, strict=True):
            assert torch.equal(tensor, wanted)
        return "\n".join(re.findall(r"(?:strided|batch|copy) .*", driver.log()))


@simulated
def test_a_layer_group_copies_no_foreign_run(driver: Driver) -> None:
    whole = torch.randint(256, (7, BLOCKS, 48), dtype=torch.uint8)
    layout = on_device(driver, whole, [whole[layer] for layer in (0, 1, 3, 6)])
    with OffloadHandler(layout, HostPool(layout, num_pages=3), copy_method="strided") as handler:
        driver.log()
        handler.synchronize(handler.load(page_ids=[2], gpu_block_ids=[1], layer_groups=2))
    assert_expected_inline(
        "\n".join(re.findall("strided .*", driver.log())),
        """\
strided copy of 2 x 48 bytes on stream 103
strided copy of 2 x 48 bytes on stream 103""",
    )


@pytest.mark.parametrize("copy_method", ["copy_engines", "strided"])
@pytest.mark.parametrize("kind", ["no two distances are equal", "backwards", "of two sizes"])
@simulated
def test_unordered_layers_go_in_a_faster_batch(driver: Driver, kind: str, copy_method: str) -> None:
    whole = torch.randint(256, (16, BLOCKS, 48), dtype=torch.uint8)
    tensors = {
        "no two distances are equal": [whole[layer] for layer in (0, 1, 3, 6, 10)],
        "backwards": [whole[layer] for layer in (9, 7, 5, 3, 1)],
        "of two sizes": [whole[layer][:, : 16 + 8 * (layer % 2)] for layer in range(6)],
    }[kind]
    log = moved(driver, on_device(driver, whole, tensors), copy_method)
    assert (bool(re.search(r"batch of \d+ on stream 101", log))) == (copy_method == "copy_engines")


@simulated
def test_layers_2_gib_apart_are_one_copy(driver: Driver) -> None:
    distance = (5 << 30) + (1 << 20)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: only what is touched
    memory = mmap.mmap(-1, 4 * distance, flags=flags)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    layers = [whole[i * distance :][: BLOCKS * 48].view(BLOCKS, 48) for i in range(4)]
    for layer in layers:
        layer.random_(256)
    log = moved(driver, on_device(driver, whole, layers), "strided")
    assert log.count("strided copy of 4 x 48 bytes") == 4
    driver.reset()


@pytest.mark.parametrize(("gap", "rows"), [(512, 3), (MAPPING - 512, 3), (MAPPING, 1)])
@simulated
def test_close_layers_without_foreign_mappings_are_one_copy(
    driver: Driver, gap: int, rows: int
) -> None:
    """As PyTorch's allocator places one after another in an expandable segment."""
    layer_bytes = BLOCKS * 48
    whole = torch.randint(256, (3, layer_bytes + gap), dtype=torch.uint8)
    # Tensors on the same bytes, which know only their own.
    layers = [torch.from_numpy(row[:layer_bytes].view(BLOCKS, 48).numpy()) for row in whole]
    log = moved(driver, on_device(driver, whole, layers), "strided")
    assert f"strided copy of {rows} x 48 bytes" in log


@pytest.mark.parametrize("storages", [1, 2])
@simulated
def test_no_copy_crosses_memory_of_others(driver: Driver, storages: int) -> None:
    """The driver knows all expandable segments of a stream as one reservation. What lies between
    two tensors may be unmapped at any time, and a copy across it is refused then."""
    size = MAPPING // BLOCKS // 16 * 16 + 16  # a layer has more bytes than a mapping
    raw = torch.randint(256, (3, BLOCKS, size), dtype=torch.uint8)
    whole = raw.view(-1)
    driver.adopt(whole, DEVICE)
    layers = [raw[0], raw[2]]
    if storages == 2:
        # Tensors on the same bytes, which know only their own.
        layers = [torch.from_numpy(layer.numpy()) for layer in layers]
        driver.unmap(raw[1])
    layout = PagedLayout(layers)
    layout.device = torch.device("cuda", 0)
    rows = {1: f"strided copy of 2 x {size} bytes", 2: f"strided copy of 1 x {size} bytes"}
    assert rows[storages] in moved(driver, layout, "strided")


@simulated
def test_a_copy_that_fails_says_which(driver: Driver) -> None:
    whole = torch.randint(256, (8, BLOCKS, 48), dtype=torch.uint8)
    layout = on_device(driver, whole, list(whole))
    with OffloadHandler(layout, HostPool(layout, num_pages=3)) as handler:
        driver.fail_copy(1)
        job = handler.store(gpu_block_ids=[1, 4], page_ids=[2, 0])
        assert job.query()
        assert job.result is not None
        assert_expected_inline(
            re.sub("0x[0-9a-f]+", "0x~", str(job.result.error)),
            """cuMemcpy3DAsync failed at block 1 of 2, from 0x~ to 0x~, 8 slabs of 48 bytes: CUDA_ERROR_SIMULATED (1): made up by the simulated driver""",
        )


@pytest.mark.gpu
@pytest.mark.parametrize("copy_method", ["strided", "staged", "batch", "kernel"])
def test_memory_freed_between_layers_does_not_matter(copy_method: str) -> None:
    """Matters with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; goes well without, too."""
    mib = 1 << 20
    torch.cuda.empty_cache()
    first, between, last = (
        torch.randint(256, (blocks, mib), dtype=torch.uint8, device="cuda") for blocks in (8, 96, 8)
    )
    layout = PagedLayout([first, last])
    host = HostPool(layout, num_pages=3)
    expected = [tensor.clone() for tensor in (first, last)]
    with OffloadHandler(layout, host, copy_method=copy_method) as handler:
        handler.synchronize(handler.store(gpu_block_ids=[1, 4], page_ids=[2, 0]))
        del between
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        handler.synchronize(handler.store(gpu_block_ids=[1, 4], page_ids=[2, 0]))
        handler.synchronize(handler.load(page_ids=[2, 0], gpu_block_ids=[6, 0]))
    for tensor, wanted in zip((first, last), expected, strict=True):
        wanted[[6, 0]] = wanted[[1, 4]]
        assert torch.equal(tensor, wanted)


@pytest.mark.gpu
def test_layers_allocated_one_by_one_arrive() -> None:
    """One copy with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, where the layers follow each
    other in one range of addresses."""
    torch.cuda.empty_cache()
    shape = (24 << 10, 1 << 10)  # an allocation of its own without expandable segments
    layers = [torch.randint(256, shape, dtype=torch.uint8, device="cuda") for _ in range(32)]
    addresses = [layer.data_ptr() for layer in layers]
    distances = {later - earlier for earlier, later in pairwise(addresses)}
    is_one_run = distances == {layers[0].nbytes} and "expandable_segments:True" in os.environ.get(
        "PYTORCH_CUDA_ALLOC_CONF", ""
    )
    layout = PagedLayout(layers)
    host = HostPool(layout, num_pages=3)
    with OffloadHandler(layout, host, copy_method="copy_engines") as handler:
        for direction in ("store", "load"):
            move = getattr(handler, direction)
            job = move(gpu_block_ids=[1, 4], page_ids=[2, 0])
            handler.synchronize(job)
            assert job.result is not None
            assert not is_one_run or job.result.copy_method == "strided"
            if direction == "store":
                expected = [layer[[1, 4]].clone() for layer in layers]
                for layer in layers:
                    layer[[1, 4]] = 0
    for layer, blocks in zip(layers, expected, strict=True):
        assert torch.equal(layer[[1, 4]], blocks)
    host.close()
