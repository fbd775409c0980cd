"""What preemptions and generations come to: tables, and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from report import Verdict, table
from timing import quartiles

if TYPE_CHECKING:
    from generations import Generation
    from preemptions import Loss

MANAGERS = ("theirs", "ours")
SHARE = 1 / 3  # of what a preemption costs with their manager
PARTS = "host", "stream"
COPIES = "copies"  # the host without what transformers does with blocks, whichever the manager
RATE = 0.95  # of their throughput: less is less than the fastest generations differ by
AGAIN = "theirs again"  # shows how much generations of one manager differ


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

    def slower(self, manager: str) -> list[float]:
        """Quartiles of by how much the batches of a preemption took longer than the usual
        ones of all samples."""
        losses = self.losses[manager]
        usual = median(one for loss in losses for one in loss.usual)
        usual_with = median(one for loss in losses for one in loss.usual_with)
        excess = [
            sum(loss.without) - usual * len(loss.without) + loss.back - usual_with
            for loss in losses
        ]
        return quartiles(excess)

    def to_json(self) -> dict[str, Any]:
        losses = {name: [asdict(loss) for loss in of] for name, of in self.losses.items()}
        sizes = self.block_tokens, self.blocks, self.block_bytes
        return dict(
            zip(("block_tokens", "blocks", "block_bytes"), sizes, strict=True),
            shares={part: self.share(part) for part in (*PARTS, COPIES)},
            batches_slower_us={name: self.slower(name) for name in MANAGERS},
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
        runs = {name: [asdict(run) for run in of] for name, of in self.runs.items()}
        ratios = {name: self.ratio(name) for name in ("ours", AGAIN)}
        return {"batches": self.name, "ratios": ratios, "generations": runs}


def tables(cells: Sequence[Cell], rates: Sequence[Rate]) -> str:
    rows = []
    for cell in cells:
        mib = round(cell.blocks * cell.block_bytes / 2**20, 1)
        for manager in MANAGERS:
            low, middle, high = (f"{quartile:,.0f}" for quartile in cell.slower(manager))
            row: list[Any] = [cell.name, mib, manager]
            for part in (*PARTS, COPIES):
                row += [cell.median_of(manager, part)]
                row += [cell.share(part) if manager == "ours" else None]
            row += [f"{middle} ({low} to {high})", int(cell.median_of(manager, "batches"))]
            rows.append([*row, len(cell.losses[manager])])
    headers = ["lost per preemption, us", "MiB", "manager"]
    for part in (*PARTS, f"host, {COPIES} only"):
        headers += [part, "share"]
    text = table([*headers, "batches slower by", "back in", "samples"], rows)
    lines = []
    for rate in rates:
        for manager in rate.runs if rate.runs["ours"] else ():
            row = [rate.name, manager, rate.fastest(manager)]
            row += [rate.median_of(manager, "tokens_per_second")]
            row += [rate.median_of(manager, part) for part in ("batches", "preempted")]
            lines.append([*row, rate.ratio(manager), len(rate.runs[manager])])
    headers = ["tokens per second", "manager", "fastest", "median", "batches", "preempted"]
    headers += ["ratio", "rounds"]
    return f"{text}\n\n{table(headers, lines)}" if lines else text


def judge(cells: Sequence[Cell], rates: Sequence[Rate]) -> list[Verdict]:
    lost = [
        Verdict(f"lost on the {part}, {cell.name}, share of theirs", SHARE, cell.share(part))
        for cell in cells
        for part in PARTS
    ]
    return lost + [
        Verdict(f"throughput, {rate.name}, over theirs", RATE, rate.ratio("ours"), at_least=True)
        for rate in rates
        if rate.runs["ours"]
    ]
