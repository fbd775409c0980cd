"""Copies of host pages that are encoded, by kernels on the simulated driver: bytes, order, rejected
blocks, and what a failure leaves behind.
"""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch
from encoded_cache import METHODS, STAGING_BYTES, VALUES, EncodedCache, finish
from encoded_fuzz import Fuzz
from fuzz import fuzz
from patience import PATIENCE
from simulated_cache import CURRENT, SIDE, Stream, let_threads_look, needs_kernels, run_until
from simulated_driver import Driver, place, run, simulated, without_cuda

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.results import BlocksRejectedError, Result


def outcomes(results: list[Result]) -> list[tuple[str, tuple[int, ...]]]:
    return [(result.state, result.rejected) for result in results]


# Bytes.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layer_groups", [1, 2, 5])
@pytest.mark.parametrize(("layers", "values"), [(5, 1024), (7, 5120), (5, 40960), (64, VALUES)])
@needs_kernels
@simulated
def test_every_bit_arrives_and_no_other_changes(
    driver: Driver, layers: int, values: int, layer_groups: int, method: str
) -> None:
    with EncodedCache(
        driver, layers=layers, values=values, per_page=2, copy_method=method,
        staging_bytes=2 << 20,
    ) as cache:  # fmt: skip
        cache.spoil(5)
        before = [cache.block(block) for block in range(16)]
        stored = cache.store([3, 11, 0, 5, 7], [4, 9, 2], first_slot=1)
        assert outcomes(finish(cache, stored)) == [("failed", (3,))]
        cache.clear(3, 11, 0, 7)
        targets = {8: 3, 1: 11, 2: 0, 4: 5, 15: 7}
        loaded = cache.load([4, 9, 2], list(targets), first_slot=1, layer_groups=layer_groups)
        (result,) = finish(cache, loaded)
        assert (result.state, result.rejected) == ("failed", (3,))
        assert {stored.result and stored.result.copy_method, result.copy_method} == {method}
        for block in range(16):
            if block in targets and block != 4:
                assert cache.is_same(block, before[targets[block]])
            elif block not in targets.values() or block == 5:
                assert cache.is_same(block, before[block])


@pytest.mark.parametrize(("mode", "shares"), [("immediate", False), ("threaded", True)])
@pytest.mark.parametrize("method", ["auto", *METHODS])
@needs_kernels
@simulated
def test_random_jobs_leave_the_bits_of_a_model(
    driver: Driver, mode: str, method: str, shares: bool
) -> None:
    def make(seed: int) -> Fuzz:
        return Fuzz(driver, seed, mode, shares=shares, copy_method=method)

    counts = fuzz(make, 2)
    assert counts["done"] > counts["failed"] > 0
    assert counts["rejected"] > 0
    assert counts["compared"] > 0
    assert min(counts[f"loaded {group}"] for group in range(3)) > 0
    assert counts["never copied"] > 0


# Order.


@needs_kernels
@simulated
def test_two_encoding_stores_share_no_counters(driver: Driver) -> None:
    """The simulated driver refuses kernels of two streams that use the same ones."""
    sizes = {"blocks": 40, "pages": 40, "layers": 8, "values": 8192}
    with EncodedCache(driver, **sizes) as cache:
        before = [cache.block(block) for block in range(40)]
        small = cache.store([0], [0])
        large = cache.store(range(1, 40), range(1, 40))
        pending = driver.pending()
        results = finish(cache, small, large)
        assert pending.count("encode") > 1
        assert [result.copy_method for result in results] == ["staged", "staged"]
        cache.clear(*range(40))
        finish(cache, cache.load(range(40), range(40)))
        assert all(cache.is_same(block, bits) for block, bits in enumerate(before))


# Rejected blocks.


