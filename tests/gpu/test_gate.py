"""On a GPU: a wait for a load that is captured into a CUDA graph and waits again on each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from patience import PATIENCE
from rigs import NEW, OLD, Hold, Rig, ended, in_time, only, watchdog

from torch_kvswap.handler import Job

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _no_hang(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    with watchdog(capfd):
        yield


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


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


def wait_and_look(rig: Rig, gate: Any, gated: bool = True) -> torch.cuda.CUDAGraph:
    """A graph that reads the cache once the gate is open, or as a control at once."""

    def work() -> None:
        if gated:
            gate.wait(0)
        rig.look()

    return capture(work)


def replay(rig: Rig, graph: torch.cuda.CUDAGraph) -> torch.cuda.Event:
    graph.replay()
    return torch.cuda.current_stream().record_event()


def ends(rig: Rig, gate: Any, event: torch.cuda.Event) -> None:
    """Waits for the replay. If it hangs, fails and tries to open the gate, for the tests behind."""
    if in_time(event.query):
        return
    with torch.cuda.stream(torch.cuda.Stream()), suppress(ValueError):
        rig.handler.load([0], [0], after=(), gate=gate)
    pytest.fail(f"the replay hangs; another load has freed it: {in_time(event.query, seconds=2)}")


def cancelled_store(rig: Rig, page: int) -> tuple[Hold, Job]:
    """A store to the page that is running, held up, and will be reported as cancelled."""
    busy = rig.hold_on(rig.side)
    store = rig.handler.store([0], [page], after=busy)
    assert rig.handler.cancel(store)
    return busy, store


# A gate is open until a load closes it


def test_a_replay_without_a_load_waits_for_nothing(rig: Rig) -> None:
    gate = rig.handler.gate()
    graph = wait_and_look(rig, gate)
    for value in (OLD + 1, OLD + 2):
        rig.cache.fill_(value)
        ends(rig, gate, replay(rig, graph))
        assert only(rig.seen) == value


@pytest.mark.parametrize("gated", [True, False], ids=["waits", "control"])
def test_a_replay_waits_for_a_load_that_is_late(rig: Rig, gated: bool) -> None:
    gate = rig.handler.gate()
    graph = wait_and_look(rig, gate, gated)
    busy = rig.hold_on(rig.side)
    job = rig.handler.load([0], [1], after=busy, gate=gate)
    event = replay(rig, graph)
    assert not busy.query()  # the host waited for nothing
    if gated:
        rig.release()
    ends(rig, gate, event)
    rig.release()
    torch.cuda.synchronize()
    assert only(rig.seen[1]) == (NEW if gated else OLD)
    assert only(rig.seen[[0, 2, 3]]) == OLD
    rig.handler.wait(job)


@pytest.mark.parametrize("gated", [True, False], ids=["waits", "control"])
def test_a_stream_that_is_not_captured_waits_too(rig: Rig, gated: bool) -> None:
    gate = rig.handler.gate()
    busy = rig.hold_on(rig.side)
    with torch.cuda.stream(rig.consumer):
        rig.handler.load([0], [1], after=busy, gate=gate)
        if gated:
            gate.wait(0, rig.consumer)
        rig.look()
        event = rig.consumer.record_event()
    assert not busy.query()
    if gated:
        rig.release()
    ends(rig, gate, event)
    rig.release()
    assert only(rig.seen[1]) == (NEW if gated else OLD)


def test_a_graph_captured_on_a_stream_of_the_callers_waits(rig: Rig) -> None:
    gate = rig.handler.gate()

    def work() -> None:
        gate.wait(0, rig.consumer)
        rig.look()

    graph = capture(work, rig.consumer)
    with torch.cuda.stream(rig.consumer):
        busy = rig.hold_on(rig.side)
        rig.handler.load([0], [1], after=busy, gate=gate)
        event = replay(rig, graph)
    assert not busy.query()
    rig.release()
    ends(rig, gate, event)
    assert only(rig.seen[1]) == NEW


def test_a_load_behind_the_current_stream_is_waited_for_by_the_next_replay(rig: Rig) -> None:
    # The load waits for the stream on which the replay waits for the load: no deadlock.
    gate = rig.handler.gate()
    graph = wait_and_look(rig, gate)
    for value in range(50):
        rig.cache.fill_(OLD)
        rig.host.pages[0].fill_(value)
        rig.handler.load([0], [1], gate=gate)
        ends(rig, gate, replay(rig, graph))
        assert only(rig.seen[1]) == value


@pytest.mark.parametrize("late", ["first", "second", "both"])
def test_each_replay_of_two_in_a_row_waits_for_its_own_load(rig: Rig, late: str) -> None:
    gate = rig.handler.gate()
    graph = wait_and_look(rig, gate)
    rig.host.pages[1].fill_(NEW + 1)
    first = rig.seen.clone()
    busy = rig.slow_on(rig.side, ms=100)
    rig.handler.load([0], [1], after=() if late == "second" else busy, gate=gate)
    graph.replay()
    first.copy_(rig.seen)
    if late != "first":
        rig.slow(100)
    rig.handler.load([1], [1], gate=gate)  # behind the first replay, which reads the block
    event = replay(rig, graph)
    ends(rig, gate, event)
    torch.cuda.synchronize()
    assert (only(first[1]), only(rig.seen[1])) == (NEW, NEW + 1)


def test_a_replay_waits_for_both_of_two_loads_that_closed_the_gate(rig: Rig) -> None:
    gate = rig.handler.gate()
    graph = wait_and_look(rig, gate)
    busy = rig.hold_on(rig.side)
    rig.handler.load([0], [0], after=busy, gate=gate)
    quick = rig.handler.load([1], [1], after=(), gate=gate, expedited=True)
    rig.handler.wait(quick, timeout=PATIENCE)
    assert not busy.query()
    event = replay(rig, graph)
    rig.release()
    ends(rig, gate, event)
    assert only(rig.seen[:2]) == NEW


def test_a_gate_opens_behind_loads_through_a_full_queue(rig: Rig) -> None:
    gate = rig.handler.gate()
    graph = wait_and_look(rig, gate)
    busy = rig.hold_on(rig.side)
    for _ in range(100):  # more than are given to the device at once
        rig.handler.load([0], [0], after=busy)
    rig.handler.load([1], [1], after=(), gate=gate)
    event = replay(rig, graph)
    assert not busy.query()
    rig.release()
    ends(rig, gate, event)
    assert only(rig.seen[1]) == NEW


# Parts


def seen_behind_the_parts(mib: int, gated: bool) -> list[list[int]]:
    """Of a load of four layers of so many MiB: the values that a graph reads of the first behind its
    part, of the last behind the part of the first, and of the last behind its own."""
    with Rig(blocks=16, row=mib << 16, layers=4) as rig:
        gate = rig.handler.gate(4)
        seen = torch.zeros(3, 16, dtype=torch.uint8, device="cuda:0")
        blocks = list(range(16))

        def work() -> None:
            for row, (part, layer) in enumerate([(0, 0), (0, 3), (3, 3)]):
                if gated:
                    gate.wait(part)
                for block in blocks:  # with copies: a kernel starts late under a sanitizer
                    seen[row, block].copy_(rig.layers[layer][block, -1])

        graph = capture(work)
        busy = rig.hold_on(rig.side)
        job = rig.handler.load(blocks, blocks, after=busy, layer_groups=4, gate=gate)
        event = replay(rig, graph)
        if gated:
            rig.release()
        ends(rig, gate, event)
        rig.release()
        values: list[list[int]] = [row.unique().tolist() for row in seen]
        rig.handler.wait(job)
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
    with Rig(layers=4) as rig:
        gate = rig.handler.gate(2)
        for groups in (1, 3):
            with pytest.raises(ValueError, match="2"):
                rig.handler.load([0], [0], layer_groups=groups, gate=gate)
        for part in (-1, 2):
            with pytest.raises((IndexError, ValueError), match=str(part)):
                gate.wait(part)
        with pytest.raises(ValueError, match="0"):
            rig.handler.gate(0)
        other = rig.another_handler()
        with pytest.raises(ValueError, match="another handler"):
            other.load([0], [0], layer_groups=2, gate=gate)
        gate.wait(1)  # which is still open
        ends(rig, gate, torch.cuda.current_stream().record_event())


# Loads that do not arrive open the gate too


@pytest.mark.parametrize("when", ["later", "before"])
def test_a_failed_load_opens_the_gate(rig: Rig, when: str) -> None:
    gate = rig.handler.gate()
    graph = wait_and_look(rig, gate)
    busy, store = cancelled_store(rig, page=3)
    if when == "before":
        rig.release()
        assert ended(rig.handler, store) == "cancelled"
        rig.handler.finished()
    job = rig.handler.load([3], [1], gate=gate)
    event = replay(rig, graph)
    assert busy.query() == (when == "before")
    rig.release()
    ends(rig, gate, event)
    assert ended(rig.handler, job) == "failed"
    assert job.result is not None
    assert f"store {store.id}" in str(job.result.error)
    rig.handler.finished()
    # The gate works on.
    rig.handler.load([0], [2], gate=gate)
    ends(rig, gate, replay(rig, graph))
    assert only(rig.seen[2]) == NEW


def test_a_failed_load_opens_every_part_of_the_gate() -> None:
    with Rig(layers=4) as rig:
        gate = rig.handler.gate(4)

        def work() -> None:
            for part in range(4):
                gate.wait(part)
            rig.look()

        graph = capture(work)
        _, store = cancelled_store(rig, page=3)
        job = rig.handler.load([3], [1], layer_groups=4, gate=gate)
        event = replay(rig, graph)
        rig.release()
        ends(rig, gate, event)
        assert ended(rig.handler, job) == "failed"
        assert ended(rig.handler, store) == "cancelled"


def test_a_cancelled_running_load_opens_the_gate(rig: Rig) -> None:
    gate = rig.handler.gate()
    graph = wait_and_look(rig, gate)
    busy = rig.hold_on(rig.side)
    job = rig.handler.load([0], [1], after=busy, gate=gate)
    event = replay(rig, graph)
    assert rig.handler.cancel(job)
    assert not busy.query()
    rig.release()
    ends(rig, gate, event)
    assert ended(rig.handler, job) == "cancelled"


@pytest.mark.parametrize("running", [True, False], ids=["a load is running", "idle"])
def test_a_replay_after_close_waits_for_nothing(rig: Rig, running: bool) -> None:
    gate = rig.handler.gate()
    graph = wait_and_look(rig, gate)
    if running:
        rig.handler.load([0], [1], after=rig.slow_on(rig.side, ms=50), gate=gate)
    rig.handler.close()
    for value in (OLD + 1, OLD + 2):
        rig.cache.fill_(value)
        ends(rig, gate, replay(rig, graph))
        assert only(rig.seen) == value


def test_a_graph_outlives_the_handler_for_whose_load_it_waits(rig: Rig) -> None:
    handler = rig.another_handler()
    gate = handler.gate()
    graph = wait_and_look(rig, gate)
    handler.load([0], [1], after=rig.slow_on(rig.side, ms=50), gate=gate)
    event = replay(rig, graph)
    handler.close()
    assert in_time(event.query)
    del handler
    ends(rig, gate, replay(rig, graph))
    assert only(rig.seen[1]) == NEW
