"""Bytes go where the ids say, whatever the layout, and every job ends once."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from caches import LAYOUTS, NUM_BLOCKS, Cache
from expecttest import assert_expected_inline
from fake_device import FakeDevice, FakeEvent
from refusal import refusal

from torch_kvswap import handler as handler_module
from torch_kvswap.handler import Job, OffloadHandler, TransferError
from torch_kvswap.host_memory import HostPool
from torch_kvswap.layout import PagedLayout


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_handler(
    device: str = "cpu", num_pages: int = 4, blocks_per_page: int = 1
) -> OffloadHandler:
    cache = torch.arange(8 * 6, dtype=torch.int16, device=device).view(8, 6)
    layout = PagedLayout([cache])
    return OffloadHandler(layout, HostPool(layout, num_pages, blocks_per_page))


# Bytes


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("blocks_per_page", [1, 4])
def test_what_is_stored_comes_back_elsewhere_and_nothing_else_changes(
    name: str, blocks_per_page: int, device: str
) -> None:
    cache, expected = Cache(name, 0, device), Cache(name, 0)
    host = HostPool(cache.layout, 5, blocks_per_page)
    host.pages.fill_(0xA5)
    pages = host.pages.clone()
    blocks, targets = [7, 0, 3], [1, 8, 2]
    page_ids = [4, 1, 2][: 3 if blocks_per_page == 1 else 2]
    first = 0 if blocks_per_page == 1 else 2
    with OffloadHandler(cache.layout, host) as handler:
        handler.wait(handler.store(blocks, page_ids, first_block=first))
        handler.wait(handler.load(page_ids, targets, first_block=first))
        for j, (block, target) in enumerate(zip(blocks, targets, strict=True)):
            page, slot = divmod(first + j, blocks_per_page)
            expected.store(block, pages[page_ids[page], slot])
            expected.load(pages[page_ids[page], slot], target)
        assert torch.equal(host.pages, pages)
    assert cache.same_bytes(expected)
    assert not cache.same_bytes(Cache(name, 0))


@pytest.mark.parametrize("seed", range(25))
def test_random_jobs_do_what_plain_indexing_does(seed: int, device: str) -> None:
    rng = random.Random(seed)
    name = rng.choice(list(LAYOUTS))
    cache, expected = Cache(name, seed, device), Cache(name, seed)
    host = HostPool(cache.layout, num_pages=rng.randint(3, 6), blocks_per_page=rng.randint(1, 4))
    pages = host.pages.clone()
    handler = OffloadHandler(cache.layout, host)
    for _ in range(rng.randint(1, 20)):
        first = rng.randrange(host.blocks_per_page)
        most = min(NUM_BLOCKS, host.num_pages * host.blocks_per_page - first)
        blocks = rng.sample(range(NUM_BLOCKS), rng.randint(0, most))
        slots = [divmod(first + j, host.blocks_per_page) for j in range(len(blocks))]
        page_ids = rng.sample(range(host.num_pages), slots[-1][0] + 1 if slots else 0)
        if rng.random() < 0.5:
            job = handler.store(
                torch.tensor(blocks, dtype=torch.int32), page_ids, first_block=first
            )
            for block, (page, slot) in zip(blocks, slots, strict=True):
                expected.store(block, pages[page_ids[page], slot])
        else:
            job = handler.load(page_ids, blocks, first_block=first)
            for block, (page, slot) in zip(blocks, slots, strict=True):
                expected.load(pages[page_ids[page], slot], block)
        assert job.nbytes == len(blocks) * cache.layout.block_bytes
        job.wait_on()  # the next job waits for the current stream, and so for this one
    handler.wait()
    assert torch.equal(host.pages, pages)
    assert cache.same_bytes(expected)
    handler.close()


def test_ids_that_change_after_the_call_change_nothing(device: str) -> None:
    handler = make_handler(device)
    blocks, pages = torch.tensor([2, 5]), torch.tensor([0, 3])
    handler.store(blocks, pages)
    blocks.fill_(0)
    pages.fill_(1)
    handler.wait()
    stored = handler.host.pages.view(torch.int16)
    assert stored[0, 0].tolist() == list(range(12, 18))
    assert stored[3, 0].tolist() == list(range(30, 36))
    assert not stored[1:3].any()
    handler.close()


def test_a_job_may_have_very_many_blocks(device: str) -> None:
    rows = torch.randint(256, (20_000, 16), dtype=torch.uint8)
    layout = PagedLayout([rows.to(device)])
    blocks, pages = torch.randperm(20_000), torch.randperm(20_000)
    with OffloadHandler(layout, HostPool(layout, 20_000)) as handler:
        handler.wait(handler.store(blocks, pages))
        assert torch.equal(handler.host.pages[pages, 0], rows[blocks])


def test_several_handlers_share_a_pool(device: str) -> None:
    one = make_handler(device)
    other = OffloadHandler(
        PagedLayout([torch.zeros(3, 6, dtype=torch.int16, device=device)]), one.host
    )
    one.wait(one.store([7], [2]))
    other.wait(other.load([2], [1]))
    assert other.gpu.tensors[0].tolist() == [[0] * 6, list(range(42, 48)), [0] * 6]
    one.host.close()
    for handler in (one, other):
        with pytest.raises(RuntimeError, match="the handler is closed"):
            handler.store([0], [0])


# Jobs and results


def test_a_job_says_what_it_is_and_a_result_how_it_went(device: str) -> None:
    handler = make_handler(device)
    store, load = handler.store([1, 2], [0, 1]), handler.load([2], [7])
    assert [(job.id, job.direction, job.nbytes) for job in (store, load)] == [
        (0, "store", 24),
        (1, "load", 12),
    ]
    handler.wait([store, load])
    assert store.done()
    results = handler.finished()
    assert results == [store.result, load.result]
    for result in results:
        assert result.ok
        assert result.error is None
        assert result.path == ("host" if device == "cpu" else "batch")
        assert 0 <= result.seconds < 10
        assert 0 < result.submit_seconds < 10
    handler.close()


def test_every_job_is_reported_once_also_one_that_was_waited_for(device: str) -> None:
    handler = make_handler(device)
    jobs = [handler.store([j], [j]) for j in range(4)]
    handler.wait(jobs[2])
    handler.wait()
    assert [result.job_id for result in handler.finished()] == [0, 1, 2, 3]
    assert handler.finished() == []
    handler.wait(jobs)
    handler.close()


def test_a_thousand_jobs_leave_nothing_behind(device: str) -> None:
    handler = make_handler(device)
    for _ in range(20):
        for _ in range(25):
            handler.store([1, 2], [0, 1]).wait_on()
            handler.load([1], [5]).wait_on()
        handler.wait()
    assert len(handler.finished()) == 1000
    for channel in (handler._stores, handler._loads):
        assert channel.events.in_use == 0
        assert channel.events.created <= 3 * 25
    handler.close()
    assert handler._stores.events.created == 0


def test_jobs_without_blocks_end_like_all_others(device: str) -> None:
    handler = make_handler(device)
    handler.store([], [])
    handler.load([], [])
    handler.wait()
    assert [(r.ok, r.nbytes) for r in handler.finished()] == [(True, 0), (True, 0)]
    handler.close()


# Failures


@pytest.fixture
def copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no copy engine")

    monkeypatch.setattr(handler_module, "swap_blocks_batch", fail)


@pytest.mark.usefixtures("copy_fails")
def test_a_copy_that_fails_makes_a_failed_job(device: str) -> None:
    handler = make_handler(device)
    job = handler.store([1], [0])
    assert job.done()
    assert job.result is not None
    assert (job.result.ok, job.result.nbytes, str(job.result.error)) == (
        False,
        12,
        "no copy engine",
    )
    handler.drain()
    assert handler.finished() == [job.result]
    assert handler._stores.events.in_use == 0
    handler.close()


@pytest.mark.usefixtures("copy_fails")
def test_waiting_for_failed_jobs_names_them(device: str) -> None:
    handler = make_handler(device)
    jobs = [handler.store([1], [0]), handler.load([0], [1])]
    assert jobs[0].result is not None
    for _ in range(2):
        with pytest.raises(TransferError) as failure:
            handler.wait()
        assert failure.value.results == [job.result for job in jobs]
        assert failure.value.__cause__ is jobs[0].result.error
    assert_expected_inline(
        refusal(handler.wait),
        """\
