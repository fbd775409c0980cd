"""The engine stores blocks and finds them again by their content."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable

import pytest
import torch
from bf16_cache import Bf16Cache
from drained import drain
from engine_bytes import BLOCKS, CHECKS, PAGES, make
from error_text import error_text
from expecttest import assert_expected_inline
from logged import logged
from patience import PATIENCE, in_time
from pinning_steps import PinningSteps
from processes import in_child
from simulated_driver import Driver, cache, place, simulated

from torch_kvswap import BlockGroup, HostPool, OffloadEngine, OffloadHandler, PagedLayout


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_engine_loads_the_bytes_that_it_stored(
    check: Callable[[str], None], device: str
) -> None:
    check(device)


def test_only_what_is_new_is_copied():
    engine, _ = make()
    with engine.handler:
        first = engine.store(["a", "b"], [1, 2])
        engine.poll()
        second = engine.store(["a", "b", "c"], [5, 6, 3])
        assert second.nbytes == first.nbytes // 2
        engine.poll()
        assert engine.store(["a", "c"], [1, 3]) is None
        assert engine.store(list(range(PAGES + 1)), list(range(PAGES + 1))) is None  # no room


def test_stats_say_why_a_store_stored_nothing():
    def why_none(engine, keys):
        """How many more blocks were skipped, and stores refused, by a store that returns None."""
        before = engine.manager.stats()
        assert engine.store(keys, [*range(len(keys))]) is None
        after = engine.manager.stats()
        return after.skipped - before.skipped, after.refused - before.refused

    engine, _ = make()
    with engine.handler:
        engine.store(["a"], [1])
        assert why_none(engine, ["a"]) == (0, 0)  # it is being stored
        engine.poll()
        assert why_none(engine, ["a"]) == (0, 0)
        assert why_none(engine, [*range(PAGES + 1)]) == (0, 1)
    engine, _ = make(store_threshold=2)
    with engine.handler:
        assert why_none(engine, ["a", "b"]) == (2, 0)


def test_an_option_that_is_neither_true_nor_false_is_refused_also_if_nothing_is_copied():
    engine, _ = make()
    lazy, _ = make(store_policy="lazy")
    with engine.handler, lazy.handler:
        engine.store(["a"], [1])  # has not been polled: "a" can neither be stored nor loaded
        for call, name in (
            (engine.store, "copy_engines_only"),
            (engine.load, "copy_engines_only"),
            (engine.load, "expedited"),
            (engine.preempt, "copy_engines_only"),
            (lazy.store, "copy_engines_only"),
        ):
            assert error_text(call, ["a"], [1], **{name: "no"}) == (
                f"TypeError: {name} is 'no'; it must be True or False"
            )
        for of_policy in (engine, lazy):
            assert error_text(of_policy.evict, [1], copy_engines_only="no") == (
                "TypeError: copy_engines_only is 'no'; it must be True or False"
            )
        assert engine.manager.stats().filling_pages == 1


def test_what_a_job_would_wait_for_is_checked_also_if_nothing_is_copied():
    engine, _ = make()
    with engine.handler:
        engine.store(["a"], [1])
        engine.poll()
        errors = [
            error_text(engine.load, ["x"], [1], gate=object()),
            error_text(engine.load, ["x"], [1], layer_groups=0),
            error_text(engine.load, ["x"], [1], after=object()),
            error_text(engine.store, ["a"], [1], after=object()),
            error_text(engine.preempt, ["a"], [1], after=object()),
        ]
        assert engine.manager.stats().idle_pages == 1
    closed = "RuntimeError: the handler is closed; make a new one"
    assert error_text(engine.load, ["x"], [1]) == closed
    assert error_text(engine.store, ["a"], [1]) == closed
    assert error_text(engine.preempt, ["a"], [1]) == closed
    of_after = (
        "TypeError: after= is an object, but transfers of a cache on the CPU run inside the call "
        "and cannot wait for a stream; wait on the host first, and pass None or AFTER_NOTHING"
    )
    assert [" ".join(error.split()) for error in errors] == [
        "TypeError: gate is an object; pass what OffloadHandler.gate() returns",
        "ValueError: layer_groups is 0; it must be 1 to 2",
        *[of_after] * 3,
    ]


def test_a_load_takes_the_blocks_of_all_keys_also_beyond_the_prefix():
    engine, tensor = make()
    with engine.handler:
        engine.store(["a", "b", "c"], [1, 2, 3])
        engine.poll()
        with pytest.raises(
            ValueError, match=r"pass one for each block of all keys, -1 for a block that is"
        ):
            engine.load(["a", "b", "c"], [7, 8], prefix=2)
        engine.load(["a", "b", "c"], [7, 8, 9], prefix=2)
        assert tensor[7:10, 0].tolist() == [1, 2, 9]


def test_a_refused_call_leaves_nothing_behind():
    engine, _ = make()
    with engine.handler:
        engine.store(["a"], [1])
        engine.poll()
        with pytest.raises(IndexError):
            engine.store(["b", "c"], [2, 99])
        with pytest.raises(IndexError):
            engine.preempt(["b", "c"], [2, 99])
        with pytest.raises(IndexError):
            engine.load(["a"], [99])
        stats = engine.manager.stats()
        assert (stats.free_pages, stats.idle_pages) == (PAGES - 1, 1)
        assert engine.lookup(["a"]).ready == 1
        assert engine.lookup(["b"]).found == 0


def test_a_preemption_that_cannot_be_submitted_holds_nothing():
    engine, tensor = make()
    with engine.handler:
        engine.store(["a"], [1])
        engine.poll()
        tensor.data = tensor.clone()
        with pytest.raises(RuntimeError, match="has moved"):
            engine.preempt(["a", "b"], [1, 2])
        stats = engine.manager.stats()
        assert (stats.free_pages, stats.idle_pages) == (PAGES - 1, 1)


def test_a_handler_has_one_engine() -> None:
    engine, _ = make()
    with engine.handler as handler:
        assert_expected_inline(
            error_text(OffloadEngine, handler),
            """\
