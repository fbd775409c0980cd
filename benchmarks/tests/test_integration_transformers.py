"""The benchmark of preemptions in transformers runs without a GPU, and notices wrong bytes."""

from __future__ import annotations

import json

import pytest
from continuous_batching import needs_transformers

pytestmark = [
    pytest.mark.slow,  # of a benchmark program
    pytest.mark.filterwarnings("ignore:.*paged.*prefix:FutureWarning"),
]


@needs_transformers
def test_it_preempts_with_both_managers_and_finds_all_bytes(tmp_path, capsys):
    import integration_transformers

    file = tmp_path / "figures.json"
    small = "--device cpu --layers 2 --samples 2 --seconds 0 --rounds 1 --requests 4 --tokens 20"
    small += " --blocks 4"
    assert integration_transformers.main([*small.split(), "--json", str(file)]) == 0
    assert "with wrong bytes: 0" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    [lost], [rate] = figures["lost"], figures["throughput"]
    for of in lost["losses_us"].values():
        assert of["host"]["count"] == 2
        assert 0 < of["host"]["quartiles"][1] <= of["stream"]["quartiles"][1]
    theirs, ours = rate["generations"]["theirs"], rate["generations"]["ours"]
    assert theirs["preempted"]["quartiles"][1] > 0
    assert abs(theirs["batches"]["quartiles"][1] - ours["batches"]["quartiles"][1]) < 5
    assert figures["verdicts"] == []  # nothing is judged without a GPU


@needs_transformers
@pytest.mark.parametrize("spoils", ["the store", "the load"])
def test_bytes_that_come_back_wrong_are_counted(monkeypatch, spoils):
    import integration_transformers as program
    import torch
    from preemptions import Preemptions

    model = program.new_model(torch.device("cpu"), 1, 1)
    with program.managed_by("ours"):
        run = Preemptions(model, 16, 4)
    run.preempt()
    assert run.wrong == 0
    parked = run._offloading.parked
    swap, tensors, park = parked.swap, run._view.layout.tensors, parked.park
    load = swap.load

    def park_and_spoil(*arguments):
        kept = park(*arguments)
        swap.pool.pages.zero_()
        return kept

    def load_nothing(*arguments):
        before = [tensor.clone() for tensor in tensors]
        copy = load(*arguments)
        copy.job.synchronize()
        for tensor, kept in zip(tensors, before, strict=True):
            tensor.copy_(kept)
        return copy

    if spoils == "the store":
        monkeypatch.setattr(parked, "park", park_and_spoil)
    else:
        monkeypatch.setattr(swap, "load", load_nothing)
    run.preempt(overwrites=True)
    assert run.wrong == 1
