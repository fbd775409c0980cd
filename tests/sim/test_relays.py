"""Transfers that the links of other GPUs take part in."""

from __future__ import annotations

import pytest
import torch
from drained import drain
from encoded_cache import EncodedCache, finish
from logged import logged
from patience import in_time
from relayed import LARGE, RelayedCache, gain_of, relayed_handler
from simulated_cache import needs_kernels, run_until
from simulated_driver import Driver, on_device, simulated
from staged_bytes import expect, numbers

from torch_kvswap import DeviceLostError, HostPool, PrefixCache

KIB, MIB = 1 << 10, 1 << 20
KINDS = pytest.mark.parametrize("kind", ["store", "load"])


@pytest.mark.parametrize("relays", [(1,), (2, 1)])
@pytest.mark.parametrize("staging", [MIB, 2 * MIB + 77, 8 * MIB])
@needs_kernels
@simulated
def test_relayed_bytes_arrive(driver: Driver, relays: tuple[int, ...], staging: int) -> None:
    whole = numbers(3, 20, 300 * KIB + 48)
    before = list(whole.clone())
    layout = on_device(driver, whole)
    ids = [*range(3, 11), *range(12, 17)]
    with relayed_handler(
        layout, HostPool(layout, num_pages=20), relays=relays, staging_bytes=staging
    ) as handler:
        expect(handler, before, ids, ids[::-1])
        for channel in (handler.metrics().stores, handler.metrics().loads):
            assert list(channel.relayed_bytes) == list(relays)
            share = channel.bytes / (1 + len(relays))
            for given in channel.relayed_bytes.values():
                # One block of 900 KiB is the unstaged head or tail.
                assert abs(given - share) < staging / 8 + layout.block_bytes


@pytest.mark.parametrize("encoding", ["lossless", "raw"])
@pytest.mark.parametrize("verify", ["off", "load"])
@needs_kernels
@simulated
def test_encoded_and_verified_bytes_are_relayed(driver: Driver, encoding: str, verify: str) -> None:
    options = {"encodings": [encoding], "verify": verify, "copy_method": "staged", "relays": (1,)}
    with gain_of(2.0), EncodedCache(driver, blocks=64, pages=64, **options) as cache:
        cache.spoil(7)
        blocks = [cache.block(block) for block in range(64)]
        store = cache.store(range(40), range(20, 60))
        cache.clear(*range(40, 64))
        load = cache.load(range(24, 44), range(44, 64))
        results = finish(cache, store, load)
        rejected = [7] if encoding == "lossless" else []
        assert [list(result.rejected) for result in results] == [
            rejected,
            [index - 4 for index in rejected],
        ]
        for index in range(20):
            if index + 4 not in rejected:
                assert cache.is_same(44 + index, blocks[4 + index])
        for channel in (cache.handler.metrics().stores, cache.handler.metrics().loads):
            assert channel.relayed_bytes[1] > channel.link_bytes // 4


@KINDS
@needs_kernels
@simulated
def test_small_transfers_keep_the_own_link(driver: Driver, kind: str) -> None:
    with RelayedCache(driver) as cache:
        cache.finish(cache.submit(kind, [3], [5]))
        assert cache.relayed(kind) == 0
        cache.finish(cache.submit(kind, LARGE, LARGE))
        assert cache.relayed(kind) > 0


# What stands still: GPU 1's link to the host, or the one between the GPUs.
LINKS = {
    "peer's link": {"device": 1},
    "nvlink of stores": {"device": 0, "peer": 1},
    "nvlink of loads": {"device": 1, "peer": 0},
}


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        ("store", "peer's link"),
        ("store", "nvlink of stores"),
        ("load", "peer's link"),
        ("load", "nvlink of loads"),
    ],
)
@needs_kernels
@simulated
def test_a_job_ends_with_its_relayed_part(driver: Driver, kind: str, link: str) -> None:
    with RelayedCache(driver) as cache:
        driver.set_link(**LINKS[link], slowness=0)
        job = cache.submit(kind, LARGE, LARGE)
        next_job = cache.submit("load" if kind == "store" else "store", LARGE[:1], LARGE[:1])
        driver.run()
        assert not job.query()
        assert not next_job.query()
        driver.set_link(**LINKS[link], slowness=1)
        cache.finish(job, next_job)
        assert cache.is_right()


