"""Options and exit codes that all benchmark programs share."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from program import device_of, finish, new_parser
from report import Verdict


@pytest.mark.parametrize(("there", "device"), [(True, "cuda:3"), (False, "cpu")])
def test_a_gpu_is_taken_where_there_is_one(
    there: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    options = new_parser("what it measures").parse_args([])
    assert device_of(options) == torch.device(device)
    assert options.json is None


def test_without_a_file_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = new_parser("what it measures").parse_args(["--device", "cpu"])
    assert finish(options, {}, [], wrong=2) == 1
    assert capsys.readouterr().out == "blocks and pages with wrong bytes: 2\n"


def test_a_missed_target_is_written_and_ends_nothing_with_1(tmp_path: Path) -> None:
    file = tmp_path / "results" / "figures.json"
    options = new_parser(None).parse_args(["--device", "cpu", "--json", str(file)])
    verdicts = [Verdict("speed", 2.0, 1.0, at_least=True), Verdict("time", 1.0, None)]
    assert finish(options, {"benchmark": "it"}, verdicts, wrong=0) == 0
    figures = json.loads(file.read_text())
    assert figures["benchmark"] == "it"
    assert figures["machine"]["torch"] == torch.__version__
    assert figures["verdicts"] == [
        {"name": "speed", "target": 2, "measured": 1, "at_least": True, "met": False},
        {"name": "time", "target": 1, "measured": None, "at_least": False, "met": None},
    ]


def test_a_verdict_at_its_target_is_met_and_what_was_not_measured_is_neither_met_nor_missed() -> (
    None
):
    assert Verdict("x", 3, 3.0).met
    assert Verdict("x", 3, 3.01).met is False
    assert Verdict("x", 3, 3.0, at_least=True).met
    assert Verdict("x", 3, 2.99, at_least=True).met is False
    for at_least in (False, True):
        assert Verdict("x", 3, None, at_least).met is None
        assert Verdict("x", 3, math.nan, at_least).met is None


def test_a_miss_by_little_is_told_with_the_digits_that_show_it() -> None:
    verdicts = [
        Verdict("far", 1.05, 1.1),
        Verdict("near", 3, 3.000447),
        Verdict("large", 2_097_152, 2_097_153.0),
        Verdict("met", 3, 3.0),
        Verdict("under", 0.93, 0.9279458, at_least=True),
    ]
    assert_expected_inline(
        "\n".join(map(str, verdicts)),
        """\
MISSED       far: 1.10, at most 1.05
MISSED       near: 3.0004, at most 3
MISSED       large: 2,097,153, at most 2,097,152
met          met: 3, at most 3
MISSED       under: 0.928, at least 0.93""",
    )
