"""How the programs measure: rounds, ratios, units and shares of time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import comparison
import computes
import numpy as np
import pytest
import timing
import torch
import traffic
from big_copy import BigCopy, Reference
from comparison import BIG, COLD, OURS, REFERENCE, SUBMIT, WARM, Cell, Comparison, Samples
from computes import Idle
from interference import Sample
from prefix_cache_model import PrefixCacheModel, block_keys
from timing import Move, Spread, synchronize
from traffic import HandlerWay, beside
from transfers import Kind, Shape, move

from torch_kvswap import OffloadHandler
from torch_kvswap.prefix import BlockManager

pytestmark = pytest.mark.slow  # of benchmark programs

CPU = torch.device("cpu")
KIND = Kind(Shape(3, 1), "layers one by one", "store", 8)


class Clock:
    """Takes the place of the module `time`; only sleep() makes time pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (comparison, traffic, computes):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(timing, "perf_counter", clock.perf_counter)
    return clock


# Rounds


def test_each_way_is_at_every_place_in_turn_with_the_same_before_it_and_warm_ups_are_not_kept() -> (
    None
):
    said: list[str] = []

    def way(name: str) -> Callable[[Any], Move]:
        def timed(before: Callable[[], object]) -> Move:
            before()
            said.append(name)
            return Move(len(said), 1)

        return timed

    ways = {name: way(name) for name in "abc"}
    samples = comparison.alternate(ways, lambda: said.append("-"), range(-1, 3), float("inf"))
    assert "".join(said) == "-c-a-b" + "-a-b-c" + "-b-c-a" + "-c-a-b"
    assert samples.numbers("a") == [8, 18, 22]


def test_only_what_is_cold_has_other_work_before_it() -> None:
    parser = comparison.comparison_parser(None, samples=6, cold_samples=2)
    options = parser.parse_args(["--device", "cpu"])
    compared = Comparison(options, KIND.nbytes, parts=2)
    done: list[str] = []
    compared._other = lambda: done.append("work")  # type: ignore[assignment]
    assert compared.run(compared.copies(KIND), KIND, WARM).count == 6
    assert done == []
    assert compared.run(compared.copies(KIND), KIND, COLD).count == 2
    assert done == ["work"] * 2 * 3  # two ways; a round that warms up, and two samples


# Figures


def test_a_cell_has_quartiles_and_the_ratios_to_both_copies_of_the_same_round() -> None:
    cell = Cell(KIND)
    cell.states[COLD] = Samples(
        {
            OURS: [Move(10, 1, "staged"), Move(90, 4, "batch"), Move(30, 6, "staged")],
            BIG: [Move(10, 1), Move(30, 2), Move(20, 3)],
            REFERENCE: [Move(5, 1), Move(5, 1), Move(5, 1)],
        }
    )
    figures = json.loads(json.dumps(cell.to_json()))
    assert figures["shape"] == {"layers": 3, "fragment_kib": 1}
    cold = figures["states"]["cold"]
    assert cold["counts"] == {OURS: 3, BIG: 3, REFERENCE: 3}
    assert cold["copy_methods"] == {OURS: ["batch", "staged"]}
    assert cold["total_us"]["quartiles"] == {
        OURS: [20, 30, 60],
        BIG: [15, 20, 25],
        REFERENCE: [5] * 3,
    }
    assert cold["total_us"]["over big copy"][OURS] == [1.25, 1.5, 2.25]
    assert cold["total_us"]["over reference"][BIG] == [3, 4, 5]
    assert cold["submit_us"]["over reference"][OURS] == [2.5, 4, 5]
    assert cell.states[COLD].ratio(OURS, BIG, SUBMIT) == 2


def test_a_table_has_the_cells_of_its_arrangement_and_direction() -> None:
    cells = [Cell(replace(KIND, direction=way)) for way in ("store", "load", "store")]
    assert dict(comparison.by_kind(cells)) == {
        "layers one by one, store": [cells[0], cells[2]],
        "layers one by one, load": [cells[1]],
    }


def test_calls_have_microseconds_and_compute_loses_milliseconds_for_each_gb() -> None:
    assert Spread.of(np.arange(0, 101_000, 1000)) == Spread(median=50, p99=99)
    assert Sample(floor_ms=10, ms=12, gb=4, gb_per_s=50).lost == 0.5


