"""The benchmark of copy methods: it finds the best forced one, and notices wrong bytes."""

from __future__ import annotations

from typing import Any

import copy_methods
import pytest
import torch
from blocks import ARRANGEMENTS
from comparison import BIG, REFERENCE, WARM, Comparison, Samples
from copy_methods_report import Cell, candidates
from corrupting_handler import CorruptingHandler, Ids
from timing import Move
from transfers import Kind, Shape

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
TINY = ["--shapes", "3x1", "1x2", "--blocks", "1", "8", "--samples", "2", "--cold-samples", "1"]
TINY += ["--other-mib", "1", "--device"]


def moves_of(**total_us: list[float]) -> dict[str, list[Move]]:
    return {name: [Move(us, 1.0, "staged") for us in times] for name, times in total_us.items()}


def a_cell(direction: str = "store", **total_us: list[float]) -> Cell:
    copies = {BIG: [Move(1, 1)], REFERENCE: [Move(1, 1)]}
    samples = Samples({**moves_of(**total_us), **copies})
    return Cell(Kind(Shape(2, 8), ARRANGEMENTS[0], direction, 64), {WARM: samples})


def test_the_best_forced_method_is_that_over_which_the_automatic_one_takes_longest() -> None:
    cell = a_cell(
        auto=[10, 30, 20], strided=[5, 30, 40], staged=[8, 24, 40], batch=[100], kernel=[]
    )
    assert cell.ratios(WARM) == {"strided": 1.0, "staged": 1.25, "batch": 0.1}
    assert (cell.best(WARM), cell.ratio(WARM)) == ("staged", 1.25)


def test_a_method_that_takes_twice_as_long_is_no_candidate_and_copies_always_stay() -> None:
    moves = moves_of(auto=[50, 60], strided=[10, 30], staged=[30, 20], batch=[21, 22])
    moves |= {BIG: [Move(1, 1)], REFERENCE: [Move(500, 1)]}
    assert candidates(1, moves) == ["auto", "strided", "staged", BIG, REFERENCE]


def test_while_it_warms_up_only_a_method_that_takes_ten_times_as_long_is_left_out() -> None:
    moves = moves_of(auto=[200], strided=[10], staged=[99], batch=[101])
    assert candidates(-3, moves) == ["auto", "strided", "staged"]


CELLS = [
    a_cell(auto=[105.0], staged=[100.0], strided=[200.0]),
    a_cell(auto=[106.0], staged=[100.0], strided=[200.0]),
    a_cell("load", auto=[106.0]),
]
CELLS[2].refused["strided"] = "the layers lie at several distances"


def compared(kind: Kind) -> Comparison:
    options = copy_methods._parser().parse_args([*TINY, "cpu", "--samples", "3"])
    return Comparison(CPU, options, kind.nbytes, parts=2)


def into_the_first(source: Ids, destination: Ids) -> tuple[Ids, Ids]:
    """The first block stays wrong: no other transfer writes it."""
    return source, [0, *destination[1:]]


@pytest.mark.parametrize(("corrupt", "right"), [(lambda *ids: ids, True), (into_the_first, False)])
def test_bytes_that_one_method_gets_wrong_are_seen(corrupt: Any, right: bool) -> None:
    torch.manual_seed(0)
    kind = Kind(Shape(3, 1), ARRANGEMENTS[0], "load", 8)
    blocks = kind.shape.new_blocks(CPU, 34)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        ways = {"auto": handler, "staged": CorruptingHandler(handler, corrupt)}
        cell = copy_methods.measure(compared(kind), ways, {}, blocks, kind)
    assert (cell.wrong == 0) == right