ValueError: the handler has an engine already, which assigns its pages; make a handler
and a pool for another one""",
        )
        job = engine.store(["a"], [1])
        del engine
        other = OffloadEngine(handler)
        assert [result.job_id for result in other.poll()] == [job.id]
        assert other.lookup(["a"]).found == 0  # it knows only what it has stored itself


def test_an_engine_that_was_refused_does_not_keep_the_handler() -> None:
    engine, _ = make()
    with engine.handler as handler:
        del engine
        with pytest.raises(ValueError, match="policy"):
            OffloadEngine(handler, eviction_policy="never")
        OffloadEngine(handler)


def test_the_handler_of_an_engine_reports_no_results() -> None:
    engine, _ = make()
    with engine.handler as handler:
        engine.store(["a"], [1])
        assert_expected_inline(
            error_text(handler.poll),
            """\
RuntimeError: an OffloadEngine uses this handler; call the engine's poll()""",
        )
        assert [result.ok for result in engine.poll()] == [True]
        assert engine.lookup(["a"]).ready == 1
        del engine
        assert handler.poll() == []


def test_the_handler_of_an_engine_takes_no_page_ids() -> None:
    engine, tensor = make()
    with engine.handler as handler:
        engine.store(["a"], [1])
        engine.poll()
        assert_expected_inline(
            error_text(handler.store, page_ids=[0], gpu_block_ids=[7]),
            """\
RuntimeError: an OffloadEngine assigns the pages of this handler; call the engine's
store(), or make a handler and a pool for your own page ids""",
        )
        with pytest.raises(RuntimeError, match=r"call the engine's load\(\), or make"):
            handler.load(page_ids=[0], gpu_block_ids=[1])
        engine.load(["a"], [8])
        assert tensor[[1, 8], 0].tolist() == [1, 1]
        engine.poll()
        handler.rebind(handler.layouts[0])
        handler.close()
        with pytest.raises(RuntimeError, match="the handler is closed"):
            handler.store(page_ids=[0], gpu_block_ids=[7])


def test_a_handler_whose_engine_was_dropped_takes_page_ids() -> None:
    engine, tensor = make()
    with engine.handler as handler:
        engine.store(["a"], [1])
        del engine
        handler.store(page_ids=[0], gpu_block_ids=[7])
        handler.load(page_ids=[0], gpu_block_ids=[8])
        assert tensor[8, 0] == 7


def test_a_closed_handler_gets_no_engine() -> None:
    engine, _ = make()
    handler = engine.handler
    del engine
    handler.close()
    with pytest.raises(RuntimeError, match=r"^the handler is closed; make a new one$"):
        OffloadEngine(handler)


