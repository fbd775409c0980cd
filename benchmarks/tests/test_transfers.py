"""A benchmark's transfer is timed, and its blocks are recorded."""

from __future__ import annotations

import pytest
import torch
from big_copy import BigCopy
from transfers import BOTH, Kind, Shape, link_us, move, scattered

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")


def test_a_shape_is_layers_and_kib() -> None:
    assert Shape.parse("160x8") == Shape(160, 8)
    assert str(Shape.parse("160x8")) == "160 x 8 KiB"
    assert Shape(3, 2).block_bytes == 6144


def test_a_kind_of_transfer_says_what_it_moves() -> None:
    both = Kind(Shape(3, 2), "one tensor", BOTH, 8)
    assert str(both) == "both of 8 x (3 x 2 KiB), one tensor"
    assert (both.directions, both.nbytes) == (("store", "load"), 8 * 6144)
    assert Kind(Shape(3, 2), "one tensor", "load", 8).directions == ("load",)


def test_ids_are_ready_when_that_is_called_which_comes_before_a_move() -> None:
    blocks = Shape(2, 1).new_blocks(CPU, 10)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        states: list[object] = []

        def before() -> None:
            states.append(torch.random.get_rng_state())
            assert blocks.host.pages[1:9].equal(unmoved)

        unmoved = blocks.host.pages[1:9].clone()
        move(handler, blocks, ["store"], 8, before)
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert not blocks.host.pages[1:9].equal(unmoved)


def test_scattered_ids_are_distinct_and_leave_out_the_ends() -> None:
    blocks = Shape(1, 1).new_blocks(CPU, 10)
    for ids in scattered(blocks, 8):
        assert sorted(ids.tolist()) == [*range(1, 9)]


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_move_takes_time_and_is_noted(direction: str) -> None:
    blocks = Shape(2, 1).new_blocks(CPU, 10)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        moved = move(handler, blocks, [direction], 8)
        assert 0 < moved.submit_us <= moved.total_us
        assert moved.copy_method == "host"
        assert handler.poll() == []
    assert blocks.wrong() == 0
    held = blocks.host.pages[1:9] if direction == "store" else blocks.layout.tensors[0][1:9]
    held.zero_()
    assert blocks.wrong() == 8


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