TransferError: store 0 failed: RuntimeError: no copy engine; load 1 failed:
RuntimeError: no copy engine""",
    )
    assert len(handler.finished()) == 2
    handler.wait()  # what was reported is nobody's surprise any more
    handler.close()


@pytest.mark.usefixtures("copy_fails")
def test_no_stream_waits_for_a_failed_job(device: str) -> None:
    handler = make_handler(device)
    job = handler.load([0], [1])
    with pytest.raises(TransferError, match="load 0 failed: RuntimeError: no copy engine"):
        job.wait_on()
    handler.close()


def test_wrong_ids_raise_and_there_is_no_job(device: str) -> None:
    handler = make_handler(device)
    with pytest.raises(IndexError):
        handler.store([8], [0])
    with pytest.raises(ValueError, match="page_ids has 2"):
        handler.load([0, 1], [0])
    assert handler.finished() == []
    assert handler.store([0], [0]).id == 0
    handler.close()


def test_a_job_of_another_handler_is_refused(device: str) -> None:
    one, other = make_handler(device), make_handler(device)
    with pytest.raises(ValueError, match="store 0 is of another handler"):
        one.wait(other.store([0], [0]))
    one.close()
    other.close()


def test_a_closed_handler_takes_no_jobs_but_still_reports(device: str) -> None:
    with make_handler(device) as handler:
        job = handler.store([0], [0])
    handler.close()
    with pytest.raises(RuntimeError, match="the handler is closed; make a new one"):
        handler.load([0], [0])
    assert [result.job_id for result in handler.finished()] == [0]
    assert job.done()
    job.wait_on()
    assert not handler._finalizer.alive


def test_a_closed_pool_takes_no_handler(device: str) -> None:
    handler = make_handler(device)
    handler.host.close()
    with pytest.raises(RuntimeError, match="the host pool is closed"):
        OffloadHandler(handler.gpu, handler.host)


def test_a_pool_of_another_number_of_planes_is_refused() -> None:
    rows = torch.zeros(4, 6)
    host = HostPool(PagedLayout([rows]), num_pages=1)
    assert_expected_inline(
        refusal(OffloadHandler, PagedLayout([rows, rows.clone()]), host),
        """ValueError: the cache has 2 planes, the host pool 1; make the pool from this layout""",
    )


def test_a_pool_of_other_blocks_is_refused() -> None:
    layout = PagedLayout([torch.zeros(4, 6), torch.zeros(4, 5)])
    host = HostPool(PagedLayout([torch.zeros(4, 6), torch.zeros(4, 7)]), num_pages=1)
    assert_expected_inline(
        refusal(OffloadHandler, layout, host),
        """\
