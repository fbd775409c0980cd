"""A rank of an exchange, in a process of its own and on its own GPU: python -m exchange_rank.

Does what it reads, one JSON list a line: ["load", pages, blocks] submits a load, ["end"] waits for the
loads and answers with what became of them, ["close"] closes the handler.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any

import torch
from patience import PATIENCE, in_time

from torch_kvswap import HostPool, Job, OffloadHandler, PagedLayout
from torch_kvswap.host_pool import PoolHandle
from torch_kvswap.offload import exchange

BLOCKS, LAYERS, WORDS = 96, 4, 1 << 17  # 384 MiB


class Rank:
    """Starts such a process. Killed at the end."""

    def __init__(self, rank: int, ranks: int, path: str, deadline: float = PATIENCE) -> None:
        arguments = [*map(str, (rank, ranks)), path, str(deadline)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "exchange_rank", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def tell(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def load(self, pages: Sequence[int], blocks: Sequence[int]) -> None:
        self.tell("load", list(pages), list(blocks))

    def end(self) -> dict[str, Any]:
        """errors (of each load, "" for none), wrong (blocks), exchanged (bytes)."""
        self.tell("end")
        found: dict[str, Any] = self.answer()
        return found

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def shared_pool(layout: PagedLayout, rank: int, ranks: int, path: str) -> HostPool:
    """Rank 0 makes the pool, in which all numbers differ, and the others attach to it."""
    if rank > 0:
        connection = socket.socket(socket.AF_UNIX)
        assert in_time(lambda: connection.connect_ex(path) == 0)
        with connection, closing(PoolHandle.receive(connection)) as handle:
            return HostPool.attach(layout, handle)
    pool = HostPool(layout, BLOCKS, shared=True)
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


def main(rank: int, ranks: int, path: str, deadline: float) -> None:
    exchange.DEADLINE = deadline
    torch.cuda.set_device(rank)
    tensors = [torch.zeros(BLOCKS, WORDS, dtype=torch.int64, device="cuda") for _ in range(LAYERS)]
    layout = PagedLayout(tensors)
    pool = shared_pool(layout, rank, ranks, path)
    handler = OffloadHandler(layout, pool, exchange=(rank, ranks))
    torch.cuda.synchronize()
    print("0", flush=True)
    pages = pool.pages.view(torch.int64).view(BLOCKS, LAYERS, WORDS)
    jobs: list[tuple[Job, Sequence[int], Sequence[int]]] = []
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "load":
            job = handler.load(page_ids=arguments[0], gpu_block_ids=arguments[1])
            jobs.append((job, *arguments))
        elif command == "end":
            with suppress(Exception):
                handler.synchronize(timeout=PATIENCE)
            errors = [str(job.result.error or "") if job.result else "no end" for job, *_ in jobs]
            found = torch.stack([tensor.cpu() for tensor in tensors], 1)
            expected = torch.full((BLOCKS,), -1)
            for (_, loaded, blocks), error in zip(jobs, errors, strict=True):
                expected[blocks] = torch.tensor(loaded if not error else [-1] * len(loaded))
            known = expected >= 0
            same = (found[known] == pages[expected[known]]).flatten(1).all(1)
            exchanged = handler.metrics().loads.exchanged_bytes
            answer = {"errors": errors, "wrong": int((~same).sum()), "exchanged": exchanged}
            print(json.dumps(answer), flush=True)
            jobs = []
        else:
            handler.close()
            print("0", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