@pytest.mark.parametrize("keys", [["a", "b"], ["x", "y"]], ids=["stored", "new"])
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_gpu_blocks_are_checked_whatever_the_host_has(keys: list[str], policy: str) -> None:
    engine, _ = make(store_policy=policy)
    with engine.handler:
        engine.preempt(["a", "b"], [0, 1])
        engine.poll()
        for call in (engine.store, engine.preempt):
            with pytest.raises(IndexError, match=r"^gpu_block_ids\[1\] is 999; there are 16 GPU"):
                call(keys, [0, 999])
            with pytest.raises(IndexError, match=r"^gpu_block_ids\[0\] is -2; there are 16 GPU"):
                call(keys, [-2, 0])
            with pytest.raises(ValueError, match=r"^gpu_block_ids has 1 id for 2 keys of 1 block"):
                call(keys, [0])
        with pytest.raises(ValueError, match=r"^gpu_block_ids has 1 id for 2 keys of 1 block"):
            engine.load(keys, [0])
        with pytest.raises(IndexError, match=r"^gpu_block_ids\[1\] is 16; there are 16 GPU"):
            engine.load(keys, [0, 16])
        assert engine.manager.stats().filling_pages == 0


def test_gpu_blocks_of_each_group_are_checked_whatever_the_host_has() -> None:
    layouts = [PagedLayout([torch.zeros(4, 4)]), PagedLayout([torch.zeros(8, 4)])]
    with OffloadHandler(layouts, [HostPool(layout, 4) for layout in layouts]) as handler:
        engine = OffloadEngine(handler, [BlockGroup(4), BlockGroup(4)])
        keys = [["a", "b"], ["a", "b"]]
        engine.store(keys, [[0, 1], [0, 7]])
        engine.poll()
        for call in (engine.store, engine.preempt):
            with pytest.raises(IndexError, match=r"^gpu_block_ids\[0\]\[1\] is 7; there are 4 GPU"):
                call(keys, [[0, 7], [0, 1]])
            with pytest.raises(ValueError, match=r"^gpu_block_ids\[1\] has 3 ids for 2 keys"):
                call(keys, [[0, 1], [0, 1, 2]])
            with pytest.raises(TypeError, match=r"^keys\[1\] is None; pass bytes"):
                call([["a"], None], [[0], [0]])


@simulated
def test_an_engine_starts_while_its_pool_is_being_pinned(driver: Driver) -> None:
    steps = PinningSteps()
    rows = torch.randint(256, (16, 4096), dtype=torch.uint8)
    layout = place(driver, PagedLayout([rows]))
    options = {"chunk_bytes": 4 * 4096, "pin_in_background": True, "on_progress": steps}
    with HostPool(layout, 12, **options) as pool, OffloadHandler(layout, pool) as handler:
        assert pool.wait_ready(PATIENCE, pages=8)
        engine = OffloadEngine(handler)
        assert engine.store(list(range(9)), list(range(9))) is None  # one page too many
        assert engine.preempt(list(range(9)), list(range(9))) is None
        handler.synchronize(engine.store(list(range(8)), list(range(8))))
        engine.poll()
        handler.synchronize(engine.store([8], [8]))  # the end of the prompt goes for it
        assert engine.manager.stats().evicted == 1
        engine.poll()
        steps.pin_more(2)
        assert pool.wait_ready(PATIENCE)
        held = engine.preempt([9, 10, 11, 12], [9, 10, 11, 12])
        handler.synchronize(held.jobs)
        engine.poll()
        assert engine.release(held)
        stats = engine.manager.stats()
        assert (stats.pages, stats.evicted, stats.free_pages) == (12, 1, 0)
        keys, kept = [*range(7), *range(8, 13)], rows.clone()
        rows.zero_()
        handler.synchronize(engine.load(keys, keys))
        assert torch.equal(rows[keys], kept[keys])


@simulated
def test_an_engine_goes_on_with_the_pages_that_could_be_pinned(driver: Driver) -> None:
    steps = PinningSteps()
    layout = place(driver, PagedLayout([torch.zeros(16, 4096, dtype=torch.uint8)]))
    options = {"chunk_bytes": 4 * 4096, "pin_in_background": True, "on_progress": steps}
    with HostPool(layout, 12, **options) as pool, OffloadHandler(layout, pool) as handler:
        assert pool.wait_ready(PATIENCE, pages=8)
        driver.limit_registration(in_all=8 * 4096)
        with logged() as messages:
            steps.pin_more(2)
            assert "no more will be" in error_text(pool.wait_ready, PATIENCE)
            assert in_time(lambda: not pinning_threads())
        assert "8 of 12 host pages are pinned" in messages[0]
        engine = OffloadEngine(handler)
        for i in range(20):
            handler.synchronize(engine.store([i], [i % 16]))
            engine.poll()
        assert engine.manager.stats().evicted == 12