ValueError: a block has 20 bytes in plane 1 of the cache and 28 in the host pool; make
the pool from this layout""",
    )


def test_what_is_no_layout_and_no_pool_is_refused() -> None:
    layout = PagedLayout([torch.zeros(4, 6)])
    host = HostPool(layout, num_pages=1)
    assert_expected_inline(
        refusal(OffloadHandler, host, layout),
        """\
TypeError: a handler takes a PagedLayout and a HostPool, in this order, not HostPool and
PagedLayout""",
    )
    assert_expected_inline(
        refusal(OffloadHandler(layout, host).wait, [0]),
        """TypeError: store() and load() return Jobs to wait for, not 0""",
    )
    assert_expected_inline(
        refusal(HostPool, [torch.zeros(4, 6)], 1),
        """TypeError: a host pool is made from a PagedLayout, not list""",
    )


def test_a_cache_that_moved_is_refused() -> None:
    rows = torch.zeros(4, 6)
    layout = PagedLayout([rows])
    handler = OffloadHandler(layout, HostPool(layout, num_pages=1))
    rows.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"tensors\[0\] has moved from 0x\w+ to 0x0 since"):
        handler.store([0], [0])
    assert handler.finished() == []


# What only shows while jobs run: a device that ends nothing until it is told to


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(handler_module, "open_device", lambda device: fake)
    return fake


def test_waiting_with_a_timeout_names_the_jobs_that_still_run(fake: FakeDevice) -> None:
    handler = make_handler()
    jobs = [handler.store([0], [0]), handler.load([1], [1])]
    assert not jobs[0].done()
    assert jobs[0].result is None
    assert_expected_inline(
        refusal(handler.wait, timeout=0.01),
        """TimeoutError: after 0.01 s these jobs still run: store 0, load 1""",
    )
    fake.run()
    handler.wait(jobs, timeout=0)
    assert [result.job_id for result in handler.finished()] == [0, 1]


def waits(fake: FakeDevice) -> list[str]:
    """The events that the transfer submitted last waits for."""
    steps = fake.take_log().splitlines()
    return [step.partition("waits for ")[2] for step in steps if "waits for" in step]


def end(job: Job) -> str:
    return str(job._transfer.end.name)


def test_a_store_and_a_load_wait_for_each_other_where_they_share_a_block_or_a_page(
    fake: FakeDevice,
) -> None:
    handler = make_handler()
    store = handler.store([0], [3], after=())
    assert waits(fake) == []
    load = handler.load([1], [2], after=())
    assert waits(fake) == []
    reload = handler.load([3], [4], after=())  # the page that the store fills
    assert waits(fake) == [end(load), end(store)]
    handler.load([0], [0], after=())  # into the block that the store reads
    assert waits(fake) == [end(reload), end(store)]
    second = handler.store([2], [0], after=())  # of the block that the load fills
    assert waits(fake)[0] == end(store)
    handler.store([7], [1], after=())  # into the page that the load reads
    assert waits(fake) == [end(second), end(load)]


def test_a_transfer_that_has_ended_or_failed_is_not_waited_for(fake: FakeDevice) -> None:
    handler = make_handler()
    handler.store([0], [3], after=())
    fake.run()
    fake.fail = {"make stream1 current": RuntimeError("no")}
    assert handler.store([1], [2], after=()).done()
    fake.take_log()
    handler.load([3, 2], [2, 1], after=())
    assert waits(fake) == []


def test_each_direction_reports_in_the_order_of_submission(fake: FakeDevice) -> None:
    handler = make_handler()
    for j in range(3):
        handler.store([j], [j])
        handler.load([3], [j])
    fake.run()
    assert [(r.direction, r.job_id) for r in handler.finished()] == [
        ("store", 0),
        ("store", 2),
        ("store", 4),
        ("load", 1),
        ("load", 3),
        ("load", 5),
    ]


def test_a_failed_look_at_one_direction_loses_no_result_of_the_other(fake: FakeDevice) -> None:
    handler = make_handler()
    handler.store([0], [0])
    fake.run()
    handler.load([1], [1])
    error = RuntimeError("operation not permitted when stream is capturing")
    error.error_code = 900  # type: ignore[attr-defined]
    handler._stores.poll()
    fake.broken = error
    with pytest.raises(RuntimeError, match="capturing"):
        handler.finished()
    fake.broken = None
    fake.run()
    assert [result.job_id for result in handler.finished()] == [0, 1]


def test_closing_the_pool_waits_for_the_jobs_of_its_handlers(fake: FakeDevice) -> None:
    handler = make_handler()
    job = handler.store([0], [0])
    handler.host.close()
    assert job.result is not None
    assert handler.finished() == [job.result]


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_dropped_handler_waits_for_its_jobs_before_its_memory_goes(
    fake: FakeDevice, in_a_cycle: bool
) -> None:
    handler = make_handler()
    alive = [weakref.ref(handler.gpu.tensors[0]), weakref.ref(handler.host)]
    seen = []

    def look(event: FakeEvent) -> None:
        seen.append([reference() is not None for reference in alive])
        fake.run()

    fake.on_synchronize = look
    handler.store([0], [0])
    if in_a_cycle:
        handler.itself = handler  # type: ignore[attr-defined]
    del handler
    gc.collect()
    assert seen == [[True, True]]
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_a_job_keeps_its_handler(fake: FakeDevice) -> None:
    job: Job = make_handler().store([0], [0])
    gc.collect()
    assert not job.done()
    fake.run()
    assert job.done()


def run_script(script: str) -> str:
    """Runs it in a process of its own that imports what this one does; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{script}"],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_handler_left_open_at_exit_waits_for_its_jobs() -> None:
    script = """
        from fake_device import FakeDevice
        from torch_kvswap import handler as handler_module
        fake = FakeDevice()
        handler_module.open_device = lambda device: fake
        from test_handler import make_handler
        handler = make_handler()
        job = handler.store([0], [0])
        fake.on_synchronize = lambda event: (print("waits"), fake.run())
        print("ends")
    """
    assert run_script(textwrap.dedent(script)).split() == ["ends", "waits"]


