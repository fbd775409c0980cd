"""What compute loses beside transfers: a table for each direction and shape, and the targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from peers import BESIDE_COMPUTE
from report import Verdict, table
from transfers import Shape

BIG, REFERENCE, COPY_ENGINES_ONLY = "big copy", "reference", "copy engines only"
SHARE = 0.93  # of the link
TIMES, PLUS = 1.5, 1.0  # of what a big copy costs, and so many ms for each GB more
HOLDS_ALL = "GEMM"  # the compute whose kernels hold every SM
SHARE_THEN = 0.6  # of the link beside it, for fragments of 8 KiB and more


@dataclass(frozen=True)
class Sample:
    """Milliseconds of the compute alone and beside transfers; what moved meanwhile, how fast."""

    floor_ms: float
    ms: float
    gb: float
    gb_per_s: float

    @property
    def lost(self) -> float:
        """Milliseconds of compute for each GB."""
        return (self.ms - self.floor_ms) / self.gb


@dataclass(frozen=True)
class Cell:
    """A compute beside one way of moving. link: GB/s of big copies alone."""

    shape: Shape
    arrangement: str
    direction: str
    compute: str
    way: str
    samples: list[Sample]
    copy_methods: list[str]
    link: float

    @property
    def lost(self) -> float:
        return median(sample.lost for sample in self.samples)

    @property
    def most_lost(self) -> float:
        return max(sample.lost for sample in self.samples)

    @property
    def gb_per_s(self) -> float:
        return median(sample.gb_per_s for sample in self.samples)

    def to_json(self) -> dict[str, Any]:
        lost = [sample.lost for sample in self.samples]
        speeds = [sample.gb_per_s for sample in self.samples]
        return {
            "shape": vars(self.shape),
            "arrangement": self.arrangement,
            "direction": self.direction,
            "compute": self.compute,
            "way": self.way,
            "copy_methods": self.copy_methods,
            "link_gb_per_s": self.link,
            "lost_ms_per_gb": self.lost,
            "lost_spread": [min(lost), max(lost)],
            "gb_per_s": self.gb_per_s,
            "gb_per_s_spread": [min(speeds), max(speeds)],
            "samples": [vars(sample) for sample in self.samples],
        }


def tables(cells: Sequence[Cell]) -> str:
    kinds = dict.fromkeys((cell.arrangement, cell.direction, cell.shape) for cell in cells)
    said = ["ms: of compute lost for each GB moved; GB/s: meanwhile; medians"]
    for kind in kinds:
        chosen = [cell for cell in cells if (cell.arrangement, cell.direction, cell.shape) == kind]
        arrangement, direction, shape = kind
        said.append(_of_kind(f"{arrangement}, {direction} {shape}", chosen))
    return "\n\n".join(said)


def _of_kind(title: str, cells: Sequence[Cell]) -> str:
    found = {(cell.way, cell.compute): cell for cell in cells}
    computes = list(dict.fromkeys(compute for _, compute in found))
    headers = [title, "method"]
    for compute in computes:
        headers += [f"{compute}: ms", "GB/s"]
    rows: list[list[object]] = []
    for way in dict.fromkeys(way for way, _ in found):
        of_way = [found[way, compute] for compute in computes]
        used = sorted({name for cell in of_way for name in cell.copy_methods})
        numbers = [number for cell in of_way for number in (cell.lost, cell.gb_per_s)]
        rows.append([way, "/".join(used) or None, *numbers])
    rows += _peers(cells[0], computes)
    rows.append(["link, nothing beside it", None, *[None, cells[0].link] * len(computes)])
    return table(headers, rows)


def _peers(cell: Cell, computes: Sequence[str]) -> Iterator[list[object]]:
    if cell.shape != Shape(160, 8) or "decode" not in computes:
        return
    for peer in BESIDE_COMPUTE:
        if peer.direction == cell.direction:
            row: list[object] = [peer.name, None, *[None, None] * len(computes)]
            at = 2 + 2 * computes.index("decode")
            row[at : at + 2] = peer.lost_ms_per_gb, float(peer.gb_per_s)
            yield row


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    found: dict[tuple[Shape, str, str, str], dict[str, Cell]] = {}
    for cell in cells:
        key = cell.shape, cell.arrangement, cell.direction, cell.compute
        found.setdefault(key, {})[cell.way] = cell
    verdicts: list[Verdict] = []
    for (shape, arrangement, direction, compute), of_kind in found.items():
        name = f"{direction} of {shape}, {arrangement}, beside {compute}"
        verdicts += _holding(name, of_kind) if compute == HOLDS_ALL else _others(name, of_kind)
        verdicts.append(_copy_engines_only(name, of_kind))
    return verdicts


def _others(name: str, cells: dict[str, Cell]) -> Iterator[Verdict]:
    ours = cells["auto"]
    share = ours.gb_per_s / ours.link
    yield Verdict(f"{name}, share of the link", SHARE, share, at_least=True)
    yield Verdict(f"{name}, lost ms/GB", TIMES * max(0.0, cells[BIG].lost) + PLUS, ours.lost)


def _holding(name: str, cells: dict[str, Cell]) -> Iterator[Verdict]:
    """Of small fragments only the best method's figure is to be told; the table does."""
    ours = cells["auto"]
    if ours.shape.fragment_kib >= 8:
        share = ours.gb_per_s / ours.link
        yield Verdict(f"{name}, share of the link", SHARE_THEN, share, at_least=True)


def _copy_engines_only(name: str, cells: dict[str, Cell]) -> Verdict:
    """At the cost of big copies: within what their repeats differ by."""
    target, ours = max(0.0, cells[BIG].most_lost), cells[COPY_ENGINES_ONLY].lost
    return Verdict(f"{name}, copy engines only, lost ms/GB", target, ours)
