"""Ctrl-C and other asynchronous exceptions in calls of a handler and of a prefix cache."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
import torch
from interrupts import Interrupter
from processes import run_script

from torch_kvswap import HostPool, OffloadHandler, PagedLayout, PrefixCache
from torch_kvswap.offload.handler import Job
from torch_kvswap.results import Result

BLOCKS = 8


def make_layout(blocks: int = BLOCKS) -> PagedLayout:
    """A cache whose blocks are filled with their numbers."""
    return PagedLayout([torch.arange(blocks)[:, None].expand(blocks, 4).contiguous()])


def make_handler(num_pages: int = BLOCKS) -> OffloadHandler:
    layout = make_layout()
    return OffloadHandler(layout, HostPool(layout, num_pages))


def jobs_alive() -> list[Job]:
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Job)]


@pytest.mark.parametrize(("direction", "has_tag"), [("store", False), ("load", True)])
def test_an_interrupted_submission_is_reported_or_undone(direction: str, has_tag: bool) -> None:
    before = jobs_alive()
    handler, interrupter, outcomes = make_handler(), Interrupter(), []
    submit = getattr(handler, direction)
    for at in count(1):
        tag = at if has_tag else None
        interrupted = interrupter.stops(
            at, partial(submit, gpu_block_ids=[1], page_ids=[2], tag=tag)
        )
        handler.synchronize()
        results = handler.poll()
        assert [(result.state, result.tag) for result in results] == [("done", tag)] * len(results)
        assert handler._tags == {}
        outcomes.append(len(results))
        if not interrupted:
            break
    assert jobs_alive() == before
    assert outcomes == sorted(outcomes), "no job up to some point, one behind it"
    assert {*outcomes} == {0, 1}
    assert outcomes.count(1) > 1
    handler.close()


def test_a_dropped_job_is_released_before_exceptions() -> None:
    handler, interrupter = make_handler(), Interrupter()
    jobs = [handler.store(gpu_block_ids=[1], page_ids=[2])]
    assert not interrupter.drop(1, jobs.clear)
    assert interrupter.points == 0


def make_rejecting_handler() -> OffloadHandler:
    """Its stores fail, and Python makes their errors."""
    bits = torch.randint(-(2**15), 2**15, (BLOCKS, 4096), dtype=torch.int16)
    layout = PagedLayout([bits.view(torch.bfloat16)])
    return OffloadHandler(layout, HostPool(layout, BLOCKS, encoding="lossless"))


@pytest.mark.parametrize(("make", "jobs"), [(make_handler, 70), (make_rejecting_handler, 3)])
def test_an_interrupted_poll_reports_no_job_twice(
    make: Callable[[], OffloadHandler], jobs: int
) -> None:
    handler, interrupter = make(), Interrupter()
    for at in count(1):
        tags = [(at, number) for number in range(jobs)]
        for tag in tags:
            handler.store(gpu_block_ids=[1], page_ids=[2], tag=tag)
        results: list[Result] = []
        is_interrupted = interrupter.stops(at, lambda into=results: into.extend(handler.poll()))
        handler.store(gpu_block_ids=[1], page_ids=[2], tag="later")
        results += handler.poll()
        assert results.pop().tag == "later"
        assert [result.tag for result in results] in (([], tags) if is_interrupted else (tags,))
        assert handler._tags == {}
        if not is_interrupted:
            break
    assert at > (1 if make is make_handler else jobs)
    handler.close()


def test_jobs_after_an_interrupted_rebind_are_consistent() -> None:
    interrupter, outcomes = Interrupter(), []
    for at in count(1):
        handler, new = make_handler(), make_layout(2 * BLOCKS)
        new.tensors[0].add_(100)
        interrupted = interrupter.stops(at, partial(handler.rebind, new))
        (layout,) = handler.layouts
        handler.synchronize(handler.store(gpu_block_ids=[3], page_ids=[0]))
        page = handler.pools[0].pages[0, 0].view(torch.int64)
        assert page.tolist() == layout.tensors[0][3].tolist()
        outcomes.append(layout is new)
        handler.close()
        if not interrupted:
            break
    assert outcomes == sorted(outcomes)
    assert outcomes.count(True) > 1


def make_prefix_cache() -> PrefixCache:
    layout = make_layout()
    return PrefixCache(layout, HostPool(layout, BLOCKS))


@pytest.mark.parametrize("state", ["done", "failed"])
def test_an_interrupted_poll_ends_each_reservation(state: str) -> None:
    interrupter, keys = Interrupter(), [bytes([number]) * 32 for number in range(4)]
    for at in count(1):
        handler = make_handler() if state == "done" else make_rejecting_handler()
        handler.close()
        prefixes = PrefixCache(handler.layouts[0], handler.pools[0])
        for number, key in enumerate(keys):
            prefixes.store([key], [number])
        assert prefixes.stats().filling_pages == len(keys)
        is_interrupted = interrupter.stops(at, prefixes.poll)
        prefixes.poll()
        stats = prefixes.stats()
        assert stats.filling_pages == 0
        assert (stats.stored, stats.failed) == ((4, 0) if state == "done" else (0, 4))
        prefixes.close()
        if not is_interrupted:
            break
    assert at > 3


@pytest.mark.parametrize("what", ["handler", "prefix cache", "pool"])
def test_a_cache_survives_its_last_users_interruption(what: str) -> None:
    layout, interrupter = make_layout(), Interrupter()
    for at in count(1):
        dropped: list[object] = [HostPool(layout, BLOCKS)]
        if what == "handler":
            handler = OffloadHandler(layout, dropped.pop())  # type: ignore[arg-type]
            handler.store(gpu_block_ids=[1], page_ids=[2])
            dropped.append(handler)
            del handler
        if what == "prefix cache":
            prefixes = PrefixCache(layout, dropped.pop())  # type: ignore[arg-type]
            prefixes.store([b"a" * 32], [1])
            dropped.append(prefixes)
            del prefixes
        is_interrupted = interrupter.drop(at, dropped.clear)
        with HostPool(layout, BLOCKS) as pool, PrefixCache(layout, pool) as another:
            check_that_it_works(another)
        if not is_interrupted:
            break
    assert at > 3


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_memory_not_waited_for_is_never_freed(is_interrupted: bool) -> None:
    script = """
        import os, sys, torch
        from torch_kvswap import HostPool, OffloadHandler, PagedLayout

        class Witness:
            def __del__(self, write=os.write):
                write(1, b"freed")

        def interrupt():
            raise KeyboardInterrupt

        layout = PagedLayout([torch.zeros(4, 4)])
        layout.witness = Witness()
        handler = OffloadHandler(layout, HostPool(layout, 4))
        if sys.argv[1] == "True":
            handler._native.close = interrupt
    """
    printed = run_script(script, str(is_interrupted), ends_as_usual=True)
    assert printed == ("" if is_interrupted else "freed")


CALLS: dict[str, Callable[[PrefixCache], object]] = {
    "store": lambda prefixes: prefixes.store([b"a" * 32, b"b" * 32], [0, 1]),
    "load": lambda prefixes: prefixes.load([b"a" * 32], [2]),
    "hold": lambda prefixes: prefixes.store([b"c" * 32], [3], hold=True),
    "poll": lambda prefixes: prefixes.poll(),
}


@pytest.mark.parametrize("when", ["first", "after another", "after rebind"])
@pytest.mark.parametrize("call", CALLS)
def test_a_prefix_cache_works_after_any_interrupted_call(call: str, when: str) -> None:
    interrupter = Interrupter()
    for at in count(1):
        prefixes = make_prefix_cache()
        if when != "first":
            prefixes.store([b"a" * 32], [0])
            prefixes.poll()
        if when == "after rebind":
            prefixes.rebind(make_layout(2 * BLOCKS))
        interrupted = interrupter.stops(at, partial(CALLS[call], prefixes))
        check_that_it_works(prefixes)
        assert_no_page_is_held(prefixes)
        prefixes.close()
        if not interrupted:
            break
    assert at > 3


def assert_no_page_is_held(prefixes: PrefixCache) -> None:
    stats = prefixes.stats()
    assert stats.free_pages + stats.idle_pages == stats.pages


def check_that_it_works(prefixes: PrefixCache) -> None:
    """Stores the last block, loads it into the first one, and holds it."""
    (rows,) = prefixes.layouts[0].tensors
    last = len(rows) - 1
    assert all(result.ok for result in prefixes.poll())
    prefixes.store([b"z" * 32], [last])
    assert [result.ok for result in prefixes.poll()] == [True]
    assert prefixes.load([b"z" * 32], [0]) is not None
    assert [result.ok for result in prefixes.poll()] == [True]
    assert rows[0].eq(last).all()
    held = prefixes.store([b"z" * 32], [last], hold=True)
    assert held.state == "present"
    assert held.lease is not None
    assert held.lease.let_go()


def test_a_rejected_submission_keeps_nothing() -> None:
    before, handler = jobs_alive(), make_handler()
    with pytest.raises(IndexError):
        handler.store(gpu_block_ids=[BLOCKS], page_ids=[0], tag="mine")
    assert (handler._tags, jobs_alive(), handler.poll()) == ({}, before, [])
