"""Serves prompts that begin alike, in several rounds: what the host has of them is loaded, and only
the rest is computed."""

from collections import deque
from random import Random

import torch

from serving_demo.block_allocator import BlockAllocator
from serving_demo.model import Model
from torch_kvswap.handler import Job
from torch_kvswap.prefix.engine import OffloadEngine
from torch_kvswap.prefix.hashing import DIGEST_BYTES, PrefixHasher


def alike_prompts(text: bytes, count: int, longest: int, seed: int) -> list[bytes]:
    """Half of each prompt is one of two beginnings, the rest its own."""
    random, half = Random(seed), longest // 2
    starts = [random.randint(0, len(text) - half) for _ in range(2)]
    beginnings = [text[start : start + half] for start in starts]
    own = [random.randint(0, len(text) - half) for _ in range(count)]
    return [
        beginnings[index % 2] + text[start : start + random.randint(1, half)]
        for index, start in enumerate(own)
    ]


class PrefixServer:
    """One request at a time, each in new blocks; its prompt is stored while the next one runs.

    engine: of a handler for `model.new_cache()`, whose pages nobody else uses. reused, computed:
    tokens of prompts.
    """

    def __init__(self, model: Model, engine: OffloadEngine) -> None:
        (layout,), (pool,) = engine.handler.layouts, engine.handler.pools
        self.reused = self.computed = 0
        self._model = model
        self._engine = engine
        self._cache = list(layout.tensors)
        self._per_page = pool.blocks_per_page
        self._blocks = BlockAllocator(layout.num_blocks)
        self._hasher = PrefixHasher("demo", "float32", model.block_size * pool.blocks_per_page)
        self._storing: deque[tuple[Job, list[int]]] = deque()

    def generate(self, prompt: bytes, new_tokens: int) -> list[int]:
        """The tokens behind the prompt. Raises RuntimeError when a transfer failed."""
        size = self._model.block_size
        blocks = self._take(-(-(len(prompt) + new_tokens - 1) // size))
        cached = self._load(prompt, blocks)
        self.reused += cached
        self.computed += len(prompt) - cached
        table = torch.tensor(self._model.padded(blocks), device=self._model.device)
        tokens = [self._model.prefill(prompt, self._cache, table, cached)]
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            tokens.append(self._model.decode(tokens[-1], position, self._cache, table))
        self._store(prompt, blocks)
        generated: list[int] = torch.cat(tokens).tolist()
        return generated

    def collect(self) -> None:
        """Makes known what was stored. Raises RuntimeError when a transfer failed."""
        for result in self._engine.poll():
            if not result.ok:
                message = f"{result.direction} {result.job_id} failed: {result.error}"
                raise RuntimeError(message) from result.error

    def _load(self, prompt: bytes, blocks: list[int]) -> int:
        """How many tokens of the prompt are in the blocks then, before anything reads them."""
        self.collect()
        keys = self._hasher.lookup_keys(list(prompt))
        ready = self._engine.lookup(keys).ready
        job = self._engine.load(keys, self._of_keys(keys, blocks), ready) if ready else None
        if job is None:
            return 0
        job.wait()
        return ready * self._hasher.block_tokens

    def _store(self, prompt: bytes, blocks: list[int]) -> None:
        keys = self._hasher.keys(list(prompt))
        job = self._engine.store(keys, self._of_keys(keys, blocks))
        if job is None:
            self._blocks.give(blocks)
        else:
            self._storing.append((job, blocks))

    def _of_keys(self, keys: bytes, blocks: list[int]) -> list[int]:
        return blocks[: len(keys) // DIGEST_BYTES * self._per_page]

    def _take(self, count: int) -> list[int]:
        while self._blocks.num_free < count:
            job, blocks = self._storing.popleft()
            self._engine.handler.synchronize(job)
            self._blocks.give(blocks)
        return self._blocks.take(count)