@needs_kernels
@simulated
def test_a_store_waits_for_what_relays_copy(driver: Driver) -> None:
    """The second store, of one block, is too small for a relay, and is not staged."""
    with RelayedCache(driver, copy_method="auto") as cache:
        driver.set_link(1, slowness=0)
        jobs = [cache.store(LARGE, LARGE), cache.store(LARGE[:1], LARGE[-1:])]
        driver.run()
        driver.set_link(1, slowness=1)
        cache.finish(*jobs)
        assert cache.is_right()


@KINDS
@pytest.mark.parametrize(
    "call",
    ["cuMemcpyPeerAsync", "cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent", "cuEventCreate"],
)
@pytest.mark.parametrize("nth", [1, 4, 9])
@needs_kernels
@simulated
def test_a_failed_call_fails_one_relayed_job(
    driver: Driver, kind: str, call: str, nth: int
) -> None:
    with RelayedCache(driver) as cache:
        driver.set_mode("immediate")
        whole, pages = cache.whole.clone(), cache.pages.clone()
        number = driver.fail(call, nth)
        job = cache.submit(kind, LARGE, LARGE)
        drain(cache.handler)
        assert driver.calls(call) >= number
        assert job.result is not None
        assert call in str(job.result.error)
        cache.handler.poll()
        cache.whole.copy_(whole)
        cache.pages.copy_(pages)
        cache.handler.mark_written(LARGE)
        cache.expected_blocks, cache.expected_pages = cache.blocks(), pages.clone()
        for then in ("store", "load"):
            cache.submit(then, LARGE, LARGE[::-1]).synchronize()
        assert cache.is_right()


@KINDS
@pytest.mark.parametrize("events_happen", [True, False])
@pytest.mark.parametrize("finder", ["query", "synchronize", "poll", "close"])
@needs_kernels
@simulated
def test_a_lost_relay_ends_all_jobs(
    driver: Driver, kind: str, events_happen: bool, finder: str
) -> None:
    with RelayedCache(driver) as cache:
        driver.set_link(1, slowness=0)
        jobs = [cache.submit(kind, LARGE, LARGE), cache.submit(kind, [1], [1])]
        driver.run()
        driver.lose(719, device=1, events_happen=events_happen)
        driver.run()
        if finder == "query":
            in_time(jobs[0].query)
        elif finder == "synchronize":
            with pytest.raises(DeviceLostError):
                cache.handler.synchronize(jobs)
        elif finder == "poll":
            run_until(driver, lambda: len(cache.handler.poll()) > 0)
        if events_happen:
            cache.handler.close()
        else:  # what GPU 0 was given may still use the memory
            for close in (cache.handler.close, cache.pool.close):
                with pytest.raises(DeviceLostError, match="waits for a relay that is lost"):
                    close()
        for job in jobs:
            assert job.result is not None
            assert isinstance(job.result.error, DeviceLostError)
        with pytest.raises(RuntimeError):
            cache.submit(kind, [2], [2])


@needs_kernels
@simulated
def test_nothing_is_left_after_close(driver: Driver) -> None:
    driver.cuda.create_stream()
    kinds = ("events", "streams", "allocations")
    with RelayedCache(driver) as cache:
        pass  # what stays for the next handler: the kernels' streams
    live = [driver.live(kind) for kind in kinds]
    handler = relayed_handler(cache.layout, cache.pool, relays=(1, 2))
    assert handler.metrics().loads.streams == 2 + 1 + 2 * 2
    for _ in range(3):
        handler.store(gpu_block_ids=LARGE, page_ids=LARGE)
    handler.close()
    assert [driver.live(kind) for kind in kinds] == live


