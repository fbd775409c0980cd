"""Times the calls of a block manager with very many pages, on the CPU, beside those of vLLM's.

Each manager is filled with random prompts; then for some of them, in random order, each call is
timed, the managers taking turns.
Ours gets a prompt as one object with all digests ("digests"), as a list of keys ("keys"), or is
called for every single key ("by key"). vLLM's gets what its scheduler gives it: lookups key by key,
other calls with a list of keys; "vLLM by key" gets one key in all calls. Memory is what a process
holds when the manager is full, less what it held before it was made. With --server, the manager of
a server in another process takes part too ("server", lru only).

vLLM's modules come from its package, of which nothing else is needed:
    pip download --no-deps --only-binary :all: vllm==0.26.0
    unzip 'vllm-*.whl' 'vllm/v1/kv_offload/*' -d FOLDER
Without --vllm FOLDER it is left out, and what is compared with it is not judged.
"""

from __future__ import annotations

import os
import random
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import numpy as np
import torch
from block_manager_report import (
    MISS,
    SERVER,
    VLLM,
    VLLM_BY_KEY,
    Cell,
    Memory,
    judge,
    tables,
)
from block_managers import Contestant, OfDigests, OfKeys, OfServer, OfVllm, OneByOne
from report import write_json
from timing import Spread, no_garbage_collection, resident_bytes

from torch_kvswap.prefix.hashing import DIGEST_BYTES

Maker = Callable[[int, str], Contestant]
Times = dict[tuple[str, str], list[int]]  # of each manager and call


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    count, samples = options.pages // options.blocks, options.samples
    if not 1 <= samples <= count // 2:
        print(f"--samples: with these pages and blocks 1 to {count // 2}", file=sys.stderr)
        return 2
    numbers = random.Random(0)
    length = DIGEST_BYTES * options.blocks
    prompts = [numbers.randbytes(length) for _ in range(count + samples)]  # the last do not fit
    pages = count * options.blocks
    cells: list[Cell] = []
    memory: list[Memory] = []
    for policy in options.policies:
        every = makers(options.vllm)
        managers = {name: make(pages, policy) for name, make in every.items()}
        server = OfServer(pages) if options.server and policy == "lru" else None
        if server is not None:
            managers[SERVER] = server
        for (name, operation), times in measure(managers, prompts, samples).items():
            spread = Spread.of(np.array(times))
            cells.append(Cell(policy, name, operation, options.blocks, spread))
        if server is not None:
            server.close()
        del managers
        for name in ("digests", VLLM)[: 1 + (VLLM in every)]:
            size = in_a_new_process(bytes_per_page, name, policy, count, options)
            memory.append(Memory(policy, name, pages, size))
    verdicts = judge(cells, memory)
    print(tables(cells, memory), "", *verdicts, sep="\n")
    if options.json:
        settings = {name: getattr(options, name) for name in ("pages", "blocks", "samples")}
        content = {
            "benchmark": "block_manager",
            "settings": settings,
            "cells": list(map(asdict, cells)),
            "memory": list(map(asdict, memory)),
        }
        write_json(options.json, torch.device("cpu"), content, verdicts)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pages", type=int, default=1_000_000)
    add("--blocks", type=int, default=1000, help="of a prompt")
    add("--samples", type=int, default=100, help="prompts for which each call is timed")
    add("--policies", nargs="+", choices=("lru", "arc"), default=("lru", "arc"))
    add("--server", action="store_true")
    add("--vllm", type=Path, help="a folder with the folder vllm of its package")
    add("--json", type=Path, help="where the figures go")
    return parser


def makers(vllm: Path | None) -> dict[str, Maker]:
    every: dict[str, Maker] = {
        "digests": OfDigests,
        "keys": OfKeys,
        "by key": lambda pages, policy: OneByOne(OfDigests(pages, policy)),
    }
    if vllm is not None:
        every[VLLM] = lambda pages, policy: OfVllm(pages, policy, vllm)
        every[VLLM_BY_KEY] = lambda pages, policy: OneByOne(OfVllm(pages, policy, vllm))
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
    fill(manager, prompts[: count - samples])
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
    blocks = len(prompts[0]) // DIGEST_BYTES
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


def fill(manager: Contestant, prompts: Sequence[bytes]) -> None:
    for prompt in map(manager.form, prompts):
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


def bytes_per_page(name: str, policy: str, prompts: int, options: Namespace) -> float:
    """Of a full manager, without the keys."""
    make = makers(options.vllm)[name]
    form = make(1, policy).form
    forms = [form(os.urandom(DIGEST_BYTES * options.blocks)) for _ in range(prompts)]
    pages: int = prompts * options.blocks
    before = resident_bytes()
    manager = make(pages, policy)
    for prompt in forms:
        manager.complete_store(manager.to_complete(prompt, manager.prepare_store(prompt)))
    return round((resident_bytes() - before) / pages, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
