"""Copies of KVSwapLinker behind SGLang's streams, on the simulated driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from logged import logged
from sglang_engine import ComponentType, PoolName, PoolTransfer, make_linker, make_params, mha_pool
from simulated_cache import CURRENT, SIDE
from simulated_driver import Driver, place, pool, simulated
from simulated_driver.handles import Event, Stream

import torch_kvswap as kvs

KEYS = [f"{number:064x}" for number in range(2)]
PAGES = torch.arange(4, 12), torch.arange(20, 28)  # slots of two pages


class Ready:
    """Events behind what the streams have, as SGLang's own record_offload_ready() makes them."""

    def __init__(self, driver: Driver, streams: Sequence[int]) -> None:
        self.driver, self.streams, self.made = driver, streams, list[Event]()

    def __call__(self) -> list[Event]:
        cuda, events = self.driver.cuda, list[Event]()
        for stream in self.streams:
            event = Event(cuda.create_event())
            cuda.record(event.cuda_event, stream)
            event.query = partial(cuda.is_done, event=event.cuda_event)  # type: ignore[method-assign]
            events.append(event)
        self.made += events
        return events


@contextmanager
def linker(driver: Driver, kvcache: Any, streams: Sequence[int] = (CURRENT, SIDE)) -> Iterator[Any]:
    """On a GPU with the scheduler's stream CURRENT and the forward's SIDE. streams: those that an
    offload waits for."""

    def new_pool(layout: Any, pages: int) -> Any:
        return pool(driver, layout, pages)

    new_layout = kvs.PagedLayout
    new_pool.page_bytes_of = kvs.HostPool.page_bytes_of  # type: ignore[attr-defined]

    driver.set_mode("manual")
    driver.set_stream(0, CURRENT)
    current: Any = Stream(CURRENT)
    current.synchronize = lambda: None  # the slots of most tests are on the host
    with (
        mock.patch.object(kvs, "PagedLayout", lambda *of: place(driver, new_layout(*of))),
        mock.patch.object(kvs, "HostPool", new_pool),
        logged(),  # that pages of 4 tokens are small
        mock.patch.object(torch.cuda, "current_stream", return_value=current),
    ):
        made = make_linker(
            make_params(kvcache), {ComponentType.FULL}, Stream(SIDE), host_bytes=8 * 1536
        )
        made.record_offload_ready = ready = Ready(driver, streams)
        try:
            yield made
        finally:
            driver.set_mode("immediate")
            made.close()
            for event in ready.made:
                driver.cuda.destroy_event(event.cuda_event)


def completed(driver: Driver, one: Any) -> int:
    """Offloads that are completed after some steps, in which everything runs that can."""
    for _ in range(2):  # the first one submits
        driver.run()
        count: int = one.num_completed_offloads()
    driver.run()
    count = one.num_completed_offloads()
    return count


def transfers(slots: Any) -> list[Any]:
    return [PoolTransfer(name=PoolName.KV, keys=KEYS, device_indices=slots)]


def random_pool() -> Any:
    kvcache = mha_pool()
    for buffer in (*kvcache.k_buffer, *kvcache.v_buffer):
        buffer.copy_(torch.rand_like(buffer))
    return kvcache


STREAMS = pytest.mark.parametrize("stream", [CURRENT, SIDE], ids=["scheduler", "forward"])


@pytest.mark.parametrize("waits", [True, False], ids=["", "control"])
@STREAMS
@simulated
def test_a_store_waits_for_both_streams(driver: Driver, stream: int, waits: bool) -> None:
    kvcache, both = random_pool(), (CURRENT, SIDE)
    streams = both if waits else [other for other in both if other != stream]
    with linker(driver, kvcache, streams) as one:
        hold = driver.hold(stream)
        assert one.offload(transfers(PAGES[0]))
        assert one.offload(transfers(PAGES[0]))  # which the first one stores
        assert completed(driver, one) == (0 if waits else 2)
        kvcache.k_buffer[1].fill_(5)  # what the forward writes
        driver.release(hold)
        assert completed(driver, one) == 2
        assert [one.pop_completed_offload() for _ in range(2)] == [True, True]
        stored = one.cache.pools[0].pages.view(torch.float32)
        assert bool((stored == 5).any()) == waits


@pytest.mark.parametrize("waits", [True, False], ids=["", "control"])
@simulated
def test_a_load_waits_for_the_forward(driver: Driver, waits: bool) -> None:
    """A forward that runs may still use what was freed for the load."""
    kvcache = random_pool()
    with linker(driver, kvcache) as one:
        assert one.offload(transfers(PAGES[0]))
        assert completed(driver, one) == 1
        before = kvcache.k_buffer[0].clone()
        hold = driver.hold(SIDE)
        if not waits:
            one.forward_stream = None
        assert one.load("1", transfers(PAGES[1]))
        index = one.start_layer_wise_loading()
        driver.run()
        assert torch.equal(kvcache.k_buffer[0], before) == waits
        driver.release(hold)
        driver.run()
        assert one.finish_layer_wise_loading(index)
        assert torch.equal(kvcache.k_buffer[0][PAGES[1]], before[PAGES[0]])


@pytest.mark.parametrize("waits", [True, False], ids=["", "control"])
@simulated
def test_a_load_waits_for_its_slots(driver: Driver, waits: bool) -> None:
    """The scheduler's stream computes them and copies them to the host. A load that waits for that
    is behind all other work of this stream, too."""
    kvcache, on_host = random_pool(), PAGES[0].clone()  # the host memory had other slots

    class Slots:
        def to(self, *_: object, **__: object) -> torch.Tensor:
            return on_host

    with linker(driver, kvcache) as one:
        assert one.offload(transfers(PAGES[0]))
        assert completed(driver, one) == 1
        assert one.load("1", transfers(Slots()))
        stream: Any = torch.cuda.current_stream()
        stream.synchronize = lambda: on_host.copy_(PAGES[1]) if waits else None
        index = one.start_layer_wise_loading()
        driver.run()
        assert one.finish_layer_wise_loading(index)
        of_layer = kvcache.k_buffer[0]
        assert torch.equal(of_layer[PAGES[1]], of_layer[PAGES[0]]) == waits


@pytest.mark.parametrize("waits", [True, False], ids=["", "control"])
@simulated
def test_a_layer_waits_on_the_stream_only(driver: Driver, waits: bool) -> None:
    kvcache = random_pool()
    with linker(driver, kvcache) as one:
        assert one.offload(transfers(PAGES[0]))
        assert completed(driver, one) == 1
        hold = driver.hold(SIDE)  # the copy cannot begin
        assert one.load("1", transfers(PAGES[1]))
        counter, index = one.layer_done_counter, one.start_layer_wise_loading()
        counter.set_consumer(index if waits else -1)
        counter.wait_until(0)  # returns, although nothing has been copied
        behind = driver.hold(CURRENT)
        driver.release(behind)
        driver.run(CURRENT)
        assert driver.cuda.is_done(stream=CURRENT) != waits
        driver.release(hold)
        driver.run()
        assert one.finish_layer_wise_loading(index)
        assert driver.cuda.is_done(stream=CURRENT)
