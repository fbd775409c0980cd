"""What a transfer copies is divided: the link starts at once, and nobody waits in a long call."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from patience import PATIENCE
from sim import CHANNELS, SIDE, Rig, Stream, needs_kernels, run_until, states
from simulated_driver import Driver, on_device, stubbed

from torch_kvswap import HostPool, OffloadHandler
from torch_kvswap.handler import Job, TransferError

BLOCKS = 1024  # more than are enqueued in the call that submits them
ALL = list(range(BLOCKS))


def large(rig: Rig, kind: str) -> Job:
    return rig.submit(kind, ALL, ALL[::-1])


def batches(driver: Driver) -> list[int]:
    return [int(size) for size in re.findall(r"batch of (\d+)", driver.log())]


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_who_submits_a_large_job_enqueues_its_beginning(driver: Driver, kind: str) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        large(rig, kind)
        assert states(rig.finish()) == ["done"]
        first, rest = batches(driver)
        assert 1 < first < 100
        assert first + rest == BLOCKS
        assert rig.is_right()


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_a_stream_that_waits_for_a_large_job_waits_for_all_of_it(driver: Driver, kind: str) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        rig.start_log()
        large(rig, kind).wait_on(Stream(SIDE))
        lines = rig.log().splitlines()
        waits = next(i for i, line in enumerate(lines) if line.endswith("on side"))
        copies = [i for i, line in enumerate(lines) if line.startswith("batch of")]
        assert len(copies) == 2
        assert copies[1] < waits
        rig.finish()


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_a_job_behind_a_large_one_comes_behind_all_of_it(driver: Driver, kind: str) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        for _ in range(5):
            large(rig, kind)
            rig.submit(kind, [BLOCKS - 1], [7])
            rig.submit("load" if kind == "store" else "store", [BLOCKS - 2], [BLOCKS - 2])
        assert states(rig.finish()) == ["done"] * 15
        assert rig.is_right()


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_a_failure_in_the_rest_ends_the_job_with_nothing_in_flight(
    driver: Driver, kind: str
) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        driver.fail("cuMemcpyBatchAsync", 2)
        failed = large(rig, kind)
        with pytest.raises(TransferError):
            rig.handler.wait(failed)  # and the device runs only what is waited for
        assert driver.pending() == ""
        assert states(rig.finish()) == ["failed"]
        assert failed.result is not None
        assert "cuMemcpyBatchAsync failed at index" in str(failed.result.error)
        rig.host.pages.random_(256)
        again = rig.handler.store(ALL, ALL, after=())
        run_until(driver, again.done)
        assert torch.equal(rig.host.pages[:, 0], rig.tensors[0])


@pytest.mark.parametrize("kind", CHANNELS)
@stubbed
def test_a_large_job_can_be_cancelled_until_it_has_ended(driver: Driver, kind: str) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        job = large(rig, kind)
        assert rig.handler.cancel(job)
        assert states(rig.finish()) == ["cancelled"]
        assert not rig.handler.cancel(job)


@stubbed
def test_threads_that_submit_large_jobs_and_wait_share_the_work(driver: Driver) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS) as rig:
        driver.set_mode("threaded")
        ended = []

        def serve(kind: str) -> None:
            for _ in range(20):
                job = rig.handler.load(ALL, ALL, after=(), expedited=kind == "expedited")
                if kind == "store":
                    job = rig.handler.store(ALL, ALL, after=())
                rig.handler.wait(job)
                ended.append(job)

        threads = [threading.Thread(target=serve, args=[kind]) for kind in CHANNELS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        rig.handler.drain()
        assert len(ended) == 60
        assert torch.equal(rig.host.pages[:, 0], rig.tensors[0])
        driver.set_mode("manual")


@needs_kernels
@stubbed
def test_neighbours_on_the_host_are_copied_as_one_in_whatever_order(driver: Driver) -> None:
    whole = torch.randint(256, (2, 12, 4096), dtype=torch.uint8)
    layout = on_device(driver, whole)
    with OffloadHandler(layout, HostPool(layout, num_pages=12), path="staged") as handler:
        driver.log()
        handler.wait(handler.store([1, 5, 3, 7, 11], [6, 4, 7, 5, 1], after=()))
        assert re.findall(r"(?:batch of|copy) \d+", driver.log()) == ["batch of 2"]
        for block, page in zip([1, 5, 3, 7, 11], [6, 4, 7, 5, 1], strict=True):
            assert torch.equal(handler.pools[0].pages[page, 0], whole[:, block].flatten())


@needs_kernels
@stubbed
def test_a_load_behind_another_is_staged_as_a_whole(driver: Driver) -> None:
    whole = torch.randint(256, (2, 24, 1 << 18), dtype=torch.uint8)
    layout = on_device(driver, whole)
    ids = list(range(12))
    with OffloadHandler(layout, HostPool(layout, num_pages=24), path="staged") as handler:
        handler.wait(handler.store(ids, ids))
        driver.set_mode("manual")
        driver.log()
        for first in (0, 12):
            handler.load(ids, [first + i for i in ids], after=())
        run_until(driver, lambda: handler.metrics().loads.done == 2)
        assert driver.log().count("strided copy") == 1
        assert torch.equal(whole[:, 12:], whole[:, :12])
        driver.set_mode("immediate")


@pytest.mark.parametrize("options", ["gate", "layer_groups"])
@stubbed
def test_a_load_that_is_waited_for_part_by_part_is_not_divided(
    driver: Driver, options: str
) -> None:
    with Rig(driver, blocks=BLOCKS, pages=BLOCKS, layers=2) as rig:
        given = {"gate": rig.handler.gate()} if options == "gate" else {"layer_groups": 2}
        rig.submit("load", ALL, ALL[::-1], **given)
        assert states(rig.finish()) == ["done"]
        assert batches(driver) == ([2 * BLOCKS] if options == "gate" else [BLOCKS, BLOCKS])
        assert rig.is_right()


@needs_kernels
@stubbed
def test_pieces_grow_and_shrink_through_all_parts_of_a_transfer(driver: Driver) -> None:
    layout = on_device(driver, torch.randint(256, (2, 160, 1 << 16), dtype=torch.uint8))
    ids = list(range(160))
    with OffloadHandler(layout, HostPool(layout, num_pages=160), path="staged") as handler:
        sizes = {}
        for kind in ("store", "load"):
            driver.log()
            handler.wait(getattr(handler, kind)(ids, ids, after=()))
            sizes[kind] = [int(blocks) for blocks in re.findall(r"pack (\d+) blocks", driver.log())]
    # The first are what the submitting thread has enqueued; three blocks are the edge.
    assert sizes == {"store": [7, 30, 64, 56], "load": [7, 64, 64, 18, 4]}
