"""On a GPU: a gate's wait is captured into a CUDA graph, and waits again on each replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from gpu_cache import NEW, OLD, GpuCache, Hold, ended, only
from patience import in_time

from torch_kvswap.offload.handler import Job

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_hang")]


def capture(
    work: Callable[[], None], stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """In the default mode, "global", on a side stream."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    graph.replay()  # makes ready what the first replay does
    torch.cuda.synchronize()
    return graph


def wait_and_look(gpu: GpuCache, gate: Any, gated: bool = True) -> torch.cuda.CUDAGraph:
    """A graph that reads the cache once the gate is open, or as a control at once."""

    def work() -> None:
        if gated:
            gate.wait(0)
        gpu.look()

    return capture(work)


def replay(gpu: GpuCache, graph: torch.cuda.CUDAGraph) -> torch.cuda.Event:
    graph.replay()
    return torch.cuda.current_stream().record_event()


def ends(gpu: GpuCache, gate: Any, event: torch.cuda.Event) -> None:
    """Waits for the replay. If it hangs, fails and tries to open the gate, for the tests behind."""
    if in_time(event.query):
        return
    with torch.cuda.stream(torch.cuda.Stream()), suppress(ValueError):
        gpu.handler.load(page_ids=[0], gpu_block_ids=[0], after=(), gate=gate)
    pytest.fail(f"the replay hangs; another load has freed it: {in_time(event.query, seconds=2)}")


def cancelled_store(gpu: GpuCache, page: int) -> tuple[Hold, Job]:
    """A store to the page that is running, held up, and will be reported as cancelled."""
    busy = gpu.hold_on(gpu.side)
    store = gpu.handler.store(gpu_block_ids=[0], page_ids=[page], after=busy)
    assert gpu.handler.cancel(store)
    return busy, store


# A gate is open until a load closes it


def test_a_replay_without_a_load_waits_for_nothing(gpu: GpuCache) -> None:
    gate = gpu.handler.gate()
    graph = wait_and_look(gpu, gate)
    for value in (OLD + 1, OLD + 2):
        gpu.cache.fill_(value)
        ends(gpu, gate, replay(gpu, graph))
        assert only(gpu.seen) == value


@pytest.mark.parametrize("gated", [True, False], ids=["waits", "control"])
def test_a_replay_waits_for_a_load_that_is_late(gpu: GpuCache, gated: bool) -> None:
    gate = gpu.handler.gate()
    graph = wait_and_look(gpu, gate, gated)
    busy = gpu.hold_on(gpu.side)
    job = gpu.handler.load(page_ids=[0], gpu_block_ids=[1], after=busy, gate=gate)
    event = replay(gpu, graph)
    assert not busy.query()  # the host waited for nothing
    if gated:
        gpu.release()
    ends(gpu, gate, event)
    gpu.release()
    torch.cuda.synchronize()
    assert only(gpu.seen[1]) == (NEW if gated else OLD)
    assert only(gpu.seen[[0, 2, 3]]) == OLD
    gpu.handler.synchronize(job)


@pytest.mark.parametrize("late", ["first", "second", "both"])
def test_each_replay_of_two_in_a_row_waits_for_its_own_load(gpu: GpuCache, late: str) -> None:
    gate = gpu.handler.gate()
    graph = wait_and_look(gpu, gate)
    gpu.host.pages[1].fill_(NEW + 1)
    first = gpu.seen.clone()
    busy = gpu.slow_on(gpu.side, ms=100)
    gpu.handler.load(
        page_ids=[0], gpu_block_ids=[1], after=() if late == "second" else busy, gate=gate
    )
    graph.replay()
    first.copy_(gpu.seen)
    if late != "first":
        gpu.slow(100)
    gpu.handler.load(
        page_ids=[1], gpu_block_ids=[1], gate=gate
    )  # behind the first replay, which reads the block
    event = replay(gpu, graph)
    ends(gpu, gate, event)
    torch.cuda.synchronize()
    assert (only(first[1]), only(gpu.seen[1])) == (NEW, NEW + 1)


# Parts


