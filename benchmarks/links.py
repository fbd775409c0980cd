"""Moves scattered blocks over the links of several GPUs, beside one big copy over one link.

A handler without relays, and handlers with some, move the same blocks, in turn with one big pinned
copy of the same bytes, and with plain copies of equal parts over as many links, in changing order.
Total time is from the call of store() or load() until handler.synchronize() returns. All bytes are
compared after each cell. Then a decode GEMM on the own GPU and one on a relay run beside transfers
with and without the relay, and beside transfers of the relay's own. Without a GPU there are no
relays.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import comparison
import torch
from big_copy import Before
from blocks import ONE_BY_ONE, NumberedBlocks
from comparison import (
    BIG,
    WARM,
    Comparison,
    by_kind,
    comparison_parser,
    finish_cells,
    measure_kinds,
    moves_of,
    plan_of,
)
from computes import computes
from interference import Cell as BesideCell
from interference import measure as measure_beside
from program import count, device_of
from report import Column, table_of
from timing import Move, TimeLimit
from traffic import HandlerWay
from transfers import BOTH, DIRECTIONS, Kind, Shape

from torch_kvswap import OffloadHandler

SHAPES = ("1x2", "64x32")  # the first one without a GPU
BLOCKS = (8, 64, 512, 2048)  # with the second shape 16 MiB to 4 GiB
RELAYS = (0, 1, 3, 7)
MIB_BESIDE = 128  # what moves beside the compute at a time


@dataclass
class Cell(comparison.Cell):
    """Transfers of one kind. relayed: part of the bytes that relays have moved, by way."""

    relayed: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "relayed": self.relayed, "bytes": self.nbytes}

    @property
    def nbytes(self) -> int:
        """Of a round of one way."""
        return self.kind.nbytes * len(self.kind.directions)

    def rate(self, way: str) -> float:
        """Median, in GB/s."""
        return self.nbytes / self.states[WARM].median(way) / 1e3


def main(arguments: list[str]) -> int:
    parser = comparison_parser(__doc__, samples=20, cold_samples=0)
    text = "numbers of other GPUs that take part; default: those of 0, 1, 3 and 7 that the host has"
    parser.add_argument("--relays", type=int, nargs="+", help=text)
    parser.add_argument("--staging-mib", type=count, default=256, help="staging_bytes of handlers")
    parser.set_defaults(arrangements=[ONE_BY_ONE])
    options = parser.parse_args(arguments)
    on_cuda = options.device == "cuda"
    options.blocks = options.blocks or BLOCKS[: None if on_cuda else 2]
    plan = plan_of(options, (WARM,), SHAPES[on_cuda:], (*DIRECTIONS, BOTH))
    cells = measure_kinds(
        plan, options, partial(open_handlers, options), partial(measure, relays_of(options))
    )
    print(tables(cells), "", sep="\n")
    beside, wrong = measure_compute(options) if max(relays_of(options)) > 0 else ([], 0)
    if beside:
        print(table_of(BESIDE, beside), "", sep="\n")
    lost = {"beside compute": [cell.to_json() for cell in beside]}
    return finish_cells(options, "links", cells, **lost) or int(wrong > 0)


def open_handlers(
    options: Namespace,
    device: torch.device,
    shape: Shape,
    arrangement: str,
    count: int,
    stack: ExitStack,
) -> tuple[NumberedBlocks, dict[str, OffloadHandler]]:
    """A handler for each number of relays, all of the same blocks."""
    blocks = shape.new_blocks(device, count, arrangement)
    stack.enter_context(blocks.host)
    handlers = {}
    for number in relays_of(options):
        relays = other_gpus(device)[:number]
        handlers[name_of(number)] = stack.enter_context(
            OffloadHandler(
                blocks.layout,
                blocks.host,
                staging_bytes=options.staging_mib << 20,
                relays=relays,
            )
        )
    return blocks, handlers


def other_gpus(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return []
    return [gpu for gpu in range(torch.cuda.device_count()) if gpu != device.index]


def relays_of(options: Namespace) -> list[int]:
    """The numbers of relays that are compared."""
    available = len(other_gpus(device_of(options)))
    return [number for number in options.relays or RELAYS if number <= available]


def name_of(number: int) -> str:
    return "1 relay" if number == 1 else f"{number} relays"


def name_of_links(relays: int) -> str:
    """The name of plain copies over as many links as a handler with these relays has."""
    return f"{relays + 1} links"


def measure(
    relays: Sequence[int],
    comparison: Comparison,
    opened: tuple[NumberedBlocks, dict[str, OffloadHandler]],
    kind: Kind,
) -> Cell:
    blocks, handlers = opened
    ways = moves_of(handlers, blocks, kind) | {BIG: comparison.copies(kind)[BIG]}
    gpus = [blocks.device.index, *other_gpus(blocks.device)]
    for number in filter(None, relays):
        ways[name_of_links(number)] = copies_over(gpus[: number + 1], kind)
    blocks.refill()
    before = {name: bytes_of(handler) for name, handler in handlers.items()}
    samples = comparison.run(ways, kind, WARM)
    relayed = {}
    for name, handler in handlers.items():
        by_relays, all_bytes = (
            now - then for now, then in zip(bytes_of(handler), before[name], strict=True)
        )
        relayed[name] = round(by_relays / all_bytes, 3)
    return Cell(kind, {WARM: samples}, blocks.wrong(), relayed)


def copies_over(gpus: Sequence[int], kind: Kind) -> Callable[[Before], Move]:
    """Plain copies of equal parts of the bytes, over the link of each GPU at once."""
    nbytes = kind.nbytes // len(gpus)
    copies = []
    for gpu in gpus:
        for direction in kind.directions:
            there = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{gpu}")
            here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
            source, target = (there, here) if direction == "store" else (here, there)
            copies.append((source, target, torch.Stream(there.device)))
        torch.cuda.synchronize(gpu)

    def move(before: Before) -> Move:
        before()
        start = time.perf_counter_ns()
        for source, target, stream in copies:
            with stream:
                target.copy_(source, non_blocking=True)
        submitted = time.perf_counter_ns()
        for _, _, stream in copies:
            stream.synchronize()
        end = time.perf_counter_ns()
        return Move((end - start) / 1e3, (submitted - start) / 1e3)

    return move


def measure_compute(options: Namespace) -> tuple[list[BesideCell], int]:
    """Cells of decode on a GPU beside transfers; and the blocks and pages with wrong bytes.

    The bytes are those of the GPU's own link.
    """
    shape = Shape.parse(SHAPES[1])
    count = (MIB_BESIDE << 20) // shape.block_bytes
    own, relay = (torch.device("cuda", gpu) for gpu in (0, 1))
    limit = TimeLimit(options.time_limit and options.time_limit / 4, 2 * len(DIRECTIONS))
    cells = []
    with ExitStack() as stack:
        blocks = {gpu: shape.new_blocks(gpu, 3 * count + 2) for gpu in (own, relay)}
        for one in blocks.values():
            stack.enter_context(one.host)

        def new_handler(gpu: torch.device, relays: Sequence[int]) -> OffloadHandler:
            of = blocks[gpu]
            return stack.enter_context(OffloadHandler(of.layout, of.host, relays=relays))

        alone, relayed, beside = new_handler(own, ()), new_handler(own, [1]), new_handler(relay, ())
        for gpu, handlers in (
            (own, {"0 relays": (alone, own), "1 relay": (relayed, own)}),
            (relay, {"own transfers": (beside, relay), "as a relay": (relayed, own)}),
        ):
            with torch.cuda.device(gpu):
                decode = computes(gpu)[0]
            for direction in DIRECTIONS:
                ways = {
                    name: HandlerWay(handler, blocks[of], direction, count)
                    for name, (handler, of) in handlers.items()
                }
                for name, way in ways.items():
                    if handlers[name][0] is relayed:
                        way.nbytes //= 2  # by each of the two links
                for name, samples in measure_beside(decode, ways, limit.next_part()).items():
                    kind = shape, ONE_BY_ONE, direction, str(gpu), name
                    cells.append(BesideCell(*kind, samples, sorted(ways[name].copy_methods), 0.0))
        return cells, sum(one.wrong() for one in blocks.values())


def bytes_of(handler: OffloadHandler) -> tuple[int, int]:
    """Bytes that the relays of a handler were given, and those of all its jobs."""
    channels = handler.metrics().stores, handler.metrics().loads
    by_relays = sum(sum(channel.relayed_bytes.values()) for channel in channels)
    return by_relays, sum(channel.bytes for channel in channels)


BESIDE: list[Column[BesideCell]] = [
    Column("decode on", lambda cell: cell.compute),
    Column("direction", lambda cell: cell.direction),
    Column("beside", lambda cell: cell.way),
    Column("lost ms/GB of its link", lambda cell: cell.lost),
    Column("GB/s of its link", lambda cell: cell.gb_per_s),
]


def tables(cells: Sequence[Cell]) -> str:
    """One for each arrangement and direction; a row for each shape and number of blocks."""
    said = [
        "GB/s, medians; links: plain copies over as many, at once;"
        " gain: time of the handler without relays over time with them"
    ]
    said += [table_of(_columns(title, of[0]), of) for title, of in by_kind(cells)]
    return "\n\n".join(said)


def _columns(title: str, first: Cell) -> list[Column[Cell]]:
    columns: list[Column[Cell]] = [
        Column(title, lambda cell: str(cell.kind.shape)),
        Column("blocks", lambda cell: cell.kind.blocks),
        Column("MiB", lambda cell: cell.nbytes / (1 << 20)),
        Column("big copy", lambda cell: cell.rate(BIG)),
    ]
    own, *with_relays = first.relayed
    columns.append(Column(own, lambda cell: cell.rate(own)))
    for name in with_relays:
        columns += _columns_of(name, name_of_links(int(name.split()[0])), own)
    return columns


def _columns_of(name: str, plain: str, own: str) -> list[Column[Cell]]:
    return [
        Column(plain, lambda cell: cell.rate(plain)),
        Column(name, lambda cell: cell.rate(name)),
        Column("gain", lambda cell: cell.states[WARM].ratio(own, name)),
        Column("relayed", lambda cell: cell.relayed[name]),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
