"""Transfers, one big copy of their bytes and the reference in turn, warm and cold."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from statistics import median
from typing import Any, TypeVar

import torch
from big_copy import Before, BigCopy, Reference, nothing
from blocks import NumberedBlocks
from other_work import OtherWork
from program import count, device_of, finish, new_parser
from timing import (
    Hold,
    Move,
    TimeLimit,
    in_turn,
    no_garbage_collection,
    quartiles,
    rounded,
    synchronize,
)
from transfers import (
    DIRECTIONS,
    SHAPES,
    Kind,
    Shape,
    add_transfers,
    blocks_of,
    move,
    shapes_of,
)

from torch_kvswap import OffloadHandler

OURS, BIG, REFERENCE = "ours", "big copy", "reference"
WARM, HELD, COLD = "warm", "held", "cold"
TOTAL, SUBMIT = "total_us", "submit_us"  # of a Move
LEAST = 5  # samples that a limit of time leaves
_WARM_UPS = {WARM: 3, HELD: 3, COLD: 1}

Timed = Callable[[Before], Move]  # does it once, and tells what it took
NewHandler = Callable[[NumberedBlocks], Any]  # of what moves these blocks
Candidates = Callable[[int, Mapping[str, Sequence[Move]]], list[str]]
Caches = TypeVar("Caches")
OpenCaches = Callable[[torch.device, Shape, str, int, ExitStack], Caches]
OneCell = TypeVar("OneCell", bound="Cell")


@dataclass
class Samples:
    """What was measured in one state: by way, in the order of the rounds."""

    moves: dict[str, list[Move]]

    def numbers(self, way: str, what: str = TOTAL) -> list[float]:
        return [getattr(move, what) for move in self.moves[way]]

    def median(self, way: str, what: str = TOTAL) -> float:
        return median(self.numbers(way, what))

    def ratios(self, way: str, other: str, what: str = TOTAL) -> list[float]:
        """Quartiles of the ratios of a way to another one in the same round."""
        pairs = zip(self.numbers(way, what), self.numbers(other, what), strict=False)
        return quartiles([mine / beside for mine, beside in pairs])

    def ratio(self, way: str, other: str, what: str = TOTAL) -> float:
        return self.ratios(way, other, what)[1]

    @property
    def count(self) -> int:
        """Rounds that were kept."""
        return max(map(len, self.moves.values()), default=0)

    @property
    def complete(self) -> list[str]:
        """The ways that took part in all rounds."""
        return [way for way, moves in self.moves.items() if len(moves) == self.count]

    @property
    def copy_methods(self) -> dict[str, list[str]]:
        """The copy methods that the results name, for each way of copying."""
        used = {way: {move.copy_method for move in moves} for way, moves in self.moves.items()}
        return {way: sorted(filter(None, names)) for way, names in used.items() if any(names)}

    def to_json(self) -> dict[str, Any]:
        """For the JSON file: counts, quartiles, and ratios to both copies."""
        measured = [way for way, moves in self.moves.items() if moves]
        others = [way for way in (BIG, REFERENCE) if way in measured]
        figures = {
            what: {
                "quartiles": {way: rounded(quartiles(self.numbers(way, what))) for way in measured},
                **{
                    f"over {other}": {
                        way: rounded(self.ratios(way, other, what))
                        for way in measured
                        if way != other
                    }
                    for other in others
                },
            }
            for what in (TOTAL, SUBMIT)
        }
        counts = {way: len(moves) for way, moves in self.moves.items()}
        return {"counts": counts, "copy_methods": self.copy_methods, **figures}


@dataclass
class Cell:
    """Transfers of one kind. wrong: blocks and pages."""

    kind: Kind
    states: dict[str, Samples] = field(default_factory=dict)
    wrong: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.kind),
            "wrong": self.wrong,
            "states": {state: samples.to_json() for state, samples in self.states.items()},
        }


def comparison_parser(description: str | None, samples: int, cold_samples: int) -> ArgumentParser:
    """With the options of a program that compares."""
    parser = new_parser(description)
    add = parser.add_argument
    add_transfers(parser)
    add("--blocks", type=count, nargs="+", help="blocks per transfer")
    add("--samples", type=count, default=samples, help="rounds per cell, after the warm-up")
    text = "rounds per cell with other work before each transfer and each copy"
    add("--cold-samples", type=int, default=cold_samples, help=text)
    text = f"for the whole program; cells then have fewer rounds, but {LEAST} at least"
    add("--time-limit", type=float, metavar="SECONDS", help=text)
    return parser


def settings(options: Namespace) -> dict[str, Any]:
    """What says how a comparison was made, for the JSON file."""
    names = ("samples", "cold_samples", "arrangements", "time_limit")
    return {name: getattr(options, name) for name in names}


def finish_cells(options: Namespace, benchmark: str, cells: Sequence[Cell], **more: Any) -> int:
    """finish() of a program whose figures are these cells; more: what its JSON file has besides."""
    figures = [cell.to_json() for cell in cells]
    content = {"benchmark": benchmark, "settings": settings(options), **more, "cells": figures}
    return finish(options, content, sum(cell.wrong for cell in cells))


def by_kind(cells: Sequence[OneCell]) -> Iterator[tuple[str, list[OneCell]]]:
    """The cells of each arrangement and direction, and a title that names the two."""
    kinds = dict.fromkeys((cell.kind.arrangement, cell.kind.direction) for cell in cells)
    for kind in kinds:
        chosen = [cell for cell in cells if (cell.kind.arrangement, cell.kind.direction) == kind]
        yield ", ".join(kind), chosen


def alternate(
    ways: Mapping[str, Timed],
    before: Before,
    rounds: range,
    end: float,
    candidates: Candidates | None = None,
) -> Samples:
    """All ways once in each round, and each of them at every place in turn.

    Args:
        ways: by name.
        before: is called right before each of them.
        rounds: rounds below zero warm up, and are not kept.
        end: after that time of perf_counter() no round begins once there are LEAST samples.
        candidates: gets the number of a round that has ended and all moves so far, also of rounds
            that warm up, and returns the ways that are worth measuring on.
    """
    everything: dict[str, list[Move]] = {name: [] for name in ways}
    kept: dict[str, list[Move]] = {name: [] for name in ways}
    names = list(ways)
    for number in rounds:
        if number >= LEAST and time.perf_counter() > end:
            break
        for name in in_turn(names, number):
            moved = ways[name](before)
            everything[name].append(moved)
            if number >= 0:
                kept[name].append(moved)
        names = candidates(number, everything) if candidates else names
    return Samples(kept)


class Comparison:
    """Measures transfers beside a big copy and the reference, warm and cold.

    Args:
        options: see comparison_parser().
        nbytes: of the largest transfer.
        parts: how often run() will be called; they share the limit of time.
    """

    def __init__(self, options: Namespace, nbytes: int, parts: int) -> None:
        self._device = device = device_of(options)
        self._samples = {WARM: options.samples, HELD: options.samples, COLD: options.cold_samples}
        self._limit = TimeLimit(options.time_limit, parts)
        self._other = OtherWork(device)
        self._big = BigCopy(device, nbytes)
        self._reference = Reference(self._big, device)
        # One for all that is held: of 32 that are made torch would hand out those of the copies.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copies(self, kind: Kind) -> dict[str, Timed]:
        """What the transfers are compared with."""
        return {
            BIG: lambda before: self._big.move(kind.directions, kind.nbytes, before),
            REFERENCE: lambda before: self._reference.move(kind.directions, kind.nbytes, before),
        }

    def run(
        self,
        ways: Mapping[str, Timed],
        kind: Kind,
        state: str,
        candidates: Candidates | None = None,
    ) -> Samples:
        """All ways in turn; see alternate()."""
        rounds = range(-_WARM_UPS[state], self._samples[state])
        with self._before_each(state, kind.blocks) as before:
            samples = alternate(ways, before, rounds, self._limit.next_part(), candidates)
        synchronize(self._device)
        return samples

    @contextmanager
    def _before_each(self, state: str, blocks: int) -> Iterator[Before]:
        """What makes the state, right before a transfer of so many blocks."""
        if state != HELD:
            yield self._other if state == COLD else nothing
            return
        stream = self._stream
        assert stream is not None, "without a GPU no stream can be held"
        with torch.cuda.stream(stream):
            yield lambda: Hold(stream, 0.002 + 4e-6 * blocks)  # longer than the call


@dataclass(frozen=True)
class Plan:
    """What is measured: every number of blocks, in each direction, in every state."""

    shapes: Sequence[Shape]
    counts: Sequence[int]
    states: Sequence[str]
    directions: Sequence[str]


def plan_of(
    options: Namespace,
    states: Sequence[str],
    shapes: Sequence[str] = SHAPES,
    directions: Sequence[str] = DIRECTIONS,
) -> Plan:
    return Plan(shapes_of(options, shapes), blocks_of(options), states, directions)


def measure_kinds(
    plan: Plan,
    options: Namespace,
    open_caches: OpenCaches[Caches],
    measure: Callable[[Comparison, Caches, Kind], OneCell],
) -> list[OneCell]:
    """Cells of each arrangement, shape, direction and number of blocks.

    Args:
        open_caches: makes caches of so many blocks, and what moves them. The stack closes it.
        measure: a cell. The first and the last block and page stay as they are.
    """
    kinds = [*product(plan.directions, plan.counts)]
    number = len(plan.shapes) * len(options.arrangements) * len(kinds)
    nbytes = max(plan.counts) * max(shape.block_bytes for shape in plan.shapes)
    device = device_of(options)
    comparison = Comparison(options, nbytes, number * len(plan.states))
    # As many blocks again do not move. With very few a page would soon get a block that it has,
    # and nobody would see when it does not.
    count = 2 * max(*plan.counts, 16) + 18

    def of_cache(arrangement: str, shape: Shape) -> Iterator[OneCell]:
        with ExitStack() as stack:
            caches = open_caches(device, shape, arrangement, count, stack)
            stack.enter_context(no_garbage_collection())
            for direction, blocks in kinds:
                yield measure(comparison, caches, Kind(shape, arrangement, direction, blocks))

    cells: list[OneCell] = []
    for arrangement, shape in product(options.arrangements, plan.shapes):
        cells += of_cache(arrangement, shape)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next shape has blocks of another size
    return cells


def moves_of(handlers: Mapping[str, Any], blocks: NumberedBlocks, kind: Kind) -> dict[str, Timed]:
    """What each handler is timed at: moving the blocks."""
    return {
        name: partial(move, handler, blocks, kind.directions, kind.blocks)
        for name, handler in handlers.items()
    }


def measure_all(
    plan: Plan, options: Namespace, others: Mapping[str, NewHandler] | None = None
) -> list[Cell]:
    """See measure_kinds(). others: other handlers, which move the same blocks."""

    def open_cache(
        device: torch.device, shape: Shape, arrangement: str, count: int, stack: ExitStack
    ) -> tuple[NumberedBlocks, dict[str, Any]]:
        blocks = shape.new_blocks(device, count, arrangement)
        stack.enter_context(blocks.host)
        ours = stack.enter_context(OffloadHandler(blocks.layout, blocks.host))
        return blocks, {OURS: ours} | {name: new(blocks) for name, new in (others or {}).items()}

    def measure(
        comparison: Comparison, cache: tuple[NumberedBlocks, dict[str, Any]], kind: Kind
    ) -> Cell:
        blocks, handlers = cache
        ways = moves_of(handlers, blocks, kind) | comparison.copies(kind)
        blocks.refill()
        states = {state: comparison.run(ways, kind, state) for state in plan.states}
        return Cell(kind, states, blocks.wrong())

    return measure_kinds(plan, options, open_cache, measure)