def seen_behind_the_parts(mib: int, gated: bool) -> list[list[int]]:
    """Of a load of four layers of so many MiB: the values that a graph reads of the first behind its
    part, of the last behind the part of the first, and of the last behind its own."""
    with GpuCache(blocks=16, row=mib << 16, layers=4) as gpu:
        gate = gpu.handler.gate(4)
        seen = torch.zeros(3, 16, dtype=torch.uint8, device="cuda:0")
        blocks = list(range(16))

        def work() -> None:
            for row, (part, layer) in enumerate([(0, 0), (0, 3), (3, 3)]):
                if gated:
                    gate.wait(part)
                for block in blocks:  # with copies: a kernel starts late under a sanitizer
                    seen[row, block].copy_(gpu.layers[layer][block, -1])

        graph = capture(work)
        busy = gpu.hold_on(gpu.side)
        job = gpu.handler.load(
            page_ids=blocks, gpu_block_ids=blocks, after=busy, layer_groups=4, gate=gate
        )
        event = replay(gpu, graph)
        if gated:
            gpu.release()
        ends(gpu, gate, event)
        gpu.release()
        values: list[list[int]] = [row.unique().tolist() for row in seen]
        gpu.handler.synchronize(job)
        return values


@pytest.mark.parametrize("gated", [True, False], ids=["waits", "control"])
def test_the_parts_of_a_gate_open_one_after_another(gated: bool) -> None:
    if not gated:
        assert seen_behind_the_parts(64, gated) == [[OLD]] * 3
        return
    between = []
    for mib in (64, 256, 512):  # one to ten milliseconds of copying, and kernels that may be slow
        first, early, last = seen_behind_the_parts(mib, gated)
        assert (first, last) == ([NEW], [NEW])
        between.append(early)
        if OLD in early:
            return
    pytest.fail(f"the first part opens when the last layer has come: {between}")


def test_a_gate_has_the_parts_of_the_load_that_closes_it() -> None:
    with GpuCache(layers=4) as gpu:
        gate = gpu.handler.gate(2)
        for groups in (1, 3):
            with pytest.raises(ValueError, match="2"):
                gpu.handler.load(page_ids=[0], gpu_block_ids=[0], layer_groups=groups, gate=gate)
        for part in (-1, 2):
            with pytest.raises((IndexError, ValueError), match=str(part)):
                gate.wait(part)
        with pytest.raises(ValueError, match="0"):
            gpu.handler.gate(0)
        other = gpu.another_handler()
        with pytest.raises(ValueError, match="another handler"):
            other.load(page_ids=[0], gpu_block_ids=[0], layer_groups=2, gate=gate)
        gate.wait(1)  # which is still open
        ends(gpu, gate, torch.cuda.current_stream().record_event())


# Loads that do not arrive open the gate too


@pytest.mark.parametrize("when", ["later", "before"])
def test_a_failed_load_opens_the_gate(gpu: GpuCache, when: str) -> None:
    gate = gpu.handler.gate()
    graph = wait_and_look(gpu, gate)
    busy, store = cancelled_store(gpu, page=3)
    if when == "before":
        gpu.release()
        assert ended(gpu.handler, store) == "cancelled"
        gpu.handler.poll()
    job = gpu.handler.load(page_ids=[3], gpu_block_ids=[1], gate=gate)
    event = replay(gpu, graph)
    assert busy.query() == (when == "before")
    gpu.release()
    ends(gpu, gate, event)
    assert ended(gpu.handler, job) == "failed"
    assert job.result is not None
    assert f"store {store.id}" in str(job.result.error)
    gpu.handler.poll()
    # The gate works on.
    gpu.handler.load(page_ids=[0], gpu_block_ids=[2], gate=gate)
    ends(gpu, gate, replay(gpu, graph))
    assert only(gpu.seen[2]) == NEW


@pytest.mark.parametrize("running", [True, False], ids=["a load is running", "idle"])
def test_a_replay_after_close_waits_for_nothing(gpu: GpuCache, running: bool) -> None:
    gate = gpu.handler.gate()
    graph = wait_and_look(gpu, gate)
    if running:
        gpu.handler.load(
            page_ids=[0], gpu_block_ids=[1], after=gpu.slow_on(gpu.side, ms=50), gate=gate
        )
    gpu.handler.close()
    for value in (OLD + 1, OLD + 2):
        gpu.cache.fill_(value)
        ends(gpu, gate, replay(gpu, graph))
        assert only(gpu.seen) == value
