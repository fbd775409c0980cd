"""What compute loses beside transfers: a table for each direction and shape, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from report import Column, Verdict, table_of
from timing import summary
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
            "count": len(self.samples),
            "compute_ms": {
                "alone": summary([sample.floor_ms for sample in self.samples]),
                "beside": summary([sample.ms for sample in self.samples]),
            },
        }


def tables(cells: Sequence[Cell]) -> str:
    kinds = dict.fromkeys((cell.arrangement, cell.direction, cell.shape) for cell in cells)
    said = ["ms: of compute lost for each GB moved; GB/s: meanwhile; medians"]
    for kind in kinds:
        chosen = [cell for cell in cells if (cell.arrangement, cell.direction, cell.shape) == kind]
        arrangement, direction, shape = kind
        said.append(_of_kind(f"{arrangement}, {direction} {shape}", chosen))
    return "\n\n".join(said)


@dataclass(frozen=True)
class _Line:
    """What one way has lost and moved, by compute."""

    way: str
    copy_methods: Sequence[str]
    lost: Mapping[str, float]
    gb_per_s: Mapping[str, float]


def _of_kind(title: str, cells: Sequence[Cell]) -> str:
    computes = list(dict.fromkeys(cell.compute for cell in cells))

    def lost(compute: str) -> Callable[[_Line], object]:
        return lambda line: line.lost.get(compute)

    def speed(compute: str) -> Callable[[_Line], object]:
        return lambda line: line.gb_per_s.get(compute)

    columns: list[Column[_Line]] = [
        Column(title, lambda line: line.way),
        Column("method", lambda line: "/".join(line.copy_methods) or None),
    ]
    for compute in computes:
        columns += [Column(f"{compute}: ms", lost(compute)), Column("GB/s", speed(compute))]
    return table_of(columns, [*_ways(cells), _link(cells[0], computes)])


def _ways(cells: Sequence[Cell]) -> Iterator[_Line]:
    for way in dict.fromkeys(cell.way for cell in cells):
        of_way = [cell for cell in cells if cell.way == way]
        used = sorted({name for cell in of_way for name in cell.copy_methods})
        lost = {cell.compute: cell.lost for cell in of_way}
        yield _Line(way, used, lost, {cell.compute: cell.gb_per_s for cell in of_way})


def _link(cell: Cell, computes: Sequence[str]) -> _Line:
    return _Line("link, nothing beside it", (), {}, dict.fromkeys(computes, cell.link))


def judge(cells: Sequence[Cell]) -> list[Verdict]:
    found: dict[tuple[Shape, str, str, str], dict[str, Cell]] = {}
    for cell in cells:
        key = cell.shape, cell.arrangement, cell.direction, cell.compute
        found.setdefault(key, {})[cell.way] = cell
    verdicts: list[Verdict] = []
    for (shape, arrangement, direction, compute), of_kind in found.items():
        name = f"{direction} of {shape}, {arrangement}, beside {compute}"
        verdicts += _holding(name, of_kind) if compute == HOLDS_ALL else _others(name, of_kind)
        verdicts.append(_copy_engines(name, of_kind))
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


def _copy_engines(name: str, cells: dict[str, Cell]) -> Verdict:
    """At the cost of big copies: within what their repeats differ by."""
    target, ours = max(0.0, cells[BIG].most_lost), cells[COPY_ENGINES_ONLY].lost
    return Verdict(f"{name}, copy engines only, lost ms/GB", target, ours)
