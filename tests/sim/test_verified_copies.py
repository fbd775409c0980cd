"""Copies of host pages with checksums, by kernels on the simulated driver: what they find, when, and
what a failure leaves behind.
"""

from __future__ import annotations

import re
from contextlib import closing
from itertools import product
from typing import Any

import pytest
import torch
from caller_submits import CallerBegins
from damage import Damage
from encoded_cache import METHODS, EncodedCache, finish
from encoded_fuzz import Fuzz
from error_text import error_text
from expecttest import assert_expected_inline
from fuzz import fuzz
from host_pools import in_chunks
from logged import logged
from patience import in_time
from simulated_cache import CURRENT, Stream, needs_kernels, rest, threads
from simulated_driver import Driver, on_device, place, simulated

from torch_kvswap import (
    BlocksRejectedError,
    CorruptedPageError,
    HostPool,
    OffloadHandler,
    PagedLayout,
    TransferError,
)
from torch_kvswap.prefix.remote_pools import RemotePools

ENCODINGS = ("raw", "lossless")


def steps(driver: Driver) -> str:
    """What was submitted to streams, without events."""
    log = re.sub(r"(push|pop) context.*\n|(record|wait for) event.*\n", "", driver.log())
    log = re.sub(r"stream 10[135]", "copies", log)
    return re.sub(r"stream \d+", "kernels", log)


@pytest.mark.parametrize(("encoding", "method"), [*product(ENCODINGS, METHODS), ("raw", "strided")])
@pytest.mark.parametrize("layer_groups", [1, 3])
@pytest.mark.parametrize("rows", [False, True])
@needs_kernels
@simulated
def test_no_damage_goes_unnoticed(
    driver: Driver, encoding: str, layer_groups: int, method: str, rows: bool
) -> None:
    sizes = {"values": 6144, "encodings": [encoding], "verify": "load", "rows": rows}
    with EncodedCache(driver, copy_method=method, **sizes) as cache:
        seen = Damage(cache, seed=2).run(100, layer_groups=layer_groups)
    assert set(seen) <= {"noticed", "harmless"}
    assert seen["noticed"] > 90


@pytest.mark.parametrize("encoding", ENCODINGS)
@needs_kernels
@simulated
def test_an_expedited_load_notices_damage(driver: Driver, encoding: str) -> None:
    with EncodedCache(driver, values=6144, encodings=[encoding], verify="load") as cache:
        seen = Damage(cache, seed=3).run(20, expedited=True)
    assert seen["noticed"] == 20


@pytest.mark.parametrize("method", ["auto", *METHODS])
@needs_kernels
@simulated
def test_random_jobs_find_nothing_but_what_is_wrong(driver: Driver, method: str) -> None:
    def make(seed: int) -> Fuzz:
        return Fuzz(driver, seed, "threaded", shares=True, verify="load", copy_method=method)

    counts = fuzz(make, 1)
    assert counts["done"] > 0
    assert counts["rejected"] > 0
    assert counts["compared"] > 0


@needs_kernels
@simulated
def test_a_load_compares_with_its_first_store(driver: Driver) -> None:
    """Another handler stores into the page when a piece of the block is loaded."""
    layout = on_device(driver, torch.randint(256, (1, 3, 8 << 20), dtype=torch.uint8))
    pool = HostPool(layout, 1, verify="load")
    before = threads()
    with (
        CallerBegins(layout, pool, copy_method="staged", staging_bytes=4 << 20) as handler,
        OffloadHandler(layout, pool, copy_method="kernel") as other,
        logged(),
    ):
        other.store(gpu_block_ids=[0], page_ids=[0]).synchronize()
        handler.load(page_ids=[0], gpu_block_ids=[2]).synchronize()  # starts the worker
        (worker,) = threads() - before
        assert in_time(lambda: rest({worker}))
        with driver.stopped(worker):
            job = handler.load(page_ids=[0], gpu_block_ids=[2])
            other.store(gpu_block_ids=[1], page_ids=[0]).synchronize()
        with pytest.raises(CorruptedPageError, match="stored again while it was loaded"):
            job.synchronize()


@needs_kernels
@simulated
def test_slabs_of_any_size_have_checksums(driver: Driver) -> None:
    sizes = {"values": 4099, "layers": 2, "encodings": ["raw"], "verify": "load"}
    with EncodedCache(driver, copy_method="kernel", **sizes) as cache:
        seen = Damage(cache, seed=4).run(50)
    assert seen == {"noticed": 50}