@pytest.mark.parametrize("method", METHODS)
@needs_kernels
@simulated
def test_retried_joined_jobs_reject_their_own_blocks(driver: Driver, method: str) -> None:
    with EncodedCache(driver, blocks=32, pages=32, copy_method=method) as cache:
        spoiled = [3, 8, 9]
        cache.spoil(*spoiled)
        hold = driver.hold(SIDE)
        fill = [cache.store([0], [0], after=Stream(SIDE))]
        while not cache.handler.metrics().stores.queued:
            fill.append(cache.store([0], [0]))
        stores = [cache.store([block, block + 10], [block, block + 10]) for block in range(1, 11)]
        driver.fail("cuLaunchKernel", 1)  # of the first transfer that leaves the queue
        driver.release(hold)
        results = finish(cache, *fill, *stores)
        failed = [result for result in results if not result.ok and not result.rejected]
        assert len(failed) <= 1, "only one launch has failed"
        for block, result in enumerate(results[len(fill) :], 1):
            if result not in failed:
                assert result.rejected == ((0,) if block in spoiled else ())


@pytest.mark.parametrize("nth", [0, 5, 30])
@pytest.mark.parametrize("submit_thread", [False, True])
@needs_kernels
@simulated
def test_two_submitting_threads_reject_blocks_of_both(
    driver: Driver, submit_thread: bool, nth: int
) -> None:
    size = {"blocks": 128, "pages": 64, "layers": 8, "values": 8192}  # 8 MiB of 64 blocks
    options = {"copy_method": "staged", "submit_thread": submit_thread}
    with EncodedCache(driver, **size, **options) as cache:
        cache.spoil(3, 60)
        before = [cache.block(block) for block in range(128)]
        if nth > 0:
            driver.fail("cuLaunchKernel", nth)
            (failed,) = finish(cache, cache.store(range(64), range(64)))
            assert (failed.state, failed.rejected) == ("failed", ())
            assert outcomes(finish(cache, cache.store(range(64, 128), range(64)))) == [("done", ())]
        store = cache.store(range(64), range(64))
        load = cache.load(range(64), range(64, 128))
        assert outcomes(finish(cache, store, load)) == [("failed", (3, 60))] * 2
        for block in range(64):
            source = block + 64 if block in (3, 60) else block
            assert cache.is_same(block + 64, before[source])


@pytest.mark.parametrize("when", ["behind the load", "when the load has ended"])
@needs_kernels
@simulated
def test_a_store_behind_a_rejected_load_says_what(driver: Driver, when: str) -> None:
    with EncodedCache(driver) as cache:
        cache.spoil(2)
        finish(cache, cache.store([1, 2], [0, 1]))
        load = cache.load([0, 1], [7, 8])
        if when == "when the load has ended":
            finish(cache, load)
        store = cache.store([7], [2])
        of_load, of_store = finish(cache, load, store)
        assert str(of_store.error) == (
            "GPU block 7 (gpu_block_ids[0]) is of a load that rejected blocks; when poll() has "
            f"reported it, store the others: load {load.id} failed: {of_load.error}"
        )
        cache.handler.poll()
        (again,) = finish(cache, cache.store([7], [2]))
        assert again.ok


@pytest.mark.slow
@needs_kernels
@simulated
def test_a_job_without_free_states_waits(driver: Driver) -> None:
    most = 1 << 20
    tensors = [torch.zeros(most + 8, 2048, dtype=torch.bfloat16)]
    layout = place(driver, PagedLayout(tensors))
    pool = HostPool(layout, 2, encoding="lossless")
    driver.set_mode("manual")
    with OffloadHandler(layout, pool, copy_method="kernel", staging_bytes=STAGING_BYTES) as handler:
        # Nothing was stored, so all blocks are rejected, and their memory is not touched.
        blocks, pages = np.arange(most - 8), np.zeros(most - 8, np.int64)
        hold = driver.hold(SIDE)
        first = handler.load(page_ids=pages, gpu_block_ids=blocks, after=Stream(SIDE))
        second = handler.load(
            page_ids=[0] * 9, gpu_block_ids=list(range(most - 8, most + 1)), after=()
        )

        def wait() -> None:
            with contextlib.suppress(BlocksRejectedError):  # if it has ended before this has looked
                second.wait(Stream(CURRENT))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        run_until(driver, lambda: handler.metrics().loads.running == 1)
        let_threads_look(driver)
        assert waiting.is_alive()
        assert handler.metrics().loads.queued == 1
        driver.release(hold)
        run_until(driver, lambda: bool([first.query(), second.query()] == [True, True]))
        waiting.join(PATIENCE)
        assert first.result is not None
        assert second.result is not None
        assert len(first.result.rejected) == most - 8
        assert second.result.rejected == tuple(range(9))
        driver.set_mode("immediate")


