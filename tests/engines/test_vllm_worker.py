"""Our worker meets vLLM's contract: blocks go where the specs say, and every job ends once. vLLM need
not be installed."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_contract import KVSwapWorker, TwoWorkers, base, caches, common, names

from torch_kvswap.integrations.vllm.kv_layouts import Move, group_layouts, read_move
from torch_kvswap.integrations.vllm.options import SpecOptions
from torch_kvswap.integrations.vllm.worker_pools import replicated_pool
from torch_kvswap.layout import PagedLayout

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
        how = PAGES, chunk, SpecOptions(1, **options), names(self.groups)
        self.worker = KVSwapWorker(self.caches, *how)
        self.worker._pool.pages.random_(256)
        self.expected = [one.tensor.cpu().clone() for one in self.caches.tensors]
        self.pages = self.worker._pool.pages.clone()
        self.number = 0

    def submit(self, direction: str, moves: list[tuple[list[int], list[int], int]]) -> int:
        """moves: of each group the blocks, the pages, and the first block's place in the request."""
        self.number += 1
        gpu = base.GPULoadStoreSpec(
            [block for blocks, _, _ in moves for block in blocks],
            group_sizes=[len(blocks) for blocks, _, _ in moves],
            block_indices=[index for _, _, index in moves],
        )
        host = common.CPULoadStoreSpec([page for _, pages, _ in moves for page in pages])
        if direction == "store":
            assert self.worker.submit_store(self.number, gpu, host)
        else:
            assert self.worker.submit_load(self.number, host, gpu)
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

    def is_right(self) -> bool:
        tensors: list[Tensor] = [one.tensor.cpu() for one in self.caches.tensors]
        return all(map(torch.equal, tensors, self.expected)) and torch.equal(
            self.worker._pool.pages, self.pages
        )


def random_moves(chosen: random.Random, groups: int, chunk: int, is_store: bool) -> list[Any]:
    blocks, pages = chosen.sample(range(1, 24), 23), chosen.sample(range(PAGES), PAGES)
    moves = []
    for _ in range(groups):
        count, index = chosen.randint(0, 5), chosen.randint(0, 7)
        if is_store:  # of whole chunks
            count, index = count // chunk * chunk, index * chunk
        taken = -(-(count + index % chunk) // chunk) if count else 0
        moves.append((blocks[:count], pages[:taken], index))
        blocks, pages = blocks[count:], pages[taken:]
    return moves


@pytest.mark.parametrize("name", GROUPS)
def test_random_transfers_move_only_their_blocks(name, device, chunk):
    """Several at a time, some of them of nothing. Each ends once, whatever waits for it."""
    checked, chosen = CheckedWorker(GROUPS[name], device, chunk), random.Random(name)
    worker, sizes, results = checked.worker, dict[int, int](), list[Any]()
    for _ in range(8):
        for _ in range(chosen.randint(1, 3)):
            direction = chosen.choice(["store", "load"])
            moves = random_moves(chosen, len(checked.groups), chunk, direction == "store")
            number = checked.submit(direction, moves)
            sizes[number] = checked.nbytes(moves)
        if chosen.random() < 0.5:
            worker.wait({number, 1000})  # of another it never heard
        results += worker.get_finished()
    worker.wait(set(sizes))
    results += worker.get_finished()
    assert worker.get_finished() == []
    ended = sorted((one.job_id, one.success, one.transfer_size) for one in results)
    assert ended == [(number, True, size) for number, size in sizes.items()]
    assert min(one.transfer_time for one in results) >= 0
    assert checked.is_right()
    checked.submit("store", random_moves(chosen, len(checked.groups), chunk, True))
    pages = worker._pool.pages
    for _ in range(2):
        worker.shutdown()  # waits for it
    assert torch.equal(pages, checked.pages)


@pytest.mark.parametrize(
    ("blocks", "pages", "index", "said"),
    [
        ([24, 1, 2, 3], [0], 0, "24"),
        ([1, 2, 3, 4, 5], [7], 0, "groups of [5] blocks starting at [0] need 5 and 2"),
        ([1, 2, 3, 4, 5], [7, 8, 9], 0, "groups of [5] blocks starting at [0] need 5 and 2"),
    ],
)
def test_an_impossible_store_moves_nothing(device, blocks, pages, index, said):
    checked = CheckedWorker(GROUPS["padded rows"], device, chunk=4)
    gpu = base.GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[index])
    with pytest.raises((IndexError, ValueError), match=re.escape(said)):
        checked.worker.submit_store(1, gpu, common.CPULoadStoreSpec(pages))
    assert checked.worker.get_finished() == []
    assert checked.is_right()
    checked.worker.shutdown()


# vLLM's caches as layouts, and its transfers as lists of ids


@pytest.mark.parametrize(
    ("refs", "sizes"),
    [
        ([(0, 16), (1, 32)], {"a": 16, "b": 32}),
        ([(1, 16), (0, 32)], {"a": 16, "b": 32}),
        ([(0, 16)], {"a to b": 16}),
        ([(0, 48), (0, 32)], {"b": 48}),
    ],
)
def test_a_tensor_is_named_after_its_layers(refs, sizes):
    """It is one slab, as large as the largest of them."""
    (layout,) = group_layouts(caches([refs], [64] * 2, "cpu"), [["a", "b"]])
    assert dict(zip(layout.names, layout.sizes.tolist(), strict=True)) == sizes


def test_a_worker_without_layers_says_so():
    with pytest.raises(ValueError, match="no layer of this worker has a KV cache to offload"):
        KVSwapWorker(caches([[]], [64], "cpu"), PAGES, 1, SpecOptions(1), [[]])


def test_places_are_in_the_order_of_blocks():
    gpu = base.GPULoadStoreSpec([1, 2, 3, 4, 5], group_sizes=[2, 0, 3], block_indices=[2, 0, 4])
    move = read_move(gpu, common.CPULoadStoreSpec([7, 6, 8, 9]), [True] * 3, 3)
    assert move.places(3) == [(1, 7), (2, 6), (3, 8), (4, 8), (5, 9)]


@pytest.mark.parametrize(
    ("first", "size", "why"),
    [(0, 5, "5 blocks from slot 0 of 2 pages"), (2, 6, "6 blocks from slot 2 of 2 pages")],
)
def test_parts_of_pages_are_not_joined(first, size, why):
    specs = [
        (base.GPULoadStoreSpec([10, 11, 12, 13], [4], [0]), common.CPULoadStoreSpec([2])),
        (base.GPULoadStoreSpec([*range(size)], [size], [first]), common.CPULoadStoreSpec([0, 1])),
    ]
    whole, part = (read_move(gpu, host, [True], 4) for gpu, host in specs)
    with pytest.raises(ValueError, match=rf"\[1\] has {why}"):
        Move.joined([whole, part], 4)


# The workers of an engine with equal caches share one host pool


def test_a_worker_that_fails_holds_up_no_other():
    layouts = [PagedLayout([torch.zeros(8, size, dtype=torch.uint8)]) for size in (64, 32)]
    options = {"encoding": "raw", "verify": "load", "pin_in_background": False}
    workers = TwoWorkers()
    first, other = workers.run(
        lambda rank: replicated_pool(layouts[rank], 6, 2, group=workers, **options)
    )
    with pytest.raises(ValueError, match="the handle is for other pages"):
        other()
    first().close()
