"""Moves scattered blocks by what other libraries have installed here, beside torch_kvswap.

In turn, in one process, on the same blocks and pages: this library; the worker of vLLM's CPU
offloading; SGLang's transfer kernel; the copies of LMCache's server; the plain ops
(torch_kvswap/reference.py); and beside them one contiguous copy by PyTorch, which gathers nothing,
and one big copy, as in bandwidth.py, whose terms, shapes and states these are. A library takes part
if it can be imported and moves a few blocks right; the others are named, with the reason. Without a
GPU none does.

The tables have total times over that of the big copy; ! marks a way that moves the same blocks and
is more than 3 us faster than this library. All bytes are compared after each cell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from blocks import NumberedBlocks
from comparison import (
    BIG,
    COLD,
    OURS,
    REFERENCE,
    WARM,
    Cell,
    NewHandler,
    Samples,
    comparison_parser,
    finish_cells,
    measure_all,
    plan_of,
)
from peer_handlers import PEERS
from program import device_of
from report import Column, table_of
from transfers import DIRECTIONS, Shape, move

from torch_kvswap.reference import ReferenceHandler

AHEAD_US = 3.0  # what calls and launches differ by


def main(arguments: list[str]) -> int:
    options = comparison_parser(__doc__, samples=20, cold_samples=10).parse_args(arguments)
    left_out = why_not(PEERS, device_of(options))
    found = {name: peer for name, peer in PEERS.items() if name not in left_out}
    versions = {name: peer.version() for name, peer in found.items()}
    others: dict[str, NewHandler] = {**found, "plain ops": plain_ops}
    cells = measure_all(plan_of(options, (WARM, COLD)), options, others)
    said = [f"{name}: {text}" for name, text in versions.items()]
    said += [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    print(tables(cells), "", *said, "", sep="\n")
    return finish_cells(options, "peers", cells, versions=versions, left_out=left_out)


def plain_ops(blocks: NumberedBlocks) -> ReferenceHandler:
    return ReferenceHandler(blocks.layout, blocks.host)


def why_not(peers: Mapping[str, NewHandler], device: torch.device) -> dict[str, str]:
    """Moves a few blocks by each, and returns why some cannot take part."""
    left_out = {}
    for name, peer in peers.items():
        blocks = Shape(2, 4).new_blocks(device, 20)
        with blocks.host:
            try:
                handler = peer(blocks)
                for direction in DIRECTIONS:
                    move(handler, blocks, (direction,), 9)
                if wrong := blocks.wrong():
                    left_out[name] = f"{wrong} blocks and pages had wrong bytes"
            except Exception as error:
                left_out[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return left_out


def same_blocks(samples: Samples) -> list[str]:
    """The ways that move the same blocks."""
    return [way for way in samples.moves if way not in (OURS, BIG, REFERENCE)]


def behind_us(samples: Samples, way: str) -> float:
    """How much longer ours takes than another way in the same round."""
    pairs = zip(samples.numbers(OURS), samples.numbers(way), strict=True)
    return median(ours - other for ours, other in pairs)


def tables(cells: Sequence[Cell]) -> str:
    """One for each arrangement and state; a row for each shape, number of blocks and direction."""
    return "\n\n".join(_tables(cells))


def _tables(cells: Sequence[Cell]) -> Iterator[str]:
    yield f"total / big copy, medians; ! is more than {AHEAD_US:g} us ahead of ours"
    for arrangement in dict.fromkeys(cell.kind.arrangement for cell in cells):
        chosen = [cell for cell in cells if cell.kind.arrangement == arrangement]
        for state in chosen[0].states:
            yield table_of(_columns(f"{arrangement}, {state}", state, chosen[0]), chosen)


def _columns(title: str, state: str, first: Cell) -> list[Column[Cell]]:
    def ratio(way: str) -> Callable[[Cell], object]:
        return lambda cell: cell.states[state].ratio(way, BIG)

    def marked(way: str) -> Callable[[Cell], str]:
        def text(cell: Cell) -> str:
            samples = cell.states[state]
            mark = " !" if behind_us(samples, way) > AHEAD_US else ""
            return f"{samples.ratio(way, BIG):.2f}{mark}"

        return text

    return [
        Column(title, lambda cell: str(cell.kind.shape)),
        Column("blocks", lambda cell: cell.kind.blocks),
        Column("direction", lambda cell: cell.kind.direction),
        Column("big copy, us", lambda cell: cell.states[state].median(BIG)),
        Column(OURS, ratio(OURS)),
        *(Column(way, marked(way)) for way in same_blocks(first.states[state])),
        Column("contiguous copy", ratio(REFERENCE)),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
