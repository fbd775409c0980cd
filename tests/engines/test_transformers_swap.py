"""Host pages of preempted requests: allocated for a store, freed, and loaded one layer group at
a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace as Record
from typing import Any
from unittest import mock

import torch
from continuous_batching import first_parts_of
from logged import logged
from simulated_driver import Driver, place, simulated

from torch_kvswap.integrations.transformers.cache_view import CacheView
from torch_kvswap.integrations.transformers.swap import Swap, SwapOptions
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import Job


def make(pages: int = 6, first_part_bytes: int = 32 << 20) -> tuple[torch.Tensor, Swap]:
    blocks = torch.arange(20 * 64).view(20, 64)
    with first_parts_of(first_part_bytes):
        return blocks, Swap(PagedLayout([blocks]), pages, None, SwapOptions())


def test_a_load_of_a_damaged_page_fails():
    blocks = torch.randn(20, 2048)
    swap = Swap(PagedLayout([blocks]), 6, None, SwapOptions(verify="load"))
    good, damaged = swap.store([[3]]), swap.store([[7]])
    swap.pool.pages[damaged.pages[0][0], 0, 99] ^= 1
    loads = [swap.load(good, [[10]]), swap.load(damaged, [[11]])]
    with logged() as warnings:
        swap.collect()
    assert [load.ok for load in loads] == [True, False]
    assert torch.equal(blocks[10], blocks[3])
    assert len(warnings) == 1


def test_groups_are_loaded_as_far_as_possible():
    blocks, swap = make()
    before = blocks.clone()
    stored = swap.store([[3, 1, 4], [7]])
    swap.load(stored, [[10], [12, 13]])
    assert torch.equal(blocks[[10, 12]], before[[3, 7]])
    assert torch.equal(blocks[[11, 13]], before[[11, 13]])


def test_freed_pages_are_reused_in_memory_order():
    _, swap = make()
    first = swap.store([[1, 2, 3]])
    swap.free(first)
    again = swap.store([[4, 5, 6]])
    assert [pages.tolist() for pages in again.pages] == [[3, 4, 5]]
    assert again.pages == first.pages


def test_a_failed_load_is_reported_at_once():
    _, swap = make()
    stored = swap.store([[1]])
    load = swap.load(stored, [[2]])
    with mock.patch.object(Job, "_is_done", False), mock.patch.object(swap.handler, "poll") as poll:
        swap.store([[2]])
    assert load.ok is False
    poll.assert_called_once_with()


def view_of(*groups: Any) -> Any:
    def free_blocks(name: str, no_cache: bool) -> None:
        for group in groups:
            del group.block_table[name]

    sectors = {"cache_tensor": torch.zeros(64, dtype=torch.uint8), "dtype": torch.float32}
    allocators = dict(enumerate(groups))
    return CacheView(Record(cache_allocators=allocators, free_blocks=free_blocks, **sectors))


def group_of(blocks: list[int], bytes_per_block: int = 8, **more: Any) -> Any:
    """Its request "a" has these blocks of 4 tokens."""
    table = {"a": blocks}
    return Record(block_table=table, bytes_per_block=bytes_per_block, tokens_per_page=4, **more)


def test_a_batch_writes_growing_blocks_and_whole_windows():
    growing, window = group_of([5, 2, 9]), group_of([4, 7], 16, sliding_window=8)
    future = Record(state=Record(request_id="a", position_offset=8))
    assert list(view_of(growing, window).written([future])) == [9, 8, 9, 14, 15]


def test_a_request_without_blocks_is_not_freed():
    view = view_of(group_of([1]))
    for name, left in (("b", {"a": [1]}), ("a", {})):
        state = Record(request_id=name, allocated_blocks=3)
        view.release(state)
        assert (view.groups[0].block_table, state.allocated_blocks) == (left, 0)


def waits_of(swap: Swap, written: Iterable[int] | None) -> list[int]:
    """The ids of the jobs that guard() makes the stream wait for."""
    with mock.patch.object(swap, "_make_stream_wait") as waited:
        swap.guard(written)
    return [call.args[0].id for call in waited.call_args_list]


def make_late(driver: Driver) -> Swap:
    """Its copies run when the driver is told to."""
    driver.set_mode("manual")
    layout = place(driver, PagedLayout([torch.arange(20 * 64).view(20, 64)]))
    return Swap(layout, 6, None, SwapOptions())


@simulated
def test_a_stream_waits_once_for_each_store(driver: Driver) -> None:
    swap = make_late(driver)
    swap.store([[1, 2]])
    swap.store([[3]])
    assert waits_of(swap, [4, 5]) == []
    assert waits_of(swap, [4, 3]) == [1]
    assert waits_of(swap, [3]) == []  # the stream waits already
    assert waits_of(swap, None) == [0]
    driver.set_mode("immediate")
    swap.reset()


@simulated
def test_a_stream_waits_for_loads_given_away(driver: Driver) -> None:
    swap = make_late(driver)
    driver.set_mode("immediate")
    stored = swap.store([[1, 2]])
    swap.reset()
    driver.set_mode("manual")
    load = swap.load(stored, [[3, 4]])
    assert waits_of(swap, [3]) == waits_of(swap, None) == []
    load.is_exposed = True
    assert waits_of(swap, [5]) == []
    assert waits_of(swap, [3]) == [load.job.id]
    driver.set_mode("immediate")
    swap.reset()


@simulated
def test_only_what_nobody_wants_any_more_is_cancelled(driver: Driver) -> None:
    swap = make_late(driver)
    kept, dropped = swap.store([[1]]), swap.store([[2, 3]])
    swap.free(kept)
    swap.discard(dropped)
    assert len(swap._free) == 6
    driver.set_mode("immediate")
    swap.reset()
    jobs = [job for stored in (kept, dropped) for job in stored.stores]
    assert [job.result.state for job in jobs] == ["done", "cancelled"]


def test_host_and_guard_wait_for_a_job():
    _, swap = make()
    stored = swap.store([[3]])
    load = swap.load(stored, [[4]])
    with mock.patch.object(swap.handler, "synchronize") as waited:
        swap.wait(load)
    waited.assert_called_once_with(load.job)
    (job,) = stored.stores
    with (
        mock.patch.object(Job, "query", return_value=False),
        mock.patch.object(Job, "wait") as waited,
    ):
        swap.guard(None)
    waited.assert_called_once_with(None)
    assert job.query()
