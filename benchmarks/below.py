"""Writes and reads pages through a store below a prefix cache, beside plain files.

Four ways, in turns in one process: "plain", threads that write and read a file for each page with
pwritev() and preadv() around the page cache; "store", the FileStore alone, which also renames; and
"cache", a PrefixCache from poll() until all pages are below, and from lookup() until all can be
loaded, which also asks what is there, checks digests, and moves a trailer for each page; and
"without digests", the same with zeros for digests. Then digests are timed alone, and lookup() of
512 keys in an idle process without a store, and beside such transfers.

Ends with 1 when bytes are wrong, else with 0, whether or not targets are met.
"""

from __future__ import annotations

import mmap
import os
import select
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b, sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
from report import Column, Verdict, table_of, write_json
from timing import Spread, in_turn, new_samples, quartiles, rounded

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.below import FileStore, format

THREADS = 4  # as many as the store has
KEYS = 512
REST = 0.4  # seconds
UNDIGESTED = "without digests"


@dataclass(frozen=True)
class Cell:
    """Quartiles of a way: GB/s, and its speed over that of plain files in the same round.
    over_undigested: the median of its speed over that of the cache without digests."""

    way: str
    direction: str
    gb_per_second: list[float]
    over_plain: list[float]
    over_undigested: float
    wrong: int


Measured = Iterator[tuple[str, float, bool]]  # direction, seconds, and whether the bytes are right
COLUMNS = [
    Column[Cell]("way", lambda cell: cell.way),
    Column[Cell]("direction", lambda cell: cell.direction),
    Column[Cell]("GB/s", lambda cell: cell.gb_per_second[1]),
    Column[Cell]("over plain", lambda cell: cell.over_plain[1]),
]


class Pages:
    """Memory for pages, with random bytes or zeros."""

    def __init__(self, count: int, nbytes: int, is_random: bool) -> None:
        self.memory = torch.frombuffer(mmap.mmap(-1, count * nbytes), dtype=torch.uint8)
        if is_random:
            self.memory.random_(256)
        self.views = [page.numpy().data for page in self.memory.view(count, nbytes)]


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the file system to be measured")
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--page-bytes", type=int, default=2_621_440, help="a multiple of 4,096")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--lookups", type=int, default=4000)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        cells = measure(Path(folder), options.pages, options.page_bytes, options.samples)
        idle, beside = measure_lookups(Path(folder), options.pages, options.lookups)
    digests = measure_digests(options.page_bytes)
    verdicts = [
        Verdict(f"{cell.direction} of {cell.way} over plain", 0.9, cell.over_plain[1], True)
        for cell in cells
        if cell.way in ("store", "cache")
    ]
    for direction in ("write", "read"):
        name = f"{direction} with digests over without"
        (over,) = (
            cell.over_undigested
            for cell in cells
            if (cell.way, cell.direction) == ("cache", direction)
        )
        verdicts.append(Verdict(name, 0.9, over, True))
    verdicts.append(Verdict("lookup beside transfers over idle, p99", 2.0, beside.p99 / idle.p99))
    print(table_of(COLUMNS, cells))
    print("digests, GB/s:", ", ".join(f"{name} {rate:.1f}" for name, rate in digests.items()))
    print(f"lookup of {KEYS} keys, us, median and p99: idle {idle.median:.0f}, {idle.p99:.0f}; ")
    print(f"beside transfers {beside.median:.0f}, {beside.p99:.0f}", "", *verdicts, sep="\n")
    wrong = sum(cell.wrong for cell in cells)
    print(f"pages with wrong bytes: {wrong}")
    if options.json:
        settings = {"pages": options.pages, "page_bytes": options.page_bytes, "threads": THREADS}
        content = {
            "benchmark": "below",
            "settings": {**settings, "samples": options.samples},
            "cells": list(map(asdict, cells)),
            "digests_gb_per_second": digests,
            "lookup_us": {"idle": asdict(idle), "beside": asdict(beside)},
        }
        write_json(options.json, torch.device("cpu"), content, verdicts)
    return 1 if wrong else 0


def measure(folder: Path, count: int, nbytes: int, samples: int) -> list[Cell]:
    source, target = Pages(count, nbytes, True), Pages(count, nbytes, False)
    seconds: dict[tuple[str, str], list[float]] = {}
    wrong: dict[tuple[str, str], int] = {}
    ways: dict[str, Callable[[Path, Pages, Pages], Measured]]
    ways = {"plain": plain, "store": store, "cache": cache, UNDIGESTED: undigested}
    for number in range(-1, samples):
        for name in in_turn(list(ways), max(number, 0)):
            target.memory.zero_()
            path = folder / "pages"
            path.mkdir()
            for direction, took, is_right in ways[name](path, source, target):
                if number >= 0:
                    seconds.setdefault((name, direction), []).append(took)
                    wrong[name, direction] = wrong.get((name, direction), 0) + (not is_right)
            shutil.rmtree(path)
    cells = []
    for (name, direction), times in seconds.items():
        rates = [count * nbytes / one / 1e9 for one in times]
        over_plain, over_undigested = (
            rounded(quartiles([its / own for own, its in zip(times, other, strict=True)]))
            for other in (seconds["plain", direction], seconds[UNDIGESTED, direction])
        )
        speeds, bad = rounded(quartiles(rates)), wrong[name, direction]
        cells.append(Cell(name, direction, speeds, over_plain, over_undigested[1], bad))
    return sorted(cells, key=lambda cell: cell.direction, reverse=True)


