"""Serves prompts with common prefixes: loads what the host has, and computes the rest."""

from collections import deque
from contextlib import suppress
from random import Random

import torch

from serving_demo.block_allocator import BlockAllocator
from serving_demo.model import Model
from torch_kvswap.handler import BlocksRejectedError, Job
from torch_kvswap.prefix.engine import OffloadEngine
from torch_kvswap.prefix.hashing import DIGEST_BYTES, PrefixHasher


def alike_prompts(text: bytes, count: int, longest: int, seed: int) -> list[bytes]:
    """Prompts that start with one of two common prefixes and continue differently.

    Args:
        text (bytes): the text to cut them from; at least `longest` bytes.
        count (int): number of prompts.
        longest (int): upper bound of a prompt's length; half of it is the prefix.
        seed (int): seed of the choice.
    """
    random, half = Random(seed), longest // 2
    starts = [random.randint(0, len(text) - half) for _ in range(2)]
    beginnings = [text[start : start + half] for start in starts]
    own = [random.randint(0, len(text) - half) for _ in range(count)]
    return [
        beginnings[index % 2] + text[start : start + random.randint(1, half)]
        for index, start in enumerate(own)
    ]


class PrefixServer:
    """Serves one request at a time; its prompt is stored while the next request runs.

    Args:
        model (Model): the model.
        engine (OffloadEngine): for a handler on `model.new_cache()`; nobody else may use it.

    Attributes:
        reused (int): prompt tokens that were loaded from the host.
        computed (int): prompt tokens that were computed.
    """

    def __init__(self, model: Model, engine: OffloadEngine) -> None:
        (layout,), (pool,) = engine.handler.layouts, engine.handler.pools
        self.reused = self.computed = 0
        self._model = model
        self._engine = engine
        self._cache = list(layout.tensors)
        self._per_page = pool.blocks_per_page
        self._blocks = BlockAllocator(layout.num_blocks)
        tokens = model.block_size * pool.blocks_per_page
        self._hasher = PrefixHasher("demo", str(layout.dtype), tokens)
        self._storing: deque[tuple[Job, list[int]]] = deque()

    def generate(self, prompt: bytes, new_tokens: int) -> list[int]:
        """The tokens after the prompt.

        Raises:
            RuntimeError: a transfer failed.
        """
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
        """Polls the engine, so that stored blocks can be found.

        Raises:
            RuntimeError: a transfer failed.
        """
        for result in self._engine.poll():
            # The engine forgets blocks that a store has rejected.
            is_expected = result.direction == "store" and result.rejected
            if not result.ok and not is_expected:
                message = f"{result.direction} {result.job_id} failed: {result.error}"
                raise RuntimeError(message) from result.error

    def _load(self, prompt: bytes, blocks: list[int]) -> int:
        """Loads the cached prefix of the prompt, and returns its number of tokens."""
        self.collect()
        keys = self._hasher.lookup_keys(list(prompt))
        ready = self._engine.lookup(keys).ready
        job = self._engine.load(keys, self._of_keys(keys, blocks), ready) if ready else None
        if job is None:
            return 0
        job.wait()
        return ready * self._hasher.block_tokens

    def _store(self, prompt: bytes, blocks: list[int]) -> None:
        """Stores the prompt; its blocks are free when the store has ended."""
        keys = self._hasher.keys(list(prompt))
        job = self._engine.store(keys, self._of_keys(keys, blocks))
        if job is None:
            self._blocks.give(blocks)
        else:
            self._storing.append((job, blocks))

    def _of_keys(self, keys: bytes, blocks: list[int]) -> list[int]:
        return blocks[: len(keys) // DIGEST_BYTES * self._per_page]

    def _take(self, count: int) -> list[int]:
        """Takes blocks, waiting for the oldest stores if too few are free."""
        while self._blocks.num_free < count:
            job, blocks = self._storing.popleft()
            with suppress(BlocksRejectedError):
                self._engine.handler.synchronize(job)
            self._blocks.give(blocks)
        return self._blocks.take(count)
