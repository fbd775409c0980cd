"""Times the calls of a block manager with very many pages, on the CPU, beside those of vLLM's.

Each manager is filled with random prompts; then for some of them, in random order, each call is
timed, the managers taking turns.
Ours gets a prompt as one object with all keys ("joined"), or is called for every single key
("by key"). vLLM's gets what its scheduler gives it: lookups key by key, other calls with a list of
keys; "vLLM by key" gets one key in all calls. All evict by lru. Memory is what a process holds when
the manager is full, less what it held before it was made. With --server, the manager of a server in
another process takes part too ("server").

With --vllm, the manager of the vLLM that is installed takes part.

--trace FILE only replays the requests of such a file, one after another, and says which share of
their blocks each policy finds: https://github.com/kvcache-ai/Mooncake has conversation_trace.jsonl.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import numpy as np
from block_managers import Contestant, OfKeys, OfVllm, OneByOne
from page_server import serving, tiny_cache
from program import count, finish, new_parser
from report import Column, table_of
from timing import Spread, no_garbage_collection, resident_bytes

from torch_kvswap import PrefixCache
from torch_kvswap.prefix import BlockGroup, BlockManager
from torch_kvswap.prefix.hashing import KEY_BYTES
from torch_kvswap.prefix.manager import POLICIES

TRACE_PAGES = 2_500, 6_250, 12_500, 25_000
SERVER = "server"
VLLM, VLLM_BY_KEY = "vLLM", "vLLM by key"
MISS = "lookup, a miss"  # one key is looked up, so the call itself is all that it costs
Maker = Callable[[int], Contestant]
Times = dict[tuple[str, str], list[int]]  # of each manager and call


@dataclass(frozen=True)
class Cell:
    """Calls for prompts of so many blocks, microseconds for a prompt."""

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

    manager: str
    pages: int
    bytes_per_page: float


@dataclass(frozen=True)
class Found:
    """Of all blocks that a trace asks for, those that a manager with so many pages finds."""

    pages: int
    policy: str
    share: float


MEMORY: list[Column[Memory]] = [
    Column("manager", lambda its: its.manager),
    Column("bytes a page", lambda its: round(its.bytes_per_page, 1)),
]
FOUND: list[Column[Found]] = [
    Column("pages", lambda its: its.pages),
    Column("policy", lambda its: its.policy),
    Column("found, %", lambda its: f"{100 * its.share:.1f}"),
]


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    if options.trace is not None:
        found = replay(options.trace)
        print(table_of(FOUND, found))
        content = {"benchmark": "block_manager", "trace": options.trace.name}
        return finish(options, {**content, "found": list(map(asdict, found))})
    count, samples = options.pages // options.blocks, options.samples
    if not 1 <= samples <= count // 2:
        print(f"--samples: with these pages and blocks 1 to {count // 2}", file=sys.stderr)
        return 2
    numbers = random.Random(0)
    length = KEY_BYTES * options.blocks
    prompts = [numbers.randbytes(length) for _ in range(count + samples)]  # the last do not fit
    pages = count * options.blocks
    every = makers(options.vllm)
    with ExitStack() as stack:
        managers = {name: make(pages) for name, make in every.items()}
        if options.server:
            path = stack.enter_context(serving(pages))
            groups = [BlockGroup(pages)]
            connected = PrefixCache.connect(path, [tiny_cache()], groups, model="none")
            managers[SERVER] = OfKeys(stack.enter_context(connected)._manager, in_lists=True)
        cells = [
            Cell(name, operation, options.blocks, Spread.of(np.array(times)))
            for (name, operation), times in measure(managers, prompts, samples).items()
        ]
    del managers
    memory = [
        Memory(name, pages, in_a_new_process(bytes_per_page, name, count, options))
        for name in ("joined", VLLM)
        if name in every
    ]
    print(tables(cells, memory))
    settings = {name: getattr(options, name) for name in ("pages", "blocks", "samples")}
    content = {
        "benchmark": "block_manager",
        "settings": settings,
        "cells": list(map(asdict, cells)),
        "memory": list(map(asdict, memory)),
    }
    return finish(options, content)


def _options(arguments: list[str]) -> Namespace:
    parser = new_parser(__doc__, of_gpu=False)
    add = parser.add_argument
    add("--pages", type=count, default=1_000_000)
    add("--blocks", type=count, default=1000, help="blocks per prompt")
    add("--samples", type=count, default=100, help="prompts for which each call is timed")
    add("--server", action="store_true")
    add("--trace", type=Path)
    add("--vllm", action="store_true")
    return parser.parse_args(arguments)


def replay(trace: Path) -> list[Found]:
    """Replays a file with a line of JSON for each request, whose "hash_ids" name its blocks."""
    prompts = [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]
    asked = sum(map(len, prompts))
    return [
        Found(pages, policy, round(_blocks_found(policy, pages, prompts) / asked, 4))
        for pages in TRACE_PAGES
        for policy in POLICIES
    ]


def _blocks_found(policy: str, pages: int, prompts: Iterable[list[int]]) -> int:
    manager, found = BlockManager(pages, eviction_policy=policy), 0
    for prompt in prompts:
        ready = manager.lookup(prompt).ready
        found += ready
        if ready and (load := manager.prepare_load(prompt[:ready])) is not None:
            manager.complete(load)
        if (store := manager.prepare_store(prompt)) is not None:
            manager.complete(store)
    return found


def makers(vllm: bool) -> dict[str, Maker]:
    every: dict[str, Maker] = {
        "joined": lambda pages: OfKeys(BlockManager(pages)),
        "by key": lambda pages: OneByOne(OfKeys(BlockManager(pages))),
    }
    if vllm:
        every[VLLM] = lambda pages: OfVllm(pages)
        every[VLLM_BY_KEY] = lambda pages: OneByOne(OfVllm(pages))
    return every


def measure(managers: Mapping[str, Contestant], prompts: Sequence[bytes], samples: int) -> Times:
    """Nanoseconds of each call. The managers take turns, a kind of call at a time, so that what
    else the machine does hurts all of them."""
    times: Times = {}
    with no_garbage_collection():
        turns = (calls(manager, prompts, samples) for manager in managers.values())
        for turn in zip(*turns, strict=True):
            for name, (operation, nanoseconds) in zip(managers, turn, strict=True):
                times[name, operation] = nanoseconds
    return times


def calls(
    manager: Contestant, prompts: Sequence[bytes], samples: int
) -> Iterator[tuple[str, list[int]]]:
    """What is called, and how long each call takes, with all pages filled but for a few.

    Raises:
        RuntimeError: the manager has stored or found other blocks than it should; a call that
            refuses its work would look fast.
    """
    count = len(prompts) - samples
    fill(manager, map(manager.form, prompts[: count - samples]))
    known = random.Random(1).sample(range(count - samples), samples)
    present, new, more = (
        list(map(manager.form, part))
        for part in ([prompts[i] for i in known], prompts[count - samples : count], prompts[count:])
    )
    stored: list[Any] = []
    evicting: list[Any] = []
    loaded: list[Any] = []
    hits: set[int] = set()
    yield "prepare_store", [timed(manager.prepare_store, its, stored.append) for its in new]
    told = list(map(manager.to_complete, new, stored))
    yield "complete_store", [timed(manager.complete_store, its) for its in told]
    yield "lookup", [timed(manager.lookup, its, hits.add) for its in present]
    yield MISS, [timed(manager.lookup, its, hits.add) for its in more]
    blocks = len(prompts[0]) // KEY_BYTES
    if hits != {blocks, 0}:
        raise RuntimeError("the manager finds other blocks than were stored")
    yield "touch", [timed(manager.touch, its) for its in present]
    yield "prepare_load", [timed(manager.prepare_load, its, loaded.append) for its in present]
    told = list(map(manager.to_complete, present, loaded))
    yield "complete_load", [timed(manager.complete_load, its) for its in told]
    taken = [timed(manager.prepare_store, its, evicting.append) for its in more]
    if {*map(manager.stored, stored + evicting)} != {blocks}:
        raise RuntimeError("the manager has not stored every block of a prompt")
    yield "prepare_store, evicting", taken


def fill(manager: Contestant, prompts: Iterable[Any]) -> None:
    """prompts: in the form of the manager."""
    for prompt in prompts:
        manager.complete_store(manager.to_complete(prompt, manager.prepare_store(prompt)))


def timed(
    call: Callable[[Any], Any], argument: Any, keep: Callable[[Any], None] = lambda result: None
) -> int:
    """Nanoseconds of the call, whose result is kept."""
    start = time.perf_counter_ns()
    result = call(argument)
    nanoseconds = time.perf_counter_ns() - start
    keep(result)
    return nanoseconds


def in_a_new_process(call: Callable[..., float], *arguments: object) -> float:
    """Where no memory was used before, so that none is found to be used again."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        result: float = pool.submit(call, *arguments).result()
        return result


def bytes_per_page(name: str, prompts: int, options: Namespace) -> float:
    """Of a full manager, without the keys."""
    make = makers(options.vllm)[name]
    form = make(1).form
    forms = [form(os.urandom(KEY_BYTES * options.blocks)) for _ in range(prompts)]
    pages: int = prompts * options.blocks
    before = resident_bytes()
    manager = make(pages)
    fill(manager, forms)
    return round((resident_bytes() - before) / pages, 1)


def tables(cells: Sequence[Cell], memory: Sequence[Memory]) -> str:
    found = {(cell.operation, cell.manager): cell.ns_per_block for cell in cells}

    def cost(manager: str) -> Callable[[str], object]:
        return lambda operation: round(found[operation, manager], 1)

    columns: list[Column[str]] = [
        Column("lru, ns a block", lambda operation: operation),
        *(Column(name, cost(name)) for name in dict.fromkeys(cell.manager for cell in cells)),
    ]
    operations = dict.fromkeys(cell.operation for cell in cells)
    return f"{table_of(columns, operations)}\n\n{table_of(MEMORY, memory)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
