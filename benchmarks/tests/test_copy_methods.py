"""The benchmark of copy methods: it finds the best forced one, and notices wrong bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import copy_methods
import pytest
import torch
from blocks import ARRANGEMENTS
from comparison import BIG, COLD, REFERENCE, WARM, Comparison, Samples
from copy_methods_report import COPY_ENGINES_ONLY, Cell, candidates, judge, tables
from corrupting_handler import CorruptingHandler, Ids
from expecttest import assert_expected_inline
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


def test_the_automatic_method_may_take_a_twentieth_longer() -> None:
    kind = ", layers one by one, warm, automatic method over the best forced one"
    assert_expected_inline(
        "\n".join(map(str, judge(CELLS))).replace(kind, ""),
        """\
met          store of 64 x (2 x 8 KiB): 1.05, at most 1.05
MISSED       store of 64 x (2 x 8 KiB): 1.06, at most 1.05
not measured load of 64 x (2 x 8 KiB): -, at most 1.05""",
    )


def test_the_tables_have_all_methods_and_say_what_cannot_be_had() -> None:
    store, load, refused = tables(CELLS).split("\n\n")
    assert store.splitlines()[2].split()[4:] == [
        *("64", "warm", "106.00", "100.00", "200.00", "1", "1", "staged", "staged", "1.06")
    ]
    assert load.startswith("layers one by one, load, us")
    assert refused == "strided cannot be had: the layers lie at several distances"


def compared(kind: Kind) -> Comparison:
    options = copy_methods._parser().parse_args([*TINY, "cpu", "--samples", "3"])
    return Comparison(CPU, options, kind.nbytes, parts=2)


def test_a_method_that_is_slow_when_warm_is_not_measured_cold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {"auto": 10.0, "strided": 10.0, "batch": 30.0, "kernel": 300.0}
    order: list[str] = []

    def move(
        handler: str, blocks: Any, directions: Any, count: int, before: Any, **options: Any
    ) -> Move:
        order.append("".join([handler, *options]))
        return Move(seconds[handler] * (1 + len(options)), 1.0, handler)

    monkeypatch.setattr(copy_methods, "move", move)
    kind = Kind(Shape(2, 8), ARRANGEMENTS[0], "store", 8)
    blocks = kind.shape.new_blocks(CPU, 34)
    ways = {name: name for name in seconds}
    cell = copy_methods.measure(compared(kind), ways, {}, blocks, kind)
    assert order.count("kernel") == 1
    assert order.count("batch") == 3 + 2
    assert order.count("autocopy_engines_only") == order.count("auto")
    assert {*cell.states[COLD].moves} == {"auto", "strided", COPY_ENGINES_ONLY, BIG, REFERENCE}
    assert cell.best(WARM) == "strided"
    assert cell.states[WARM].copy_methods == {
        "auto": ["auto"],
        "strided": ["strided"],
        "batch": ["batch"],
        COPY_ENGINES_ONLY: ["auto"],
    }


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_cell_is_in_the_file(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert copy_methods.main([*TINY, device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert (figures["benchmark"], figures["settings"]["samples"]) == ("copy_methods", 2)
    kinds = [
        (one["arrangement"], one["shape"]["layers"], one["direction"], one["blocks"])
        for one in figures["cells"]
    ]
    assert kinds == [
        (arrangement, layers, direction, blocks)
        for arrangement in ARRANGEMENTS
        for layers in (3, 1)
        for direction in ("store", "load")
        for blocks in (1, 8)
    ]
    assert len(figures["verdicts"]) == (2 * len(kinds) if device == "cuda" else 0)
    for cell in figures["cells"]:
        assert cell["wrong"] == 0
        chosen, warm = cell["auto over best forced"][WARM], cell["states"][WARM]
        if device == "cpu":
            assert chosen == {"ratio": None, "best": None}
            assert warm["copy_methods"] == {"auto": ["host"]}
        else:
            assert chosen["ratio"] > 0
            assert chosen["best"] in copy_methods.FORCED
    assert "copy methods 100 %" in capsys.readouterr().err


def test_wrong_bytes_end_the_program_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = a_cell(auto=[200.0], staged=[100.0])  # a missed target does not
    monkeypatch.setattr(copy_methods, "measure_all", lambda *_: [cell])
    assert copy_methods.main([*TINY, "cpu"]) == 0
    cell.wrong = 1
    assert copy_methods.main([*TINY, "cpu"]) == 1
