"""The simulated driver's GPUs: each has a link, a context and memory of its own, and can be lost."""

from __future__ import annotations

import pytest
import torch
from simulated_driver import DEVICE, HOST, Driver, simulated
from simulated_driver.cuda import CudaError


def filled(driver: Driver, kind: int, gpu: int, value: int) -> torch.Tensor:
    return driver.memory(64, kind, gpu).fill_(value)


def stream_on(driver: Driver, gpu: int) -> int:
    with driver.on(gpu):
        return driver.cuda.create_stream()


def copy_to_peer(driver: Driver, *, stream: int) -> torch.Tensor:
    """From GPU 0 to GPU 1, on a stream of GPU 0."""
    found = driver.memory(64, DEVICE, 1)
    driver.cuda.copy_peer(found, 1, filled(driver, DEVICE, 0, 7), 0, stream)
    return found


@pytest.mark.parametrize("enabled", [True, False])
@simulated
def test_peer_copies_without_access_are_noticed(driver: Driver, enabled: bool) -> None:
    if enabled:
        driver.cuda.enable_peer_access(1)
    found = copy_to_peer(driver, stream=stream_on(driver, 0))
    assert found.eq(7).all()
    assert driver.violations() == (not enabled)


@simulated
def test_peer_copies_name_the_owners_of_memory(driver: Driver) -> None:
    driver.cuda.enable_peer_access(1)
    memory = [filled(driver, DEVICE, 0, 0) for _ in range(2)]
    driver.cuda.copy_peer(memory[1], 1, memory[0], 0, stream_on(driver, 0))
    assert driver.violations() == 1


@simulated
def test_peer_access_has_the_drivers_errors(driver: Driver) -> None:
    driver.refuse_peer_access(1, 0)
    pairs = [(0, 0), (0, 1), (1, 0), (0, 2)]
    assert [driver.cuda.can_access_peer(*pair) for pair in pairs] == [False, False, False, True]
    codes = []
    for peer in (0, 1, 2, 2):
        try:
            driver.cuda.enable_peer_access(peer)
            codes.append(0)
        except CudaError as error:
            codes.append(error.code)
    assert codes == [201, 217, 0, 704]


@simulated
def test_links_run_independently(driver: Driver) -> None:
    driver.set_mode("manual")
    driver.cuda.enable_peer_access(1)
    streams = [stream_on(driver, gpu) for gpu in (0, 1)]
    found = []
    for gpu, stream in enumerate(streams):
        found.append(driver.memory(64, DEVICE, gpu))
        with driver.on(gpu):
            driver.cuda.copy(found[gpu], filled(driver, HOST, 0, 5 + gpu), stream)
    found.append(copy_to_peer(driver, stream=stream_on(driver, 0)))
    found.append(driver.memory(64, DEVICE, 1))  # by the call for copies of any kind
    driver.cuda.copy(found[3], filled(driver, DEVICE, 0, 8), stream_on(driver, 0))
    values = []
    driver.set_link(0, slowness=0)
    driver.set_link(0, slowness=0, peer=1)
    for link in ({"device": 1}, {"device": 0}, {"device": 0, "peer": 1}):
        driver.set_link(**link, slowness=1)
        driver.run()
        values.append([int(memory[0]) for memory in found])
    assert values == [[0, 6, 0, 0], [5, 6, 0, 0], [5, 6, 7, 8]]


@simulated
def test_an_event_is_recorded_on_its_gpu(driver: Driver) -> None:
    streams = [stream_on(driver, gpu) for gpu in (0, 1)]
    event = driver.cuda.create_event()
    with driver.on(1), pytest.raises(CudaError, match="400"):
        driver.cuda.record(event, streams[1])
    assert driver.violations() == 1
    driver.cuda.record(event, streams[0])
    with driver.on(1):
        driver.cuda.wait(streams[1], event)
    assert driver.violations() == 1


@simulated
def test_copies_use_memory_of_their_gpu(driver: Driver) -> None:
    stream, memory = stream_on(driver, 1), filled(driver, DEVICE, 0, 0)
    with driver.on(1):
        driver.cuda.copy(memory, filled(driver, HOST, 0, 1), stream)
        assert driver.violations() == 1
        driver.cuda.enable_peer_access(0)
        driver.cuda.copy(memory, filled(driver, HOST, 0, 1), stream)
        assert driver.violations() == 1


@pytest.mark.parametrize("events_happen", [True, False])
@simulated
def test_one_gpu_is_lost(driver: Driver, events_happen: bool) -> None:
    driver.set_mode("manual")
    streams = [stream_on(driver, gpu) for gpu in (0, 1)]
    with driver.on(1):
        driver.hold(streams[1])
        lost = driver.cuda.create_event()
        driver.cuda.record(lost, streams[1])
    driver.cuda.wait(streams[0], lost)
    alive = driver.cuda.create_event()
    driver.cuda.record(alive, streams[0])
    driver.lose(719, device=1, events_happen=events_happen)
    driver.run()
    assert driver.cuda.is_done(event=alive) == events_happen
    for ask in ({"stream": streams[1]}, {"event": lost}):
        with driver.on(1), pytest.raises(CudaError, match="719"):
            driver.cuda.is_done(**ask)
    with pytest.raises(CudaError, match="719"):
        driver.cuda.wait(streams[0], lost)
    with driver.on(1), pytest.raises(CudaError, match="719"):
        driver.cuda.create_stream()
    assert driver.cuda.create_stream()
    driver.cuda.destroy_event(lost)


@simulated
def test_a_lost_gpu_leaves_events_of_others(driver: Driver) -> None:
    """What it waited for has not happened because it is gone."""
    driver.set_mode("manual")
    streams = [stream_on(driver, gpu) for gpu in (0, 1)]
    hold, event = driver.hold(streams[0]), driver.cuda.create_event()
    driver.cuda.record(event, streams[0])
    with driver.on(1):
        driver.cuda.wait(streams[1], event)
    driver.lose(device=1)
    assert not driver.cuda.is_done(event=event)
    driver.release(hold)
    driver.run()
    assert driver.cuda.is_done(event=event)


@simulated
def test_one_gpu_is_full(driver: Driver) -> None:
    import ctypes

    driver.limit_allocations(100, device=1)
    codes = []
    for gpu in (0, 1):
        with driver.on(gpu):
            codes.append(driver.cuda.call("cuMemAlloc", ctypes.byref(ctypes.c_uint64()), 200))
    assert codes == [0, 2]
