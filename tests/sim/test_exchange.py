"""Ranks that load the same pages, each a part of them, and get the rest from the others."""

from __future__ import annotations

import os
import random
import re
import threading
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from exchanging import BLOCKS, FRAGMENT, LARGE, LAYERS, Ranks
from logged import logged
from patience import PATIENCE, in_time
from relayed import gain_of
from simulated_cache import needs_kernels
from simulated_driver import Driver, simulated
from simulated_driver.handles import Stream
from staged_bytes import numbers

from torch_kvswap import DeviceLostError, HostPool, Job, OffloadHandler

KIB = 1 << 10
HURTS_A_LOAD = (  # calls of the driver
    "cuEventRecord",
    "cuLaunchKernel",
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "cuStreamWaitEvent",
    "cuStreamWaitValue64",
    "cuStreamWriteValue64",
)
SHORT = 0.2  # seconds: the deadline of tests in which it passes


def expect_failure(group: Ranks, *jobs: Job, says: str) -> None:
    """The jobs end with this error. The next loads go by the own links."""
    group.finish(*jobs)
    for job in jobs:
        assert job.result is not None
        assert says in str(job.result.error)
    before = group.exchanged
    for whole, expected in zip(group.wholes, group.expected, strict=True):
        whole.copy_(expected.transpose(0, 1))  # failed loads may have left anything
    group.finish(*group.load_all(LARGE, LARGE[::-1]))
    assert group.is_right()
    assert group.exchanged == before


def is_closed(handler: OffloadHandler) -> bool:
    with suppress(RuntimeError):
        handler._native.check_open()
        return False
    return True


def kernels_of(group: Ranks, rank: int) -> int:
    """The stream on which the rank unpacks."""
    group.driver.log()
    jobs = [group.load(rank, LARGE, LARGE)]
    found = re.search(r"unpack .* on stream (\d+)", group.driver.log())
    assert found is not None
    group.finish(*jobs, *(group.load(other, LARGE, LARGE) for other in {0, 1} - {rank}))
    epoch = group.driver.cuda.create_stream() // 1000000  # the log counts from the last reset on
    return epoch * 1000000 + int(found[1])


@needs_kernels
@simulated
def test_large_fragments_are_exchanged(driver: Driver) -> None:
    """Which are not staged otherwise."""
    options = {"fragment": 1 << 20, "copy_method": "auto", "staging_bytes": 64 << 20}
    with Ranks(driver, **options) as group:
        group.finish(*group.load_all(LARGE, LARGE[::-1]))
        assert group.is_right()
        assert min(group.exchanged) > 0


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fragment", [1 << 15, 300 * KIB + 48])
@needs_kernels
@simulated
def test_exchanged_bytes_arrive(driver: Driver, ranks: int, fragment: int) -> None:
    with Ranks(driver, ranks, fragment=fragment) as group:
        loads = [(LARGE, LARGE[::-1]), (LARGE[9:], LARGE[:-9]), (LARGE[::-1], LARGE)]
        for pages, blocks in loads:
            group.finish(*group.load_all(pages, blocks))
            assert group.is_right()
        nbytes = sum(len(pages) * 2 * fragment for pages, _ in loads)
        # Each piece comes over one link, and from there to the other ranks.
        assert sum(group.exchanged) == (ranks - 1) * nbytes
        assert min(group.exchanged) > 0.7 * max(group.exchanged)


@pytest.mark.parametrize("encoding", ["raw", "lossless"])
@pytest.mark.parametrize("verify", ["off", "load"])
@needs_kernels
@simulated
def test_encoded_and_verified_blocks_are_exchanged(
    driver: Driver, encoding: Any, verify: Any
) -> None:
    torch.set_num_threads(1)
    wholes = [torch.randn(2, BLOCKS, 2048).bfloat16() for _ in range(2)]
    pool = {"encoding": encoding, "verify": verify}
    with Ranks(driver, wholes=wholes, pool=pool) as group:
        whole = wholes[0].clone()
        group.finish(group.handlers[0].store(gpu_block_ids=LARGE, page_ids=LARGE, after=()))
        group.finish(*group.load_all(LARGE, LARGE))
        for loaded in wholes:
            assert torch.equal(loaded[:, LARGE], whole[:, LARGE])
        assert min(group.exchanged) > 0


