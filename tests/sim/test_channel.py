"""What a channel enqueues for a transfer, in which order, and what it waits for."""

from __future__ import annotations

import threading

import pytest
import torch
from expecttest import assert_expected_inline
from patience import PATIENCE, in_time
from simulated_cache import (
    CHANNELS,
    CURRENT,
    SHARE,
    SIDE,
    SimulatedCache,
    Stream,
    run_until,
    states,
)
from simulated_driver import DEVICE, Driver, pool, simulated

from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler

# Behind what a transfer starts


@simulated
def test_a_store_starts_behind_the_current_stream(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        hold = sim.held()
        sim.store(1, 2, after=None)
        assert_expected_inline(
            sim.log(),
            """\
record event 1 on current
wait for event 1 on stores
record event 2 on stores
copy 64 bytes on stores
record event 3 on stores
""",
        )
        before = sim.page(2)
        driver.run()
        assert sim.holds(2, before)
        sim.release(hold)
        assert states(sim.finish()) == ["done"]
        assert sim.holds(2, sim.block(1))


@pytest.mark.parametrize("handle", [0, 1, 2], ids=["legacy", "legacy by name", "per thread"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "current"])
@simulated
def test_the_default_streams_are_waited_for_like_others(
    driver: Driver, handle: int, given: bool
) -> None:
    with SimulatedCache(driver) as sim:
        hold = sim.held(handle)
        driver.set_stream(0, SIDE if given else handle)
        job = sim.store(1, 2, after=Stream(handle) if given else None)
        driver.run()
        assert not job.query()
        sim.release(hold)
        assert states(sim.finish()) == ["done"]
        assert sim.holds(2, sim.block(1))


@pytest.mark.parametrize("queued", [False, True], ids=["on the device", "queued"])
@pytest.mark.parametrize("change", ["records it again", "destroys it", "frees its stream"])
@simulated
def test_an_event_may_be_recorded_again_afterwards(
    driver: Driver, change: str, queued: bool
) -> None:
    with SimulatedCache(driver) as sim:
        if queued:
            sim.fill("store")
        stream = driver.cuda.create_stream()
        hold, later = sim.held(stream), sim.held(SIDE)
        event = sim.event(stream)
        job = sim.store(1, 2, after=event)
        assert (sim.metrics("store").queued > 0) == queued
        if change == "records it again":
            driver.cuda.record(event.cuda_event, SIDE)
        elif change == "destroys it":
            driver.cuda.destroy_event(event.cuda_event)
        else:
            driver.cuda.destroy_stream(stream)
        driver.run()
        assert not job.query()
        sim.release(hold)
        assert states(sim.finish())[-1] == "done"  # although the second recording is held up
        assert sim.holds(2, sim.block(1))
        sim.release(later)


@pytest.mark.parametrize("named", [("stream", "event"), ("stream",), ("event",), ()])
@pytest.mark.parametrize("last", ["stream", "event"])
@simulated
def test_a_transfer_starts_after_all_of_a_tuple(
    driver: Driver, named: tuple[str, ...], last: str
) -> None:
    """The control leaves out the one that ends last."""
    with SimulatedCache(driver) as sim:
        streams = {"stream": driver.cuda.create_stream(), "event": SIDE}
        holds = {name: sim.held(stream) for name, stream in streams.items()}
        points = {"stream": Stream(streams["stream"]), "event": sim.event(SIDE)}
        job = sim.store(1, 2, after=tuple(points[name] for name in named))
        for name in streams:
            if name != last:
                sim.release(holds[name])
        driver.run()
        assert job.query() == (last not in named)
        sim.release(holds[last])
        assert states(sim.finish()) == ["done"]
        assert sim.holds(2, sim.block(1))


@simulated
def test_a_transfer_starts_behind_streams_at_the_call(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        hold = sim.held(SIDE)
        job = sim.store(1, 2, after=Stream(SIDE))
        later = sim.held(SIDE)
        sim.release(hold)
        driver.run()
        assert job.query()
        sim.release(later)


# Transfers of one channel


@simulated
def test_a_layer_group_lands_before_those_behind_it(driver: Driver) -> None:
    with SimulatedCache(driver, layers=2) as sim:
        job = sim.load(2, 1, layer_groups=2)
        job.wait(Stream(SIDE), layer_group=job.layer_group_of(0))
        old = sim.block(1)
        loads = driver.cuda.create_stream() - 4  # streams are counted
        while not driver.cuda.is_done(stream=SIDE):
            assert driver.step(SIDE) or driver.step(loads)
        assert torch.equal(sim.block(1), torch.cat([sim.page(2)[:64], old[64:]]))


@simulated
def test_a_stream_waits_for_no_ended_job(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        job = sim.store(1, 2)
        driver.run()
        again = sim.store(3, 4)  # may use the events of the first
        sim.log()
        job.wait(Stream(SIDE))
        job.wait(layer_group=job.layer_group_of(0))
        assert sim.log() == ""
        again.wait()
        assert sim.log().startswith("wait for event")


# Transfers of different channels: who waits for whom


@pytest.mark.parametrize(
    ("first", "second"), [(a, b) for a in CHANNELS for b in CHANNELS if a != b]
)
@simulated
def test_jobs_that_share_nothing_wait_for_nothing(driver: Driver, first: str, second: str) -> None:
    with SimulatedCache(driver) as sim:
        hold, _ = sim.hold_up(first, block=1, page=2)
        sim.log()
        job = sim.submit(second, [2, 3], [1, 3])  # a block and a page of one number are two things
        assert "wait" not in sim.log()
        driver.run()
        assert job.query()
        sim.release(hold)


@simulated
def test_an_ended_job_is_not_waited_for(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        sim.store(1, 2)
        driver.run()
        driver.fail("cuMemcpyAsync")
        assert sim.store(3, 4).query()
        assert sim.handler.poll()
        sim.log()
        sim.submit("load", [1, 3], [5, 6])
        assert "wait" not in sim.log()


# What the handler keeps


@simulated
def test_a_thousand_jobs_reuse_streams_and_events(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        event = sim.event(SIDE)

        def work(jobs: int) -> tuple[int, int]:
            for i in range(jobs // 10):
                hold = sim.held(SIDE)
                driver.cuda.record(event.cuda_event, SIDE)
                for j in range(10):
                    kind = CHANNELS[(i + j) % 3]
                    sim.submit(kind, [j], [j], after=event if j % 2 else Stream(SIDE))
                sim.release(hold)
                assert states(sim.finish()) == ["done"] * 10
            return driver.live("streams"), driver.live("events")

        few = work(100)
        assert work(1000) == few


def start_waiting_load(driver: Driver, sim: SimulatedCache) -> threading.Thread:
    """A thread that loads page 1, whose copy fails: it waits in the driver for SIDE and CURRENT,
    and keeps the events of the store of that page.
    """
    driver.fail_copy(0)
    loading = threading.Thread(target=lambda: sim.submit("load", [2], [1], after=Stream(CURRENT)))
    synchronized = driver.calls("cuStreamSynchronize")
    loading.start()
    assert in_time(lambda: driver.calls("cuStreamSynchronize") > synchronized)
    return loading


@simulated
def test_events_are_kept_for_waiting_threads(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        hold, other = sim.held(SIDE), sim.held(CURRENT)
        sim.start_log()
        sim.store(1, 1, after=Stream(SIDE))
        used = events_recorded(sim, "stores")
        loading = start_waiting_load(driver, sim)
        sim.release(hold)
        assert run_until(driver, lambda: len(sim.handler.poll()) == 1)
        sim.log()
        sim.store(3, 3)
        assert not used & events_recorded(sim, "stores")
        run_until(driver, lambda: len(sim.handler.poll()) == 1)
        sim.release(other)
        driver.run()
        loading.join(PATIENCE)
        sim.store(4, 4)
        run_until(driver, lambda: len(sim.handler.poll()) == 2)  # with the load, which failed
        sim.log()
        sim.store(5, 5)
        sim.store(6, 6)
        sim.store(7, 7)
        assert used & events_recorded(sim, "stores")  # nobody is about to wait any more


def events_recorded(sim: SimulatedCache, stream: str) -> set[str]:
    records = [line for line in sim.log().splitlines() if line.startswith("record event")]
    return {line.split(" on ")[0] for line in records if line.endswith(f" on {stream}")}


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("pair", SHARE)
@simulated
def test_a_job_is_reported_after_its_predecessor(driver: Driver, pair: str, nth: int) -> None:
    with SimulatedCache(driver) as sim:
        jobs = [sim.submit(kind, [block], [page]) for kind, block, page in SHARE[pair]]
        driver.run()
        driver.fail("cuEventQuery", nth, code=600)  # this end comes just after it was asked for
        results = sim.handler.poll() + sim.finish()
        assert [result.job_id for result in results] == [job.id for job in jobs]


@simulated
def test_joined_jobs_are_reported_after_their_predecessors(driver: Driver) -> None:
    with SimulatedCache(driver) as sim:
        hold, _ = sim.hold_up("load")
        sim.fill("load")
        store = sim.store(4, 5, after=Stream(SIDE))
        last = sim.load(6, 4)
        transfers = sim.metrics("load").transfers
        last.wait()  # submits it, joined with the queued load before the store
        assert sim.metrics("load").transfers == transfers + 1
        sim.release(hold)
        driver.run()
        numbers = [result.job_id for result in sim.handler.poll()]
        assert numbers[-3:] == [store.id, store.id - 1, last.id]
        assert numbers[:-3] == list(range(store.id - 1))


@pytest.mark.parametrize("allocations", [1, 2])
@simulated
def test_touching_slabs_merge_within_one_allocation(driver: Driver, allocations: int) -> None:
    raw = torch.randint(256, (128,), dtype=torch.uint8)
    for part in raw.chunk(allocations):
        driver.adopt(part, DEVICE)
    layout = PagedLayout([raw[:64].view(1, 64), raw[64:].view(1, 64)])
    layout.device = torch.device("cuda", 0)
    host = pool(driver, layout, 1)
    with OffloadHandler(layout, host, copy_method="batch") as handler:
        driver.log()
        handler.synchronize(handler.store(gpu_block_ids=[0], page_ids=[0], after=()))
        log = driver.log()
        assert ("copy 128 bytes" in log, "batch of 2" in log) == (
            allocations == 1,
            allocations == 2,
        )
        assert torch.equal(host.pages[0, 0], raw)
