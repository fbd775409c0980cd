"""The copies that benchmarks compare with, in one direction and in both at once."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from big_copy import BigCopy, Reference
from timing import Hold

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")

# The big copy


class FakeDriver:
    """Copies when asked for an event the third time."""

    def __init__(self, state: int = 0) -> None:
        self.calls: list[str] = []
        self.state = state
        self.copies: dict[int, tuple[Any, ...]] = {}
        self.looks: dict[int, int] = {}

    def cuEventCreate(self, event: Any, flags: int) -> int:  # noqa: N802
        event._obj.value = len(self.looks) + 1
        self.looks[event._obj.value] = 0
        return 0

    def cuMemcpyAsync(self, *arguments: Any) -> int:  # noqa: N802
        self.calls.append("copy")
        self.last = arguments
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        self.calls.append("record")
        self.copies[event.value] = self.last
        return 0

    def cuEventQuery(self, event: Any) -> int:  # noqa: N802
        self.calls.append("query")
        self.looks[event.value] += 1
        if self.looks[event.value] < 3:
            return 600
        to, of, size, _ = self.copies[event.value]
        ctypes.memmove(to.value, of.value, size.value)
        return self.state


def filled(big: BigCopy, direction: str) -> torch.Tensor:
    """Where the sevens go that are now at the source."""
    way = big._ways[direction]
    way.source.fill_(7)
    return way.target


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("fake", [True, False])
def test_a_big_copy_moves_its_bytes_and_ends_when_its_event_has(direction: str, fake: bool) -> None:
    driver = FakeDriver() if fake else None
    big = BigCopy(CPU, 64, driver)
    target = filled(big, direction)
    assert big.move([direction], 48).total_us > 0
    assert target.tolist() == [7] * 48 + [0] * 16
    if driver:
        assert driver.calls == ["copy", "record", "query", "query", "query"]


@pytest.mark.parametrize("fake", [True, False])
def test_both_copies_are_under_way_before_the_end_of_either_is_looked_for(fake: bool) -> None:
    driver = FakeDriver() if fake else None
    big = BigCopy(CPU, 64, driver)
    targets = [filled(big, direction) for direction in ("store", "load")]
    assert big.move(["store", "load"], 48).total_us > 0
    assert [target.tolist() for target in targets] == [[7] * 48 + [0] * 16] * 2
    if driver:
        assert driver.calls == ["copy", "record", "copy", "record"] + ["query"] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("directions", [["store"], ["load"], ["store", "load"]])
def test_a_big_copy_on_a_gpu_has_landed_when_its_time_is_told(directions: list[str]) -> None:
    big = BigCopy(torch.device("cuda", torch.cuda.current_device()), 1 << 20)
    targets = [filled(big, direction) for direction in directions]
    torch.cuda.synchronize()
    assert big.move(directions, 1 << 20).total_us > 0
    assert all(bool((target == 7).all()) for target in targets)


@pytest.mark.gpu
def test_copies_that_are_given_behind_a_held_stream_wait_for_it_and_it_for_them() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    big, stream = BigCopy(device, 1 << 20), torch.cuda.Stream(device)
    targets = [filled(big, direction) for direction in ("store", "load")]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        hold = Hold(stream, 0.1)
        big.give(["store", "load"], 1 << 20)
    assert not hold.is_over
    assert not targets[0].any()
    stream.synchronize()
    assert all(bool((target == 7).all()) for target in targets)


# The reference


@pytest.mark.parametrize("directions", [["store"], ["load"], ["store", "load"]])
def test_what_comes_before_a_copy_is_done_before_the_clock_starts(directions: list[str]) -> None:
    big = BigCopy(CPU, 64)
    for copy in (big, Reference(big, CPU)):
        targets = [filled(big, direction) for direction in directions]
        for target in targets:
            target.zero_()
        seen: list[bool] = []
        moved = copy.move(directions, 48, lambda t=targets, s=seen: s.append(bool(t[0].any())))
        assert seen == [False]
        assert 0 < moved.submit_us <= moved.total_us
        assert [target.tolist() for target in targets] == [[7] * 48 + [0] * 16] * len(targets)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a stand-in for a GPU was asked for."""
    said: list[str] = []

    class FakeStream:
        made = 0

        def __init__(self, device: torch.device) -> None:
            FakeStream.made += 1
            self.name = f"stream {FakeStream.made}"

        def wait_event(self, event: FakeEvent) -> None:
            said.append(f"{self.name} waits for {event.name}")

    class FakeEvent:
        made = 0

        def __init__(self, enable_timing: bool = False) -> None:
            FakeEvent.made += 1
            self.name = f"event {FakeEvent.made}" + " with a time" * enable_timing

        def record(self, stream: FakeStream | None = None) -> None:
            said.append(f"{self.name} on {stream.name if stream else 'the current stream'}")

        def synchronize(self) -> None:
            said.append(f"the host waits for {self.name}")

    @contextmanager
    def current(stream: FakeStream) -> Any:
        said.append(f"copy on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", current)
    return said


def test_a_reference_has_the_guarantees_of_a_transfer(said: list[str]) -> None:
    big = BigCopy(CPU, 64)
    reference = Reference(big, torch.device("cuda"))
    target = filled(big, "store")
    assert reference.move(["store"], 48, lambda: said.append("before")).total_us > 0
    assert said == [
        "before",
        "event 1 on the current stream",
        "stream 1 waits for event 1",
        "event 2 with a time on stream 1",
        "copy on stream 1",
        "event 3 with a time on stream 1",
        "the host waits for event 3 with a time",
    ]
    assert target.tolist() == [7] * 48 + [0] * 16


def test_references_in_flight_have_events_of_their_own(said: list[str]) -> None:
    reference = Reference(BigCopy(CPU, 64), torch.device("cuda"))
    ends = [reference.enqueue("store", 48) for _ in range(5)]
    assert len({end.name for end in ends}) == 4
    assert ends[4] is ends[0]


@pytest.mark.gpu
@pytest.mark.parametrize("directions", [["store"], ["load"], ["store", "load"]])
def test_a_reference_on_a_gpu_waits_for_the_current_stream_and_has_landed_at_its_end(
    directions: list[str],
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    big, stream = BigCopy(device, 1 << 20), torch.cuda.Stream(device)
    reference = Reference(big, device)
    targets = [filled(big, direction) for direction in directions]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        hold = Hold(stream, 0.1)
        ends = [reference.enqueue(direction, 1 << 20) for direction in directions]
    assert not hold.is_over
    assert not any(end.query() for end in ends)
    for end in ends:
        end.synchronize()
    assert hold.is_over
    assert all(bool((target == 7).all()) for target in targets)
    moved = reference.move(directions, 1 << 20)
    assert 0 < moved.submit_us <= moved.total_us