@needs_kernels
@simulated
def test_layer_groups_of_exchanged_loads_end_in_turn(driver: Driver) -> None:
    with Ranks(driver) as group:
        jobs = group.load_all(LARGE, LARGE, layer_groups=2)
        driver.set_link(0, slowness=0)
        stream, event = driver.cuda.create_stream(), driver.cuda.create_event()
        jobs[0].wait(Stream(stream), layer_group=0)
        driver.cuda.record(event, stream)
        driver.run()
        assert not driver.cuda.is_done(event=event)
        driver.set_link(0, slowness=1)
        group.finish(*jobs)
        assert driver.cuda.is_done(event=event)
        assert group.is_right()
        assert min(group.exchanged) > 0


@needs_kernels
@simulated
def test_an_empty_last_layer_group_ends_an_exchanged_load(driver: Driver) -> None:
    with Ranks(driver, is_hybrid=True) as group:
        hold = driver.hold(kernels_of(group, 0))
        jobs = group.load_all(LARGE[:8], LARGE[:8], layer_groups=2)  # all fits into the rings
        driver.run()
        assert not jobs[0].query()
        driver.release(hold)
        group.finish(*jobs)
        assert [job.result.error for job in jobs] == [None, None]
        assert group.is_right()
        assert min(group.exchanged) > 0


@pytest.mark.parametrize(
    ("count", "options"),
    [(1, {}), (32, {"expedited": True})],
    ids=["small", "expedited"],
)
@needs_kernels
@simulated
def test_other_loads_keep_the_own_link(driver: Driver, count: int, options: Any) -> None:
    with Ranks(driver, staging_bytes=2 << 20) as group:
        group.finish(group.load(1, LARGE[:count], LARGE[:count], **options))
        assert group.exchanged == [0, 0]
        assert group.is_right()


@pytest.mark.parametrize("late", [0, 1])
@needs_kernels
@simulated
def test_exchanged_loads_start_after_the_stream(driver: Driver, late: int) -> None:
    with Ranks(driver) as group, driver.on(late):
        stream = driver.cuda.create_stream()
        hold = driver.hold(stream)
        before = group.blocks(late)
        jobs = [group.load(late, LARGE, LARGE, after=Stream(stream, late))]
        jobs.append(group.load(1 - late, LARGE, LARGE))
        driver.run()
        assert torch.equal(group.blocks(late), before)
        driver.release(hold)
        group.finish(*jobs)
        assert group.is_right()


@needs_kernels
@simulated
def test_an_unstaged_load_waits_for_an_exchanged_one(driver: Driver) -> None:
    with Ranks(driver, copy_method="auto") as group:
        hold = driver.hold(kernels_of(group, 0))
        jobs = group.load_all(LARGE[:8], LARGE[:8])  # all pieces fit into the rings
        jobs.append(group.load(0, LARGE[8:9], LARGE[:1]))
        driver.run()
        driver.release(hold)
        group.finish(*jobs)
        assert group.is_right()


@needs_kernels
@simulated
def test_an_exchanged_load_waits_for_an_unstaged_one(driver: Driver) -> None:
    with Ranks(driver, copy_method="auto") as group:
        driver.set_link(0, slowness=0)
        jobs = [group.load(0, LARGE[8:9], LARGE[:1])]
        jobs += group.load_all(LARGE[:8], LARGE[:8])
        driver.run()
        driver.set_link(0, slowness=1)
        group.finish(*jobs)
        assert group.is_right()