@needs_kernels
@simulated
def test_a_relay_without_peer_access_is_left_out(driver: Driver) -> None:
    driver.refuse_peer_access(0, 1)
    with logged() as messages, RelayedCache(driver, relays=(1, 2)) as cache:
        cache.finish(cache.store(LARGE, LARGE))
        assert list(cache.handler.metrics().stores.relayed_bytes) == [2]
        assert cache.is_right()
    assert messages == [
        "relays[0]=1 is left out: CUDA device 0 cannot access the memory of CUDA device 1"
    ]


@needs_kernels
@simulated
def test_a_relay_that_gains_little_is_left_out(driver: Driver) -> None:
    with logged() as messages, RelayedCache(driver, gain=1.29) as cache:
        cache.finish(cache.load(LARGE, LARGE))
        assert cache.handler.metrics().loads.relayed_bytes == {}
        assert cache.is_right()
    assert len(messages) == 1
    assert "only 1.29 times as fast" in messages[0]


@needs_kernels
@simulated
def test_a_relay_without_memory_is_left_out(driver: Driver) -> None:
    driver.limit_allocations(MIB // 4, device=1)
    with logged() as messages, RelayedCache(driver) as cache:
        cache.finish(cache.store(LARGE, LARGE))
        assert cache.handler.metrics().stores.relayed_bytes == {}
        assert cache.is_right()
    assert len(messages) == 1
    assert messages[0].startswith("relay 1 is not used: cuMemAlloc of 524288 bytes")


@needs_kernels
@simulated
def test_relays_without_staged_copies_are_mentioned(driver: Driver) -> None:
    with logged() as messages, RelayedCache(driver, copy_method="copy_engines"):
        pass
    assert messages == ["relays are not used: no copy is staged (docs/copy_methods.md)"]


@pytest.mark.parametrize(
    ("relays", "error", "text"),
    [
        ((1, 0), ValueError, r"relays\[1\] is 0, the GPU of the cache"),
        ((1, 1), ValueError, r"relays\[1\] is 1, which is named twice"),
        (("cuda:1",), TypeError, r"relays\[0\]"),
        ((-1,), ValueError, r"relays\[0\]"),
    ],
)
@needs_kernels
@simulated
def test_wrong_relays_are_refused(
    driver: Driver, relays: tuple[int, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        RelayedCache(driver, relays=relays)


@needs_kernels
@simulated
def test_a_prefix_cache_has_relays(driver: Driver) -> None:
    whole = numbers(2, 40, 1 << 15)
    before = whole.clone()
    layout = on_device(driver, whole)
    keys = [bytes([number]) * 32 for number in LARGE]
    options = {"copy_method": "staged", "staging_bytes": MIB, "relays": (1,)}
    with gain_of(2.0), PrefixCache(layout, HostPool(layout, num_pages=40), **options) as prefixes:
        store = prefixes.store(keys, LARGE, after=()).job
        assert store is not None
        store.synchronize()
        prefixes.poll()
        whole.zero_()
        load = prefixes.load(keys, LARGE, after=())
        assert load is not None
        load.synchronize()
        assert torch.equal(whole[:, LARGE], before[:, LARGE])
        metrics = prefixes.metrics()
        for channel in (metrics.stores, metrics.loads):
            assert channel.relayed_bytes[1] > channel.bytes // 4


@needs_kernels
@simulated
def test_the_gain_of_a_relay_is_measured(driver: Driver) -> None:
    from torch_kvswap._native.loader import native

    live = [driver.live(kind) for kind in ("events", "streams", "allocations")]
    native.enable_peer_access(0, 1)
    assert 0 < native.measure_relay(0, 1) < float("inf")
    assert [driver.live(kind) for kind in ("events", "streams", "allocations")] == live


@needs_kernels
@simulated
def test_relays_stay_after_rebind(driver: Driver) -> None:
    with RelayedCache(driver) as cache:
        driver.set_mode("immediate")
        moved = on_device(driver, cache.whole.clone())
        cache.handler.rebind(moved)
        cache.store(LARGE, LARGE[::-1]).synchronize()
        assert torch.equal(cache.pages, cache.expected_pages)
        assert cache.relayed("store") > 0