@pytest.mark.parametrize("is_aligned", [True, False])
@needs_kernels
@simulated
def test_cut_tiles_are_checksummed_either_way(driver: Driver, is_aligned: bool) -> None:
    # A piece has 256 KiB at most, a block 640 KiB, and a slab of it 16 tiles and some bytes.
    sizes = {
        "values": (1 << 16) + (8 if is_aligned else 1),
        "layers": 5,
        "blocks": 4,
        "pages": 4,
        "encodings": ["raw"],
    }
    with EncodedCache(driver, verify="load", copy_method="staged", **sizes) as cache:
        before = cache.block(0)
        finish(cache, cache.store([0], [2]))
        stored = re.findall("(pack|checksum) 1 blocks", steps(driver))
        (result,) = finish(cache, cache.load([2], [3]))
        loaded = re.findall("(unpack|checksum) 1 blocks", steps(driver))
        assert result.ok
        assert cache.is_same(3, before)
    assert stored == [*["pack"] * 3, "checksum"]
    assert loaded == [*["unpack"] * 3, "checksum"]


@needs_kernels
@simulated
def test_many_blocks_are_checksummed_by_several_launches(driver: Driver) -> None:
    sizes = {"blocks": 300, "pages": 300, "layers": 1, "values": 64, "encodings": ["raw"]}
    with EncodedCache(driver, verify="load", copy_method="kernel", **sizes) as cache, logged():
        (store,) = finish(cache, cache.store(range(300), range(300)))
        assert steps(driver).count("checksum") == 2
        assert store.ok
        cache.pools[0].pages[[0, 250, 299], 0, 5] ^= 1
        (load,) = finish(cache, cache.load(range(300), range(300)))
        assert load.rejected == (0, 250, 299)


@pytest.mark.parametrize("method", METHODS)
@needs_kernels
@simulated
def test_a_rejected_store_leaves_no_checksums(driver: Driver, method: str) -> None:
    with EncodedCache(driver, verify="load", copy_method=method) as cache, logged():
        finish(cache, cache.store([1], [0]))
        cache.spoil(1)
        (store,) = finish(cache, cache.store([1], [0]))
        (load,) = finish(cache, cache.load([0], [2], layer_groups=3))
    assert store.rejected == load.rejected == (0,)
    assert type(load.error) is BlocksRejectedError


@pytest.mark.parametrize("method", METHODS)
@needs_kernels
@simulated
def test_a_stream_passes_a_corrupted_load(driver: Driver, method: str) -> None:
    driver.set_stream(0, CURRENT)
    with (
        EncodedCache(driver, encodings=["raw"], verify="load", copy_method=method) as cache,
        logged(),
    ):
        finish(cache, cache.store([0], [0]))
        cache.pools[0].pages[0, 0, 0] ^= 1
        load = cache.load([0], [1], layer_groups=3)
        load.wait(Stream(CURRENT))
        for layer_group in range(3):
            load.wait(Stream(CURRENT), layer_group=layer_group)
        assert not load.query()
        driver.run()
        assert driver.cuda.is_done(stream=CURRENT)
        with pytest.raises(CorruptedPageError):
            load.synchronize()


@needs_kernels
@simulated
def test_blocks_copied_beside_pieces_have_checksums(driver: Driver) -> None:
    """The head of a store and the tail of a load, of layers at one distance."""
    cache = torch.randn(80, 4, 8192)
    layout = PagedLayout(list(cache.unbind(1)))
    place(driver, layout)
    pool = HostPool(layout, 40, verify="load")
    with (
        OffloadHandler(layout, pool, copy_method="staged", staging_bytes=4 << 20) as handler,
        logged(),
    ):
        driver.log()
        handler.store(gpu_block_ids=range(40), page_ids=range(40)).synchronize()
        assert steps(driver).startswith("strided copy")
        load = handler.load(gpu_block_ids=range(40, 80), page_ids=range(40))
        load.synchronize()
        assert torch.equal(cache[:40], cache[40:])
        assert "strided copy" in steps(driver).splitlines()[-2]
        for page in range(40):
            pool.pages[page, 0, page] ^= 1
        load = handler.load(gpu_block_ids=range(40, 80), page_ids=range(40))
        with pytest.raises(CorruptedPageError) as error:
            load.synchronize()
        assert error.value.rejected == tuple(range(40))


