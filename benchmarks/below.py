"""Writes and reads pages through stores below a prefix cache, beside their bare references.

In turns in one process: "plain files", threads that write and read a file for each page with
pwritev() and preadv() around the page cache; "FileStore", which also renames; "cache on files", a
PrefixCache from poll() until all pages are below, and from lookup() until all can be loaded, which
also asks what is there, checks digests, and moves a trailer for each page; and the same without
digests, with zeros. With --valkey: "ValkeyStore" and "cache on Valkey". With --mooncake: "bare
Mooncake", all pages in one call of its own client; "MooncakeStore"; and "cache on Mooncake". A bare
store is called by as many threads as a PrefixCache has for each direction.

Then lookup() of 512 keys in turns: in an idle process without a store; while another cache writes
pages to files; and with 32 keys that are not there, of which a store is asked that answers after
50 ms.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import numpy as np
import torch
from program import finish, new_parser
from report import Column, Verdict, table_of
from timing import Nanoseconds, Spread, in_turn, new_samples, quartiles, rounded

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.below import FileStore, MooncakeStore, PageStore, ValkeyStore, format

THREADS = 4  # as many as a PrefixCache has for each direction
KEYS, MISSED = 512, 32
ROUNDS = 10  # of lookups, among which the situations take turns
REST = 0.4  # seconds
REFERENCES = {
    "FileStore": "plain files",
    "cache on files": "plain files",
    "cache on Valkey": "ValkeyStore",
    "MooncakeStore": "bare Mooncake",
    "cache on Mooncake": "bare Mooncake",
}
UNDIGESTED = "without digests"
_names = itertools.count()  # no two caches and rounds have equal keys


@dataclass(frozen=True)
class Cell:
    """Quartiles of a way: GB/s, and its speed over that of its reference in the same round."""

    way: str
    direction: str
    gb_per_second: list[float]
    over_reference: list[float] | None
    wrong: int


Measured = Iterator[tuple[str, float, bool]]  # direction, seconds, and whether the bytes are right
Way = Callable[[Path, "Pages", "Pages"], Measured]
COLUMNS = [
    Column[Cell]("way", lambda cell: cell.way),
    Column[Cell]("direction", lambda cell: cell.direction),
    Column[Cell]("GB/s", lambda cell: cell.gb_per_second[1]),
    Column[Cell]("over", lambda cell: REFERENCES.get(cell.way)),
    Column[Cell]("that", lambda cell: cell.over_reference and cell.over_reference[1]),
]


class Pages:
    """Memory for pages, with random bytes or zeros."""

    def __init__(self, count: int, nbytes: int, is_random: bool) -> None:
        self.memory = torch.frombuffer(mmap.mmap(-1, count * nbytes), dtype=torch.uint8)
        if is_random:
            self.memory.random_(256)
        self.views = [page.numpy().data for page in self.memory.view(count, nbytes)]


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__, of_gpu=False)
    parser.add_argument("--folder", type=Path, help="on the file system to be measured")
    parser.add_argument("--valkey", help="URL of a server without anything else in it")
    parser.add_argument("--mooncake", help="URL of the master of a store with 1 GiB or more")
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--page-bytes", type=int, default=2_621_440, help="a multiple of 4,096")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--lookups", type=int, default=4000, help="in each situation")
    options = parser.parse_args(arguments)
    ways = ways_of(options.valkey, options.mooncake)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds, wrong = measure(
            ways, Path(folder), options.pages, options.page_bytes, options.samples
        )
        lookups = measure_lookups(Path(folder), options.pages, options.lookups)
    digests = measure_digests(options.page_bytes)
    nbytes = options.pages * options.page_bytes
    cells = [cell_of(way, seconds, wrong, nbytes) for way in seconds]
    verdicts = [
        Verdict(f"{cell.direction} of {cell.way}", 0.9, cell.over_reference[1], True)
        for cell in cells
        if cell.over_reference is not None
    ]
    for direction in ("write", "read"):
        over = ratios(seconds, ("cache on files", direction), (UNDIGESTED, direction))[1]
        verdicts.append(Verdict(f"{direction} with digests over without", 0.9, over, True))
    for situation in ("beside transfers", "asking"):
        over = lookups[situation].p99 / lookups["idle"].p99
        verdicts.append(Verdict(f"lookup {situation} over idle, p99", 2.0, over))
    print(table_of(COLUMNS, cells))
    print("digests, GB/s:", ", ".join(f"{name} {rate:.1f}" for name, rate in digests.items()))
    for situation, spread in lookups.items():
        print(f"lookup of {KEYS} keys, {situation}: {spread.median:.0f} us, p99 {spread.p99:.0f}")
    print("", *verdicts, sep="\n")
    settings = {"pages": options.pages, "page_bytes": options.page_bytes, "threads": THREADS}
    content = {
        "benchmark": "below",
        "settings": {**settings, "samples": options.samples, "lookups": options.lookups},
        "cells": list(map(asdict, cells)),
        "digests_gb_per_second": digests,
        "lookup_us": {name: asdict(spread) for name, spread in lookups.items()},
    }
    return finish(options, content, verdicts, sum(wrong.values()))


def ways_of(valkey: str | None, mooncake: str | None) -> dict[str, Way]:
    ways: dict[str, Way] = {
        "plain files": plain,
        "FileStore": partial(store, lambda folder: FileStore(str(folder))),
        "cache on files": partial(cache, "file:{}"),
        UNDIGESTED: undigested,
    }
    if valkey:
        ways["ValkeyStore"] = partial(store, lambda _: ValkeyStore(valkey))
        ways["cache on Valkey"] = partial(cache, valkey)
    if mooncake:
        ways["bare Mooncake"] = partial(bare_mooncake, mooncake)
        ways["MooncakeStore"] = partial(store, lambda _: MooncakeStore(mooncake))
        ways["cache on Mooncake"] = partial(cache, mooncake)
    return ways


Seconds = dict[tuple[str, str], list[float]]  # key: way and direction


def measure(
    ways: dict[str, Way], folder: Path, count: int, nbytes: int, samples: int
) -> tuple[Seconds, dict[tuple[str, str], int]]:
    """Seconds of each sample, and how many had wrong bytes."""
    source, target = Pages(count, nbytes, True), Pages(count, nbytes, False)
    seconds: Seconds = {}
    wrong: dict[tuple[str, str], int] = {}
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
    return dict(sorted(seconds.items(), key=lambda item: list(ways).index(item[0][0]))), wrong


def ratios(seconds: Seconds, way: tuple[str, str], reference: tuple[str, str]) -> list[float]:
    """Quartiles of the speed of a way over that of another one."""
    pairs = zip(seconds[way], seconds[reference], strict=True)
    return rounded(quartiles([its / own for own, its in pairs]))


def cell_of(
    way: tuple[str, str], seconds: Seconds, wrong: dict[tuple[str, str], int], nbytes: int
) -> Cell:
    name, direction = way
    rates = rounded(quartiles([nbytes / took / 1e9 for took in seconds[way]]))
    reference = REFERENCES.get(name, ""), direction
    over = ratios(seconds, way, reference) if reference in seconds else None
    return Cell(name, direction, rates, over, wrong[way])


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


def store(
    new_store: Callable[[Path], PageStore], folder: Path, source: Pages, target: Pages
) -> Measured:
    pages = new_store(folder)
    places = range(len(source.views))
    keys = list(map(str, places))

    def put(first: int) -> None:
        pages.put(keys[first::THREADS], source.views[first::THREADS])

    def get(first: int) -> None:
        pages.get(keys[first::THREADS], target.views[first::THREADS])

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(int, places))  # starts them
        yield "write", timed(lambda: threads.map(put, range(THREADS))), True
        took = timed(lambda: threads.map(get, range(THREADS)))
        yield "read", took, torch.equal(source.memory, target.memory)
    pages.delete(keys)
    pages.close()


def bare_mooncake(url: str, _: Path, source: Pages, target: Pages) -> Measured:
    from mooncake.store import MooncakeDistributedStore

    pages, address = MooncakeDistributedStore(), urlsplit(url)
    master = f"{address.hostname}:{address.port or 50051}"
    assert pages.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
    keys = list(map(str, range(len(source.views))))
    sizes = list(map(len, source.views))
    moves = (("write", pages.batch_put_from, source), ("read", pages.batch_get_into, target))
    for direction, move, memory in moves:
        first = memory.memory.data_ptr()
        pages.register_buffer(first, memory.memory.nbytes)
        addresses = [first + place * sizes[0] for place in range(len(keys))]
        took = timed(partial(move, keys, addresses, sizes))
        is_read = direction == "read"
        yield direction, took, not is_read or torch.equal(source.memory, target.memory)
    pages.batch_remove(keys, force=True)
    pages.close()


@contextmanager
def prefix_cache(below: str, pages: Pages, num_pages: int) -> Iterator[PrefixCache]:
    """Whose blocks on the "GPU" are these pages."""
    layout = PagedLayout([pages.memory.view(len(pages.views), -1)])
    pool = HostPool(layout, num_pages, page_alignment=4096)
    pool.pages.zero_()  # commits its memory
    options: dict[str, Any] = {"below_model": "m", "below_policy": "all"}
    with PrefixCache(layout, pool, below=below, **options) as prefixes:
        missing = new_keys(1)
        while prefixes.lookup(missing).asking:  # connects to the store
            prefixes.poll(timeout=1.0)
        yield prefixes


def new_keys(count: int) -> list[bytes]:
    name = f"{os.getpid()} {time.time()} {next(_names)}"
    return [sha256(f"{name} {place}".encode()).digest() for place in range(count)]


def cache(below: str, folder: Path, source: Pages, target: Pages) -> Measured:
    below = below.format(folder)
    keys = new_keys(len(source.views))
    blocks = list(range(len(keys)))
    with prefix_cache(below, source, 4 * len(keys)) as prefixes:
        job = prefixes.store(keys, blocks)
        assert job is not None

        def write() -> Iterator[object]:
            prefixes.poll()
            while prefixes.below_stats().written < len(keys):
                time.sleep(0.0005)
                yield None

        yield "write", timed(write), True
    with prefix_cache(below, target, 4 * len(keys)) as prefixes:

        def read() -> Iterator[object]:
            while prefixes.lookup(keys).ready < len(keys):
                yield prefixes.poll(timeout=1.0)

        took = timed(read)
        job = prefixes.load(keys, blocks)
        assert job is not None
        yield "read", took, torch.equal(source.memory, target.memory)


def undigested(folder: Path, source: Pages, target: Pages) -> Measured:
    load, format.load_digest = format.load_digest, lambda: lambda page, digests: bytes(16)
    try:
        yield from cache("file:{}", folder, source, target)
    finally:
        format.load_digest = load


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


class SlowStore(PageStore):
    """Has nothing, and says so after 50 ms."""

    def exists(self, keys: list[str]) -> list[bool]:
        time.sleep(0.05)
        return [False] * len(keys)

    def get(self, keys: list[str], buffers: list[memoryview]) -> list[bool]:
        return self.exists(keys)

    def put(self, keys: list[str], buffers: list[memoryview]) -> None:
        self.exists(keys)

    def delete(self, keys: list[str]) -> None:
        self.exists(keys)


def measure_lookups(folder: Path, count: int, lookups: int) -> dict[str, Spread]:
    """lookup() of a prompt that is in memory, or all but its last keys, in each situation."""
    prompt = new_keys(KEYS)
    layout = PagedLayout([torch.zeros(KEYS, 4096, dtype=torch.uint8)])
    samples: dict[str, list[Nanoseconds]] = {}
    pages = Pages(count, 1 << 20, True)
    with (
        PrefixCache(layout, HostPool(layout, 2 * KEYS)) as prefixes,
        PrefixCache(
            layout, HostPool(layout, 2 * KEYS), below=SlowStore(), below_model="m"
        ) as asking,
    ):
        for cache in (prefixes, asking):
            cache.store(prompt, list(range(KEYS)))
            cache.poll()
        for _ in range(ROUNDS):
            several = -(-lookups // ROUNDS)
            same = [prompt] * several
            samples.setdefault("idle", []).append(time_lookups(prefixes, same, None))
            with prefix_cache(f"file:{folder / 'beside'}", pages, 8 * count) as other:
                samples.setdefault("beside transfers", []).append(
                    time_lookups(prefixes, same, other)
                )
            prompts = [[*prompt[:-MISSED], *new_keys(MISSED)] for _ in range(several)]
            samples.setdefault("asking", []).append(time_lookups(asking, prompts, None))
    return {name: Spread.of(np.concatenate(several)) for name, several in samples.items()}


def time_lookups(
    prefixes: PrefixCache, prompts: list[list[bytes]], other: PrefixCache | None
) -> Nanoseconds:
    samples = new_samples(len(prompts))
    for number, keys in enumerate(prompts):
        if other is not None and number % 100 == 0:  # it writes new pages
            other.poll()
            blocks = list(range(other.layouts[0].num_blocks))
            other.store(new_keys(len(blocks)), blocks)
            other.poll()
        prefixes.poll()
        time.sleep(0.0005)  # as a scheduler waits for its GPU, without the GIL
        began = time.perf_counter_ns()
        prefixes.lookup(keys)
        samples[number] = time.perf_counter_ns() - began
    return samples


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
