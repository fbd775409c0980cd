"""What the calls of block managers cost: a table for each policy, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from report import Column, Verdict, table_of
from timing import Spread

FASTER = 5.0  # than vLLM's
BYTES_PER_PAGE = 200.0
SERVER, SERVER_MICROSECONDS = "server", 60.0  # a lookup of 512 keys
VLLM, VLLM_BY_KEY = "vLLM", "vLLM by key"
MISS = "lookup, a miss"  # one key is looked up, so the call itself is all that it costs
BESIDE = {"digests": VLLM, "keys": VLLM, "by key": VLLM_BY_KEY}  # who is compared with whom


@dataclass(frozen=True)
class Cell:
    """Calls for prompts of so many blocks, microseconds for a prompt; their median is judged."""

    policy: str
    manager: str
    operation: str
    blocks: int
    prompt: Spread

    @property
    def ns_per_block(self) -> float:
        return self.prompt.median * 1e3 / self.blocks


@dataclass(frozen=True)
class Memory:
    """Resident memory that a full manager has added, without the keys that it was given."""

    policy: str
    manager: str
    pages: int
    bytes_per_page: float


MEMORY: list[Column[Memory]] = [
    Column("policy", lambda its: its.policy),
    Column("manager", lambda its: its.manager),
    Column("bytes a page", lambda its: round(its.bytes_per_page, 1)),
]


def tables(cells: Sequence[Cell], memory: Sequence[Memory]) -> str:
    policies = dict.fromkeys(cell.policy for cell in cells)
    parts = [_of_policy([cell for cell in cells if cell.policy == name]) for name in policies]
    return "\n\n".join([*parts, table_of(MEMORY, memory)])


def _of_policy(cells: Sequence[Cell]) -> str:
    found = {(cell.operation, cell.manager): cell.ns_per_block for cell in cells}

    def cost(manager: str) -> Callable[[str], object]:
        return lambda operation: round(found[operation, manager], 1)

    columns: list[Column[str]] = [
        Column(f"{cells[0].policy}, ns a block", lambda operation: operation),
        *(Column(name, cost(name)) for name in dict.fromkeys(cell.manager for cell in cells)),
        Column("M blocks/s, digests", lambda each: round(1e3 / found[each, "digests"], 2)),
    ]
    return table_of(columns, dict.fromkeys(cell.operation for cell in cells))


def judge(cells: Sequence[Cell], memory: Sequence[Memory]) -> list[Verdict]:
    ours = [its for its in memory if its.manager != VLLM]
    worst = max(its.bytes_per_page for its in ours)
    name = f"bytes for each of {ours[0].pages:,} pages"
    by_socket = [
        Verdict(
            f"{SERVER}, us for a lookup of {of.blocks} keys", SERVER_MICROSECONDS, of.prompt.median
        )
        for of in cells
        if (of.manager, of.operation) == (SERVER, "lookup")
    ]
    return [*_speeds(cells), *by_socket, Verdict(name, BYTES_PER_PAGE, worst)]


def _speeds(cells: Sequence[Cell]) -> Iterator[Verdict]:
    """For each way of calling the operation that gains least over vLLM's; misses by themselves."""
    found = {(cell.policy, cell.operation, cell.manager): cell for cell in cells}
    for manager, beside in BESIDE.items():
        gains: dict[bool, list[tuple[float, str, str]]] = {False: [], True: []}
        for (policy, operation, its), cell in found.items():
            other = found.get((policy, operation, beside))
            if its == manager and other:
                gain = other.ns_per_block / cell.ns_per_block
                gains[operation == MISS].append((gain, policy, operation))
        for is_miss, name in ((False, "all calls but misses"), (True, MISS)):
            least, policy, operation = min(gains[is_miss], default=(None, "each policy", name))
            said = f"{manager}, times as fast as {beside}, least in {operation} ({policy})"
            yield Verdict(said, FASTER, least, at_least=True)
