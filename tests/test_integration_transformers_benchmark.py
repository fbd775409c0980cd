"""The benchmark of transformers' preemptions runs without a GPU, and its verdicts are right."""

from __future__ import annotations

import json
import math

import pytest
from continuous import needs_transformers
from integration_transformers_report import Cell, Rate, judge, tables


class Loss:
    """As `preemptions` has it, which needs transformers."""

    def __init__(self, host: float, total: float) -> None:
        self.host = self.stream = host
        self.beside, self.total, self.batches = total - host, total, 2


def cell(theirs: list[float], ours: list[float]) -> Cell:
    losses = {"theirs": [Loss(t, t) for t in theirs], "ours": [Loss(1.0, t) for t in ours]}
    return Cell(16, 64, 1 << 20, losses)


def test_a_third_of_what_is_lost_with_theirs_is_the_target():
    [met, missed] = judge([cell([300, 900, 200], [100, 50, 999]), cell([300], [101])], [])
    assert math.isclose(met.measured, 1 / 3)
    assert (met.met, missed.met) == (True, False)


def test_the_throughput_is_compared_pair_by_pair():
    rate = Rate(True, {"theirs": [100.0, 200.0, 400.0], "ours": [101.0, 198.0, 300.0]})
    [verdict] = judge([], [rate])
    assert verdict.measured == 0.99
    assert verdict.met
    assert judge([], [Rate(False)]) == []


def test_the_tables_name_what_was_lost_and_the_rates():
    rate = Rate(False, {"theirs": [100.0], "ours": [150.0]})
    text = tables([cell([300], [75])], [rate])
    assert "64 blocks of 16 tokens" in text
    assert "0.25" in text
    assert "1.50" in text
    assert "tokens per second" not in tables([cell([300], [75])], [Rate(False)])


@needs_transformers
@pytest.mark.filterwarnings("ignore:.*paged.*prefix:FutureWarning")
def test_it_preempts_with_both_managers_and_finds_all_bytes(tmp_path, capsys):
    import integration_transformers

    file = tmp_path / "figures.json"
    small = "--device cpu --layers 2 --samples 2 --rounds 1 --requests 2 --tokens 2 --blocks 4"
    assert integration_transformers.main([*small.split(), "--json", str(file)]) == 0
    assert "with wrong bytes: 0" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    [lost], [rate] = figures["lost"], figures["throughput"]
    assert {name: len(of) for name, of in lost["losses_us"].items()} == {"theirs": 2, "ours": 2}
    assert all(loss["host"] > 0 for of in lost["losses_us"].values() for loss in of)
    assert len(rate["tokens_per_second"]["ours"]) == 1
    assert figures["verdicts"] == []  # nothing is judged without a GPU


@needs_transformers
def test_bytes_that_come_back_wrong_are_counted(monkeypatch):
    import integration_transformers as program
    import torch
    from preemptions import Preemptions

    model = program.new_model(torch.device("cpu"), 1, 1)
    with program.managed_by("ours"):
        run = Preemptions(model, 16, 4)
    run.preempt()
    assert run.wrong == 0
    park = run._offloading.parked.park

    def park_and_spoil(*arguments):
        kept = park(*arguments)
        run._offloading.parked.swap.pool.pages.zero_()
        return kept

    monkeypatch.setattr(run._offloading.parked, "park", park_and_spoil)
    run.preempt()
    assert run.wrong == 1
