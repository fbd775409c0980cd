"""A transfer of a benchmark says what it took, and notes what it moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfers
from big_copy import BigCopy
from transfers import Shape, link_us, move, scattered, submit

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")


def test_a_shape_is_layers_and_kib() -> None:
    assert Shape.parse("160x8") == Shape(160, 8)
    assert str(Shape.parse("160x8")) == "160 x 8 KiB"
    assert Shape(3, 2).block_bytes == 6144


def test_scattered_ids_are_distinct_and_leave_out_the_ends() -> None:
    blocks = Shape(1, 1).new_blocks(CPU, 10)
    for ids in scattered(blocks, 8):
        assert sorted(ids.tolist()) == [*range(1, 9)]


def test_the_ids_are_given_in_the_order_that_the_call_takes() -> None:
    said: list[Any] = []
    handler = SimpleNamespace(
        store=lambda *ids, **more: said.append(("store", *ids, more)),
        load=lambda *ids, **more: said.append(("load", *ids, more)),
    )
    submit(handler, "store", [1], [2], after=())
    submit(handler, "load", [1], [2])
    assert said == [("store", [1], [2], {"after": ()}), ("load", [2], [1], {})]


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_move_takes_time_and_is_noted(direction: str) -> None:
    blocks = Shape(2, 1).new_blocks(CPU, 10)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        moved = move(handler, blocks, [direction], 8)
        assert 0 < moved.submit_us <= moved.total_us
        assert moved.copy_method == "host"
        assert handler.finished() == []
    assert blocks.wrong() == 0
    held = blocks.host.pages[1:9] if direction == "store" else blocks.layout.tensors[0][1:9]
    held.zero_()
    assert blocks.wrong() == 8


def test_two_transfers_at_once_are_both_submitted_before_either_is_waited_for() -> None:
    said: list[Any] = []
    jobs = [
        SimpleNamespace(result=SimpleNamespace(copy_method=copy_method))
        for copy_method in ("strided", "staged")
    ]
    handler = SimpleNamespace(
        store=lambda *ids: said.append(ids) or jobs[0],
        load=lambda *ids: said.append(ids) or jobs[1],
        wait=said.append,
        finished=list,
    )
    blocks = Shape(1, 1).new_blocks(CPU, 10)
    assert move(handler, blocks, ["store", "load"], 4).copy_method == "staged/strided"
    (stored, filled), (loaded, written), waited = said
    assert sorted(stored + written) == sorted(filled + loaded) == [*range(1, 9)]
    assert waited == jobs


def test_the_end_can_be_looked_for_in_a_loop() -> None:
    looks = iter([False, False, True])
    job = SimpleNamespace(done=lambda: next(looks), result=SimpleNamespace(copy_method="batch"))
    handler = SimpleNamespace(store=lambda blocks, pages: job, wait=lambda job: None, finished=list)
    blocks = Shape(1, 1).new_blocks(CPU, 10)
    assert move(handler, blocks, ["store"], 2, poll=True).copy_method == "batch"
    assert next(looks, None) is None


@pytest.mark.parametrize("in_time", [True, False])
def test_on_the_device_both_are_given_before_the_stream_waits_for_either(
    in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    stream, blocks = object(), Shape(2, 1).new_blocks(CPU, 26)
    with OffloadHandler(blocks.layout, blocks.host) as handler:

        def call(direction: str, ids: Any) -> Any:
            said.append(direction)
            getattr(handler, direction)(*ids)
            return SimpleNamespace(wait_on=lambda: said.append(f"wait {direction}"))

        spied = SimpleNamespace(
            store=lambda *ids: call("store", ids),
            load=lambda *ids: call("load", ids),
            drain=handler.drain,
            finished=handler.finished,
        )
        big: Any = SimpleNamespace(give=lambda *what: said.append(what))

        def device_us(on: Any, give: Any) -> float | None:
            assert on is stream
            give()
            return float(len(said)) if in_time else None

        monkeypatch.setattr(transfers, "device_us", device_us)
        directions: list[str] = ["store", "load"]
        link = link_us(spied, blocks, directions, 4, big, stream)
    assert said == ["store", "load", "wait store", "wait load", (directions, 4 * 2048)]
    assert link == ((4, 5) if in_time else None)
    assert blocks.wrong() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("directions", [["store"], ["load"], ["store", "load"]])
def test_the_time_on_a_gpu_has_no_host_in_it_and_the_bytes_are_right(directions: list[str]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    blocks, stream = Shape(4, 64).new_blocks(device, 66), torch.cuda.Stream(device)
    big = BigCopy(device, 32 * blocks.layout.block_bytes)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        for _ in range(3):
            link = link_us(handler, blocks, directions, 32, big, stream)
    assert link is not None
    assert 0.5 < link[0] / link[1] < 10
    assert blocks.wrong() == 0
