"""vLLM's caches as layouts, its transfers as lists of ids, and a failed copy that is repeated."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from types import SimpleNamespace as Record
from typing import Any

import numpy as np
import pytest
import torch
from gpu_cache import NEW, OLD, keep_busy

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm.layout import Move, Place, group_layouts, read_move
from torch_kvswap.integrations.vllm.retry import Retry
from torch_kvswap.layout import PagedLayout


def caches(rows: list[int], groups: list[list[tuple[int, int]]], blocks: int = 6) -> Any:
    memory = [torch.randint(-128, 128, (blocks, row), dtype=torch.int8) for row in rows]
    return Record(
        tensors=[Record(tensor=tensor, page_size_bytes=tensor.shape[1]) for tensor in memory],
        group_data_refs=[
            [Record(tensor_idx=index, page_size_bytes=size) for index, size in group]
            for group in groups
        ],
    )


def gpu(blocks: list[int], sizes: list[int], indices: list[int], dtype: Any = np.int32) -> Any:
    return Record(block_ids=np.array(blocks, dtype), group_sizes=sizes, block_indices=indices)


def host(*pages: int) -> Any:
    return Record(block_ids=np.array(pages, np.int64))


def lists(move: Move) -> tuple[list[list[int]], list[list[int]], list[int]]:
    return (
        [blocks.tolist() for blocks in move.blocks],
        [pages.tolist() for pages in move.pages],
        move.first_slots,
    )


def test_a_group_has_a_slab_for_each_tensor_with_the_bytes_that_are_used():
    canonical = caches([64, 96], [[(0, 64), (1, 80)], [(1, 96)]])
    first, second = group_layouts(canonical)
    assert first.sizes.tolist() == [64, 80]
    assert first.strides.tolist() == [64, 96]
    assert second.sizes.tolist() == [96]
    assert second.bases[0] == first.bases[1] == canonical.tensors[1].tensor.data_ptr()


def test_a_group_without_layers_in_this_worker_has_no_layout():
    first, second = group_layouts(caches([64], [[], [(0, 64)]]))
    assert first is None
    assert second.sizes.tolist() == [64]


def test_layers_of_a_group_that_share_a_tensor_are_one_slab_of_the_larger():
    (layout,) = group_layouts(caches([64], [[(0, 16), (0, 48), (0, 32)]]))
    assert layout.sizes.tolist() == [48]


def test_a_view_into_one_allocation_of_all_layers_keeps_its_place():
    memory = torch.zeros(6 * 64 * 2, dtype=torch.int8)
    views = [memory[begin : begin + 6 * 64].view(6, 64) for begin in (0, 6 * 64)]
    canonical = caches([64, 64], [[(0, 64), (1, 64)]])
    for of_cache, view in zip(canonical.tensors, views, strict=True):
        of_cache.tensor = view
    (layout,) = group_layouts(canonical)
    assert (layout.bases - memory.data_ptr()).tolist() == [0, 6 * 64]


def test_heads_are_slabs_one_head_of_all_layers_after_another():
    canonical = caches([64, 96], [[(0, 64), (1, 80)]])
    (layout,) = group_layouts(canonical, heads=2)
    assert layout.sizes.tolist() == [32, 40, 32, 40]
    first, second = (one.tensor.data_ptr() for one in canonical.tensors)
    assert layout.bases.tolist() == [first, second, first + 32, second + 40]
    assert layout.strides.tolist() == [64, 96, 64, 96]


def test_a_transfer_of_whole_chunks_takes_a_page_for_each():
    move = read_move(gpu([5, 6, 7, 8], [4], [0]), host(9, 3), [True], 2)
    assert lists(move) == ([[5, 6, 7, 8]], [[9, 3]], [0])
    assert move.blocks[0].dtype == np.int64


def test_the_first_chunk_can_be_used_from_its_middle_and_the_last_in_part():
    move = read_move(gpu([5, 6, 7], [3], [7]), host(9, 3), [True], 4)
    assert lists(move) == ([[5, 6, 7]], [[9, 3]], [3])
    move = read_move(gpu([5], [1], [6]), host(9), [True], 4)
    assert lists(move) == ([[5]], [[9]], [2])


def test_each_group_has_its_own_first_slot_and_may_be_empty():
    move = read_move(gpu([1, 2, 3, 4, 5], [2, 0, 3], [0, 5, 4]), host(7, 8, 9), [True] * 3, 3)
    assert lists(move) == ([[1, 2], [], [3, 4, 5]], [[7], [], [8, 9]], [0, 0, 1])


def test_groups_without_layers_are_left_out_of_a_transfer():
    sizes = gpu([1, 2, 3, 4, 5], [2, 0, 3], [0, 5, 4])
    move = read_move(sizes, host(7, 8, 9), [False, True, True], 3)
    assert lists(move) == ([[], [3, 4, 5]], [[], [8, 9]], [0, 1])
    move = read_move(sizes, host(7, 8, 9), [True, True, False], 3)
    assert lists(move) == ([[1, 2], []], [[7], []], [0, 0])
    assert move.places(3) == [Place(0, 1, 7, 0), Place(0, 2, 7, 1)]


def test_the_places_of_a_transfer_are_in_the_order_of_its_blocks():
    move = read_move(gpu([1, 2, 3, 4, 5], [2, 0, 3], [2, 0, 4]), host(7, 6, 8, 9), [True] * 3, 3)
    assert move.places(3) == [
        *(Place(0, 1, 7, 2), Place(0, 2, 6, 0)),
        *(Place(2, 3, 8, 1), Place(2, 4, 8, 2), Place(2, 5, 9, 0)),
    ]


def test_of_a_store_by_turns_each_worker_has_whole_pages():
    move = read_move(gpu([*range(10)], [6, 0, 4], [0] * 3), host(9, 4, 3, 7, 2), [True] * 3, 2)
    assert lists(move.of_turn(0, 2, 2)) == ([[2, 3], [], [8, 9]], [[4], [], [2]], [0] * 3)
    assert lists(move.of_turn(1, 2, 2)) == ([[0, 1, 4, 5], [], [6, 7]], [[9, 3], [], [7]], [0] * 3)
    assert lists(move.of_turn(2, 8, 2)) == ([[], [], [8, 9]], [[], [], [2]], [0] * 3)


@pytest.mark.parametrize(
    ("blocks", "pages", "index"),
    [
        ([1, 3, 4, 5, 6, 7], [7, 8], 0),  # one in the middle of the first chunk is missing
        ([3, 4, 5, 6, 7], [7, 8], 1),  # the first one, and one in the second chunk
        ([2, 3, 4, 5, 6, 7, 8], [7, 8], 1),  # the first one
        ([2, 3, 4, 5, 6, 7, 8, 9], [7, 8, 9], 1),  # as many as in two chunks
    ],
)
def test_a_store_of_a_part_of_a_chunk_is_refused(blocks, pages, index):
    move = read_move(
        gpu([9, 9, 9, 9, *blocks], [4, len(blocks)], [8, index]), host(1, *pages), [True] * 2, 4
    )
    said = f"group 1 of a store has {len(blocks)} blocks for {len(pages)} chunks of 4, from slot"
    with pytest.raises(ValueError, match=said):
        move.check_whole_pages(4)


def test_a_store_of_whole_chunks_or_of_nothing_is_not_refused():
    read_move(gpu([1, 2, 3, 4], [4, 0], [6, 3]), host(7, 8), [True] * 2, 2).check_whole_pages(2)


@pytest.mark.parametrize(
    ("blocks", "pages"), [([1, 2, 3], [7]), ([1, 2], [7, 8, 9]), ([1, 2, 3, 4], [7, 8])]
)
def test_a_transfer_whose_pages_do_not_fit_its_blocks_is_refused(blocks, pages):
    move = gpu(blocks, [3], [0])
    said = "but its groups of [3] blocks starting at [0] need 3 and 2"
    with pytest.raises(ValueError, match=re.escape(said)):
        read_move(move, host(*pages), [True], 2)


def test_a_transfer_of_another_number_of_groups_is_refused():
    move = gpu([1], [1, 0], [0, 0])
    with pytest.raises(ValueError, match="the transfer has 2 groups, but the cache has 1"):
        read_move(move, host(1), [True], 1)


def moved(layout: PagedLayout, pool: HostPool, direction: Any) -> tuple[Retry, torch.Tensor]:
    """Blocks 4, 1 and 3 and the slots 1 to 3 of pages 2 and 0."""
    places = Move([np.array([4, 1, 3])], [np.array([2, 0])], [1]).places(2)
    retry = Retry([layout], [pool], direction, places, {}, has_run=False)
    retry.wait()
    return retry, torch.stack([pool.pages[2, 1], pool.pages[0, 0], pool.pages[0, 1]])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_is_done_again_moves_the_same_bytes_and_no_others(direction, device):
    tensors = [torch.randint(-128, 128, (6, row), dtype=torch.int8).to(device) for row in (64, 96)]
    layout = PagedLayout([tensors[0], tensors[1][:, :80]])
    pool = HostPool(layout, 3, 2)
    pool.pages.random_(256)
    before = torch.cat(tensors, 1).cpu(), pool.pages.clone()
    retry, slots = moved(layout, pool, direction)
    assert retry.error is None
    seconds = retry.seconds
    assert retry.has_ended()
    assert retry.seconds == seconds > 0
    after, blocks = torch.cat(tensors, 1).cpu(), [4, 1, 3]
    assert torch.equal(slots, after[blocks][:, :144].view(torch.uint8))
    if direction == "store":
        assert torch.equal(after, before[0])
        assert torch.equal(pool.pages[[2, 1, 1], [0, 0, 1]], before[1][[2, 1, 1], [0, 0, 1]])
    else:
        assert torch.equal(pool.pages, before[1])
        assert torch.equal(after[[0, 2, 5]], before[0][[0, 2, 5]])
        assert torch.equal(after[:, 144:], before[0][:, 144:])


def test_a_copy_that_fails_again_ends_with_the_error():
    layout = PagedLayout([torch.zeros(2, 64, dtype=torch.int8)])
    retry, _ = moved(layout, HostPool(layout, 3, 2), "store")
    assert retry.has_ended()
    assert "index 4 is out of bounds" in str(retry.error)


@pytest.mark.parametrize("has_run", [False, True])
def test_a_copy_waits_for_the_current_stream_unless_its_transfer_has_run(has_run, monkeypatch):
    log = []

    class Stream:
        def __init__(self, *_: object) -> None:
            log.append("a stream is made")

        def wait_stream(self, other: object) -> None:
            log.append(f"it waits for the {other}")

    class Event:
        def record(self, stream: Stream) -> None:
            log.append("its end is recorded")

    @contextlib.contextmanager
    def enter(stream: Stream) -> Any:
        log.append("it becomes the current one")
        yield
        log.append("it is left")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(Retry, "_copy", lambda *_: log.append("blocks are copied"))
    layout = PagedLayout([torch.zeros(6, 64, dtype=torch.int8)])
    pool = HostPool(layout, 3, 2)
    layout.device = torch.device("cuda", 1)
    places = [Place(0, 4, 2, 1)]
    assert Retry([layout], [pool], "store", places, {}, has_run).error is None
    assert log == [
        "a stream is made",
        *([] if has_run else ["it waits for the stream of cuda:1"]),
        "it becomes the current one",
        "blocks are copied",
        "its end is recorded",
        "it is left",
    ]


def test_decoded_blocks_are_held_until_their_copies_have_ended(monkeypatch):
    """A copy from pageable memory may read it after the call has returned."""
    layout = PagedLayout([torch.zeros(6, 4096, dtype=torch.bfloat16)])
    pool, decoded = HostPool(layout, 3, encoding="lossless"), []

    def read_block(page: int, slot: int) -> torch.Tensor:
        block = torch.full((8192,), page, dtype=torch.uint8)
        decoded.append(weakref.ref(block))
        return block

    monkeypatch.setattr(pool, "read_block", read_block)
    places = [Place(0, 4, 2, 0), Place(0, 1, 1, 0)]
    retry = Retry([layout], [pool], "load", places, {}, has_run=True)
    assert len(decoded) == 2
    assert all(block() is not None for block in decoded)
    del retry
    gc.collect()
    assert all(block() is None for block in decoded)


@pytest.mark.gpu
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_is_done_again_starts_behind_what_writes_its_blocks(direction, has_run):
    """has_run: True is the control, a copy that does not wait: it is too early. A store reads the
    old bytes, and what a load brings is overwritten."""
    cache = torch.full((6, 1 << 16), OLD, dtype=torch.uint8, device="cuda")
    layout = PagedLayout([cache])
    pool = HostPool(layout, 3, 2)
    pool.pages.fill_(OLD)
    places = [Place(0, 4, 2, 1)]
    Retry([layout], [pool], "load", places, {}, has_run).wait()  # the first one takes longer
    torch.cuda.synchronize()
    keep_busy()
    cache.fill_(NEW)
    retry = Retry([layout], [pool], direction, places, {}, has_run)
    retry.wait()
    was_busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert was_busy is has_run, "it waits for the stream, and only the control does not"
    assert retry.error is None
    if direction == "store":
        assert pool.pages[2, 1].unique().tolist() == [OLD if has_run else NEW]
    else:
        assert cache[4].unique().tolist() == [NEW if has_run else OLD]
