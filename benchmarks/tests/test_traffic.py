"""Continuous transfers beside a computation: their bytes are right and counted by time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import computes
import pytest
import torch
import traffic
from big_copy import BigCopy, Reference
from computes import Idle
from fake_clock import Clock
from traffic import BigWay, HandlerWay, ReferenceWay, Traffic, beside
from transfers import Shape

from torch_kvswap import OffloadHandler, TransferError

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")


class SteadyWay:
    """10 MB after another, each in 10 ms of the clock."""

    nbytes = 10_000_000

    def __init__(self, clock: Clock) -> None:
        self.started = 0
        self._clock = clock
        self._free = clock.now

    def start(self) -> Callable[[], bool]:
        self.started += 1
        end = self._free = max(self._free, self._clock.now) + 0.01
        return lambda: self._clock.now >= end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(traffic, "time", clock)
    monkeypatch.setattr(computes, "time", clock)
    return clock


def test_what_moved_beside_a_compute_is_told_with_its_speed(clock: Clock) -> None:
    milliseconds, gigabytes, speed = beside(Idle(0.1), SteadyWay(clock))
    assert milliseconds == 100
    assert speed == pytest.approx(1, rel=0.01)
    assert gigabytes == pytest.approx(0.1 * speed, rel=0.01)


def test_a_compute_alone_has_nothing_beside_it(clock: Clock) -> None:
    assert beside(Idle(0.01), None) == (10, 0, 0)


def test_two_transfers_are_under_way_until_they_are_stopped(clock: Clock) -> None:
    way = SteadyWay(clock)
    traffic = Traffic(way)
    assert way.started == 2
    clock.sleep(0.015)
    traffic.look()
    assert way.started == 3
    traffic.stop(clock.now)
    assert len(traffic._running) == 0


def test_bytes_between_two_ends_are_counted_in_part(clock: Clock) -> None:
    traffic = Traffic(SteadyWay(clock))
    traffic.stop(0)
    traffic._times, traffic._bytes = [0.0, 1.0, 3.0], [0, 100, 300]
    assert traffic.moved(0.5, 2.0) == 150


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_handler_moves_the_right_bytes_and_other_ones_each_time(direction: str) -> None:
    blocks = Shape(2, 1).new_blocks(CPU, 26)
    pairs: list[Any] = []
    with OffloadHandler(blocks.layout, blocks.host) as handler:

        def note(*, after: Any, copy_method: str, **ids: list[int]) -> Any:
            assert (after, copy_method) == ((), "copy_engines")
            pairs.append([*zip(*ids.values(), strict=True)])
            return getattr(handler, direction)(**ids)

        spied = SimpleNamespace(store=note, load=note, poll=handler.poll)
        way = HandlerWay(spied, blocks, direction, 8, copy_method="copy_engines")
        beside(Idle(0.005), way)
    assert way.nbytes == 8 * 2048
    assert way.copy_methods == {"host"}
    assert blocks.wrong() == 0
    assert not {*pairs[0]} & {*pairs[2]}
    for one, other in pairwise(pairs):
        blocks_and_pages = [*zip(*one, strict=True), *zip(*other, strict=True)]
        assert not {*blocks_and_pages[0]} & {*blocks_and_pages[2]}
        assert not {*blocks_and_pages[1]} & {*blocks_and_pages[3]}


def test_a_transfer_that_fails_is_an_error() -> None:
    blocks = Shape(2, 1).new_blocks(CPU, 26)

    def fail() -> None:
        raise TransferError("store 1 failed: lost")

    job = SimpleNamespace(query=lambda: True, synchronize=fail)
    handler = SimpleNamespace(store=lambda *_, **__: job)
    ended = HandlerWay(handler, blocks, "store", 8, copy_method=None).start()
    with pytest.raises(TransferError, match="store 1 failed: lost"):
        ended()


@pytest.mark.gpu
def test_copies_on_a_gpu_move_gigabytes() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    big = BigCopy(device, 64 << 20)
    reference = Reference(big, device)
    for way in (BigWay(big, "load", 64 << 20), ReferenceWay(reference, "load", 64 << 20)):
        beside(Idle(0.02), way)
        assert beside(Idle(0.05), way)[2] > 1
