"""What preemptions and generations come to: tables, and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from report import Verdict, table

if TYPE_CHECKING:
    from preemptions import Loss

MANAGERS = ("theirs", "ours")
SHARE = 1 / 3  # of what a preemption costs with their manager
RATE = 0.98  # of their throughput: less is less by more than two runs of one manager differ


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

    @property
    def share(self) -> float:
        """What is lost with ours over what is lost with theirs."""
        return self.median_of("ours", "total") / self.median_of("theirs", "total")

    def to_json(self) -> dict[str, Any]:
        losses = {name: [asdict(loss) for loss in of] for name, of in self.losses.items()}
        sizes = self.block_tokens, self.blocks, self.block_bytes
        return dict(
            zip(("block_tokens", "blocks", "block_bytes"), sizes, strict=True),
            share=self.share,
            losses_us=losses,
            wrong=self.wrong,
        )


@dataclass
class Rate:
    """Tokens per second of generations, of each manager in turn."""

    asynchronous: bool
    rates: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MANAGERS})

    @property
    def name(self) -> str:
        return "asynchronous batches" if self.asynchronous else "synchronous batches"

    @property
    def ratio(self) -> float:
        """Of ours to theirs, each pair one after the other."""
        pairs = zip(self.rates["ours"], self.rates["theirs"], strict=True)
        return median(ours / theirs for ours, theirs in pairs)

    def to_json(self) -> dict[str, Any]:
        return {"batches": self.name, "ratio": self.ratio, "tokens_per_second": self.rates}


def tables(cells: Sequence[Cell], rates: Sequence[Rate]) -> str:
    rows = []
    for cell in cells:
        mib = round(cell.blocks * cell.block_bytes / 2**20, 1)
        for manager in MANAGERS:
            parts = [
                cell.median_of(manager, part) for part in ("host", "stream", "beside", "total")
            ]
            share = cell.share if manager == "ours" else None
            batches = int(cell.median_of(manager, "batches"))
            rows.append([cell.name, mib, manager, *parts, share, batches])
    headers = ["lost per preemption, us", "MiB", "manager", "host", "stream", "beside", "in all"]
    lost = table([*headers, "share", "batches"], rows)
    if not rates or not rates[0].rates["ours"]:
        return lost
    lines = [[rate.name, *(median(rate.rates[m]) for m in MANAGERS), rate.ratio] for rate in rates]
    return f"{lost}\n\n{table(['tokens per second', *MANAGERS, 'ratio'], lines)}"


def judge(cells: Sequence[Cell], rates: Sequence[Rate]) -> list[Verdict]:
    lost = [Verdict(f"lost, {cell.name}, share of theirs", SHARE, cell.share) for cell in cells]
    return lost + [
        Verdict(f"throughput, {rate.name}, over theirs", RATE, rate.ratio, at_least=True)
        for rate in rates
        if rate.rates["ours"]
    ]