STAGED_CALLS = ("cuLaunchKernel", "cuMemcpyBatchAsync", "cuEventRecord")


@pytest.mark.parametrize(
    ("method", "call", "nth"),
    [
        *(("staged", call, nth) for call in STAGED_CALLS for nth in (1, 2, 3)),
        ("kernel", "cuLaunchKernel", 1),
        ("kernel", "cuEventRecord", 2),
    ],
)
@pytest.mark.parametrize("kind", ["store", "load"])
@needs_kernels
@simulated
def test_a_failed_job_leaves_no_states_behind(
    driver: Driver, kind: str, method: str, call: str, nth: int
) -> None:
    options = {"layers": 6, "values": 8192, "pages": 32, "copy_method": method}
    with EncodedCache(driver, **options) as cache:
        driver.set_mode("immediate")  # kernels have run before a later call fails
        good, spoiled = list(range(8)), list(range(8, 16))
        cache.spoil(*spoiled)

        def submit(blocks: list[int]) -> Result:
            pages = [2 * block for block in blocks]  # no neighbours
            job = cache.store(blocks, pages) if kind == "store" else cache.load(pages, good)
            (result,) = finish(cache, job)
            cache.handler.poll()
            return result

        finish(cache, cache.store(good, range(0, 16, 2)), cache.store(spoiled, range(16, 32, 2)))
        driver.fail(call, nth)
        failed = submit(spoiled)
        assert (failed.state, failed.rejected) == ("failed", ())
        assert call in str(failed.error)
        assert submit(good).ok
        assert submit(spoiled).rejected == tuple(range(8))  # the control


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemHostAlloc", "cuMemcpyAsync"])
@pytest.mark.parametrize("nth", [1, 2, 3])
@needs_kernels
@simulated
def test_a_handler_that_cannot_be_made_leaves_nothing(driver: Driver, nth: int, call: str) -> None:
    layout = place(driver, PagedLayout([torch.randn(8, VALUES).bfloat16()]))
    pool = HostPool(layout, 8, encoding="lossless")
    OffloadHandler(layout, pool, copy_method="auto", staging_bytes=STAGING_BYTES).close()
    before = what_lives(driver)
    made = driver.calls(call)
    OffloadHandler(layout, pool, copy_method="auto", staging_bytes=STAGING_BYTES).close()
    made = driver.calls(call) - made
    driver.fail(call, nth)
    if nth <= made:
        with pytest.raises(ValueError, match=f"encoding='lossless' cannot be had: {call}"):
            OffloadHandler(layout, pool, copy_method="auto", staging_bytes=STAGING_BYTES)
    assert what_lives(driver) == before


def what_lives(driver: Driver) -> tuple[int, ...]:
    return tuple(driver.live(kind) for kind in ("allocations", "streams", "events"))


# What is refused.


@pytest.mark.parametrize("method", ["copy_engines", "strided", "batch"])
@needs_kernels
@simulated
def test_a_method_that_cannot_encode_is_refused(driver: Driver, method: str) -> None:
    with pytest.raises(ValueError, match="lossless") as refusal:
        EncodedCache(driver, copy_method=method)
    assert str(refusal.value) == (
        f"copy_method='{method}' cannot encode or decode blocks of host pages with "
        "encoding='lossless'; it must be 'auto', 'staged' or 'kernel', or make the pool with "
        "encoding='raw'"
    )