def test_a_forked_child_may_not_use_the_handler_and_ends_in_peace() -> None:
    script = """
        import os, warnings
        warnings.simplefilter("ignore")
        sys.stderr = sys.stdout  # of which nothing is expected
        from test_handler import make_handler
        handler = make_handler()
        job = handler.store([0], [0])
        child = os.fork()
        if child == 0:
            for call in (
                lambda: handler.store([0], [0]), lambda: handler.load([0], [0]), handler.finished,
                handler.wait, handler.drain, handler.close, handler.host.close, job.done,
                job.wait_on,
            ):
                try:
                    call()
                except RuntimeError as error:
                    assert "forked from it" in str(error), error
                else:
                    raise AssertionError("the call went on")
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        handler.close()
        print("closed")
    """
    assert run_script(textwrap.dedent(script)).split() == ["closed"]


def test_importing_the_handler_leaves_cuda_alone() -> None:
    script = "import torch, torch_kvswap.handler; print(torch.cuda.is_initialized())"
    assert run_script(script).split() == ["False"]


def test_a_handler_that_gets_no_streams_for_loads_frees_those_for_stores_and_the_pool_closes(
    fake: FakeDevice,
) -> None:
    layout = PagedLayout([torch.zeros(4, 6)])
    fake.fail = {"new stream5": MemoryError("no streams")}
    with (
        pytest.raises(MemoryError, match="no streams"),
        HostPool(layout, num_pages=1) as host,
        OffloadHandler(layout, host),
    ):
        raise AssertionError("it was made")
    assert sum(line.startswith("free") for line in fake.log) == 5


def test_a_dropped_handler_that_cannot_wait_keeps_its_memory(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PagedLayout([torch.zeros(4, 6)])
    handler = OffloadHandler(layout, HostPool(layout, num_pages=1))
    handler.store([0], [0])
    kept = weakref.ref(handler.host)
    monkeypatch.setattr(handler_module, "_kept", [])

    def capturing() -> None:
        raise RuntimeError("a graph is captured")

    fake.check_not_capturing = capturing  # type: ignore[method-assign]
    handler_of_nobody = weakref.ref(handler)
    with pytest.warns(RuntimeWarning, match="cannot wait for its jobs: a graph is captured"):
        del handler
    assert handler_of_nobody() is None
    assert kept() is not None