@pytest.mark.gpu
def test_lazy_storing_into_a_pool_that_is_being_pinned_keeps_the_bytes_on_a_gpu() -> None:
    rows = torch.randint(256, (64, 1 << 20), dtype=torch.uint8, device="cuda")
    layout, ids = PagedLayout([rows]), list(range(64))
    kept = rows.clone()
    with (
        HostPool(layout, 64, chunk_bytes=4 << 20, pin_in_background=True) as pool,
        OffloadHandler(layout, pool) as handler,
    ):
        engine = OffloadEngine(handler, store_policy="lazy")
        assert engine.store(ids, ids) is None
        for job in engine.evict(ids):
            handler.synchronize(job)
        engine.poll()
        if engine.lookup(ids).ready < 64:  # there were too few pages
            assert pool.wait_ready(60)
            engine.store(ids, ids)
            for job in engine.evict(ids):
                job.wait()
                rows.zero_()
            drain(handler)
            engine.poll()
        rows.zero_()
        assert engine.lookup(ids).ready == 64
        engine.load(ids, ids).wait()
        assert torch.equal(rows, kept)


def pinning_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("kvswap-pin")]


def test_of_a_shared_pool_an_engine_uses_the_pages_of_its_process():
    layout = PagedLayout([torch.arange(1, 9, dtype=torch.uint8)[:, None].repeat(1, 16)])
    with HostPool.create_shared(layout, 6, world=2) as first:
        pool = HostPool.attach(layout, first.share(), rank=1)
        with pool, OffloadHandler(layout, pool) as handler:
            engine = OffloadEngine(handler)
            assert engine.store(["a", "b", "c", "d"], [0, 1, 2, 3]) is None
            engine.store(["a", "b", "c"], [0, 1, 2])
            engine.poll()
            assert first.pages[:, 0, 0].tolist() == [0, 0, 0, 1, 2, 3]
            engine.load(["a", "b"], [6, 7])
            assert layout.tensors[0][6:, 0].tolist() == [1, 2]


@simulated
def test_blocks_of_jobs_that_failed_are_not_found(driver: Driver) -> None:
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        engine = OffloadEngine(handler)
        driver.fail("cuMemcpyBatchAsync")
        engine.store(["a", "b"], [1, 3])
        drain(handler)
        assert [result.state for result in engine.poll()] == ["failed"]
        assert engine.lookup(["a"]).found == 0
        engine.store(["a", "b"], [1, 3])
        drain(handler)
        engine.poll()
        assert engine.lookup(["a", "b"]).ready == 2
        driver.fail("cuMemcpyBatchAsync")
        engine.load(["a"], [5])
        drain(handler)
        assert [result.state for result in engine.poll()] == ["failed"]
        assert engine.lookup(["a", "b"]).found == 0
        assert engine.manager.stats().free_pages == host.num_pages - 1


@simulated
def test_blocks_of_a_load_that_was_cancelled_are_still_found(driver: Driver) -> None:
    driver.set_mode("manual")
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        engine = OffloadEngine(handler)
        engine.store(["a", "b"], [1, 3])
        driver.run()
        assert [result.state for result in engine.poll()] == ["done"]
        assert handler.cancel(engine.load(["a", "b"], [5, 6]))
        driver.set_mode("immediate")
        drain(handler)
        assert [result.state for result in engine.poll()] == ["cancelled"]
        assert engine.lookup(["a", "b"]).ready == 2
        assert engine.manager.stats().idle_pages == 2


@simulated
def test_blocks_of_a_store_that_was_cancelled_are_not_found(driver: Driver) -> None:
    driver.set_mode("manual")
    gpu, host = cache(driver)
    with OffloadHandler(gpu, host) as handler:
        engine = OffloadEngine(handler)
        assert handler.cancel(engine.store(["a", "b"], [1, 3]))
        driver.set_mode("immediate")
        drain(handler)
        assert [result.state for result in engine.poll()] == ["cancelled"]
        assert engine.lookup(["a"]).found == 0
        assert engine.manager.stats().free_pages == host.num_pages


