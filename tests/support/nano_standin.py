"""Stands in for nano-vllm: the interface that `examples/nano_vllm.py` uses, written for its tests.

Where nano-vllm is installed, its block manager, scheduler and sequences take the place of these.
The model, whose tokens depend on each key and value that it reads, and the loop are always these.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import sys
import types
from collections import deque
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

BLOCK, LAYERS, VOCABULARY = 4, 3, 61
_LARGE_PRIME = 8191


class SamplingParams:
    def __init__(self, temperature: float = 1.0, max_tokens: int = 8, ignore_eos: bool = True):
        self.temperature, self.max_tokens, self.ignore_eos = temperature, max_tokens, ignore_eos


class Status(Enum):
    WAITING, RUNNING, FINISHED = range(3)


class Sequence:
    block_size, ids = BLOCK, itertools.count()

    def __init__(self, token_ids: list[int], params: SamplingParams) -> None:
        self.seq_id, self.token_ids, self.prompt = next(self.ids), [*token_ids], len(token_ids)
        self.status, self.is_prefill, self.block_table = Status.WAITING, True, list[int]()
        self.num_cached_tokens = self.num_scheduled_tokens = 0
        self.max_tokens = params.max_tokens

    num_tokens = property(lambda self: len(self.token_ids))
    num_blocks = property(lambda self: -(-len(self.token_ids) // BLOCK))
    is_finished = property(lambda self: self.status is Status.FINISHED)
    completion_token_ids = property(lambda self: self.token_ids[self.prompt :])

    def block(self, number: int) -> list[int]:
        return self.token_ids[number * BLOCK : (number + 1) * BLOCK]


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.users, self.hash = block_id, 0, -1

    def update(self, hash: int, token_ids: list[int]) -> None:
        self.hash = hash


class BlockManager:
    """Blocks keep what they hold until they are given away."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size, self.blocks = block_size, [Block(each) for each in range(num_blocks)]
        self.free_block_ids, self.hash_to_block_id = deque(range(num_blocks)), dict[int, int]()

    @staticmethod
    def compute_hash(token_ids: list[int], before: int = -1) -> int:
        return int.from_bytes(hashlib.sha256(f"{before} {token_ids}".encode()).digest()[:8], "big")

    def _found(self, seq: Any) -> list[int]:
        found, before = list[int](), -1
        for number in range(seq.num_blocks - 1):
            before = self.compute_hash(seq.block(number), before)
            if before not in self.hash_to_block_id:
                break
            found.append(self.hash_to_block_id[before])
        return found

    def _allocate_block(self) -> int:
        block = self.blocks[self.free_block_ids.popleft()]
        if self.hash_to_block_id.get(block.hash) == block.block_id:
            del self.hash_to_block_id[block.hash]
        block.users, block.hash = 1, -1
        return block.block_id

    def can_allocate(self, seq: Any) -> int:
        found = self._found(seq)
        idle = sum(self.blocks[block].users == 0 for block in found)
        fits = len(self.free_block_ids) - idle >= seq.num_blocks - len(found)
        return len(found) if fits else -1

    def allocate(self, seq: Any, num_cached_blocks: int) -> None:
        for block in self._found(seq)[:num_cached_blocks]:
            if self.blocks[block].users == 0:
                self.free_block_ids.remove(block)
            self.blocks[block].users += 1
            seq.block_table.append(block)
        while len(seq.block_table) < seq.num_blocks:
            seq.block_table.append(self._allocate_block())
        seq.num_cached_tokens = num_cached_blocks * BLOCK

    def deallocate(self, seq: Any) -> None:
        for block in reversed(seq.block_table):
            self.blocks[block].users -= 1
            if self.blocks[block].users == 0:
                self.free_block_ids.append(block)
        seq.block_table.clear()
        seq.num_cached_tokens = 0

    def can_append(self, seq: Any) -> bool:
        return seq.num_tokens % BLOCK != 1 or bool(self.free_block_ids)

    def may_append(self, seq: Any) -> None:
        if seq.num_tokens % BLOCK == 1:
            seq.block_table.append(self._allocate_block())

    def hash_blocks(self, seq: Any) -> None:
        first = seq.num_cached_tokens // BLOCK
        last = (seq.num_cached_tokens + seq.num_scheduled_tokens) // BLOCK
        for number in range(first, last):
            before = self.blocks[seq.block_table[number - 1]].hash if number else -1
            block = self.blocks[seq.block_table[number]]
            block.update(self.compute_hash(seq.block(number), before), seq.block(number))
            self.hash_to_block_id[block.hash] = block.block_id