@needs_kernels
@simulated
def test_too_little_staging_names_what_is_needed(driver: Driver) -> None:
    sizes = {"layers": 8, "values": 1 << 18, "blocks": 8}
    with pytest.raises(ValueError, match="staging_bytes") as refusal:
        EncodedCache(driver, **sizes)
    assert str(refusal.value) == (
        "staging_bytes=1048576 is too little for slots of 3178496 bytes with "
        "encoding='lossless'; give it 12713984 or more"
    )
    with EncodedCache(driver, staging_bytes=12713984, **sizes) as cache:
        before = cache.block(3)
        finish(cache, cache.store([3, 4], [0, 1]), cache.load([0, 1], [5, 6], layer_groups=3))
        assert cache.is_same(5, before)


def load_no_kernels(driver: Driver) -> None:
    import torch
    from simulated_driver import place

    from torch_kvswap import HostPool, OffloadHandler, PagedLayout

    layout = place(driver, PagedLayout([torch.randn(8, 2048).bfloat16()]))
    pool = HostPool(layout, 4, encoding="lossless")
    driver.fail("cuModuleLoadData", 1, 209)
    try:
        OffloadHandler(layout, pool, copy_method="auto")
    except ValueError as error:
        print(error)
    print(driver.live("streams"), driver.live("allocations"))


@needs_kernels
@without_cuda
def test_kernels_without_code_for_the_gpu_refuse() -> None:
    assert run(load_no_kernels) == (
        "encoding='lossless' cannot be had: this library was built without machine code for this "
        "GPU; build it again with the GPU's architecture in TORCH_CUDA_ARCH_LIST\n0 0\n"
    )


def encode_on_an_old_gpu(driver: Driver) -> None:
    import torch
    from simulated_driver import place

    from torch_kvswap import HostPool, OffloadHandler, PagedLayout

    driver.set_attribute(75, 7)  # the compute capability
    layout = place(driver, PagedLayout([torch.randn(8, 2048).bfloat16()]))
    try:
        OffloadHandler(layout, HostPool(layout, 4, encoding="lossless"), copy_method="auto")
    except ValueError as error:
        print(error)
    print(driver.live("streams"), driver.live("allocations"))
    handler = OffloadHandler(layout, HostPool(layout, 4), copy_method="staged")
    handler.synchronize(handler.store(gpu_block_ids=[1], page_ids=[1], after=()))
    handler.close()


@needs_kernels
@without_cuda
def test_an_old_gpu_copies_raw_blocks_only() -> None:
    assert run(encode_on_an_old_gpu) == (
        "encoding='lossless' cannot be had: CUDA device 0 is older than Ampere, for which there "
        "are no kernels that encode; make the pool with encoding='raw'\n0 0\n"
    )


@pytest.mark.parametrize(("start", "row"), [(4, VALUES), (0, VALUES + 4)])
@needs_kernels
@simulated
def test_unreadable_slabs_are_refused_by_number(driver: Driver, start: int, row: int) -> None:
    # Of 2 bytes: the second slab begins in the middle of 16 bytes, or its second block does.
    first = torch.zeros(8, VALUES, dtype=torch.bfloat16)
    whole = torch.zeros(8 * row + 16, dtype=torch.bfloat16)
    start += -whole.data_ptr() // 2 % 8
    second = whole[start:][: 8 * row].view(8, row)[:, :VALUES]
    layout = place(driver, PagedLayout([first, second]))
    pool = HostPool(layout, 4, encoding="lossless")
    with pytest.raises(ValueError, match="lossless") as refusal:
        OffloadHandler(layout, pool, copy_method="auto")
    assert str(refusal.value) == (
        f"encoding='lossless' cannot be had: slab 1 begins at address 0x{second.data_ptr():x} and "
        f"its blocks are {2 * row} bytes apart; the kernels need multiples of 16 for both: allocate "
        "the cache so, or make the pool with encoding='raw'"
    )
    assert (driver.live("streams"), driver.live("allocations")) == (0, 0)