# What is timed


@pytest.mark.parametrize("directions", [["store"], ["load"], ["store", "load"]])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_have_landed_when_their_time_is_told_and_what_is_before_them_is_not_timed(
    device: str, directions: list[str]
) -> None:
    where = torch.device(device, 0 if device == "cuda" else None)
    big = BigCopy(where, 64)
    for copy in (big, Reference(big, where)):
        targets = []
        for direction in directions:
            source, target = big.tensors(direction, 64)
            source.fill_(7)
            target.zero_()
            targets.append(target)
        synchronize(where)  # a big copy waits for no kernel
        seen: list[bool] = []
        moved = copy.move(directions, 48, lambda t=targets, s=seen: s.append(bool(t[0].any())))
        assert seen == [False]
        assert 0 < moved.submit_us <= moved.total_us
        assert [target.tolist() for target in targets] == [[7] * 48 + [0] * 16] * len(targets)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_move_is_timed_after_its_ids_are_there_and_leaves_out_both_ends(direction: str) -> None:
    blocks = Shape(2, 1).new_blocks(CPU, 10)
    with OffloadHandler(blocks.layout, blocks.host) as handler:
        states: list[torch.Tensor] = []
        moved = move(
            handler, blocks, [direction], 8, lambda: states.append(torch.random.get_rng_state())
        )
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert 0 < moved.submit_us <= moved.total_us
    assert moved.copy_method == "host"
    assert blocks.wrong() == 0
    held = blocks.host.pages[1:9] if direction == "store" else blocks.layout.tensors[0][1:9]
    held.zero_()
    assert blocks.wrong() == 8


# Beside a computation


class SteadyWay:
    """10 MB after another, each in 10 ms of the clock."""

    nbytes = 10_000_000

    def __init__(self, clock: Clock) -> None:
        self.started = 0
        self._clock = clock
        self._free = clock.now

    def start(self) -> Callable[[], bool]:
        self.started += 1
        end = self._free = max(self._free, self._clock.now) + 0.01
        return lambda: self._clock.now >= end


def test_what_moved_beside_a_compute_is_told_with_its_speed(clock: Clock) -> None:
    milliseconds, gigabytes, speed = beside(Idle(), SteadyWay(clock))
    assert milliseconds == 60
    assert speed == pytest.approx(1, rel=0.01)
    assert gigabytes == pytest.approx(0.06 * speed, rel=0.01)
    assert beside(Idle(), None) == (60, 0, 0)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_handler_moves_other_blocks_to_other_pages_each_time(direction: str) -> None:
    blocks = Shape(2, 1).new_blocks(CPU, 26)
    pairs: list[Any] = []
    with OffloadHandler(blocks.layout, blocks.host) as handler:

        def note(*, after: Any, copy_method: str, **ids: list[int]) -> Any:
            pairs.append([*zip(*ids.values(), strict=True)])
            return getattr(handler, direction)(**ids)

        spied = SimpleNamespace(store=note, load=note, poll=handler.poll)
        way = HandlerWay(spied, blocks, direction, 8, copy_method=None)
        beside(Idle(), way)
    assert way.copy_methods == {"host"}
    assert blocks.wrong() == 0
    assert not {*pairs[0]} & {*pairs[2]}


# The hits that a server should have


def test_the_model_and_the_block_manager_find_the_same() -> None:
    """Called as vLLM's connector does: a touch, a load, a store of what is new, a touch."""
    numbers = torch.Generator().manual_seed(0)

    def draw(end: int) -> int:
        return int(torch.randint(end, (), generator=numbers))

    assert block_keys([1, 2, 3, 4, 5], 2) == [(1, 2), (1, 2, 3, 4)]
    model, manager = PrefixCacheModel(40), BlockManager(40)
    hits = 0
    for _ in range(1000):
        keys = block_keys([draw(3)] * draw(7) + [draw(8)] * (1 + draw(9)), 1)
        found = manager.lookup(keys).ready
        manager.touch(keys)
        if found:
            manager.complete(manager.prepare_load(keys[:found]))
        store = manager.prepare_store(keys[found:])
        if store is not None:
            manager.touch(keys)
            if store.id:
                manager.complete(store)
        manager.touch(keys)
        assert found == model.serve(keys)
        hits += found
    assert 0.2 < hits / (1000 * 8) < 0.8
