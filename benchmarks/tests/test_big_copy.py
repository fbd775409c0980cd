"""The big copy that benchmarks compare with, in one direction and in both at once."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from big_copy import BigCopy
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
    assert big.nanoseconds([direction], 48) > 0
    assert target.tolist() == [7] * 48 + [0] * 16
    if driver:
        assert driver.calls == ["copy", "record", "query", "query", "query"]


@pytest.mark.parametrize("fake", [True, False])
def test_both_copies_are_under_way_before_the_end_of_either_is_looked_for(fake: bool) -> None:
    driver = FakeDriver() if fake else None
    big = BigCopy(CPU, 64, driver)
    targets = [filled(big, direction) for direction in ("store", "load")]
    assert big.nanoseconds(["store", "load"], 48) > 0
    assert [target.tolist() for target in targets] == [[7] * 48 + [0] * 16] * 2
    if driver:
        assert driver.calls == ["copy", "record", "copy", "record"] + ["query"] * 6


def test_a_copy_without_a_gpu_is_done_when_it_is_enqueued() -> None:
    big = BigCopy(CPU, 64)
    target = filled(big, "load")
    big.enqueue("load", 48)
    assert target.tolist() == [7] * 48 + [0] * 16
    assert big.stream("load") is None


class FakeStream:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name = name
        self.said = said

    def wait_stream(self, other: FakeStream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("directions", [["store"], ["store", "load"]])
def test_a_big_copy_that_fails_says_so(directions: list[str]) -> None:
    with pytest.raises(RuntimeError, match="a big copy failed with CUDA error 700"):
        BigCopy(CPU, 64, FakeDriver(700)).nanoseconds(directions, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("directions", [["store"], ["load"], ["store", "load"]])
def test_a_big_copy_on_a_gpu_has_landed_when_its_time_is_told(directions: list[str]) -> None:
    big = BigCopy(torch.device("cuda", torch.cuda.current_device()), 1 << 20)
    targets = [filled(big, direction) for direction in directions]
    torch.cuda.synchronize()
    assert big.nanoseconds(directions, 1 << 20) > 0
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
