"""vLLM's worker with encoded pages: no block is lost, whatever fits. vLLM need not be installed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bf16_blocks import KINDS, make_block, random_bits
from gpu_cache import keep_busy
from vllm_contract import KVSwapWorker, bytes_of, caches, common, submit, worker_module

from torch_kvswap.integrations.vllm.options import SpecOptions
from torch_kvswap.results import BlocksRejectedError

BLOCKS, PAGES = 16, 6
SIZES = [4096, 2048]


class Encoded:
    """A worker, and its caches of bf16 values, which it sees as bytes."""

    def __init__(self, device: str, chunk: int = 1, width: float | None = None) -> None:
        self.caches = caches([[*enumerate(SIZES)]], SIZES, device, BLOCKS)
        options = SpecOptions(1, encoding="lossless", bits_per_value=width)
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
        assert result.job_id == self.number
        assert result.transfer_size == len(blocks) * sum(SIZES)
        return bool(result.success)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encoded(device: str) -> Iterator[Encoded]:
    one = Encoded(device)
    yield one
    one.worker.shutdown()


def test_what_was_kept_survives_a_store_that_is_refused(encoded: Encoded) -> None:
    expected = encoded.fill(0, None)
    encoded.copy("store", [0], [3])
    with pytest.raises(IndexError, match=f"{BLOCKS}"):
        encoded.submit("store", [BLOCKS], [3])
    assert encoded.copy("load", [5], [3])
    assert encoded.bytes_of(5) == expected


def test_only_transfers_that_have_run_are_copied_again_without_waiting(
    encoded: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer with rejected blocks had waited for the kernels before it. One that failed may
    have ended before that."""
    copy_again, retried = worker_module.copy_again, []

    def noted(*operands: Any) -> None:
        retried.append((operands[2], operands[-1]))
        copy_again(*operands)

    monkeypatch.setattr(worker_module, "copy_again", noted)
    encoded.fill(0, None)
    encoded.copy("store", [0], [3])
    encoded.copy("load", [5], [3])
    poll, error = encoded.worker._handler.poll, RuntimeError("error 700")
    monkeypatch.setattr(
        encoded.worker._handler,
        "poll",
        lambda: [replace(one, state="failed", error=error, rejected=()) for one in poll()],
    )
    encoded.copy("store", [0], [3])
    encoded.copy("load", [5], [3])
    assert retried == [("store", True), ("load", True), ("store", False), ("load", False)]


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["store", "load"])
def test_rejected_blocks_are_copied_beside_a_busy_stream(direction: str) -> None:
    one = Encoded("cuda")
    expected = one.fill(0, None)
    one.copy("store", [0], [3])  # the first ones take longer
    one.copy("load", [5], [3])
    one.fill(5, "zeros")
    torch.cuda.synchronize()
    number = one.submit(direction, [0 if direction == "store" else 5], [3])
    with pytest.raises(BlocksRejectedError):
        one.worker._handler.synchronize()
    keep_busy()
    one.worker.wait({number})
    was_busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert was_busy
    assert [result.success for result in one.worker.get_finished()] == [True]
    if direction == "store":
        one.copy("load", [5], [3])
    assert one.bytes_of(5) == expected
    one.worker.shutdown()


def test_a_load_of_what_was_never_stored_fails(
    encoded: Encoded, caplog: pytest.LogCaptureFixture
) -> None:
    before = encoded.fill(5, "normal")
    assert not encoded.copy("load", [5], [3])
    assert "slot 0 of page 3 holds no encoded block" in caplog.text
    assert encoded.bytes_of(5) == before


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_failed_is_done_again(
    encoded: Encoded, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = encoded.fill(0, "normal")
    poll = encoded.worker._handler.poll

    def spoiled() -> list[Any]:
        results = poll()
        if any(result.direction == direction for result in results):
            if direction == "store":
                encoded.worker._pool.pages.zero_()
            else:
                encoded.fill(9, "zeros")
        error = RuntimeError("error 700")
        return [
            replace(one, state="failed", error=error) if one.direction == direction else one
            for one in results
        ]

    monkeypatch.setattr(encoded.worker._handler, "poll", spoiled)
    assert encoded.copy("store", [0], [3])
    assert encoded.copy("load", [9], [3])
    assert encoded.bytes_of(9) == expected
    assert bool(encoded.worker._kept) == (direction == "store")


@pytest.mark.parametrize("width", [12.125, 12.5])
@pytest.mark.parametrize("chunk", [1, 3])
def test_random_transfers_lose_no_block(device: str, chunk: int, width: float) -> None:
    rng = random.Random(chunk)
    one = Encoded(device, chunk, width)
    held: dict[tuple[int, int], bytes] = {}
    for step in range(80):
        is_store = step % 2 == 1  # of whole chunks
        index = 0 if is_store else rng.randrange(chunk)
        count = rng.randint(1, 6 // chunk) * chunk if is_store else rng.randint(1, 5)
        blocks = rng.sample(range(BLOCKS), count)
        pages = rng.sample(range(PAGES), -(-(index + len(blocks)) // chunk))
        slots = [(pages[at // chunk], at % chunk) for at in range(index, index + len(blocks))]
        if is_store:
            for block, slot in zip(blocks, slots, strict=True):
                held[slot] = one.fill(block, rng.choice([*KINDS, None, None]), step)
            assert one.copy("store", blocks, pages, index)
        elif held.keys() >= set(slots):
            assert one.copy("load", blocks, pages, index)
            assert [one.bytes_of(block) for block in blocks] == [held[slot] for slot in slots]
    one.worker.shutdown()
