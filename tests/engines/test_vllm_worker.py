"""Our worker meets vLLM's contract: blocks go where the specs say, and every job ends once. vLLM need
not be installed."""

from __future__ import annotations

import dataclasses
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import PATIENCE, in_time
from torch import Tensor
from vllm_contract import KVSwapWorker, base, caches, common

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm.kv_layouts import group_layouts, read_move
from torch_kvswap.integrations.vllm.options import SpecOptions
from torch_kvswap.integrations.vllm.worker_pools import replicated_pool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.results import CorruptedPageError, TransferError

PAGES = 16
GROUPS = {  # of layers, as (tensor, bytes used), and the bytes of the rows of each tensor
    "a tensor for each layer": ([[(0, 512), (1, 512), (2, 512)]], [512, 512, 512]),
    "one tensor for all layers": ([[(0, 2048)]], [2048]),
    "padded rows": ([[(0, 500), (1, 320)]], [512, 384]),
    "groups that share tensors": ([[(0, 64), (1, 64)], [(0, 64), (1, 64)], [(0, 64)]], [64, 64]),
    "groups of other sizes": ([[(0, 64), (1, 96)], [(2, 32)], [(1, 80), (2, 32)]], [64, 96, 32]),
    "a group without layers": ([[(0, 64)], [], [(1, 96)]], [64, 96]),
    "packed": ([[(0, 640)], [(0, 640)]], [640]),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[1, 3])
