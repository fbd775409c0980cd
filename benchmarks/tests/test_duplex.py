"""The benchmark of both directions at once: it judges its figures right, and notices wrong
bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duplex
import pytest
import torch
from big_copy import BigCopy
from corrupting_handler import CorruptingHandler, leave_one_out
from duplex_report import Cell, judge
from expecttest import assert_expected_inline
from transfers import Move, Shape

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--shapes", "3x1", "1x2", "--blocks", "4", "--samples", "2"]


def a_cell(total: list[float], big: list[float], link: tuple[float, float] | None = None) -> Cell:
    cell = Cell(Shape(2, 8), 64)
    for total_us, big_us in zip(total, big, strict=True):
        cell.add(Move(total_us, 1.0, "staged/strided"), big_us, link)
    return cell


def test_the_share_is_the_median_of_pairs() -> None:
    assert a_cell([100, 200, 400], [90, 100, 320]).share == 0.8


def test_the_target_is_0_93_of_two_big_copies_at_once() -> None:
    cells = [a_cell([100], [93]), a_cell([100], [90])]
    assert_expected_inline(
        "\n".join(map(str, judge(cells))),
        """\
met          both at once, 64 x (2 x 8 KiB), share of two big copies: 0.93, at least 0.93
MISSED       both at once, 64 x (2 x 8 KiB), share of two big copies: 0.90, at least 0.93""",
    )


def wrong_of(corrupt: Any) -> int:
    torch.manual_seed(0)
    shape = Shape(3, 1)
    blocks = shape.new_blocks(CPU, 50)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        big = BigCopy(CPU, 8 * shape.block_bytes)
        return duplex.measure(CorruptingHandler(handler, corrupt), blocks, big, shape, 8, 2).wrong


def test_right_bytes_are_right() -> None:
    assert wrong_of(lambda first, second: (first, second)) == 0


def test_a_block_that_is_left_out_is_seen() -> None:
    assert wrong_of(leave_one_out) > 0


def test_the_store_and_the_load_share_no_block_and_no_page() -> None:
    said: list[tuple[list[int], list[int]]] = []
    wrong_of(lambda first, second: said.append((first, second)) or (first, second))
    for (blocks, pages), (pages_read, blocks_written) in zip(said[::2], said[1::2], strict=True):
        assert len({*blocks, *blocks_written}) == len({*pages, *pages_read}) == 16


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_cell_is_in_the_file(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert duplex.main([*TINY, "--device", device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert (figures["benchmark"], figures["settings"]["samples"]) == ("duplex", 2)
    assert len(figures["verdicts"]) == (2 if device == "cuda" else 0)
    assert [cell["shape"]["layers"] for cell in figures["cells"]] == [3, 1]
    for cell in figures["cells"]:
        assert (cell["blocks"], cell["wrong"]) == (4, 0)
        assert min(cell["total_us"] + cell["big_us"]) > 0
        assert len(cell["link_us"]) == (2 if device == "cuda" else 0)
    said = capsys.readouterr()
    assert "blocks and pages with wrong bytes: 0" in said.out
    assert "duplex 100 %" in said.err


def test_wrong_bytes_end_the_program_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = a_cell([100.0], [1.0])  # a missed target does not
    monkeypatch.setattr(duplex, "measure_all", lambda *_: [cell])
    assert duplex.main(TINY) == 0
    cell.wrong = 1
    assert duplex.main(TINY) == 1
