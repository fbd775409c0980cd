"""The benchmark of both directions at once: it judges its figures right, and notices wrong
bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comparison
import duplex
import pytest
import torch
from blocks import ARRANGEMENTS
from comparison import BIG, COLD, OURS, REFERENCE, WARM, Cell, Comparison, Plan, Samples
from comparison_report import judge
from corrupting_handler import CorruptingHandler, leave_one_out
from duplex_report import targets
from expecttest import assert_expected_inline
from timing import Move
from transfers import BOTH, Kind, Shape

from torch_kvswap import OffloadHandler

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
TINY = ["--shapes", "3x1", "1x2", "--blocks", "4", "--samples", "2", "--cold-samples", "1"]
TINY += ["--other-mib", "1", "--device"]


def a_cell(total: float, kib: int = 8, blocks: int = 64) -> Cell:
    """Two big copies at once take 100 us."""
    moves = {OURS: [Move(total, 1, "staged/strided")], BIG: [Move(100, 1)]}
    samples = Samples({**moves, REFERENCE: [Move(100, 1)]})
    kind = Kind(Shape(2, kib), ARRANGEMENTS[0], BOTH, blocks)
    return Cell(kind, {WARM: samples, COLD: samples})


def test_small_transfers_and_small_fragments_may_take_longer_and_cold_ones_are_not_judged() -> None:
    cells = [a_cell(115), a_cell(116), a_cell(150, 2), a_cell(105, 8, 512), a_cell(113, 2, 512)]
    assert_expected_inline(
        "\n".join(map(str, judge(cells, targets))),
        """\
met          both of 64 x (2 x 8 KiB), layers one by one, warm, total / big copy: 1.15, at most 1.15
MISSED       both of 64 x (2 x 8 KiB), layers one by one, warm, total / big copy: 1.16, at most 1.15
met          both of 64 x (2 x 2 KiB), layers one by one, warm, total / big copy: 1.50, at most 1.50
met          both of 512 x (2 x 8 KiB), layers one by one, warm, total / big copy: 1.05, at most 1.05
MISSED       both of 512 x (2 x 2 KiB), layers one by one, warm, total / big copy: 1.13, at most 1.12""",
    )
    assert judge([a_cell(900, blocks=8)], targets) == []


def wrong_of(corrupt: Any) -> int:
    torch.manual_seed(0)
    kind = Kind(Shape(3, 1), ARRANGEMENTS[0], BOTH, 8)
    blocks = kind.shape.new_blocks(CPU, 50)
    options = duplex._parser().parse_args([*TINY, "cpu"])
    plan = Plan([kind.shape], [BOTH], [8], [WARM], links=True)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        compared = Comparison(CPU, options, kind.nbytes, parts=1)
        corrupting = CorruptingHandler(handler, corrupt)
        return comparison.measure(compared, corrupting, blocks, kind, plan).wrong


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
    assert duplex.main([*TINY, device, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert (figures["benchmark"], figures["settings"]["samples"]) == ("duplex", 2)
    assert figures["verdicts"] == []  # there is no target for 4 blocks
    kinds = [(cell["arrangement"], cell["shape"]["layers"]) for cell in figures["cells"]]
    assert kinds == [(arrangement, layers) for arrangement in ARRANGEMENTS for layers in (3, 1)]
    for cell in figures["cells"]:
        assert (cell["direction"], cell["blocks"], cell["wrong"]) == (BOTH, 4, 0)
        for state, count in ((WARM, 2), (COLD, 1)):
            for times in cell["states"][state]["samples"].values():
                assert len(times["total_us"]) == count
                assert min(times["total_us"]) > 0
    said = capsys.readouterr()
    assert "blocks and pages with wrong bytes: 0" in said.out
    assert "duplex 100 %" in said.err


def test_wrong_bytes_end_the_program_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = a_cell(1000)  # a missed target does not
    monkeypatch.setattr(duplex, "measure_all", lambda *_: [cell])
    assert duplex.main([*TINY, "cpu"]) == 0
    cell.wrong = 1
    assert duplex.main([*TINY, "cpu"]) == 1
