"""Ours, a big copy and the reference are measured in turn, each with the same done before it."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import comparison
import pytest
import torch
from comparison import (
    BIG,
    COLD,
    HELD,
    LEAST,
    OURS,
    REFERENCE,
    SUBMIT,
    WARM,
    Cell,
    Comparison,
    Samples,
    add_comparison,
    alternate,
)
from fake_clock import Clock
from timing import Hold, Move
from transfers import Kind, Shape

pytestmark = pytest.mark.slow  # of a benchmark program

CPU = torch.device("cpu")
KIND = Kind(Shape(3, 1), "layers one by one", "store", 8)


def options_of(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    add_comparison(parser, samples=6, cold_samples=2)
    return parser.parse_args(["--other-mib", "1", *arguments])


class Recorded:
    """Ways whose moves take as long as told, and what happened in which order."""

    def __init__(self, **total_us: float) -> None:
        self.said: list[str] = []
        self.ways = {name: self._way(name, us) for name, us in total_us.items()}

    def _way(self, name: str, us: float) -> Callable[[Any], Move]:
        def timed(before: Callable[[], object]) -> Move:
            before()
            self.said.append(name)
            return Move(us, us / 2)

        return timed


def test_each_way_is_at_every_place_in_turn_and_what_warms_up_is_not_kept() -> None:
    recorded = Recorded(a=1, b=2, c=4)
    samples = alternate(recorded.ways, lambda: None, range(-1, 3), float("inf"))
    assert "".join(recorded.said) == "cab" + "abc" + "bca" + "cab"
    assert samples.moves["b"] == [Move(2, 1)] * 3
    assert samples.complete == ["a", "b", "c"]


def test_the_same_is_done_right_before_each() -> None:
    recorded = Recorded(a=1, b=2)
    alternate(recorded.ways, lambda: recorded.said.append("-"), range(2), float("inf"))
    assert "".join(recorded.said) == "-a-b-b-a"


def test_a_way_that_is_no_candidate_is_not_measured_on() -> None:
    recorded = Recorded(a=1, b=2)
    samples = alternate(
        recorded.ways,
        lambda: None,
        range(-1, 3),
        float("inf"),
        lambda number, moves: ["a"] if number == 0 else list(moves),
    )
    assert {way: len(moves) for way, moves in samples.moves.items()} == {"a": 3, "b": 2}
    assert samples.complete == ["a"]


def test_a_limit_of_time_leaves_the_least_number_of_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(comparison, "time", clock)
    for end, count in ((0.0, LEAST), (7.5, 8), (100.0, 20)):
        clock.now = 0.0
        recorded = Recorded(a=1)
        samples = alternate(recorded.ways, lambda: clock.sleep(1), range(20), end)
        assert samples.count == count


def test_ratios_are_of_the_same_round_and_have_quartiles() -> None:
    moves = {
        OURS: [Move(10, 1, "staged"), Move(90, 4, "batch"), Move(30, 6, "staged")],
        BIG: [Move(10, 1), Move(30, 2), Move(20, 3)],
    }
    samples = Samples(moves)
    assert samples.ratios(OURS, BIG) == [1.25, 1.5, 2.25]
    assert samples.ratio(OURS, BIG, SUBMIT) == 2
    assert (samples.median(OURS), samples.median(BIG, SUBMIT)) == (30, 2)
    assert samples.copy_methods == {OURS: ["batch", "staged"]}


def test_a_cell_is_written_with_quartiles_and_the_ratios_to_both() -> None:
    cell = Cell(KIND, link_us=[(11, 10), (24, 20)])
    moves = {way: [Move(us, us / 4)] * 2 for way, us in ((OURS, 12), (BIG, 8), (REFERENCE, 6))}
    cell.states[COLD] = Samples(moves)
    figures = json.loads(json.dumps(cell.to_json()))
    assert figures["shape"] == {"layers": 3, "fragment_kib": 1}
    assert (figures["arrangement"], figures["blocks"]) == ("layers one by one", 8)
    assert figures["link_ratio"] == pytest.approx(1.15)
    assert figures["link_us"][BIG] == {"count": 2, "quartiles": [12.5, 15, 17.5]}
    cold = figures["states"]["cold"]
    assert cold["counts"] == {OURS: 2, BIG: 2, REFERENCE: 2}
    assert cold["total_us"] == {
        "quartiles": {OURS: [12] * 3, BIG: [8] * 3, REFERENCE: [6] * 3},
        "over big copy": {OURS: [1.5] * 3, REFERENCE: [0.75] * 3},
        "over reference": {OURS: [2] * 3, BIG: [1.3333] * 3},
    }
    assert cold["submit_us"]["over reference"][OURS] == [2] * 3


def test_only_what_is_cold_has_other_work_before_it() -> None:
    compared = Comparison(CPU, options_of(), KIND.nbytes, parts=2)
    done: list[str] = []
    compared._other = lambda: done.append("work")  # type: ignore[assignment]
    ways = compared.copies(KIND)
    assert compared.run(ways, KIND, WARM).count == 6
    assert done == []
    cold = compared.run(ways, KIND, COLD)
    assert done == ["work"] * 2 * 3  # two ways; a round that warms up, and two samples
    assert {way: len(moves) for way, moves in cold.moves.items()} == {BIG: 2, REFERENCE: 2}


@pytest.mark.gpu
def test_a_held_stream_is_busy_when_a_transfer_begins() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    compared = Comparison(device, options_of(), KIND.nbytes, 1)
    Hold(torch.cuda.Stream(device), 0.001).wait()  # measures the clock
    with compared._before_each(HELD, 100_000) as before:
        before()
        assert not torch.cuda.current_stream(device).query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_big_copies_and_references_are_measured_in_every_state_of_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    compared = Comparison(device, options_of(), KIND.nbytes, 3)
    for state in (WARM, HELD, COLD):
        samples = compared.run(compared.copies(KIND), KIND, state)
        assert all(0 < move.submit_us <= move.total_us for move in samples.moves[REFERENCE])
