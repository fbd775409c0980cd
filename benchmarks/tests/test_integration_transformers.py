"""The benchmark of preemptions in transformers: it runs without a GPU, and judges its figures
right.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from continuous_batching import needs_transformers
from integration_transformers_report import Cell, Rate, judge

pytestmark = pytest.mark.slow  # of a benchmark program


@dataclass
class Loss:
    """As `preemptions` has it, which needs transformers."""

    host: float
    stream: float
    without: list[float] = field(default_factory=lambda: [100.0, 100.0])
    back: float = 200.0
    usual: list[float] = field(default_factory=lambda: [100.0])
    usual_with: list[float] = field(default_factory=lambda: [200.0])
    batches: int = 1
    copies: float = 1.0


@dataclass
class Generation:
    """As `generations` has it."""

    tokens_per_second: float
    batches: int = 64
    preempted: int = 7


def cell(theirs: list[Loss], ours: list[Loss]) -> Cell:
    return Cell(16, 64, 1 << 20, {"theirs": theirs, "ours": ours})


def rate(theirs: list[float], ours: list[float], again: list[float]) -> Rate:
    runs = {"theirs": theirs, "ours": ours, "theirs again": again}
    return Rate(True, {name: [Generation(one) for one in of] for name, of in runs.items()})


def test_batches_are_compared_with_the_usual_ones_of_all_samples():
    unusual = Loss(1, 1, without=[150, 100, 130], back=250, usual=[40], usual_with=[500])
    measured = cell([], [Loss(1, 1), unusual, Loss(1, 1)])
    assert measured.slower("ours") == [0, 0, (150 + 100 + 130 - 300 + 250 - 200) / 2]
    assert cell([], [Loss(1, 1)]).slower("ours") == [0, 0, 0]


def test_the_fastest_generation_is_compared_with_the_fastest_of_both_runs_of_theirs():
    measured = rate([100.0, 200.0, 400.0], [101.0, 396.0, 300.0], [320.0])
    [verdict] = judge([], [measured])
    assert (verdict.target, verdict.measured, verdict.met) == (0.95, 0.99, True)
    assert measured.to_json()["ratios"] == {"ours": 0.99, "theirs again": 0.8}
    [verdict] = judge([], [rate([320.0], [300.0], [200.0, 400.0])])
    assert (verdict.measured, verdict.met) == (0.75, False)
    assert judge([], [Rate(False)]) == []


@needs_transformers
@pytest.mark.filterwarnings("ignore:.*paged.*prefix:FutureWarning")
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
        assert 0 < of["blocks"]["quartiles"][1] < of["host"]["quartiles"][1]
    theirs, ours = rate["generations"]["theirs"], rate["generations"]["ours"]
    assert theirs["preempted"]["quartiles"][1] > 0
    assert abs(theirs["batches"]["quartiles"][1] - ours["batches"]["quartiles"][1]) < 5
    assert figures["verdicts"] == []  # nothing is judged without a GPU


@needs_transformers
@pytest.mark.filterwarnings("ignore:.*paged.*prefix:FutureWarning")
def test_generations_go_on_with_the_manager_that_they_began_with():
    import integration_transformers as program
    import torch
    from generations import generations, new_prompts

    prompts = new_prompts(3, 4096)
    model = program.new_model(torch.device("cpu"), 1, 1)
    with program.pageable_without(False), program.managed_by("ours"):
        each = generations(model, 3, 20, False)
        run = each.__enter__()
    assert type(run.offloading).__name__ == "SwapManager"
    first, second = (run.generate(prompts, 20) for _ in range(2))
    each.__exit__(None, None, None)
    assert first.batches == second.batches
    assert first.preempted == second.preempted > 0


@needs_transformers
@pytest.mark.parametrize("manager", ["theirs", "ours"])
def test_blocks_that_a_request_gets_again_are_counted_once_with_either_manager(
    monkeypatch, manager
):
    import integration_transformers as program
    import preemptions
    import timing
    import torch
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    seconds = 0

    def allocate(cache, *arguments, **options):
        """Takes a second for each block."""
        nonlocal seconds
        before = num_blocks(run._view)
        answer = given(cache, *arguments, **options)
        seconds += num_blocks(run._view) - before
        return answer

    def num_blocks(view):
        return sum(len(of) for group in view.groups for of in group.block_table.values())

    model = program.new_model(torch.device("cpu"), 1, 1)
    with program.pageable_without(False), program.managed_by(manager):
        run = preemptions.Preemptions(model, 16, 4)
    name = "allocate_blocks" if run._is_old else "can_store_request_tokens"
    given = getattr(PagedAttentionCache, name)
    delattr(run._cache, name)
    monkeypatch.setattr(PagedAttentionCache, name, allocate)
    run._watch_blocks(name)
    for module in (preemptions, timing):
        monkeypatch.setattr(module, "perf_counter", lambda: seconds)
    loss = run.preempt()
    assert loss.host == loss.blocks == 5e6
    assert loss.copies == 0


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


@needs_transformers
@pytest.mark.parametrize("overwrites", [True, False])
def test_a_restore_that_copies_nothing_is_seen_when_the_blocks_were_overwritten(
    monkeypatch, overwrites
):
    import integration_transformers as program
    import torch
    from preemptions import Preemptions

    model = program.new_model(torch.device("cpu"), 1, 1)
    with program.managed_by("ours"):
        run = Preemptions(model, 16, 4)
    run.preempt(overwrites)
    assert run.wrong == 0
    swap, tensors = run._offloading.parked.swap, run._view.layout.tensors
    load = swap.load

    def load_nothing(*arguments):
        before = [tensor.clone() for tensor in tensors]
        copy = load(*arguments)
        copy.job.synchronize()
        for tensor, kept in zip(tensors, before, strict=True):
            tensor.copy_(kept)
        return copy

    monkeypatch.setattr(swap, "load", load_nothing)
    run.preempt(overwrites)
    assert run.wrong == overwrites
