"""A rank of an exchange, in a process of its own and on its own GPU: python -m exchange_rank.

Does what it reads, one JSON list a line: ["load", pages, blocks, options] and ["store", ...] submit,
["end"] waits for that and answers with what became of it. ["open", deadline] makes a handler instead of
the one that it has, ["close"] closes that. ["reduce"] submits a collective of all ranks to the compute
stream, ["free"] frees GPU memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed
from exchange import shared_pool
from patience import PATIENCE

from torch_kvswap import Job, OffloadHandler, PagedLayout
from torch_kvswap.offload import exchange

BLOCKS, LAYERS, WORDS = 96, 4, 1 << 17  # 384 MiB
PAGES = BLOCKS + 8
UNKNOWN = -1  # what a block or page has


class Rank:
    """Starts such a process. Killed at the end."""

    def __init__(self, rank: int, ranks: int, path: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "exchange_rank", str(rank), str(ranks), path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        )

    def tell(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def load(self, pages: Sequence[int], blocks: Sequence[int], **options: Any) -> None:
        self.tell("load", list(pages), list(blocks), options)

    def store(self, pages: Sequence[int], blocks: Sequence[int]) -> None:
        """Into pages that no other rank uses."""
        self.tell("store", list(pages), list(blocks), {})

    def end(self) -> dict[str, Any]:
        """errors (of each job, "" for none), wrong (blocks), exchanged (bytes)."""
        self.tell("end")
        found: dict[str, Any] = self.answer()
        return found

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def main(rank: int, ranks: int, path: str) -> None:
    torch.cuda.set_device(rank)
    tensors = [torch.zeros(BLOCKS, WORDS, dtype=torch.int64, device="cuda") for _ in range(LAYERS)]
    layout = PagedLayout(tensors)
    pool = shared_pool(layout, PAGES, rank, ranks, path)
    handler = OffloadHandler(layout, pool)
    first = torch.arange(LAYERS * WORDS, device="cuda").view(LAYERS, WORDS)
    jobs: list[tuple[Job, str, Sequence[int], Sequence[int]]] = []
    # The page whose numbers a block or page has.
    blocks_have, pages_have = [UNKNOWN] * BLOCKS, list(range(PAGES))
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "end":
            with suppress(Exception):
                handler.synchronize(timeout=PATIENCE)
            errors = [str(job.result.error or "") if job.result else "no end" for job, *_ in jobs]
            for (_, kind, pages, blocks), error in zip(jobs, errors, strict=True):
                for page, block in zip(pages, blocks, strict=True):
                    if kind == "load":
                        blocks_have[block] = UNKNOWN if error else pages_have[page]
                    else:
                        pages_have[page] = UNKNOWN if error else blocks_have[block]
            wrong = 0
            for block, page in enumerate(blocks_have):
                found = torch.stack([tensor[block] for tensor in tensors])
                wrong += page != UNKNOWN and not torch.equal(found, first + page * first.numel())
            exchanged = handler.metrics().loads.exchanged_bytes
            print(
                json.dumps({"errors": errors, "wrong": wrong, "exchanged": exchanged}), flush=True
            )
            jobs = []
        elif command == "reduce":
            if not torch.distributed.is_initialized():
                store = {"init_method": f"file://{path}.nccl", "rank": rank, "world_size": ranks}
                torch.distributed.init_process_group("nccl", **store)
            torch.distributed.all_reduce(torch.ones(1 << 24, device="cuda"))
        elif command == "free":
            torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
            torch.cuda.empty_cache()
        elif command in ("open", "close"):
            handler.close()
            if command == "open":
                exchange.DEADLINE = arguments[0]
                handler = OffloadHandler(layout, pool, exchange=(rank, ranks))
            print("0", flush=True)
        else:
            submit = handler.load if command == "load" else handler.store
            *ids, options = arguments
            job = submit(page_ids=ids[0], gpu_block_ids=ids[1], **options)
            jobs.append((job, command, *ids))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
