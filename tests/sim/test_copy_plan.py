"""Who submits a job, and the parts in which it is copied."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from caller_submits import CallerSubmits
from patience import in_time
from simulated_cache import CHANNELS, SIDE, SimulatedCache, Stream, needs_kernels, run_until, states
from simulated_driver import Driver, on_device, pool, simulated

from torch_kvswap import HostPool, OffloadHandler
from torch_kvswap.offload.handler import Job

BLOCKS = 1024  # more than the calling thread submits
ALL = list(range(BLOCKS))
COPY = "cuMemcpyBatchAsync"


def large(sim: SimulatedCache, kind: str) -> Job:
    return sim.submit(kind, ALL, ALL[::-1])


def batches(driver: Driver) -> list[int]:
    return [int(size) for size in re.findall(r"batch of (\d+)", driver.log())]


@pytest.mark.parametrize("kind", CHANNELS)
@pytest.mark.parametrize("submit_thread", [False, True])
@simulated
def test_the_worker_submits_only_large_jobs(driver: Driver, kind: str, submit_thread: bool) -> None:
    with SimulatedCache(driver, blocks=BLOCKS, pages=BLOCKS, submit_thread=submit_thread) as sim:
        for job_is_small in (True, False):
            before = driver.calls(COPY), driver.calls_here(COPY)
            sim.submit(kind, [1, 5, 3], [2, 6, 4]) if job_is_small else large(sim, kind)
            assert in_time(lambda before=before: driver.calls(COPY) > before[0])
            assert driver.calls_here(COPY) - before[1] == (job_is_small and not submit_thread)
        assert states(sim.finish()) == ["done", "done"]
        assert batches(driver) == [3, *[32] * (BLOCKS // 32)]
        assert sim.is_right()


@needs_kernels
@simulated
def test_host_neighbours_are_one_copy(driver: Driver) -> None:
    whole = torch.randint(256, (2, 12, 4096), dtype=torch.uint8)
    layout = on_device(driver, whole)
    with OffloadHandler(layout, HostPool(layout, num_pages=12), copy_method="staged") as handler:
        driver.log()
        handler.synchronize(
            handler.store(gpu_block_ids=[1, 5, 3, 7, 11], page_ids=[6, 4, 7, 5, 1], after=())
        )
        assert re.findall(r"(?:batch of|copy) \d+", driver.log()) == ["batch of 2"]
        for block, page in zip([1, 5, 3, 7, 11], [6, 4, 7, 5, 1], strict=True):
            assert torch.equal(handler.pools[0].pages[page, 0], whole[:, block].flatten())


@needs_kernels
@simulated
def test_a_load_behind_another_is_staged_whole(driver: Driver) -> None:
    whole = torch.randint(256, (2, 24, 1 << 18), dtype=torch.uint8)
    layout = on_device(driver, whole)
    ids = list(range(12))
    with OffloadHandler(layout, HostPool(layout, num_pages=24), copy_method="staged") as handler:
        handler.synchronize(handler.store(gpu_block_ids=ids, page_ids=ids))
        driver.set_mode("manual")
        driver.log()
        for first in (0, 12):
            handler.load(page_ids=ids, gpu_block_ids=[first + i for i in ids], after=())
        run_until(driver, lambda: handler.metrics().loads.done == 2)
        assert driver.log().count("strided copy") == 1
        assert torch.equal(whole[:, 12:], whole[:, :12])
        driver.set_mode("immediate")


@needs_kernels
@simulated
def test_a_queued_stores_head_is_not_staged(driver: Driver) -> None:
    whole = torch.randint(256, (2, 12, 1 << 18), dtype=torch.uint8)
    layout = on_device(driver, whole)
    pool = HostPool(layout, num_pages=24)
    ids = list(range(12))
    with OffloadHandler(layout, pool, copy_method="staged") as handler:
        driver.set_mode("manual")
        driver.log()
        for first in (0, 12):
            handler.store(gpu_block_ids=ids, page_ids=[first + i for i in ids], after=())
        run_until(driver, lambda: handler.metrics().stores.done == 2)
        assert driver.log().count("strided copy") == 2
        assert torch.equal(pool.pages[12:], pool.pages[:12])
        assert torch.equal(pool.pages[:12, 0], whole.transpose(0, 1).reshape(12, -1))
        driver.set_mode("immediate")


@pytest.mark.parametrize(
    ("staging", "stores", "loads"),
    [
        (32 << 20, [28, 36, 64, 28], [64, 64, 28]),  # a piece has 8 MiB at most
        (128 << 20, [28, 128], [140, 16]),
    ],
)
@needs_kernels
@simulated
def test_store_pieces_grow_and_load_pieces_shrink(
    driver: Driver, staging: int, stores: list[int], loads: list[int]
) -> None:
    layout = on_device(driver, torch.randint(256, (2, 160, 1 << 16), dtype=torch.uint8))
    ids = list(range(160))
    with CallerSubmits(
        layout, HostPool(layout, num_pages=160), copy_method="staged", staging_bytes=staging
    ) as handler:
        sizes = {}
        for kind in ("store", "load"):
            driver.log()
            handler.synchronize(getattr(handler, kind)(gpu_block_ids=ids, page_ids=ids, after=()))
            sizes[kind] = [int(blocks) for blocks in re.findall(r"pack (\d+) blocks", driver.log())]
    # Four blocks of each transfer, 512 KiB, are its head or tail, which is not staged.
    assert sizes == {"store": stores, "load": loads}


@needs_kernels
@simulated
def test_large_blocks_are_divided_to_start_early(driver: Driver) -> None:
    whole = torch.randint(256, (1, 2, 20 << 20), dtype=torch.uint8)
    layout = on_device(driver, whole)
    with OffloadHandler(layout, HostPool(layout, num_pages=2), copy_method="staged") as handler:
        for kind, is_small in (
            ("store", lambda sizes: sizes[0]),
            ("load", lambda sizes: sizes[-1]),
        ):
            driver.log()
            handler.synchronize(getattr(handler, kind)(gpu_block_ids=[1], page_ids=[0], after=()))
            sizes = [int(size) for size in re.findall(r"copy (\d+) bytes", driver.log())]
            assert sum(sizes) == 20 << 20
            assert is_small(sizes) <= 1 << 20
        assert torch.equal(handler.pools[0].pages[0, 0], whole[0, 1])


@dataclass(frozen=True)
class Loads:
    """Equal loads of some blocks, which wait for a stream."""

    method: str
    layouts: Sequence[Sequence[int]] = (range(32),)  # which rows of a tensor are layers
    layer_groups: int = 32
    block_bytes: int = 64  # in each layer
    blocks: int = 1
    staging_mib: int = 64


@pytest.mark.parametrize(
    "loads",
    [
        pytest.param(Loads("batch"), id="batches of layer groups"),
        pytest.param(Loads("strided"), id="copies of layer groups"),
        pytest.param(Loads("kernel"), id="kernels of layer groups"),
        pytest.param(Loads("strided", [range(31, -1, -1)], blocks=4), id="layers at no distance"),
        pytest.param(
            Loads("batch", [range(i, i + 8) for i in (0, 8, 16, 24)]), id="groups of layers"
        ),
        pytest.param(
            Loads("batch", [range(i, i + 8) for i in (0, 8, 16, 24)], layer_groups=8, blocks=64),
            id="fewer layer groups than layers",
        ),
        pytest.param(
            Loads("staged", [range(4)], layer_groups=4, block_bytes=9 << 20),
            id="layer groups in several pieces",
        ),
        pytest.param(
            Loads("staged", [range(4)], 1, 33 << 10, blocks=64, staging_mib=1),
            id="blocks that fill a piece by half",
        ),
    ],
)
@needs_kernels
@simulated
def test_a_channel_fills_the_drivers_queue(driver: Driver, loads: Loads) -> None:
    num_rows = 1 + max(row for rows in loads.layouts for row in rows)
    whole = torch.zeros((num_rows, loads.blocks, loads.block_bytes), dtype=torch.uint8)
    layouts = [on_device(driver, whole, [whole[i] for i in rows]) for rows in loads.layouts]
    pools = [pool(driver, layout, loads.blocks) for layout in layouts]
    handler = CallerSubmits(
        layouts, pools, copy_method=loads.method, staging_bytes=loads.staging_mib << 20
    )
    driver.set_mode("manual")
    ids = [list(range(loads.blocks))] * len(layouts)
    with handler:
        hold = driver.hold(SIDE)
        try:
            for _ in range(40):
                handler.load(
                    page_ids=ids,
                    gpu_block_ids=ids,
                    after=Stream(SIDE),
                    layer_groups=loads.layer_groups,
                )
            assert handler.metrics().loads.queued > 0
            entries = Counter(re.findall(r"^stream (\d+):", driver.pending(), re.MULTILINE))
            del entries[str(SIDE)]  # 1,020 fill the queue of a stream
            assert 450 < max(entries.values()) <= 1020
        finally:
            driver.release(hold)
            driver.set_mode("immediate")