def random_loads(
    driver: Driver, seed: int, encoding: Any = "raw", control: bool = False, faults: bool = False
) -> int:
    """Loads that all ranks exchange, and between them loads and stores of one rank that share their
    blocks, staged or not, over links of random speeds. Returns how many blocks are wrong.

    faults: one call of the driver fails, or one rank leaves a load out.
    """
    chance = random.Random(seed)
    driver.reset()
    ranks = range(chance.choice([2, 3]))
    kept = [numbers(LAYERS, BLOCKS, FRAGMENT) for _ in ranks]
    if encoding == "lossless":
        kept = [torch.randn(LAYERS, BLOCKS, FRAGMENT // 2).bfloat16() for _ in ranks]
    relays = [{"relays": [chance.choice([r for r in ranks if r != rank])]} for rank in ranks]
    with gain_of(2.0), Ranks(
        driver, len(ranks), deadline=SHORT if faults else PATIENCE, wholes=kept,
        own=relays if chance.random() < 0.3 else (), pool={"encoding": encoding} if encoding == "lossless" else None,
        copy_method="staged" if encoding == "lossless" else "auto",
    ) as group:  # fmt: skip
        blocks_of = [dict(enumerate(group.blocks(rank))) for rank in ranks]
        pages_of = [dict(blocks_of[0]) for _ in ranks]
        if encoding == "raw":
            pages_of = [dict(enumerate(group.pages.clone())) for _ in ranks]
        else:
            same = list(range(BLOCKS))
            group.finish(group.handlers[0].store(gpu_block_ids=same, page_ids=same, after=()))
        driver.set_mode("threaded", seed)
        if control:
            driver.drop_waits_between_gpus()
        fault, left_out = chance.randrange(12), chance.choice([*ranks, None]) if faults else None
        done: list[tuple[int, Job, str, list[int], list[int]]] = []
        for number in range(12):
            if faults and number == fault and left_out is None:
                driver.fail(chance.choice(HURTS_A_LOAD), chance.randint(1, 30))
            for rank in ranks:
                driver.set_link(rank, slowness=chance.choice([1, 1, 8, 32]))
            pages = chance.sample(range(BLOCKS), chance.choice([2, 9, 33]))
            blocks = chance.sample(range(BLOCKS), len(pages))
            options = {"layer_groups": chance.choice([1, 1, 2])}
            for rank in chance.sample(ranks, len(ranks)):
                handler = group.handlers[rank]
                if rank != left_out or number != fault:
                    job = group.load(rank, pages, blocks, **options)
                    done.append((rank, job, "load", pages, blocks))
                while chance.random() < 0.5:
                    count = chance.choice([1, 2])
                    own = group.own_pages(rank)[:count]
                    if chance.random() < 0.3:
                        given = {"gpu_block_ids": blocks[:count], "page_ids": own, "after": ()}
                        job = handler.store(**given)
                        done.append((rank, job, "store", own, blocks[:count]))
                        continue
                    route = chance.choice([{}, {"expedited": True}][count - 1 :])
                    of = chance.sample(range(BLOCKS), count) if chance.random() < 0.7 else own
                    if of[-1] in pages_of[rank] or faults or encoding == "raw":
                        job = group.load(rank, of, blocks[:count], **route)
                        done.append((rank, job, "load", of, blocks[:count]))
        wrong = 0
        for rank, job, kind, pages, blocks in done:
            assert in_time(job.query), driver.pending()
            assert job.result is not None
            assert job.result.ok or faults or control, job.result.error
            moved, known = (blocks_of[rank], pages_of[rank])
            for page, block in zip(pages, blocks, strict=True):
                if kind == "store":
                    known[page] = moved.get(block) if job.result.ok else None
                else:
                    moved[block] = known.get(page) if job.result.ok else None
        assert faults or control or min(group.exchanged) > 0
        for rank in ranks:
            for block, found in enumerate(group.blocks(rank)):
                expected = blocks_of[rank][block]
                wrong += expected is not None and not torch.equal(found, expected)
        return wrong


@pytest.mark.parametrize("encoding", ["raw", "lossless"])
@needs_kernels
@simulated
def test_random_exchanged_loads_have_the_pages_bytes(driver: Driver, encoding: Any) -> None:
    torch.set_num_threads(1)
    assert sum(random_loads(driver, seed, encoding) for seed in range(10)) == 0


@needs_kernels
@simulated
def test_random_faults_leave_no_wrong_bytes(driver: Driver) -> None:
    assert sum(random_loads(driver, seed, faults=True) for seed in range(24)) == 0


@needs_kernels
@simulated
def test_as_a_control_no_stream_waits_for_a_word(driver: Driver) -> None:
    assert any(random_loads(driver, seed, control=True) for seed in range(20))


# What ends an exchange.


@needs_kernels
@simulated
def test_a_rank_that_loads_nothing_fails_the_load(driver: Driver) -> None:
    with Ranks(driver, deadline=SHORT) as group:
        job = group.load(0, LARGE, LARGE)
        expect_failure(group, job, says="rank 0 has waited too long for the others")


@needs_kernels
@simulated
def test_a_failed_load_ends_after_its_own_copies(driver: Driver) -> None:
    with Ranks(driver, deadline=SHORT) as group:
        driver.set_link(0, slowness=0)
        job = group.load(0, LARGE[:8], LARGE[:8])  # all pieces fit into the rings
        assert in_time(lambda: driver.run() >= 0 and "wait for a value" not in driver.pending())
        assert not job.query()
        driver.set_link(0, slowness=1)
        group.finish(job)
        assert job.result is not None
        assert not job.result.ok


@pytest.mark.parametrize("other", [[*LARGE[1:], 0], LARGE[:20], [*LARGE, 0, 1]], ids=len)
@needs_kernels
@simulated
def test_ranks_that_load_other_pages_fail(driver: Driver, other: list[int]) -> None:
    with Ranks(driver) as group:
        jobs = [group.load(0, LARGE, LARGE), group.load(1, other, list(range(len(other))))]
        expect_failure(group, *jobs, says="the exchange with the other ranks has ended")


@pytest.mark.parametrize(
    "call",
    ["cuStreamWriteValue64", "cuStreamWaitValue64", "cuMemcpyAsync", "cuLaunchKernel"],
)
@pytest.mark.parametrize("nth", [1, 9])
@needs_kernels
@simulated
def test_a_failed_call_fails_the_load_of_all(driver: Driver, call: str, nth: int) -> None:
    with Ranks(driver) as group:
        driver.set_mode("immediate")
        number = driver.fail(call, nth)
        jobs = [group.load(0, LARGE, LARGE)]
        assert in_time(lambda: driver.calls(call) >= number)
        jobs.append(group.load(1, LARGE, LARGE))
        group.finish(*jobs)
        assert call in str(jobs[0].result.error)
        expect_failure(group, says="")


@needs_kernels
@simulated
def test_a_lost_gpu_fails_the_load_of_all(driver: Driver) -> None:
    with logged(), Ranks(driver) as group:  # that what the ranks shared stays pinned
        driver.set_link(1, slowness=0)
        jobs = group.load_all(LARGE, LARGE)
        driver.run()
        driver.lose(719, device=1)
        in_time(jobs[1].query)
        assert isinstance(jobs[1].result.error, DeviceLostError)
        group.finish(jobs[0])
        assert "rank 1 could not take part" in str(jobs[0].result.error)
        group.finish(group.load(0, LARGE, LARGE))
        assert group.is_right(0)


@needs_kernels
@simulated
def test_a_cancelled_exchanged_load_serves_the_others(driver: Driver) -> None:
    with Ranks(driver, own=[{}, {"submit_thread": True}]) as group:
        driver.set_link(1, slowness=0)
        jobs = group.load_all(LARGE, LARGE)
        group.handlers[1].cancel(jobs[1])
        driver.set_link(1, slowness=1)
        group.finish(*jobs)
        assert [job.result.state for job in jobs] == ["done", "cancelled"]
        assert group.is_right()


@needs_kernels
@simulated
def test_a_rank_may_close_when_its_loads_have_ended(driver: Driver) -> None:
    with Ranks(driver) as group:
        jobs = group.load_all(LARGE, LARGE)
        group.finish(jobs[0])
        driver.set_mode("immediate")
        group.handlers[0].close()
        group.finish(jobs[1])
        assert jobs[1].result.ok
        before = group.exchanged
        group.finish(group.load(1, LARGE, LARGE[::-1]))
        assert group.exchanged == before
        assert group.is_right()


@needs_kernels
@simulated
def test_closing_holds_no_lock_while_others_load(driver: Driver) -> None:
    with Ranks(driver) as group:
        hold = driver.hold(kernels_of(group, 1))
        jobs = group.load_all(LARGE[:8], LARGE[:8])  # all pieces fit into the rings
        group.finish(jobs[0])
        closing = threading.Thread(target=group.handlers[0].close)
        closing.start()
        assert in_time(lambda: is_closed(group.handlers[0]))
        for _ in range(100):
            group.handlers[0].metrics()
        driver.release(hold)
        group.finish(jobs[1])
        closing.join()
        assert jobs[1].result.ok


@needs_kernels
@simulated
def test_a_ring_outlives_a_rank_that_others_read(driver: Driver) -> None:
    """Rank 0 has ended the exchange, and closes while rank 1 unpacks an earlier load."""
    with Ranks(driver) as group:
        hold = driver.hold(kernels_of(group, 1))
        jobs = group.load_all(LARGE[:8], LARGE[:8])  # all pieces fit into the rings
        group.finish(jobs[0])
        driver.fail("cuLaunchKernel")
        group.finish(group.load(0, LARGE, LARGE))
        group.handlers[0].close()
        assert driver.violations() == 0
        driver.release(hold)
        group.finish(jobs[1])
        assert jobs[0].result.ok
        assert "rank 0 could not take part" in str(jobs[1].result.error)


# Joining and leaving.


@needs_kernels
@simulated
def test_ranks_join_again_after_closing(driver: Driver) -> None:
    with Ranks(driver) as group:
        for _ in range(2):
            group.finish(*group.load_all(LARGE, LARGE))
            assert min(group.exchanged) > 0
            group.close()
            group.open()
        group.finish(*group.load_all(LARGE[::-1], LARGE))
        assert group.is_right()


@needs_kernels
@simulated
def test_nothing_is_left_of_an_exchange(driver: Driver) -> None:
    driver.cuda.create_stream()
    kinds = ("events", "streams", "allocations")
    with Ranks(driver, own=[{"exchange": None}] * 2) as group:
        group.close()
        live = [driver.live(kind) for kind in kinds]
        group.own = [{}] * 2
        group.open()
        group.finish(*group.load_all(LARGE, LARGE))
        group.close()
        assert [driver.live(kind) for kind in kinds] == live
    assert driver.calls("cuIpcOpenMemHandle") == driver.calls("cuIpcCloseMemHandle") == 2


@pytest.mark.parametrize(
    ("own", "timeout", "says"),
    [
        ([{}, {"exchange": None}], SHORT, "not all ranks have joined"),
        ([{}, {"staging_bytes": 4 << 20}], PATIENCE, "other pages, options or loads"),
        ([{}, {"copy_method": "copy_engines"}], PATIENCE, "no copy is staged"),
    ],
    ids=["alone", "other options", "without kernels"],
)
@needs_kernels
@simulated
def test_ranks_that_cannot_join_use_their_links(
    driver: Driver, own: Any, timeout: float, says: str
) -> None:
    with logged() as messages, Ranks(driver, own=own, join_timeout=timeout) as group:
        assert messages
        assert "exchange=(0, 2) is not used" in "".join(messages)
        assert says in "".join(messages)
        group.finish(*group.load_all(LARGE, LARGE))
        assert group.exchanged == [0, 0]
        assert group.is_right()


@needs_kernels
@simulated
def test_one_hardware_queue_exchanges_nothing(driver: Driver) -> None:
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with mock.patch.dict(os.environ, one), logged() as messages, Ranks(driver) as group:
        assert any("CUDA_DEVICE_MAX_CONNECTIONS is 1" in message for message in messages)
        group.finish(*group.load_all(LARGE, LARGE))
        assert group.exchanged == [0, 0]


@pytest.mark.parametrize(
    ("lack", "says"),
    [("peer access", "cuIpcOpenMemHandle of rank"), ("memory operations", "cannot wait for words")],
)
@needs_kernels
@simulated
def test_gpus_that_cannot_exchange_use_their_links(driver: Driver, lack: str, says: str) -> None:
    if lack == "peer access":
        driver.refuse_peer_access(0, 1)
    else:
        driver.set_attribute(122, 0)
    with logged() as messages, Ranks(driver) as group:
        assert any(says in message for message in messages)
        group.finish(*group.load_all(LARGE, LARGE))
        assert group.exchanged == [0, 0]
        assert group.is_right()


@pytest.mark.parametrize(
    ("exchange", "error", "says"),
    [
        (1, TypeError, "exchange is an int"),
        ((0, 1), ValueError, "2 to 8 ranks"),
        ((0, 9), ValueError, "2 to 8 ranks"),
        ((2, 2), ValueError, r"exchange\[0\]"),
        ((0, 2), ValueError, r"HostPool\(shared=True\)"),
    ],
)
@needs_kernels
@simulated
def test_a_wrong_exchange_is_refused(driver: Driver, exchange: Any, error: Any, says: str) -> None:
    with Ranks(driver, own=[{"exchange": None}] * 2) as group:
        private = HostPool(group.layouts[0], num_pages=2)
        with pytest.raises(error, match=says):
            OffloadHandler(group.layouts[0], private, exchange=exchange)
