"""The clocks, holds and memory counters of the benchmarks."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import timing
import torch
from fake_clock import Clock
from patience import in_time
from timing import Hold, Spread, TimeLimit, device_us, resident_bytes

pytestmark = pytest.mark.slow  # of a benchmark program


def test_a_spread_is_in_microseconds() -> None:
    samples = torch.arange(1001).numpy() * 1000
    assert Spread.of(samples) == Spread(500.0, 500.0, 900.0, 990.0, 999.0, 1000.0)


def test_resident_memory_is_seen_while_it_is_held_and_gone_afterwards() -> None:
    before = resident_bytes()
    # malloc maps a piece of this size for itself, and unmaps it when it is freed.
    held = b"\1" * (64 << 20)
    full = resident_bytes()
    assert 60e6 < full - before < 80e6
    del held
    assert resident_bytes() - before < 16e6


def test_what_a_part_does_not_take_is_left_to_those_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock.perf_counter)
    limit = TimeLimit(12, parts=3)
    assert limit.next_part() == 4
    clock.sleep(2)
    assert limit.next_part() == 2 + 5
    clock.sleep(11)  # longer than all of it
    assert limit.next_part() == 13


def test_without_a_limit_no_part_ends() -> None:
    assert TimeLimit(None, 1).next_part() == float("inf")


@pytest.mark.gpu
def test_a_held_stream_is_busy_for_about_as_long_as_asked() -> None:
    stream = torch.cuda.Stream()
    Hold(stream, 0.01).wait()  # measures the clock
    hold = Hold(stream, 0.2)
    assert torch.cuda.current_stream().query()
    hold.wait()
    assert hold.is_over
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        start.record()
        Hold(stream, 0.2)
        end.record()
    end.synchronize()
    assert 150 < start.elapsed_time(end) < 400


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a stand-in for a GPU was asked for; its hold is over when `give` asks for it."""
    said: list[str] = []

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None:
            self.number = len(said)

        def record(self) -> None:
            said.append("record")

        def synchronize(self) -> None:
            said.append("synchronize")

        def elapsed_time(self, end: Any) -> float:
            return 0.25

    class FakeHold:
        def __init__(self, stream: Any, seconds: float) -> None:
            said.append(f"hold {seconds}")

        @property
        def is_over(self) -> bool:
            return "release" in said

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(timing, "Hold", FakeHold)
    return said


def test_what_is_given_behind_a_hold_is_timed_from_its_end_on(calls: list[str]) -> None:
    assert device_us(None, lambda: calls.append("give"), 0.1) == 250
    assert calls == ["hold 0.1", "record", "give", "record", "synchronize"]


def test_a_hold_that_ends_before_all_is_given_times_nothing(calls: list[str]) -> None:
    assert device_us(None, lambda: calls.append("release")) is None
    assert calls[-1] == "synchronize"


@pytest.mark.gpu
def test_nothing_takes_no_time_on_the_device_however_long_it_takes_to_give() -> None:
    stream = torch.cuda.Stream()
    device_us(stream, lambda: None)  # measures the clock
    found: list[float] = []

    def is_timed() -> bool:
        found.extend(filter(None, [device_us(stream, lambda: time.sleep(0.01), 0.05)]))
        return bool(found)

    assert in_time(is_timed)  # a busy machine may be late with what is given
    assert found[-1] < 100
    assert device_us(stream, lambda: time.sleep(0.05), 0.01) is None