@pytest.mark.parametrize(("method", "launch"), [("staged", 2), ("kernel", 2), ("strided", 1)])
@needs_kernels
@simulated
def test_a_job_whose_checksum_cannot_be_launched_fails(
    driver: Driver, method: str, launch: int
) -> None:
    with EncodedCache(driver, encodings=["raw"], verify="load", copy_method=method) as cache:
        driver.fail("cuLaunchKernel", launch)
        job = cache.store([0], [0])
        finish(cache, job)
        with pytest.raises(TransferError, match="cuLaunchKernel of checksum, 1 blocks of 3 tiles"):
            job.synchronize()
        cache.handler.poll()
        (again,) = finish(cache, cache.store([0], [0]))
        assert again.ok


@needs_kernels
@simulated
def test_a_refused_handler_leaves_nothing(
    driver: Driver,
) -> None:
    with EncodedCache(driver, encodings=["raw"], verify="load"):
        pass
    live = [driver.live(kind) for kind in ("allocations", "streams", "events")]
    for nth in (1, 2):  # the table of slabs, that of checksums
        driver.set_mode("immediate")
        driver.fail("cuMemAlloc", nth)
        with pytest.raises(ValueError, match=r"^verify='load' cannot be had: cuMemAlloc"):
            EncodedCache(driver, encodings=["raw"], verify="load")
        found = [driver.live(kind) for kind in ("allocations", "streams", "events")]
        assert found[0] == live[0]
        assert found[2] == live[2]


def raw_layout(driver: Driver) -> PagedLayout:
    layout = PagedLayout([torch.zeros(4, 4096, dtype=torch.uint8)])
    place(driver, layout)
    return layout


@needs_kernels
@simulated
def test_pages_that_kernels_cannot_reach_are_refused(driver: Driver) -> None:
    layout = raw_layout(driver)
    driver.limit_registration(in_one=4096)  # the pages and not the table, or neither
    with logged():
        pool = HostPool(layout, 4, verify="load")
    assert_expected_inline(
        error_text(lambda: OffloadHandler(layout, pool)),
        """\
ValueError: host pages with verify='load' must be pinned, because kernels read and write
them; pin the pool, or make it with verify='off'""",
    )


@pytest.mark.parametrize("how", [{"verify": "load"}, {"encoding": "lossless"}], ids=str)
@needs_kernels
@simulated
def test_unpinned_pages_of_another_server_are_refused(driver: Driver, how: dict[str, Any]) -> None:
    layout = place(driver, PagedLayout([torch.randn(8, 4096).bfloat16() for _ in range(2)]))
    pools = RemotePools([layout], how)
    pools.let_go()
    with OffloadHandler(layout, pools.pools[0], copy_method="auto") as pools.handler:
        driver.limit_registration(in_all=0)
        with logged():
            memory = HostPool(layout, 8, shared=True, **how)
            with memory, closing(memory.share()) as handle:
                assert "must be pinned" in error_text(pools.attach, [handle])
        kept = [rows.clone() for rows in layout.tensors]
        pools.handler.store(gpu_block_ids=[5], page_ids=[0]).synchronize()
        for rows in layout.tensors:
            rows.zero_()
        pools.handler.load(gpu_block_ids=[5], page_ids=[0]).synchronize()
        assert all(
            torch.equal(rows[5], before[5])
            for rows, before in zip(layout.tensors, kept, strict=True)
        )


@pytest.mark.parametrize("method", ["copy_engines", "batch"])
@needs_kernels
@simulated
def test_a_method_that_makes_no_checksums_is_refused(driver: Driver, method: str) -> None:
    with pytest.raises(ValueError, match="verify") as refusal:
        EncodedCache(driver, encodings=["raw"], verify="load", copy_method=method)
    assert str(refusal.value) == (
        f"copy_method='{method}' cannot make the checksums of host pages with verify='load'; "
        "it must be 'auto', 'strided', 'staged' or 'kernel', or make the pool with verify='off'"
    )


@pytest.mark.parametrize("in_background", [False, True])
@needs_kernels
@simulated
def test_checksums_are_pinned_before_the_first_page(driver: Driver, in_background: bool) -> None:
    layout = raw_layout(driver)
    driver.log()
    pool = in_chunks(2 * 4096, layout, 6, verify="load", pin_in_background=in_background)
    assert pool.wait_ready()
    registered = re.findall("register ([0-9]+) bytes", driver.log())
    assert registered == [str(7 * 64), *["8192"] * 3]
    assert pool.is_pinned
    pool.close()