def timed(work: Callable[[], Iterable[object]]) -> float:
    """Seconds until all of the work has ended. Rests before, so that the disk has done so too."""
    time.sleep(REST)
    began = time.perf_counter()
    for _ in work():
        pass
    return time.perf_counter() - began


def plain(folder: Path, source: Pages, target: Pages) -> Measured:
    def write(place: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
        file = os.open(folder / str(place), flags, 0o600)
        os.pwritev(file, [source.views[place]], 0)
        os.close(file)

    def read(place: int) -> None:
        file = os.open(folder / str(place), os.O_RDONLY | os.O_DIRECT)
        os.preadv(file, [target.views[place]], 0)
        os.close(file)

    places = range(len(source.views))
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(int, places))  # starts them
        yield "write", timed(lambda: threads.map(write, places)), True
        took = timed(lambda: threads.map(read, places))
        yield "read", took, torch.equal(source.memory, target.memory)


def store(folder: Path, source: Pages, target: Pages) -> Measured:
    files = FileStore(str(folder))
    keys = list(map(str, range(len(source.views))))

    def wait(_: int) -> Iterator[object]:
        while not files.drain_completions():
            yield select.select([files.event_fd()], [], [])

    yield "write", timed(lambda: wait(files.submit_batch_set(keys, source.views))), True
    took = timed(lambda: wait(files.submit_batch_get(keys, target.views)))
    yield "read", took, torch.equal(source.memory, target.memory)
    files.close()


@contextmanager
def prefix_cache(folder: Path, pages: Pages, num_pages: int) -> Iterator[PrefixCache]:
    """Whose blocks on the "GPU" are these pages."""
    layout = PagedLayout([pages.memory.view(len(pages.views), -1)])
    pool = HostPool(layout, num_pages, page_alignment=4096)
    pool.pages.zero_()  # commits its memory
    with PrefixCache(
        layout,
        pool,
        below=f"file:{folder}",
        below_model="m",
        below_policy="all",
        below_bytes=1 << 30,
    ) as prefixes:
        yield prefixes


def no_digest(page: memoryview, digests: bytes) -> bytes:
    return bytes(16)


def undigested(folder: Path, source: Pages, target: Pages) -> Measured:
    load, format.load_digest = format.load_digest, lambda: no_digest
    try:
        yield from cache(folder, source, target)
    finally:
        format.load_digest = load


def cache(folder: Path, source: Pages, target: Pages) -> Measured:
    keys = [sha256(str(place).encode()).digest() for place in range(len(source.views))]
    blocks = list(range(len(keys)))
    with prefix_cache(folder, source, 4 * len(keys)) as prefixes:
        job = prefixes.store(keys, blocks)
        assert job is not None

        def write() -> Iterator[object]:
            prefixes.poll()
            while prefixes.below_stats().written < len(keys):
                time.sleep(0.0005)
                yield None

        yield "write", timed(write), True
    with prefix_cache(folder, target, 4 * len(keys)) as prefixes:

        def read() -> Iterator[object]:
            while prefixes.lookup(keys).ready < len(keys):
                yield prefixes.poll(timeout=1.0)

        took = timed(read)
        job = prefixes.load(keys, blocks)
        assert job is not None
        yield "read", took, torch.equal(source.memory, target.memory)


def measure_digests(nbytes: int) -> dict[str, float]:
    """GB/s of XXH3-128 and of what Python has, one page after another in one thread."""
    pages = Pages(16, nbytes, True).views
    xxh3_128 = format.load_digest()
    ways: dict[str, Callable[[memoryview], object]] = {
        "xxh3_128": lambda page: xxh3_128(page, b""),
        "sha256": lambda page: sha256(page).digest(),
        "blake2b": lambda page: blake2b(page, digest_size=16).digest(),
    }
    rates = {}
    for name, digest in ways.items():
        took = [timed(lambda digest=digest: map(digest, pages)) for _ in range(5)]  # type: ignore[misc]
        rates[name] = rounded([len(pages) * nbytes / min(took) / 1e9])[0]
    return rates


def measure_lookups(folder: Path, count: int, lookups: int) -> tuple[Spread, Spread]:
    """lookup() of keys that are in memory, without a store, and while pages are moved."""
    keys = [sha256(f"prompt {place}".encode()).digest() for place in range(KEYS)]
    small = torch.zeros(KEYS, 4096, dtype=torch.uint8)
    layout = PagedLayout([small])
    spreads = []
    for is_beside in (False, True):
        samples = new_samples(lookups)
        with PrefixCache(layout, HostPool(layout, 2 * KEYS)) as prefixes:
            prefixes.store(keys, list(range(KEYS)))
            prefixes.poll()
            pages = Pages(count, 1 << 20, True)
            with prefix_cache(folder / "beside", pages, 8 * count) as other:
                number = 0
                for sample in range(lookups):
                    if is_beside and sample % 100 == 0:
                        other.poll()
                        number += 1
                        moved = [sha256(f"{number} {at}".encode()).digest() for at in range(count)]
                        other.store(moved, list(range(count)))
                        other.poll()
                    time.sleep(0.0002)  # as a scheduler waits for its GPU, without the GIL
                    began = time.perf_counter_ns()
                    found = prefixes.lookup(keys)
                    samples[sample] = time.perf_counter_ns() - began
                    assert found.ready == KEYS
        spreads.append(Spread.of(samples))
    return spreads[0], spreads[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
