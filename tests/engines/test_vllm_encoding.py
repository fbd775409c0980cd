"""vLLM's worker with encoded pages: what does not fit is told. vLLM need not be installed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from bf16_blocks import KINDS, make_block, random_bits
from vllm_contract import KVSwapWorker, bytes_of, caches, common, submit

from torch_kvswap.integrations.vllm.options import SpecOptions

BLOCKS, PAGES = 16, 6
SIZES = [8192, 4096]


class Encoded:
    """A worker, and its caches of bf16 values, which it sees as bytes."""

    def __init__(self, device: str, chunk: int = 1) -> None:
        self.caches = caches([[*enumerate(SIZES)]], SIZES, device, BLOCKS)
        options = SpecOptions(1, encoding="lossless")
        self.worker: Any = KVSwapWorker(self.caches, PAGES, chunk, options)
        assert self.worker._pool.encoding == "lossless"
        self.number = 0

    def fill(self, block: int, kind: str | None, seed: int = 0) -> bytes:
        """None does not fit into a slot."""
        parts = random_bits(SIZES, seed) if kind is None else make_block(kind, SIZES, seed)
        for one, part in zip(self.caches.tensors, parts, strict=True):
            one.tensor[block] = torch.from_numpy(part.view(np.int8))
        return self.bytes_of(block)

    def bytes_of(self, block: int) -> bytes:
        return bytes_of(self.caches, block)

    def submit(self, direction: str, blocks: list[int], pages: list[int], index: int = 0) -> int:
        """Starts a transfer, and returns its number."""
        self.number += 1
        submit(self.worker, self.number, direction, blocks, common.CPULoadStoreSpec(pages), index)
        return self.number

    def copy(self, direction: str, blocks: list[int], pages: list[int], index: int = 0) -> bool:
        """Waits for a transfer. Whether it ended well."""
        self.submit(direction, blocks, pages, index)
        self.worker.wait({self.number})
        (result,) = self.worker.get_finished()
        assert (result.job_id, result.success) == (self.number, True)
        failures = self.worker.take_failures()
        (self.lost,) = failures or [None]
        return not failures


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encoded(device: str) -> Iterator[Encoded]:
    one = Encoded(device)
    yield one
    one.worker.shutdown()


def test_a_load_of_what_was_never_stored_fails(encoded: Encoded) -> None:
    before = encoded.fill(5, "normal")
    assert not encoded.copy("load", [5], [3])
    assert encoded.lost == (1, "load", "rejected", {5}, {3})
    assert encoded.bytes_of(5) == before


@pytest.mark.parametrize("chunk", [1, 3])
def test_random_transfers_name_each_block_that_is_lost(device: str, chunk: int) -> None:
    rng = random.Random(chunk)
    one = Encoded(device, chunk)
    held: dict[tuple[int, int], bytes] = {}
    loads = 0
    for step in range(80):
        is_store = step % 2 == 1  # of whole chunks
        index = 0 if is_store else rng.randrange(chunk)
        count = rng.randint(1, 6 // chunk) * chunk if is_store else rng.randint(1, 5)
        blocks = rng.sample(range(BLOCKS), count)
        pages = rng.sample(range(PAGES), -(-(index + len(blocks)) // chunk))
        slots = [(pages[at // chunk], at % chunk) for at in range(index, index + len(blocks))]
        if is_store:
            kinds = {block: rng.choice([*KINDS, None]) for block in blocks}
            wide = {block for block, kind in kinds.items() if kind is None}
            for block, slot in zip(blocks, slots, strict=True):
                held[slot] = one.fill(block, kinds[block], step)
            if one.copy("store", blocks, pages, index):
                assert not wide
                continue
            assert wide <= one.lost.blocks
            assert one.lost.reason == "rejected"
            for block, slot in zip(blocks, slots, strict=True):
                if block in one.lost.blocks:
                    del held[slot]
        elif held.keys() >= set(slots):
            loads += 1
            assert one.copy("load", blocks, pages, index)
            assert [one.bytes_of(block) for block in blocks] == [held[slot] for slot in slots]
    assert loads
    one.worker.shutdown()