class Scheduler:
    """Prompts first, then a token of each running sequence. The newest is preempted."""

    def __init__(self, config: Any) -> None:
        self.block_manager = BlockManager(config.num_kvcache_blocks, config.kvcache_block_size)
        self.waiting, self.running = deque[Any](), deque[Any]()

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Any) -> None:
        self.waiting.append(seq)

    def schedule(self) -> tuple[list[Any], bool]:
        prompts = []
        while self.waiting:
            cached = self.block_manager.can_allocate(self.waiting[0])
            if cached < 0:
                break
            seq = self.waiting.popleft()
            self.block_manager.allocate(seq, cached)
            seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens
            seq.status = Status.RUNNING
            prompts.append(seq)
        self.running.extend(prompts)
        if prompts:
            return prompts, True
        for seq in list(self.running):
            while seq in self.running and not self.block_manager.can_append(seq):
                newest = self.running.pop()
                self.preempt(newest)
            if seq in self.running:
                self.block_manager.may_append(seq)
                seq.num_scheduled_tokens, seq.is_prefill = 1, False
        return list(self.running), False

    def preempt(self, seq: Any) -> None:
        seq.status, seq.is_prefill = Status.WAITING, True
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)

    def postprocess(self, seqs: list[Any], token_ids: list[int], is_prefill: bool) -> None:
        for seq, token in zip(seqs, token_ids, strict=True):
            self.block_manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            seq.token_ids.append(token)
            if len(seq.completion_token_ids) == seq.max_tokens:
                seq.status = Status.FINISHED
                self.block_manager.deallocate(seq)
                self.running.remove(seq)


class Attention(torch.nn.Module):
    """Writes what a token is, and reads all that was written for the tokens before it."""

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__()
        self.k_cache, self.v_cache = cache

    def forward(self, values: torch.Tensor, seq: Any) -> torch.Tensor:
        start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
        slots = torch.tensor(
            [seq.block_table[at // BLOCK] * BLOCK + at % BLOCK for at in range(end)]
        )
        for cache, factor in ((self.k_cache, 5), (self.v_cache, 11)):
            cache.view(-1)[slots[start:]] = values * factor % _LARGE_PRIME
        read = self.k_cache.view(-1)[slots] * (self.v_cache.view(-1)[slots] + 3)
        seen = (read * torch.arange(1, end + 1)).cumsum(0)
        return (values + seen[start:]) % _LARGE_PRIME


class ModelRunner:
    def __init__(self, config: Any) -> None:
        self.config, self.world_size = config, 1
        shape = 2, LAYERS, config.num_kvcache_blocks, BLOCK
        self.kv_cache = torch.zeros(shape, dtype=torch.int64)
        self.model = torch.nn.ModuleList(map(Attention, self.kv_cache.unbind(1)))

    def call(self, name: str, seqs: list[Any], is_prefill: bool) -> list[int]:
        tokens = []
        for seq in seqs:
            end = seq.num_cached_tokens + seq.num_scheduled_tokens
            values = torch.tensor(seq.token_ids[seq.num_cached_tokens : end])
            for layer in self.model:
                values = layer(values, seq)
            tokens.append(int(values[-1]) % VOCABULARY)
        return tokens


class LLM:
    def __init__(self, model: str, num_blocks: int = 100) -> None:
        config = SimpleNamespace(num_kvcache_blocks=num_blocks, kvcache_block_size=BLOCK)
        config.max_num_seqs, config.max_num_batched_tokens, config.eos = 64, 4096, -1
        self.model_runner = ModelRunner(config)
        scheduling, sequence = (
            sys.modules[f"nanovllm.engine.{name}"] for name in ("scheduler", "sequence")
        )
        self.scheduler, self._sequence = scheduling.Scheduler(config), sequence.Sequence
        self._sequence.block_size = BLOCK

    def add_request(self, prompt: list[int], params: SamplingParams) -> None:
        self.scheduler.add(self._sequence(prompt, params))

    def is_finished(self) -> bool:
        return bool(self.scheduler.is_finished())

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        seqs, is_prefill = self.scheduler.schedule()
        tokens = self.model_runner.call("run", seqs, is_prefill)
        self.scheduler.postprocess(seqs, tokens, is_prefill)
        return [(s.seq_id, s.completion_token_ids) for s in seqs if s.is_finished], len(tokens)


def install() -> bool:
    """Makes `nanovllm` importable. Returns whether the real one is there."""
    spec = importlib.util.find_spec("nanovllm")
    names = "block_manager", "scheduler", "sequence"
    for name in ("nanovllm", "nanovllm.engine", *(f"nanovllm.engine.{each}" for each in names)):
        if spec is None or name in ("nanovllm", "nanovllm.engine"):
            module = types.ModuleType(name)
            if spec is not None and spec.submodule_search_locations is not None:
                folder = next(iter(spec.submodule_search_locations))
                module.__path__ = [folder + name.removeprefix("nanovllm").replace(".", "/")]
            vars(module).update(BlockManager=BlockManager, Scheduler=Scheduler, Sequence=Sequence)
            vars(module).update(LLM=LLM, SamplingParams=SamplingParams)
            sys.modules[name] = module
    if spec is not None:
        # Of its other modules only types are used, and its dependencies need not be there.
        for name in ("nanovllm.config", "nanovllm.sampling_params"):
            sys.modules[name] = MagicMock(SamplingParams=SamplingParams)
        for name in names:
            importlib.import_module(f"nanovllm.engine.{name}")
    return spec is not None
