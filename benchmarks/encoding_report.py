"""How much faster lossless pools are than raw ones, and what digests cost: tables, and targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import comparison
from comparison import BIG, SUBMIT, WARM
from interference_report import Cell as BesideCell
from report import Column, Verdict, table_of
from transfers import BOTH

RAW, LOSSLESS = "raw", "lossless"
VERIFIED = {RAW: "raw, verified", LOSSLESS: "lossless, verified"}
MIB = 1 << 20
FEW_BLOCKS = 8
FEW_US = 15.0  # by which few blocks may take longer than from a raw pool
LARGE_MIB = 16
# KV bytes per second over those of a raw pool.
MANY, MANY_SMALL = 1.22, 1.18  # 512 blocks; of fragments below 4 KiB, and of one fragment
LARGE = 1.10  # 64 blocks of LARGE_MIB and more
NOT_SLOWER = 1.0
AT_ONCE = 1.15  # 512 blocks, both directions
# Of a pool with digests: its time over that without, the us more, the ms of compute for each GB.
VERIFY, VERIFY_FEW_US, VERIFY_LOST = 1.02, 5.0, 0.2


class Cell(comparison.Cell):
    """Transfers of one kind with each encoding."""

    @property
    def speedup(self) -> float:
        """KV bytes per second over those of the raw pool; the median over the rounds."""
        return self.states[WARM].ratio(RAW, LOSSLESS)

    def added_us(self, way: str, to: str = RAW) -> float:
        """Microseconds that a way takes longer than another; the median over the rounds."""
        samples = self.states[WARM]
        pairs = zip(samples.numbers(way), samples.numbers(to), strict=True)
        return median(mine - other for mine, other in pairs)

    def verified(self, encoding: str) -> float:
        """Time with digests over that without; the median over the rounds."""
        return self.states[WARM].ratio(VERIFIED[encoding], encoding)

    @property
    def gb_per_s(self) -> float:
        """Of the KV cache, with the lossless pool."""
        nbytes = self.kind.nbytes * len(self.kind.directions)
        return nbytes / self.states[WARM].median(LOSSLESS) / 1e3


CELLS: list[Column[Cell]] = [
    Column("layers one by one, warm", lambda cell: str(cell.kind.shape)),
    Column("blocks", lambda cell: cell.kind.blocks),
    Column("direction", lambda cell: cell.kind.direction),
    Column("raw / big", lambda cell: cell.states[WARM].ratio(RAW, BIG)),
    Column("lossless / big", lambda cell: cell.states[WARM].ratio(LOSSLESS, BIG)),
    Column("speedup", lambda cell: cell.speedup),
    Column("added us", lambda cell: cell.added_us(LOSSLESS)),
    Column("raw verified / raw", lambda cell: cell.verified(RAW)),
    Column("added us", lambda cell: cell.added_us(VERIFIED[RAW])),
    Column("lossless verified / lossless", lambda cell: cell.verified(LOSSLESS)),
    Column("added us", lambda cell: cell.added_us(VERIFIED[LOSSLESS], LOSSLESS)),
    Column("GB/s of KV", lambda cell: cell.gb_per_s),
    Column("raw call, us", lambda cell: cell.states[WARM].median(RAW, SUBMIT)),
    Column("lossless call, us", lambda cell: cell.states[WARM].median(LOSSLESS, SUBMIT)),
    Column("method", lambda cell: "/".join(cell.states[WARM].copy_methods[LOSSLESS])),
]
BESIDE: list[Column[BesideCell]] = [
    Column("beside decode", lambda cell: str(cell.shape)),
    Column("direction", lambda cell: cell.direction),
    Column("pool", lambda cell: cell.way),
    Column("lost ms/GB of KV", lambda cell: cell.lost),
    Column("GB/s of KV", lambda cell: cell.gb_per_s),
]


def tables(cells: Sequence[Cell], beside: Sequence[BesideCell]) -> str:
    return f"{table_of(CELLS, cells)}\n\n{table_of(BESIDE, beside)}"


def judge(cells: Sequence[Cell], beside: Sequence[BesideCell]) -> list[Verdict]:
    verified = (_of_digests(cell, encoding) for cell in cells for encoding in VERIFIED)
    return [*(_of_cell(cell) for cell in cells), *verified, *_of_compute(beside)]


def _of_digests(cell: Cell, encoding: str) -> Verdict:
    if cell.kind.blocks <= FEW_BLOCKS:
        added = cell.added_us(VERIFIED[encoding], encoding)
        return Verdict(f"{cell.kind}, {encoding}, us more with digests", VERIFY_FEW_US, added)
    name = f"{cell.kind}, {encoding}, time with digests over without"
    return Verdict(name, VERIFY, cell.verified(encoding))


def _of_cell(cell: Cell) -> Verdict:
    blocks = cell.kind.blocks
    if blocks <= FEW_BLOCKS:
        return Verdict(f"{cell.kind}, us more than raw", FEW_US, cell.added_us(LOSSLESS))
    name = f"{cell.kind}, KV bytes per second over raw"
    return Verdict(name, _target(cell), cell.speedup, at_least=True)


def _target(cell: Cell) -> float:
    kind = cell.kind
    if kind.blocks >= 512:
        is_small = kind.shape.fragment_kib < 4 or kind.shape.layers == 1
        return AT_ONCE if kind.direction == BOTH else MANY_SMALL if is_small else MANY
    is_large = kind.nbytes >= LARGE_MIB * MIB and kind.direction != BOTH
    return LARGE if is_large else NOT_SLOWER


def _of_compute(beside: Sequence[BesideCell]) -> Iterator[Verdict]:
    for direction in dict.fromkeys(cell.direction for cell in beside):
        of_way = {cell.way: cell for cell in beside if cell.direction == direction}
        raw = of_way[RAW]
        name = f"{direction} beside {raw.compute}, lost ms/GB of KV"
        yield Verdict(name, raw.most_lost, of_way[LOSSLESS].lost)
        for encoding, verified in VERIFIED.items():
            target = of_way[encoding].lost + VERIFY_LOST
            yield Verdict(f"{name}, {verified}", target, of_way[verified].lost)
