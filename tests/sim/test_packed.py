"""Kernels copy blocks of any size and alignment, to host pages or into a packed buffer, and
touch nothing else. On a GPU so do strided copies.
"""

from __future__ import annotations

import re

import pytest
import torch
from simulated_cache import needs_kernels
from simulated_driver import Driver, on_device, simulated

from torch_kvswap import HostPool, OffloadHandler, PagedLayout

SHAPES = [(3, 4096), (7, 48), (2, 18432), (3, 7), (5, 10), (2, 36), (1, 1 << 20), (160, 2048)]


def check(
    layout: PagedLayout,
    count: int,
    copy_method: str,
    staging_bytes: int = 32 << 20,
) -> None:
    """Moves blocks out and in again, to other places, and compares all memory."""
    before = [tensor.cpu().clone() for tensor in layout.tensors]
    pool = HostPool(layout, num_pages=layout.num_blocks)
    pool.pages.fill_(0xA5)
    blocks, pages, targets = (torch.randperm(layout.num_blocks)[:count] for _ in range(3))
    with OffloadHandler(
        layout, pool, copy_method=copy_method, staging_bytes=staging_bytes
    ) as handler:
        jobs = [handler.store(gpu_block_ids=blocks, page_ids=pages)]
        handler.synchronize(jobs)
        stored = torch.full_like(pool.pages[:, 0], 0xA5)
        stored[pages] = torch.cat([old[blocks].flatten(1) for old in before], dim=1)
        assert torch.equal(pool.pages[:, 0], stored)
        jobs.append(handler.load(page_ids=pages, gpu_block_ids=targets))
        handler.synchronize(jobs)
        for tensor, old in zip(layout.tensors, before, strict=True):
            new = old.clone()
            new[targets] = old[blocks]
            assert torch.equal(tensor.cpu(), new)
        assert [job.result.copy_method for job in jobs if job.result] == [copy_method, copy_method]


@pytest.mark.parametrize(("layers", "fragment"), SHAPES)
@needs_kernels
@simulated
def test_a_kernel_moves_every_byte_and_no_other(driver: Driver, layers: int, fragment: int) -> None:
    whole = torch.randint(256, (layers, 9, fragment), dtype=torch.uint8)
    check(on_device(driver, whole, list(whole)), 5, "kernel")


@pytest.mark.parametrize("copy_method", ["kernel", "staged"])
@needs_kernels
@simulated
def test_more_blocks_than_a_launch_takes_are_several(driver: Driver, copy_method: str) -> None:
    whole = torch.randint(256, (2, 1100, 16), dtype=torch.uint8)
    layout = on_device(driver, whole, list(whole))
    check(layout, 1000, copy_method)
    launches = re.findall(r"^(pack|unpack) (\d+) blocks", driver.log(), re.MULTILINE)
    for direction in ("pack", "unpack"):
        blocks = [int(count) for kind, count in launches if kind == direction]
        assert max(blocks) == 496
        assert 980 < sum(blocks) <= 1000  # some are copied where they lie meanwhile


@pytest.mark.parametrize("copy_method", ["kernel", "staged"])
@needs_kernels
@simulated
def test_padded_blocks_of_several_sizes_are_moved(driver: Driver, copy_method: str) -> None:
    whole = torch.randint(256, (6, 20, 96), dtype=torch.uint8)
    tensors = [whole[4][:, :96], whole[0][:, 16:64], whole[2][:, :7], whole[5][::2, :33]]
    layout = on_device(driver, whole, [tensor[:10] for tensor in tensors])
    check(layout, 6, copy_method)


@pytest.mark.parametrize("start", [0, 8, 4, 2, 1])
@needs_kernels
@simulated
def test_unaligned_addresses_are_moved_in_smaller_words(driver: Driver, start: int) -> None:
    # The simulated driver logs every word that is not aligned.
    whole = torch.randint(256, (3, 20, 256), dtype=torch.uint8)
    layout = on_device(driver, whole, [whole[layer][:, start : start + 64] for layer in range(3)])
    check(layout, 6, "kernel")
    assert driver.unexpected_violations() == ""


@pytest.mark.parametrize(
    ("copy_method", "mib", "layers", "fragment"),
    [
        *[(method, 32, *shape) for method in ("kernel", "staged") for shape in SHAPES],
        *[("staged", mib, 61, size) for mib in (1, 256) for size in (7, 656, 8192, 18432)],
        *[("staged", mib, 5, 3 << 20) for mib in (1, 32, 256)],
        *[("strided", 32, 61, size) for size in (48, 656, 8192, 18432)],
    ],
)
@pytest.mark.gpu
def test_every_byte_arrives_on_a_gpu(
    copy_method: str, mib: int, layers: int, fragment: int
) -> None:
    blocks = 40 if fragment <= 1 << 20 else 12
    whole = torch.randint(256, (layers, blocks, fragment), dtype=torch.uint8, device="cuda")
    check(PagedLayout(list(whole)), blocks // 2, copy_method, mib << 20)


@pytest.mark.parametrize("copy_method", ["kernel", "staged"])
@pytest.mark.parametrize("start", [0, 8, 4, 2, 1])
@pytest.mark.gpu
def test_unaligned_addresses_are_moved_on_a_gpu(start: int, copy_method: str) -> None:
    whole = torch.randint(256, (3, 1200, 256), dtype=torch.uint8, device="cuda")
    layout = PagedLayout([whole[layer][:, start : start + 64] for layer in range(3)])
    check(layout, 1000, copy_method)
