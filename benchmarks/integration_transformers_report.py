"""What preemptions and generations come to: tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from report import Column, table_of
from timing import summary

if TYPE_CHECKING:
    from generations import Generation
    from preemptions import Loss

MANAGERS = ("theirs", "ours")
PARTS = "host", "stream"
AGAIN = "theirs again"  # shows how much generations of one manager differ


def summaries(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each part of the records."""
    return {name: summary([record[name] for record in records]) for name in records[0]}


@dataclass
class Cell:
    """Preemptions of a request of `blocks` blocks, of each manager in turn."""

    block_tokens: int
    blocks: int
    block_bytes: int = 0
    losses: dict[str, list[Loss]] = field(default_factory=lambda: {name: [] for name in MANAGERS})
    wrong: int = 0  # requests that came back with other bytes

    @property
    def name(self) -> str:
        return f"{self.blocks} blocks of {self.block_tokens} tokens"

    def median_of(self, manager: str, part: str) -> float:
        return float(median(getattr(loss, part) for loss in self.losses[manager]))

    def share(self, part: str) -> float:
        """What is lost with ours over what is lost with theirs."""
        return self.median_of("ours", part) / self.median_of("theirs", part)

    def to_json(self) -> dict[str, Any]:
        losses = {name: summaries(list(map(asdict, of))) for name, of in self.losses.items()}
        sizes = self.block_tokens, self.blocks, self.block_bytes
        return dict(
            zip(("block_tokens", "blocks", "block_bytes"), sizes, strict=True),
            shares={part: self.share(part) for part in PARTS},
            losses_us=losses,
            wrong=self.wrong,
        )


@dataclass
class Rate:
    """Generations of each manager in turn."""

    asynchronous: bool
    runs: dict[str, list[Generation]] = field(
        default_factory=lambda: {name: [] for name in (*MANAGERS, AGAIN)}
    )

    @property
    def name(self) -> str:
        return "asynchronous batches" if self.asynchronous else "synchronous batches"

    def median_of(self, manager: str, part: str) -> float:
        return float(median(getattr(run, part) for run in self.runs[manager]))

    def fastest(self, manager: str) -> float:
        """The others had less of the host, for whatever reason."""
        return max(run.tokens_per_second for run in self.runs[manager])

    def ratio(self, manager: str) -> float:
        """To the fastest of theirs, of both runs."""
        return self.fastest(manager) / max(self.fastest("theirs"), self.fastest(AGAIN))

    def to_json(self) -> dict[str, Any]:
        runs = {name: summaries(list(map(asdict, of))) for name, of in self.runs.items() if of}
        for name, figures in runs.items():
            figures["tokens_per_second"]["fastest"] = self.fastest(name)
        ratios = {name: self.ratio(name) for name in ("ours", AGAIN)}
        return {"batches": self.name, "ratios": ratios, "generations": runs}


class Lost(NamedTuple):
    """A line: what a manager loses in a cell."""

    cell: Cell
    manager: str

    def share(self, part: str) -> float | None:
        return self.cell.share(part) if self.manager == "ours" else None


class Made(NamedTuple):
    """A line: the tokens that a manager makes."""

    rate: Rate
    manager: str


def _part_columns(part: str, header: str) -> list[Column[Lost]]:
    return [
        Column(header, lambda line: line.cell.median_of(line.manager, part)),
        Column("share", lambda line: line.share(part)),
    ]


LOST: list[Column[Lost]] = [
    Column("lost per preemption, us", lambda line: line.cell.name),
    Column("MiB", lambda line: round(line.cell.blocks * line.cell.block_bytes / 2**20, 1)),
    Column("manager", lambda line: line.manager),
    *_part_columns("host", "host"),
    *_part_columns("stream", "stream"),
    Column("samples", lambda line: len(line.cell.losses[line.manager])),
]
MADE: list[Column[Made]] = [
    Column("tokens per second", lambda line: line.rate.name),
    Column("manager", lambda line: line.manager),
    Column("fastest", lambda line: line.rate.fastest(line.manager)),
    Column("median", lambda line: line.rate.median_of(line.manager, "tokens_per_second")),
    Column("batches", lambda line: line.rate.median_of(line.manager, "batches")),
    Column("preempted", lambda line: line.rate.median_of(line.manager, "preempted")),
    Column("ratio", lambda line: line.rate.ratio(line.manager)),
    Column("rounds", lambda line: len(line.rate.runs[line.manager])),
]


def tables(cells: Sequence[Cell], rates: Sequence[Rate]) -> str:
    text = table_of(LOST, [Lost(cell, manager) for cell in cells for manager in MANAGERS])
    made = [Made(rate, name) for rate in rates if rate.runs["ours"] for name in rate.runs]
    return f"{text}\n\n{table_of(MADE, made)}" if made else text
