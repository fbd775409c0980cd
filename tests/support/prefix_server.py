"""A server whose cache is full of prompts, which a prefix cache stores and finds again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from drained import drain
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.prefix.hashing import KEY_BYTES, PrefixHasher

HASHER = PrefixHasher("m", "bfloat16", 4)
SYSTEM = list(range(8))  # two blocks that all prompts begin with


def prompt(number: int, blocks: int = 2) -> list[int]:
    return [*SYSTEM, *range(100 * number, 100 * number + 4 * blocks)]


class PrefixServer:
    """A cache with a prefix cache of its own, least recently used pages leaving first. The bytes of a
    block are its key and its place in the page."""

    def __init__(
        self, gpu_pages: int, pages: int, per_page: int = 1, device: str = "cpu", **options: Any
    ) -> None:
        shape = gpu_pages * per_page, KEY_BYTES + 1
        self.tensor = torch.zeros(shape, dtype=torch.uint8, device=device)
        layout = PagedLayout([self.tensor])
        self.memory = layout, HostPool(layout, pages, per_page)
        self.prefixes = PrefixCache(*self.memory, **options)
        self.gpu: OrderedDict[bytes, list[int]] = OrderedDict()  # key to blocks
        self.free = list(range(gpu_pages * per_page))
        self.per_page, self.jobs = per_page, 0

    def __enter__(self) -> PrefixServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.prefixes.close()

    def bytes_of(self, keys: list[bytes]) -> Tensor:
        rows = [[*key, place] for key in keys for place in range(self.per_page)]
        return torch.tensor(rows, dtype=torch.uint8).view(-1, KEY_BYTES + 1)

    def blocks_of(self, keys: Iterable[bytes]) -> list[int]:
        return [block for key in keys for block in self.gpu[key]]

    def take(self, count: int) -> list[int]:
        """Blocks for so many pages, those of others if none are free."""
        leaving = list(self.gpu)[: max(count - len(self.free) // self.per_page, 0)]
        jobs = self.prefixes.evict(self.blocks_of(leaving))
        for job in jobs:
            job.wait()  # before the blocks are overwritten
        self.jobs += len(jobs)
        for key in leaving:
            self.free += self.gpu.pop(key)
        taken, self.free = self.free[: count * self.per_page], self.free[count * self.per_page :]
        self.tensor[taken] = 255
        return taken

    def serve(self, tokens: list[int]) -> int:
        """How many blocks of the prompt were found on the host, and not on the GPU."""
        self.collect()
        keys = HASHER.keys(tokens)
        split = list(keys)
        here = next((i for i, key in enumerate(split) if key not in self.gpu), len(split))
        for key in reversed(split):
            if key in self.gpu:
                self.gpu.move_to_end(key)
        absent = [key for key in split if key not in self.gpu]
        taken = self.take(len(absent))
        for i, key in enumerate(absent):
            self.gpu[key] = taken[i * self.per_page : (i + 1) * self.per_page]
        ready = max(self.prefixes.lookup(keys).ready, here)
        loaded = split[here:ready]
        if loaded:
            job = self.prefixes.load(loaded, self.blocks_of(loaded))
            assert job is not None
            job.wait()
            found = self.tensor[self.blocks_of(loaded)]
            assert torch.equal(found.cpu(), self.bytes_of(loaded))
        new = split[ready:]
        self.tensor[self.blocks_of(new)] = self.bytes_of(new).to(self.tensor.device)
        self.prefixes.store(keys, self.blocks_of(split))
        return len(loaded)

    def collect(self) -> None:
        """All jobs have ended, and the prefix cache knows."""
        drain(self.prefixes)
        self.prefixes.poll()

    def forget_gpu(self) -> None:
        """What a scheduler does when it drops its cache."""
        self.prefixes.evict(self.blocks_of(self.gpu))
        self.collect()
        self.free += self.blocks_of(self.gpu)
        self.gpu.clear()
