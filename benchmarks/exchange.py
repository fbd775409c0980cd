"""Loads the same pages into several GPUs: each over its own link, and as an exchange of parts.

Each GPU has a process with two handlers on one shared pool: one without exchange= and one with
it. All load the same scattered blocks at the same time, with one and with the other in turn. Time
is from the call of load() until synchronize() returns, of the slowest GPU. The bytes of the first
and the last load of each cell are compared. Needs GPUs that access each other.
"""

from __future__ import annotations

import socket
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import closing
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
import torch.multiprocessing as multiprocessing
from program import finish, new_parser
from report import Column, table_of
from transfers import Shape

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.host_pool import PoolHandle

WAYS = ("own link", "exchange")
JOIN_SECONDS = 120


@dataclass
class Cell:
    """Loads of a number of blocks. Rates are of one GPU, in GB/s; exchanged: part of the bytes."""

    gpus: int
    blocks: int
    mib: int
    own_link: float
    exchange: float
    exchanged: float
    wrong: int


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--shape", type=Shape.parse, default=Shape.parse("64x32"))
    parser.add_argument("--samples", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.gpus < 2:
        print("an exchange needs two GPUs or more")
        return 0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        barrier, results = context.Barrier(options.gpus, timeout=JOIN_SECONDS), context.Queue()
        given = options, f"{folder}/pool", barrier, results
        ranks = [
            context.Process(target=measure, args=(rank, *given), daemon=True)
            for rank in range(options.gpus)
        ]
        for rank in ranks:
            rank.start()
        measured = [results.get(timeout=JOIN_SECONDS) for _ in range(options.gpus)]
        for rank in ranks:
            rank.join(JOIN_SECONDS)
    cells = [cell_of(options, list(of_ranks)) for of_ranks in zip(*measured, strict=True)]
    fields = ("gpus", "blocks", "mib", "own_link", "exchange", "exchanged")
    print(table_of([Column[Cell](name, attrgetter(name)) for name in fields], cells))
    content = {"shape": str(options.shape), "cells": [asdict(cell) for cell in cells]}
    return finish(options, content, sum(cell.wrong for cell in cells))


def cell_of(options: Namespace, ranks: list[dict[str, Any]]) -> Cell:
    """Of what the ranks have measured with one number of blocks."""
    count = ranks[0]["blocks"]
    nbytes = count * options.shape.block_bytes
    slowest = {way: map(max, zip(*(rank[way] for rank in ranks), strict=True)) for way in WAYS}
    own_link, exchange = (nbytes / statistics.median(slowest[way]) / 1e9 for way in WAYS)
    return Cell(
        gpus=options.gpus,
        blocks=count,
        mib=nbytes >> 20,
        own_link=own_link,
        exchange=exchange,
        exchanged=ranks[0]["exchanged"] / nbytes,
        wrong=sum(rank["wrong"] for rank in ranks),
    )


def measure(rank: int, options: Namespace, path: str, barrier: Any, results: Any) -> None:
    """The process of a rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    shape, most = options.shape, max(options.blocks)
    words = shape.fragment_kib * 128
    tensors = [
        torch.zeros(most, words, dtype=torch.int64, device=device) for _ in range(shape.layers)
    ]
    layout = PagedLayout(tensors)
    pool = shared_pool(layout, most, rank, options.gpus, path)
    handlers = {
        "own link": OffloadHandler(layout, pool),
        "exchange": OffloadHandler(layout, pool, exchange=(rank, options.gpus)),
    }
    generator = torch.Generator().manual_seed(1)
    found = []
    for count in options.blocks:
        of_rank: dict[str, Any] = {"blocks": count, "wrong": 0, **{way: [] for way in WAYS}}
        for sample in range(options.samples + 2):
            ids = [torch.randperm(most, generator=generator)[:count] for _ in range(2)]
            for way in WAYS:
                handler = handlers[way]
                before = handler.metrics().loads.exchanged_bytes
                barrier.wait()
                began = time.perf_counter()
                handler.synchronize(handler.load(page_ids=ids[0], gpu_block_ids=ids[1]))
                seconds = time.perf_counter() - began
                of_rank["exchanged"] = handler.metrics().loads.exchanged_bytes - before
                if sample >= 2:
                    of_rank[way].append(seconds)
                if sample in (0, options.samples):
                    of_rank["wrong"] += wrong_blocks(tensors, *ids)
                barrier.wait()
        found.append(of_rank)
    results.put(found)
    for handler in handlers.values():
        handler.close()


def wrong_blocks(tensors: list[torch.Tensor], pages: torch.Tensor, blocks: torch.Tensor) -> int:
    """How many blocks do not have the numbers of these pages. Zeroes all."""
    device, words = tensors[0].device, tensors[0].shape[1]
    pages, blocks = pages.to(device), blocks.to(device)
    wrong = torch.zeros(len(blocks), dtype=torch.bool, device=device)
    for layer, tensor in enumerate(tensors):
        first = (pages * len(tensors) + layer) * words
        wrong |= (tensor[blocks] != first[:, None] + torch.arange(words, device=device)).any(1)
        tensor.zero_()
    found = int(wrong.sum())
    torch.cuda.synchronize()
    return found


def shared_pool(layout: PagedLayout, count: int, rank: int, ranks: int, path: str) -> HostPool:
    """Rank 0 makes the pool, in which all numbers differ, and sends it to the others."""
    if rank > 0:
        connection = socket.socket(socket.AF_UNIX)
        until = time.monotonic() + JOIN_SECONDS
        while connection.connect_ex(path) != 0 and time.monotonic() < until:
            time.sleep(0.01)
        with connection, closing(PoolHandle.receive(connection)) as handle:
            return HostPool.attach(layout, handle)
    pool = HostPool(layout, count, shared=True)
    words = pool.pages.view(torch.int64)
    words.copy_(torch.arange(words.numel()).view_as(words))
    with socket.socket(socket.AF_UNIX) as listener, closing(pool.share()) as handle:
        listener.bind(path)
        listener.listen()
        for _ in range(1, ranks):
            connection, _ = listener.accept()
            with connection:
                handle.send(connection)
    return pool


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
