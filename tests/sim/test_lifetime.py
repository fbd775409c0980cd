"""What a job needs lives as long as the job; everything else is freed, and nothing is freed
twice.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import simulated_driver
import torch
from error_text import error_text
from gpu_cache import Hold
from host_pools import in_chunks
from interrupts import Interrupted, Interrupter
from patience import PATIENCE
from pinning_steps import PinningSteps
from simulated_driver import Driver, place, simulated

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap._native import loader
from torch_kvswap.host_pool.memory import Mapping
from torch_kvswap.prefix import BlockManager

MIB = 1 << 20


def make_layout(tensors: int = 1, row_bytes: int = 64) -> PagedLayout:
    return PagedLayout([torch.zeros(8, row_bytes, dtype=torch.uint8) for _ in range(tensors)])


def pin_in_background(driver: Driver) -> HostPool:
    """128 pages of 1 MiB: the first 32 are pinned, and the others by a thread, 32 at a time."""
    layout = place(driver, make_layout(row_bytes=MIB))
    return in_chunks(32 * MIB, layout, 128, pin_in_background=True)


def is_mapped(address: int) -> bool:
    maps = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(last, 16) for first, last in maps)


@simulated
@pytest.mark.parametrize("kept", ["the view", "the pool"])
def test_pages_stay_pinned_while_a_handler_uses_them(driver: Driver, kept: str) -> None:
    driver.set_mode("manual")
    layout = place(driver, make_layout())

    def make() -> OffloadHandler:
        pool = HostPool(layout, 8)
        return OffloadHandler(layout, pool.view_for(layout) if kept == "the view" else pool)

    handler = make()
    job = handler.store(gpu_block_ids=[0], page_ids=[0], after=())
    gc.collect()
    assert not job.query()
    assert driver.calls("cuMemHostUnregister") == 0
    driver.run()
    assert job.query()
    del handler, job
    gc.collect()
    assert driver.calls("cuMemHostUnregister") == 1


def make_dropped(driver: Driver, what: str) -> list[Any]:
    """A handler with a running store, or a pool, that nothing else refers to."""
    layout = place(driver, make_layout())
    pool = HostPool(layout, 8)
    if what == "pool":
        return [pool]
    handler = OffloadHandler(layout, pool.view_for(layout) if what == "view" else pool)
    handler.store(gpu_block_ids=[0], page_ids=[0])
    return [handler]


@simulated
@pytest.mark.parametrize("what", ["handler", "view"])
@pytest.mark.parametrize("runs", [True, False])
def test_interrupted_drops_of_handlers_keep_memory_pinned(
    driver: Driver, what: str, runs: bool
) -> None:
    """The driver reports memory that is unpinned with work on it pending."""
    interrupter = Interrupter(in_waits=True)
    interrupter.drop(0, make_dropped(driver, what).clear)
    assert driver.calls("cuMemHostUnregister") == 1
    points = interrupter.points
    assert points > 5
    for at in range(1, points + 1):
        driver.set_mode("manual")
        held = driver.hold(0)
        dropped = make_dropped(driver, what)
        if not runs:
            driver.release(held)
            driver.set_mode("immediate")
        native = weakref.ref(dropped[0]._native)
        unpinned = driver.calls("cuMemHostUnregister")
        assert interrupter.drop(at, dropped.clear)
        is_kept = native() is not None
        assert is_kept or not runs
        assert driver.calls("cuMemHostUnregister") == unpinned + (not is_kept)
        if runs:
            driver.release(held)
            driver.set_mode("immediate")
        if is_kept:
            native().close()


@simulated
def test_interrupted_drops_of_pools_keep_memory_mapped(driver: Driver) -> None:
    interrupter = Interrupter()
    for at in count(1):
        dropped = make_dropped(driver, "pool")
        address = dropped[0].pages.data_ptr()
        unpinned = driver.calls("cuMemHostUnregister")
        is_interrupted = interrupter.drop(at, dropped.clear)
        is_unpinned = driver.calls("cuMemHostUnregister") > unpinned
        assert is_unpinned or is_mapped(address)
        if not is_interrupted:
            break
    assert is_unpinned
    assert at > 10


@simulated
def test_closing_waits_for_a_half_dropped_handler(driver: Driver) -> None:
    driver.set_mode("manual")
    held, interrupter = driver.hold(0), Interrupter(in_waits=True)
    dropped = make_dropped(driver, "handler")
    pool = dropped[0].pools[0]
    assert interrupter.drop(5, dropped.clear)
    with pytest.raises(Interrupted):
        interrupter.call(1000, pool.close)  # it waits for the store until the signal
    assert driver.calls("cuMemHostUnregister") == 0
    driver.release(held)
    driver.set_mode("immediate")
    pool.close()
    assert driver.calls("cuMemHostUnregister") == 1


@simulated_driver.without_cuda
def test_at_exit_memory_stays_pinned_under_a_copy() -> None:
    def body(driver):  # type: ignore[no-untyped-def]
        import sys
        import weakref

        import torch
        from simulated_driver import place

        from torch_kvswap import HostPool, OffloadHandler, PagedLayout

        global state

        class State:
            pass

        state = State()
        sys.excepthook = lambda *problem: print(problem[1])
        weakref.finalize(
            state, lambda: print("unpinned:", driver.calls("cuMemHostUnregister"))
        )  # the last finalizer
        driver.set_mode("manual")
        driver.hold(0)
        state.layout = place(driver, PagedLayout([torch.zeros(8, 64, dtype=torch.uint8)]))
        state.handler = OffloadHandler(state.layout, HostPool(state.layout, 8))
        state.handler.store(gpu_block_ids=[0], page_ids=[0])

        def interrupt():
            raise TimeoutError("a signal handler's")

        state.handler._native.close = interrupt

    assert simulated_driver.run(body, ends_as_usual=True).splitlines() == [
        "a signal handler's",
        "unpinned: 0",
    ]


@pytest.mark.gpu
def test_a_job_outlives_its_dropped_pool() -> None:
    """Pages that are unpinned under a copy are an illegal access, which the device does not survive."""
    rows = torch.arange(4, dtype=torch.uint8, device="cuda:0").repeat_interleave(MIB).view(4, MIB)
    layout = PagedLayout([rows])

    def make() -> OffloadHandler:
        pool = HostPool(layout, 4)
        return OffloadHandler(layout, pool.view_for(layout))

    with make() as handler:
        gc.collect()
        handler.synchronize(handler.store(gpu_block_ids=[0], page_ids=[0]))
        with Hold():
            jobs = [
                handler.store(gpu_block_ids=[1, 2, 3], page_ids=[1, 2, 3]),
                handler.load(page_ids=[1, 2, 3], gpu_block_ids=[3, 2, 1]),
            ]
            assert not jobs[0].query()
        handler.synchronize(jobs, timeout=PATIENCE)
        assert [int(row.unique()) for row in rows] == [0, 3, 2, 1]


@pytest.mark.parametrize("first", ["the view", "the pool"])
def test_closing_a_pool_or_its_view_closes_both(first: str) -> None:
    layout = make_layout()
    pool = HostPool(layout, 8)
    view = pool.view_for(layout)
    handler = OffloadHandler(layout, view)
    for one in (view, pool) if first == "the view" else (pool, view):
        one.close()
        for closed in (view, pool):
            assert "the host pool is closed" in error_text(lambda closed=closed: closed.pages)
    assert (
        error_text(handler.store, gpu_block_ids=[0], page_ids=[0])
        == "RuntimeError: the host pool is closed, and with it its handler; make new ones"
    )


@simulated
@pytest.mark.parametrize("which", ["pool", "view", "view that is closed"])
def test_a_closed_pool_is_refused_at_once(driver: Driver, which: str) -> None:
    layout = place(driver, make_layout())
    pool = HostPool(layout, 8)
    view = pool.view_for(layout)
    (view if which == "view that is closed" else pool).close()
    streams = driver.live("streams")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "torch_kvswap.offload.handler.NativeHandler", lambda *_: pytest.fail("it was taken")
        )
        said = error_text(OffloadHandler, layout, pool if which == "pool" else view)
    assert said == "RuntimeError: the host pool is closed; make a new one"
    assert driver.live("streams") == streams


OWNERS: dict[str, Callable[[OffloadHandler], Any]] = {
    "job": lambda handler: handler.store(gpu_block_ids=[0], page_ids=[0]),
    "handler": lambda handler: handler,
    "native handler": lambda handler: handler._native,
    "pool": lambda handler: handler.pools[0],
    "view": lambda handler: handler.pools[0].view_for(handler.layouts[0]),
    "handle": lambda handler: handler.pools[0].share(),
    "block manager": lambda handler: BlockManager(4),
}


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_owns_native_memory_is_not_copied(
    owner: str, duplicate: Callable[[Any], object]
) -> None:
    layout = make_layout()
    handler = OffloadHandler(layout, HostPool(layout, 8, shared=True))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(OWNERS[owner](handler))
    handler.synchronize()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copied_layout_has_the_copied_tensors(duplicate: Callable[[Any], Any]) -> None:
    layout = PagedLayout([torch.zeros(2, 8, 16)], block_dim=1)
    other = duplicate(layout)
    assert other.tensors[0].data_ptr() != layout.tensors[0].data_ptr()
    assert other.bases[0] == other.tensors[0].data_ptr()
    assert (other.block_dim, other.sizes.tolist()) == (1, layout.sizes.tolist())


@simulated
def test_the_touching_thread_may_drop_the_pool(driver: Driver) -> None:
    """The garbage collector runs in any thread."""
    steps, kept = PinningSteps(), list[HostPool]()
    touch, unregister, mapped = Mapping.touch, loader.native.unregister_host, list[bool]()

    def drop_and_touch(mapping: Mapping, first: int, last: int) -> None:
        if first == 96 * MIB:
            kept.clear()
        touch(mapping, first, last)

    def look(device: int, address: int) -> None:
        mapped.append(is_mapped(address))
        unregister(device, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mapping, "touch", drop_and_touch)
        patch.setattr(loader.native, "unregister_host", look)
        kept.append(pin_in_background(driver))
        pinning = kept[0]._memory.pinning
        assert pinning is not None
        assert pinning._thread is not None
        steps.pin_more(3)
        pinning._thread.join(PATIENCE)
        assert not pinning._thread.is_alive()
    assert not kept
    assert mapped == [True] * driver.calls("cuMemHostRegister")
    assert driver.calls("cuMemHostUnregister") == len(mapped) > 0


@simulated
@pytest.mark.parametrize("wait", [OffloadHandler.synchronize, OffloadHandler.poll])
def test_a_wait_can_be_interrupted(driver: Driver, wait: Callable[..., object]) -> None:
    driver.set_mode("manual")
    layout = place(driver, make_layout())
    with HostPool(layout, 8) as pool, OffloadHandler(layout, pool) as handler:
        handler.store(gpu_block_ids=[0], page_ids=[0], after=())
        with pytest.raises(Interrupted):
            Interrupter(in_waits=True).call(1000, lambda: wait(handler, timeout=PATIENCE))
        driver.run()
        assert [result.ok for result in handler.poll(PATIENCE)] == [True]