def chunk(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class CheckedWorker:
    """A worker, and what its caches and pages should have in them."""

    def __init__(self, layers: Any, device: str, chunk: int = 1, **options: Any) -> None:
        self.groups, self.rows = layers
        self.caches = caches(self.groups, self.rows, device)
        self.chunk = chunk
        self.worker = KVSwapWorker(self.caches, PAGES, chunk, SpecOptions(1, **options))
        self.worker._pool.pages.random_(256)
        self.expected = [one.tensor.cpu().clone() for one in self.caches.tensors]
        self.pages = self.worker._pool.pages.clone()
        self.number = 0

    def submit(
        self, direction: str, moves: list[tuple[list[int], list[int], int]], **options: Any
    ) -> int:
        """moves: of each group the blocks, the pages, and the first block's place in the request."""
        self.number += 1
        gpu = base.GPULoadStoreSpec(
            [block for blocks, _, _ in moves for block in blocks],
            group_sizes=[len(blocks) for blocks, _, _ in moves],
            block_indices=[index for _, _, index in moves],
        )
        host = common.CPULoadStoreSpec([page for _, pages, _ in moves for page in pages])
        if direction == "store":
            assert self.worker.submit_store(self.number, gpu, host, **options)
        else:
            assert self.worker.submit_load(self.number, host, gpu, **options)
        for layers, (blocks, pages, index) in zip(self.groups, moves, strict=True):
            for place, block in enumerate(blocks, index % self.chunk):
                self._move(direction, layers, block, pages[place // self.chunk], place % self.chunk)
        return self.number

    def _move(self, direction: str, layers: Any, block: int, page: int, slot: int) -> None:
        begin = 0
        for tensor, size in layers:
            on_gpu = self.expected[tensor][block, :size].view(torch.uint8)
            on_host = self.pages[page, slot, begin : begin + size]
            if direction == "store":
                on_host.copy_(on_gpu)
            else:
                on_gpu.copy_(on_host)
            begin += size

    def nbytes(self, moves: Any) -> int:
        return sum(
            len(blocks) * sum(size for _, size in layers)
            for layers, (blocks, _, _) in zip(self.groups, moves, strict=True)
        )

    def finished(self, count: int) -> list[Any]:
        """Polls until so many have ended."""
        results: list[Any] = []
        assert in_time(lambda: results.extend(self.worker.get_finished()) or len(results) >= count)
        return results

    def is_right(self) -> bool:
        tensors: list[Tensor] = [one.tensor.cpu() for one in self.caches.tensors]
        return all(map(torch.equal, tensors, self.expected)) and torch.equal(
            self.worker._pool.pages, self.pages
        )


@pytest.fixture
def checked(device: str) -> Iterator[CheckedWorker]:
    checked = CheckedWorker(GROUPS["a tensor for each layer"], device)
    yield checked
    checked.worker.shutdown()


@pytest.mark.parametrize("name", GROUPS)
def test_random_transfers_move_only_their_blocks(name, device, chunk):
    checked, random_ = CheckedWorker(GROUPS[name], device, chunk), random.Random(name)
    for _ in range(12):
        direction = random_.choice(["store", "load"])
        blocks = random_.sample(range(1, 24), 23)
        pages = random_.sample(range(PAGES), PAGES)
        moves = []
        for _ in checked.groups:
            count, index = random_.randint(0, 5), random_.randint(0, 7)
            if direction == "store":  # of whole chunks
                count, index = count // chunk * chunk, index * chunk
            taken = -(-(count + index % chunk) // chunk) if count else 0
            moves.append((blocks[:count], pages[:taken], index))
            blocks, pages = blocks[count:], pages[taken:]
        number = checked.submit(direction, moves)
        (result,) = checked.finished(1)
        assert (result.job_id, result.success) == (number, True)
        assert result.transfer_size == checked.nbytes(moves)
        assert result.transfer_time >= 0
    assert checked.is_right()
    checked.worker.shutdown()


def test_every_job_ends_once_whatever_waits_for_it(checked):
    numbers = {checked.submit("store", [([block], [block % PAGES], 0)]) for block in range(1, 20)}
    checked.worker.wait(set(list(numbers)[:5]))
    checked.worker.wait({*numbers, 1000, 2000})  # of others it never heard
    results = checked.finished(len(numbers))
    assert {result.job_id for result in results} == numbers
    assert all(result.success for result in results)
    assert checked.worker.get_finished() == []
    checked.worker.wait(numbers)
    assert checked.is_right()


def test_a_transfer_of_nothing_ends_well(checked):
    store, load = checked.submit("store", [([], [], 0)]), checked.submit("load", [([], [], 3)])
    checked.worker.wait({store, load})
    results = checked.finished(2)
    assert [(one.job_id, one.success, one.transfer_size) for one in results] == [
        (store, True, 0),
        (load, True, 0),
    ]


def test_an_expedited_load_is_a_load(checked):
    checked.worker.wait({checked.submit("load", [([5], [3], 0)], expedited=True)})
    assert checked.finished(1)[0].success
    assert checked.is_right()
    assert checked.worker._handler.metrics().expedited.done == 1


def test_an_impossible_transfer_moves_nothing(checked):
    gpu = base.GPULoadStoreSpec([24], group_sizes=[1], block_indices=[0])
    with pytest.raises(IndexError, match="24"):
        checked.worker.submit_store(1, gpu, common.CPULoadStoreSpec([0]))
    assert checked.worker.get_finished() == []
    assert checked.is_right()


@pytest.mark.parametrize(
    ("blocks", "pages", "index"),
    [
        ([1, 3, 4, 5, 6, 7], [7, 8], 0),  # one in the middle of the first chunk is missing
        ([3, 4, 5, 6, 7], [7, 8], 1),  # the first one, and one in the second chunk
        ([2, 3, 4, 5, 6, 7, 8], [7, 8], 1),  # the first one
        ([2, 3, 4, 5, 6, 7, 8, 9], [7, 8, 9], 1),  # as many as in two chunks
    ],
)
def test_a_partial_chunk_is_refused(device, blocks, pages, index):
    checked = CheckedWorker(GROUPS["padded rows"], device, chunk=4)
    gpu = base.GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[index])
    said = f"group 0 of a transfer has {len(blocks)} blocks for {len(pages)} chunks of 4, from slot"
    with pytest.raises(ValueError, match=said):
        checked.worker.submit_store(1, gpu, common.CPULoadStoreSpec(pages))
    assert checked.worker.get_finished() == []
    assert checked.is_right()
    checked.worker.shutdown()


def test_shutdown_waits_and_can_be_repeated(device):
    checked = CheckedWorker(GROUPS["padded rows"], device)
    checked.submit("store", [([1, 2], [3, 4], 0)])
    pages = checked.worker._pool.pages
    checked.worker.shutdown()
    checked.worker.shutdown()
    assert torch.equal(pages, checked.pages)


def fail_copies(checked: CheckedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler's copies leave other bytes, and poll() and synchronize() say that they failed."""
    handler, finished = checked.worker._handler, checked.worker._handler.poll
    wait = handler.synchronize

    def fails(jobs: Any) -> None:
        wait(jobs)
        raise TransferError("some")

    def spoiled() -> list[Any]:
        results = finished()
        for result in results:
            if result.direction == "load":
                for tensor in handler.layouts[0].tensors:
                    tensor[[3, 9]] = 0
            else:
                checked.worker._pool.pages[[2, 5]] = 0
        error = TransferError("error 700")
        return [dataclasses.replace(one, state="failed", error=error) for one in results]

    monkeypatch.setattr(handler, "poll", spoiled)
    monkeypatch.setattr(handler, "synchronize", fails)


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_failed_copy_is_told_once(device, chunk, direction, waits, monkeypatch, caplog):
    checked = CheckedWorker(GROUPS["padded rows"], device, chunk)
    fail_copies(checked, monkeypatch)
    blocks = [3, 9, 4, 8, 1, 2][: 2 * chunk]
    number = checked.submit(direction, [(blocks, [5, 2], 0)])
    if waits:
        checked.worker.wait({number})
    (result,) = checked.finished(1)
    assert (result.job_id, result.success, result.transfer_size) == (number, True, None)
    assert checked.worker.take_failures() == [(number, direction, "failed", set(blocks), {5, 2})]
    assert checked.worker.take_failures() == []
    assert "failed: error 700" in caplog.text
    assert checked.worker.get_finished() == []
    checked.worker.shutdown()


# vLLM's caches as layouts, and its transfers as lists of ids


def test_layers_sharing_a_tensor_are_one_slab():
    (layout,) = group_layouts(caches([[(0, 16), (0, 48), (0, 32)]], [64], "cpu"))
    assert layout.sizes.tolist() == [48]


@pytest.mark.parametrize(
    ("refs", "names"),
    [
        ([0, 1], ["a", "b"]),
        ([1, 0], ["a", "b"]),
        ([0], ["a to b, tensor 0"]),
        ([0, 1, 2, 3], [f"a to b, tensor {tensor}" for tensor in range(4)]),
        ([0, 0], ["b"]),
    ],
)
def test_tensors_are_named_after_their_layers(refs, names):
    cache = caches([[(tensor, 16) for tensor in refs]], [16] * 4, "cpu")
    (layout,) = group_layouts(cache, layers=[["a", "b"]])
    assert layout.names == tuple(names)


def test_places_are_in_the_order_of_blocks():
    gpu = base.GPULoadStoreSpec([1, 2, 3, 4, 5], group_sizes=[2, 0, 3], block_indices=[2, 0, 4])
    move = read_move(gpu, common.CPULoadStoreSpec([7, 6, 8, 9]), [True] * 3, 3)
    assert move.places(3) == [(1, 7), (2, 6), (3, 8), (4, 8), (5, 9)]


@pytest.mark.parametrize("pages", [[7], [7, 8, 9]])
def test_pages_that_do_not_fit_are_refused(pages):
    gpu = base.GPULoadStoreSpec([1, 2, 3], group_sizes=[3], block_indices=[0])
    said = "but its groups of [3] blocks starting at [0] need 3 and 2"
    with pytest.raises(ValueError, match=re.escape(said)):
        read_move(gpu, common.CPULoadStoreSpec(pages), [True], 2)


# The workers of an engine with equal caches share one host pool


def pools_of_two(layouts: Sequence[PagedLayout]) -> list[Callable[[], HostPool]]:
    """What the two workers of an engine, which are threads, are given."""
    said: Future[Any] = Future()
    both = threading.Barrier(2, timeout=PATIENCE)

    def make(rank: int) -> HostPool:
        def broadcast(mine: Any = None) -> Any:
            if rank == 0:
                said.set_result(mine)
            return said.result(PATIENCE)

        group = SimpleNamespace(rank_in_group=rank, broadcast_object=broadcast, barrier=both.wait)
        options = {"encoding": "raw", "verify": "load", "pin_in_background": False}
        return replicated_pool(layouts[rank], 6, 2, group=group, **options)

    with ThreadPoolExecutor(2) as threads:
        return [threads.submit(make, rank).result for rank in range(2)]


def test_a_worker_loads_what_another_stored():
    """With checksums, by which it notices damage."""
    gpu = [torch.randint(256, (8, 64), dtype=torch.uint8) for _ in range(2)]
    layouts = [PagedLayout([one]) for one in gpu]
    pools = [result() for result in pools_of_two(layouts)]
    first, second = map(OffloadHandler, layouts, pools)
    first.store(gpu_block_ids=[0, 1, 2, 3], page_ids=[4, 5]).synchronize()
    second.load(page_ids=[4, 5], gpu_block_ids=[7, 6, 5, 4]).synchronize()
    assert torch.equal(gpu[1][[7, 6, 5, 4]], gpu[0][:4])
    pools[0].pages[4, 1, 9] ^= 1
    with pytest.raises(CorruptedPageError, match="GPU block 3, page 4, slot 1"):
        second.load(page_ids=[4, 5], gpu_block_ids=[2, 3, 1, 0]).synchronize()
    for pool in pools:
        pool.close()


def test_when_worker_0_fails_others_are_told():
    first, other = pools_of_two([None, PagedLayout([torch.zeros(8, 64)])])
    with pytest.raises(TypeError, match="layout is None"):
        first()
    with pytest.raises(RuntimeError, match="worker 1 got no host pool, because worker 0"):
        other()


def test_a_worker_that_fails_holds_up_no_other():
    layouts = [PagedLayout([torch.zeros(8, size, dtype=torch.uint8)]) for size in (64, 32)]
    first, other = pools_of_two(layouts)
    with pytest.raises(ValueError, match="the handle is for other pages"):
        other()
    first().close()