def test_threads_that_submit_and_one_that_collects_lose_no_job():
    engine, _ = make(pages=8)
    over, deadline = threading.Event(), time.monotonic() + PATIENCE

    def collect():
        while not over.is_set():
            engine.poll()

    def submit(number):
        for i in range(50):
            while engine.store([(number, i)], [number]) is None:
                assert time.monotonic() < deadline

    with engine.handler:
        collector = threading.Thread(target=collect)
        threads = [threading.Thread(target=submit, args=(number,)) for number in range(3)]
        for thread in (collector, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        collector.join()
        engine.poll()
        stats = engine.manager.stats()
        assert stats.free_pages + stats.idle_pages == 8
        assert stats.stored == 150


def test_a_poll_that_sees_a_job_before_it_is_recorded_waits_for_that():
    """The job ends, and another thread polls, before the call that submits it returns."""

    class Lock:
        def __init__(self):
            self.lock, self.poll_arrives = threading.Lock(), threading.Event()
            self.owner = None

        def __enter__(self):
            if threading.current_thread() is poller:
                self.poll_arrives.set()
            self.lock.acquire()
            self.owner = threading.current_thread()

        def __exit__(self, *_):
            self.owner = None
            self.lock.release()

    engine, _ = make()
    poller = threading.Thread(target=engine.poll)
    engine._lock, submit = Lock(), engine.handler._submit

    def submit_and_poll(*arguments, **options):
        job = submit(*arguments, **options)
        poller.start()
        assert engine._lock.poll_arrives.wait(PATIENCE)
        if engine._lock.owner is not threading.current_thread():
            poller.join(PATIENCE)  # nothing makes it wait
        return job

    with engine.handler:
        engine.handler._submit = submit_and_poll
        engine.store(["a"], [1])
        poller.join(PATIENCE)
        assert engine.lookup(["a"]).ready == 1


def test_a_gpu_block_is_not_stored_as_the_contents_of_two_keys():
    """Placeholders for blocks that were not loaded would be found later as what their keys say."""
    engine, _ = make()
    lazy, _ = make(store_policy="lazy")
    pages, _ = make(per_page=2)
    layout = PagedLayout([torch.zeros(4, 4)])
    hybrid = OffloadHandler([layout, layout], [HostPool(layout, 4), HostPool(layout, 4)])
    with engine.handler, lazy.handler, pages.handler, hybrid:
        window = [BlockGroup(4), BlockGroup(4, window_tokens=1)]
        several = OffloadEngine(hybrid, window)
        twice = (
            "ValueError: gpu_block_ids[1] and gpu_block_ids[3] are both 2, but no block has the\n"
            "contents of two; pass -1 for blocks that are not on the GPU"
        )
        for call in engine.store, engine.preempt, lazy.store:
            assert error_text(call, ["a", "b", "c", "d"], [1, 2, 3, 2]) == twice
        assert error_text(pages.store, ["a", "b"], [1, 2, 3, 2]) == twice
        keys = [["a", "b", "c"], ["A", "B", "C"]]
        assert "gpu_block_ids[1][0] and gpu_block_ids[1][1] are both 0" in error_text(
            several.store, keys, [[0, 1, 2], [0, 0, 3]]
        )
        for of_policy in (engine, lazy, pages, several):
            assert of_policy.manager.stats().filling_pages == 0
            assert of_policy.evict([[3, 3], [3]] if of_policy is several else [3, 3]) == []


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("per_page", [1, 2])
def test_keys_with_a_block_that_is_not_on_the_gpu_are_left_out(per_page: int, policy: str) -> None:
    engine, tensor = make(per_page=per_page, store_policy=policy)
    keys, last = ["a", "b", "c", "d"], 4 * per_page - per_page // 2
    blocks = list(range(last))  # the last page is part full
    blocks[per_page - 1] = blocks[2 * per_page] = -1  # in the first and the third page
    with engine.handler:
        engine.store(keys, blocks)
        engine.evict(blocks)
        engine.poll()
        assert [engine.lookup([key]).ready for key in keys] == [0, 1, 0, 1]
        tensor[:] = 0
        assert engine.load(keys, [15 if block < 0 else block for block in blocks]) is None
        engine.load(keys, blocks)
        expected = torch.zeros(BLOCKS)
        for page in (1, 3):
            of_page = slice(page * per_page, min((page + 1) * per_page, last))
            expected[of_page] = torch.arange(BLOCKS)[of_page]
        assert tensor[:, 0].tolist() == expected.tolist()
        engine.poll()
        held = engine.preempt(["x", *keys[1:]], blocks)
        assert held is not None
        assert held.jobs == []  # the host has the two blocks that are on the GPU
        assert engine.manager.stats().idle_pages == 0
        assert engine.release(held)


def test_a_load_needs_a_block_on_the_gpu_for_each_block_that_its_prefix_needs() -> None:
    layouts = [PagedLayout([torch.arange(8.0)[:, None].repeat(1, 4)]) for _ in range(2)]
    pools = [HostPool(layouts[0], 4), HostPool(layouts[1], 4, blocks_per_page=2)]
    with OffloadHandler(layouts, pools) as handler:
        groups = [BlockGroup(4), BlockGroup(4, block_tokens=2, window_tokens=2)]
        engine = OffloadEngine(handler, groups)
        keys = [["a", "b", "c", "d"], ["B", "D"]]
        engine.store(keys, [[0, 1, 2, 3], [0, 1, 2, 3]])
        engine.poll()
        assert engine.manager.needed_blocks(2) == [range(4), range(1, 2)]
        engine.load(keys, [[4, 5, 6, 7], [-1, -1, 6, 7]], prefix=2)
        assert layouts[1].tensors[0][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 2, 3]
        errors = [
            error_text(engine.load, keys, ids, prefix=2)
            for ids in (
                [[4, 5, -1, 7], [-1, -1, 6, 7]],
                [[4, 5, 6, 7], [-1, -1, 6, -1]],
                [[4, 5, 6, 8], [-1, -1, 6, 7]],
                [[4, 5, 6, 7], [-2, -1, 6, 7]],
            )
        ]
        engine.poll()
        assert [engine.manager.stats(group).idle_pages for group in (0, 1)] == [4, 2]
    assert_expected_inline(
        "\n".join(errors),
        """\
ValueError: gpu_block_ids[0][2] is -1, but what follows the prefix needs this block;
pass a GPU block for each block of manager.needed_blocks(prefix)
ValueError: gpu_block_ids[1][3] is -1, but what follows the prefix needs this block;
pass a GPU block for each block of manager.needed_blocks(prefix)
IndexError: gpu_block_ids[0][3] is 8; there are 8 GPU blocks, 0 to 7, and -1 is a block
that is not on the GPU
IndexError: gpu_block_ids[1][0] is -2; there are 8 GPU blocks, 0 to 7, and -1 is a block
that is not on the GPU""",
    )


@pytest.mark.parametrize(
    ("other", "blocks"),
    [
        (BlockGroup(8, 2), [0, 1, 2, 3, 4]),
        (BlockGroup(8, 2, window_tokens=4), [-1, -1, -1, 3, 4]),
        (BlockGroup(8, 4, is_state=True), [-1, -1, 4]),
    ],
    ids=["full attention", "window", "state"],
)
def test_a_preempted_request_that_ends_inside_a_unit_is_pending_until_poll(
    other: BlockGroup, blocks: list[int]
) -> None:
    # 10 tokens; both groups have whole blocks at 4 and 8.
    layouts = [PagedLayout([torch.arange(8.0)[:, None].repeat(1, 4)]) for _ in range(2)]
    with OffloadHandler(layouts, [HostPool(layout, 8) for layout in layouts]) as handler:
        engine = OffloadEngine(handler, [BlockGroup(8, 4), other])
        keys = [["a", "b", "part"], [f"of {at}" for at in range(len(blocks))]]
        engine.store([its[:2] for its in keys], [[0, 1], blocks[:2]])
        engine.poll()
        held = engine.preempt(keys, [[0, 1, 2], blocks])
        assert held is not None
        for layout in layouts:
            layout.tensors[0].zero_()
        assert engine.load(keys, [[0, 1, 2], blocks]) is None
        assert engine.lookup(keys, again=True).pending == 1 + sum(at > 1 for at in blocks)
        engine.poll()
        assert engine.lookup(keys, again=True).pending == 0
        assert engine.load(keys, [[0, 1, 2], blocks]) is not None
        for layout, its in zip(layouts, ([0, 1, 2], blocks), strict=True):
            assert [layout.tensors[0][at, 0] for at in its if at >= 0] == [
                at for at in its if at >= 0
            ]


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_no_call_of_an_engine_works_in_a_forked_child(policy: str) -> None:
    engine, _ = make(store_policy=policy)
    with engine.handler:
        held = engine.preempt(["a"], [1])
        calls = [
            lambda: engine.lookup(["a"]),
            lambda: engine.load(["a"], [2]),
            lambda: engine.store(["a"], [1]),
            lambda: engine.evict([1]),
            lambda: engine.evict([]),
            lambda: engine.preempt(["b"], [3]),
            lambda: engine.release(held),
            lambda: engine.poll(),
        ]
        refused = "RuntimeError: this "
        assert in_child(lambda: all(error_text(call).startswith(refused) for call in calls)) == 1
        for call in calls:
            call()


def test_errors_say_what_was_wrong():
    engine, _ = make(per_page=2)
    layout = PagedLayout([torch.zeros(4, 4)])
    handler = OffloadHandler([layout], [HostPool(layout, 4)])
    with engine.handler, handler:
        several = OffloadEngine(handler, [BlockGroup(4)])
        errors = [
            error_text(OffloadEngine, handler),
            error_text(OffloadEngine, engine.handler, [BlockGroup(PAGES)]),
            error_text(OffloadEngine, handler, [BlockGroup(3)]),
            error_text(engine.store, ["a"], [1, 2, 3]),
            error_text(several.store, [["a"]], [[1], [2]]),
            error_text(several.store, [["a"]], None),
            error_text(several.evict, [1, 2]),
            error_text(engine.evict, [1, BLOCKS]),
            error_text(engine.evict, [-2]),
            error_text(OffloadEngine, None),
            error_text(OffloadEngine, engine.handler, store_policy="never"),
            error_text(OffloadEngine, engine.handler, num_ready_pages=3),
            error_text(OffloadEngine, handler, [4]),
            error_text(engine.store, ["a"], [1], first_block=1),
            error_text(engine.load, ["a"], [1], first_block=1),
            error_text(engine.preempt, ["a"], [1], first_block=1),
            error_text(engine.evict, [1], first_block=1),
            error_text(engine.store, ["a"], None),
            error_text(engine.store, None, [1]),
            error_text(engine.lookup, {"a": 1}),
            error_text(engine.release, 5),
            error_text(make(per_page=2, store_policy="lazy")[0].store, ["a"], [1, BLOCKS]),
            error_text(copy.copy, engine),
            error_text(copy.deepcopy, engine),
            error_text(pickle.dumps, engine),
        ]
    assert_expected_inline(
        "\n".join(errors),
        """\
ValueError: groups is None, but the handler has a list of 1 layouts; pass a BlockGroup
for each
ValueError: groups is for a handler with a list of layouts; leave it out, or make the
handler from a list of one layout and a list of one pool
ValueError: the groups have [3] pages, their pools [4]; make num_pages the number of the
pool's local_pages
ValueError: gpu_block_ids has 3 ids for 1 key of 2 blocks each; pass one for each block
of all keys, -1 for a block that is not on the GPU
ValueError: gpu_block_ids has 2 items for 1 group; pass one for each group
TypeError: gpu_block_ids is None; pass a list with an item for each group
ValueError: gpu_block_ids has 2 items for 1 group; pass one for each group
IndexError: gpu_block_ids[1] is 16; there are 16 GPU blocks, 0 to 15, and -1 is a block
that is not on the GPU
IndexError: gpu_block_ids[0] is -2; there are 16 GPU blocks, 0 to 15, and -1 is a block
that is not on the GPU
TypeError: handler is None; pass an OffloadHandler
ValueError: store_policy is 'never'; it can be eager or lazy
TypeError: OffloadEngine.__init__() got an unexpected keyword argument 'num_ready_pages'
TypeError: groups[0] is an int; pass a BlockGroup
TypeError: OffloadEngine.store() got an unexpected keyword argument 'first_block'
TypeError: OffloadEngine.load() got an unexpected keyword argument 'first_block'
TypeError: OffloadEngine.preempt() got an unexpected keyword argument 'first_block'
TypeError: OffloadEngine.evict() got an unexpected keyword argument 'first_block'
TypeError: gpu_block_ids is None; pass a list, numpy array or CPU tensor
TypeError: keys is None; pass bytes of digests or a list
TypeError: keys is a dict; pass bytes of digests or a list
TypeError: preempted is an int; pass what preempt() returned
IndexError: gpu_block_ids[1] is 16; there are 16 GPU blocks, 0 to 15, and -1 is a block
that is not on the GPU
TypeError: OffloadEngine cannot be copied or pickled: it owns memory of this process;
pass it by reference, or make another one
TypeError: OffloadEngine cannot be copied or pickled: it owns memory of this process;
pass it by reference, or make another one
TypeError: OffloadEngine cannot be copied or pickled: it owns memory of this process;
pass it by reference, or make another one""",
    )


def test_a_printed_engine_has_the_pages_in_use():
    engine, _ = make(store_policy="lazy")
    with engine.handler:
        engine.manager.complete(engine.manager.prepare_store(["a", "b"]))
        assert in_child(lambda: repr(engine.manager).endswith(", used_pages=unknown)")) == 1
        assert_expected_inline(
            repr(engine).replace(", manager", ",\nmanager").replace(", handler", ",\nhandler"),
            """\
OffloadEngine(store_policy='lazy',
handler=OffloadHandler(device=cpu, num_blocks=16, num_pages=6, 0 jobs outstanding),
manager=BlockManager(num_pages=6, used_pages=2))""",
        )


# Encoded pages: blocks that do not fit


def make_encoded(per_page=1, kinds=("normal",) * 6, pages=6):
    """Blocks of these kinds; None does not fit."""
    cache = Bf16Cache()
    for block, kind in enumerate(kinds):
        cache.fill(block, kind, block)
    pool = HostPool(cache.layout, pages, per_page, encoding="lossless", bits_per_value=12.5)
    return OffloadEngine(OffloadHandler(cache.layout, pool)), cache


def test_only_the_blocks_that_do_not_fit_are_forgotten():
    engine, cache = make_encoded(kinds=["normal", "zeros", None, "normal"])
    with engine.handler:
        keys = ["a", "b", "c", "d"]
        engine.store(keys, [0, 1, 2, 3])
        (result,) = engine.poll()
        assert (result.ok, result.rejected) == (False, (2,))
        assert engine.lookup(keys) == (2, 2, 0)  # not past the block that is missing
        stats = engine.manager.stats()
        assert (stats.stored, stats.failed, stats.idle_pages, stats.free_pages) == (3, 1, 3, 3)
        engine.load(keys, [8, 9, 10, 11], prefix=2).synchronize()
        assert [cache.bytes_of(block) for block in (8, 9)] == list(map(cache.bytes_of, (0, 1)))
        cache.fill(2, "normal")
        assert engine.store(keys, [0, 1, 2, 3]).nbytes == cache.layout.block_bytes
        engine.poll()
        assert engine.lookup(keys).ready == 4  # the block behind was never lost


@pytest.mark.parametrize("per_page", [2, 3])
def test_a_page_is_forgotten_for_some_of_its_blocks(per_page):
    kinds = ["normal"] * 3 * per_page
    missing = (2 * per_page - 2, 2 * per_page - 1, 2 * per_page)  # two of one page, one of the next
    for block in missing:
        kinds[block] = None
    engine, _ = make_encoded(per_page, kinds)
    with engine.handler:
        engine.store(["a", "b", "part"], list(range(2 * per_page + 1)))
        (result,) = engine.poll()
        assert result.rejected == missing
        assert engine.lookup(["a", "b"]).ready == 1
        assert engine.manager.stats().failed == 2


def test_blocks_of_a_load_that_are_not_there_are_forgotten():
    engine, cache = make_encoded()
    with engine.handler:
        engine.store(["a", "b", "c"], [0, 1, 2])
        engine.poll()
        engine.handler.pools[0].pages[1].zero_()  # damaged
        engine.load(["a", "b", "c"], [8, 9, 10])
        (result,) = engine.poll()
        assert (result.direction, result.rejected) == ("load", (1,))
        assert engine.lookup(["a", "b", "c"]) == (1, 1, 0)
        assert cache.bytes_of(10) == cache.bytes_of(2)
        assert engine.manager.stats().idle_pages == 2


def test_a_preempted_request_with_a_block_that_does_not_fit_is_lost():
    engine, _ = make_encoded(kinds=["normal", None, "normal"])
    with engine.handler:
        held = engine.preempt(["a", "b", "c"], [0, 1, 2])
        engine.poll()
        assert engine.load(["a", "b", "c"], [8, 9, 10]) is None
        assert engine.lookup(["a", "b", "c"], again=True).pending == 0
        assert engine.release(held)
        stats = engine.manager.stats()
        assert (stats.idle_pages, stats.free_pages) == (2, 4)


def test_rejected_blocks_of_each_group_are_forgotten():
    one, other = Bf16Cache(), Bf16Cache()
    one.fill(2, None)
    other.fill(1, None)
    pools = [HostPool(one.layout, 4, 2, encoding="lossless")]
    pools.append(HostPool(other.layout, 4, encoding="lossless"))
    with OffloadHandler([one.layout, other.layout], pools) as handler:
        engine = OffloadEngine(handler, [BlockGroup(4, 2), BlockGroup(4, 2)])
        engine.store([["a", "b"], ["s", "t"]], [[0, 1, 2], [0, 1]])
        (result,) = engine.poll()
        assert result.rejected == (2, 4)
        assert [engine.manager.stats(group).failed for group in range(2)] == [1, 1]
        assert engine.lookup([["a", "b"], ["s", "t"]]) == (1, 1, 0)
