"""The prefix cache stores blocks and finds them again by their content."""

from __future__ import annotations

import copy
import gc
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from bf16_cache import Bf16Cache
from drained import drain
from error_text import error_text
from expecttest import assert_expected_inline
from held_requests import resume
from host_pools import in_chunks
from logged import logged
from patience import PATIENCE, in_time
from pinning_steps import PinningSteps
from prefix_bytes import BLOCKS, PAGES, make
from processes import in_child
from simulated_driver import Driver, cache, place, simulated

from torch_kvswap import HostPool, OffloadHandler, PagedLayout, PrefixCache, PrefixHasher, Result
from torch_kvswap.prefix import BlockGroup
from torch_kvswap.prefix.manager import Lookup
from torch_kvswap.reference import ReferenceHandler


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_groups_load_what_they_need(device: str) -> None:
    attention = PagedLayout([torch.arange(16.0)[:, None].repeat(1, 4).to(device)])
    state = PagedLayout([100 + torch.arange(4.0)[:, None].repeat(1, 8).to(device)])
    pools = [HostPool(attention, 8), HostPool(state, 2)]
    with PrefixCache(
        [attention, state], pools, [BlockGroup(8, 4), BlockGroup(2, 8, is_state=True)]
    ) as prefixes:
        keys = [["a", "b", "c", "d"], ["s", "t"]]
        prefixes.store([keys[0], keys[1][1:]], [[0, 1, 2, 3], [1]])
        drain(prefixes)
        prefixes.poll()
        found = prefixes.lookup(keys)
        assert found.ready == 2
        job = prefixes.load(keys, [[12, 13, 14, 15], [2, 3]], found.ready)
        assert job is not None
        job.wait()
        assert attention.tensors[0][12:, 0].tolist() == [0, 1, 2, 3]
        assert state.tensors[0][2:, 0].tolist() == [102, 101]


def test_store_says_why_nothing_is_stored():
    def why(prefixes, keys):
        """What a store without a job says, and how many more stores were refused."""
        before = prefixes.stats()
        stored = prefixes.store(keys, [*range(len(keys))])
        assert stored.job is None
        after = prefixes.stats()
        return stored.state, after.refused - before.refused

    prefixes, _ = make()
    with prefixes:
        prefixes.store(["a"], [1])
        assert why(prefixes, ["a"]) == ("present", 0)  # it is being stored
        prefixes.poll()
        assert why(prefixes, ["a"]) == ("present", 0)
        assert why(prefixes, [*map(str, range(PAGES + 1))]) == ("full", 1)


@pytest.mark.parametrize("polls", [True, False])
def test_a_caller_who_never_polls_is_warned_once(polls):
    prefixes, _ = make()
    with prefixes, logged() as messages:
        if polls:
            prefixes.poll()
        for first in range(0, 3 * PAGES, 2):
            prefixes.store([f"{first}", f"{first + 1}"], [0, 1])
        assert prefixes.store(["a"], [2], hold=True).state == "full"
        assert len(messages) == (not polls)
        assert polls or f"poll() was never called, and all {PAGES} pages" in messages[0]


def test_blocks_that_never_fit_are_warned_of_once():
    prefixes, _ = make()
    with prefixes, logged() as messages:
        prefixes.poll()
        keys = [f"key {number}" for number in range(PAGES + 1)]
        for _ in range(2):
            assert prefixes.store(keys, list(range(PAGES + 1))).state == "full"
        [message] = messages
        assert f"{PAGES + 1} blocks at once are more than the {PAGES} pages" in message


def test_a_wrong_option_is_refused_without_a_copy():
    prefixes, _ = make()
    with prefixes:
        prefixes.store(["a"], [1])  # has not been polled: "a" can neither be stored nor loaded
        assert error_text(prefixes.load, ["a"], [1], expedited="no") == (
            "TypeError: expedited is 'no'; it must be True or False"
        )
        assert prefixes.stats().filling_pages == 1


def test_after_is_checked_without_a_copy():
    prefixes, _ = make()
    with prefixes:
        prefixes.store(["a"], [1])
        prefixes.poll()
        errors = [
            error_text(prefixes.load, ["x"], [1], layer_groups=0),
            error_text(prefixes.load, ["x"], [1], after=object()),
            error_text(prefixes.store, ["a"], [1], after=object()),
            error_text(prefixes.store, ["a"], [1], hold=True, after=object()),
        ]
        assert prefixes.stats().idle_pages == 1
    of_after = (
        "TypeError: after= is an object, but transfers of a cache on the CPU run inside the call "
        "and cannot wait for a stream; wait on the host first, and pass None or ()"
    )
    assert [" ".join(error.split()) for error in errors] == [
        "ValueError: layer_groups is 0; it must be 1 to 2",
        *[of_after] * 3,
    ]


def test_a_store_that_cannot_be_submitted_holds_nothing():
    prefixes, tensor = make()
    with prefixes:
        prefixes.store(["a"], [1])
        prefixes.poll()
        tensor.data = tensor.clone()
        with pytest.raises(RuntimeError, match="has moved"):
            prefixes.store(["a", "b"], [1, 2], hold=True)
        stats = prefixes.stats()
        assert (stats.free_pages, stats.idle_pages) == (PAGES - 1, 1)


def test_a_prefix_cache_has_its_handlers_calls() -> None:
    prefixes, tensor = make()
    with prefixes:
        job = prefixes.store(["a"], [1]).job
        prefixes.synchronize(job)
        assert prefixes.cancel(job) is False
        assert prefixes.metrics().stores.done == 1
        prefixes.poll()
        moved = PagedLayout([tensor.clone(), torch.zeros(BLOCKS, 5)])
        prefixes.rebind(moved)
        assert prefixes.layouts == (moved,)
        assert prefixes.load(["a"], [8])
        assert (moved.tensors[0][8, 0], tensor[8, 0]) == (1, 8)
    with pytest.raises(RuntimeError, match=r"^the prefix cache is closed; make a new one$"):
        prefixes.__enter__()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_manager_outlives_jobs_nobody_polled(is_closed: bool) -> None:
    prefixes, _ = make()
    manager = prefixes._manager
    prefixes.store(["a", "b"], [0, 1])
    if is_closed:
        prefixes.close()
    del prefixes
    gc.collect()
    manager.reset()
    assert manager.stats().free_pages == PAGES


def test_a_closed_pool_is_named_not_its_handler() -> None:
    for closes_pool in (True, False):
        prefixes, _ = make()
        if not closes_pool:
            prefixes.close()
        prefixes.pools[0].close()
        expected = (
            "the host pool is closed, and with it its prefix cache; make new ones"
            if closes_pool
            else "the prefix cache is closed; make a new one"
        )
        assert error_text(prefixes.lookup, ["a"]) == f"RuntimeError: {expected}"
        for call in (prefixes.store, prefixes.load):
            assert error_text(call, ["a"], [1]) == f"RuntimeError: {expected}"


def test_what_only_looks_like_keys_is_refused() -> None:
    """All of these would find nothing."""
    layout = PagedLayout([torch.zeros(4, 4)])
    groups = [BlockGroup(4, 4), BlockGroup(4, 4, window_tokens=8)]
    one = PrefixCache(layout, HostPool(layout, 4))
    two = PrefixCache([layout, layout], [HostPool(layout, 4), HostPool(layout, 4)], groups)
    keys, of_8 = (PrefixHasher("m", "uint8", tokens).keys(range(8)) for tokens in (4, 8))
    errors = [
        error_text(one.lookup, tuple(range(8))),
        error_text(one.lookup, [keys]),
        error_text(lambda: [one.lookup(some) for some in (keys, of_8)]),
        error_text(two.lookup, keys),
        error_text(two.lookup, [("a", 1), ("b", 2)]),
        error_text(two.lookup, [keys, list(range(8))]),
        error_text(one.load, ["a"], [0], prefix=one.lookup(["a"])),
    ]
    assert_expected_inline(
        "\n".join(errors),
        """\
TypeError: keys[0] is an int, as tokens are; pass keys of a PrefixHasher, such as
hasher.lookup_keys(tokens), or make keys of your own tuples, such as (0,)
TypeError: keys[0] is a PrefixKeys, but this cache was made of one layout, not of a
list; pass keys[0] itself
ValueError: keys stand for 8 tokens each, but earlier keys for 4; use one block_tokens
for all keys of a cache
TypeError: keys[0] is bytes, which is one key; pass a list of 2 lists, the keys of each
group
TypeError: keys[0] is a tuple, which is one key; pass a list of 2 lists, the keys of
each group
TypeError: keys[1][0] is an int, as tokens are; pass keys of a PrefixHasher, such as
hasher.lookup_keys(tokens), or make keys of your own tuples, such as (0,)
TypeError: prefix is a Lookup; pass a length in units, such as its `ready`""",
    )


@simulated
def test_a_refused_prefix_cache_takes_no_memory(driver: Driver) -> None:
    layout, host = cache(driver, 4, 4)
    before = driver.calls("cuMemAlloc"), driver.calls("cuStreamCreateWithPriority")
    for wrong in ({"eviction_policy": "never"}, {"groups": [BlockGroup(4)]}):
        with pytest.raises((ValueError, TypeError), match=r"eviction_policy|groups"):
            PrefixCache(layout, host, **wrong)
    assert (driver.calls("cuMemAlloc"), driver.calls("cuStreamCreateWithPriority")) == before


@pytest.mark.parametrize("kind", [OffloadHandler, ReferenceHandler, PrefixCache])
def test_no_other_handler_has_a_caches_pages(kind: Any) -> None:
    layout = PagedLayout([torch.zeros(4, 4)])
    pool = HostPool(layout, 4)
    for first, second in ((PrefixCache, kind), (kind, PrefixCache)):
        for closed in (True, False):  # a closed or dropped handler has no pages
            handler = first(layout, pool)
            if closed:
                handler.close()
            else:
                with pytest.raises(ValueError, match=r"^the host pool has an open .*make another"):
                    second(layout, pool.view_for(layout))
                del handler
                gc.collect()
        second(layout, pool).close()
    views = [pool, pool.view_for(layout)]
    with pytest.raises(ValueError, match=r"^host\[0\] and host\[1\] are the same pages"):
        PrefixCache([layout, layout], views, [BlockGroup(4), BlockGroup(4)])
    OffloadHandler([layout, layout], views).close()


def test_keys_of_other_block_sizes_are_refused() -> None:
    layout = PagedLayout([torch.zeros(4, 4)])
    groups = [BlockGroup(4, block_tokens=2), BlockGroup(4, block_tokens=4)]
    tokens = list(range(8))
    two, four = (PrefixHasher("m", "bfloat16", number).keys(tokens) for number in (2, 4))
    hosts = [HostPool(layout, 4), HostPool(layout, 4)]
    with PrefixCache([layout, layout], hosts, groups) as prefixes:
        for call in (
            prefixes.lookup,
            lambda keys: prefixes.load(keys, [[0, 1, 2, 3], [0, 1, 2, 3]]),
            lambda keys: prefixes.store(keys, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        ):
            with pytest.raises(
                ValueError, match=r"^keys\[1\] stand for 2 tokens each, but block_t"
            ):
                call([two, two])
        assert prefixes.store([two, four], [[0, 1, 2, 3], [0, 1]]).state == "storing"
        prefixes.poll()
        assert prefixes.lookup([two, four]).ready == 2
        assert prefixes.lookup([two[:2], four[:1]]).ready == 1


@pytest.mark.parametrize("keys", [["a", "b"], ["x", "y"]], ids=["stored", "new"])
def test_gpu_blocks_are_checked_whatever_the_host_has(keys: list[str]) -> None:
    prefixes, _ = make()
    with prefixes:
        prefixes.store(["a", "b"], [0, 1])
        prefixes.poll()
        before = prefixes.stats()
        for call in (prefixes.store, partial(prefixes.store, hold=True)):
            with pytest.raises(IndexError, match=r"^gpu_block_ids\[1\] is 999; there are 16 GPU"):
                call(keys, [0, 999])
            with pytest.raises(IndexError, match=r"^gpu_block_ids\[0\] is -2; there are 16 GPU"):
                call(keys, [-2, 0])
            with pytest.raises(ValueError, match=r"^gpu_block_ids has 1 id for 2 keys of 1 block"):
                call(keys, [0])
        with pytest.raises(ValueError, match=r"^gpu_block_ids has 1 id for 2 keys of 1 block"):
            prefixes.load(keys, [0])
        with pytest.raises(IndexError, match=r"^gpu_block_ids\[1\] is 16; there are 16 GPU"):
            prefixes.load(keys, [0, 16])
        assert prefixes.stats() == before, "nothing is left behind"


@simulated
def test_a_prefix_cache_starts_during_pinning(driver: Driver) -> None:
    steps = PinningSteps()
    rows = torch.randint(256, (16, 4096), dtype=torch.uint8)
    layout = place(driver, PagedLayout([rows]))
    with in_chunks(4 * 4096, layout, 12, pin_in_background=True) as pool:
        assert pool.wait_ready(PATIENCE, pages=8)
        prefixes = PrefixCache(layout, pool)
        names = [f"{number}" for number in range(13)]
        assert prefixes.store(names[:9], list(range(9))).state == "full"  # by one page
        prefixes.synchronize(prefixes.store(names[:8], list(range(8))).job)
        prefixes.poll()
        prefixes.synchronize(
            prefixes.store(names[8:9], [8]).job
        )  # the end of the prompt goes for it
        assert prefixes.stats().evicted == 1
        prefixes.poll()
        steps.pin_more(2)
        assert pool.wait_ready(PATIENCE)
        prefixes.synchronize(prefixes.store(names[9:], [9, 10, 11, 12]).job)
        prefixes.poll()
        stats = prefixes.stats()
        assert (stats.pages, stats.evicted, stats.free_pages) == (12, 1, 0)
        blocks, kept = [*range(7), *range(8, 13)], rows.clone()
        rows.zero_()
        prefixes.synchronize(prefixes.load([names[block] for block in blocks], blocks))
        assert torch.equal(rows[blocks], kept[blocks])


@simulated
def test_a_prefix_cache_uses_the_pinned_pages(driver: Driver) -> None:
    steps = PinningSteps()
    layout = place(driver, PagedLayout([torch.zeros(16, 4096, dtype=torch.uint8)]))
    with in_chunks(4 * 4096, layout, 12, pin_in_background=True) as pool:
        assert pool.wait_ready(PATIENCE, pages=8)
        driver.limit_registration(in_all=8 * 4096)
        with logged() as messages:
            steps.pin_more(2)
            assert "no more will be" in error_text(pool.wait_ready, PATIENCE)
            assert in_time(lambda: not pinning_threads())
        assert "8 of 12 host pages are pinned" in messages[0]
        prefixes = PrefixCache(layout, pool)
        for i in range(20):
            prefixes.synchronize(prefixes.store([f"{i}"], [i % 16]).job)
            prefixes.poll()
        assert prefixes.stats().evicted == 12
        prefixes.store(["last"], [0])
    assert len(prefixes.poll()) == 1, "the pool is closed"


@pytest.mark.gpu
def test_storing_during_pinning_on_a_gpu() -> None:
    rows = torch.randint(256, (64, 1 << 20), dtype=torch.uint8, device="cuda")
    layout, ids = PagedLayout([rows]), list(range(64))
    keys, kept = [str(block) for block in ids], rows.clone()
    with (
        in_chunks(4 << 20, layout, 64, pin_in_background=True) as pool,
        PrefixCache(layout, pool) as prefixes,
    ):
        if prefixes.store(keys, ids).state == "full":  # there are too few pages yet
            assert pool.wait_ready(60)
            assert prefixes.store(keys, ids).state == "storing"
        for job in prefixes.jobs_using(ids):
            job.wait()
        rows.zero_()
        drain(prefixes)
        prefixes.poll()
        assert prefixes.lookup(keys).ready == 64
        prefixes.load(keys, ids).wait()
        assert torch.equal(rows, kept)


def pinning_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("kvswap-pin")]


def test_submitting_and_collecting_threads_lose_no_job():
    prefixes, _ = make(pages=8)
    over, deadline = threading.Event(), time.monotonic() + PATIENCE

    def collect():
        while not over.is_set():
            prefixes.poll()

    def submit(number):
        for i in range(50):
            while prefixes.store([(number, i)], [number]).job is None:
                assert time.monotonic() < deadline

    with prefixes:
        collector = threading.Thread(target=collect)
        threads = [threading.Thread(target=submit, args=(number,)) for number in range(3)]
        for thread in (collector, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        collector.join()
        prefixes.poll()
        stats = prefixes.stats()
        assert stats.free_pages + stats.idle_pages == 8
        assert stats.stored == 150


@pytest.mark.parametrize("direction", ["store", "load"])
def test_an_early_poll_ends_the_reservation(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends, and another thread polls, before the call that submits it returns."""
    prefixes, _ = make()
    results: list[Result] = []
    poller = threading.Thread(target=lambda: results.extend(prefixes.poll(PATIENCE)))
    with prefixes:
        prefixes.store(["a"], [1])
        prefixes.poll()
        handler = prefixes._handler
        submit = handler._native.submit

        def submit_and_poll(*arguments: Any) -> None:
            submit(*arguments)
            poller.start()
            if direction == "load":  # during a store no job becomes reported
                poller.join(PATIENCE)
                assert not poller.is_alive()

        monkeypatch.setattr(handler._native, "submit", submit_and_poll)
        assert prefixes.load(["a"], [5]) if direction == "load" else prefixes.store(["b"], [2]).job
        poller.join(PATIENCE)
        assert [result.direction for result in results] == [direction]
        stats = prefixes.stats()
        assert stats.free_pages + stats.idle_pages == PAGES


def test_a_block_is_stored_for_one_key():
    """Placeholders for blocks that were not loaded would be found later as what their keys say."""
    prefixes, _ = make()
    pages, _ = make(per_page=2)
    layout = PagedLayout([torch.zeros(4, 4)])
    window = [BlockGroup(4), BlockGroup(4, window_tokens=1)]
    several = PrefixCache([layout, layout], [HostPool(layout, 4), HostPool(layout, 4)], window)
    with prefixes, pages, several:
        twice = (
            "ValueError: gpu_block_ids[1] and gpu_block_ids[3] are both 2, but no block has the\n"
            "contents of two; pass -1 for blocks that are not on the GPU"
        )
        assert error_text(prefixes.store, ["a", "b", "c", "d"], [1, 2, 3, 2]) == twice
        assert error_text(pages.store, ["a", "b"], [1, 2, 3, 2]) == twice
        keys = [["a", "b", "c"], ["A", "B", "C"]]
        assert "gpu_block_ids[1][0] and gpu_block_ids[1][1] are both 0" in error_text(
            several.store, keys, [[0, 1, 2], [0, 0, 3]]
        )
        for each in (prefixes, pages, several):
            assert each.stats().filling_pages == 0
            assert each.jobs_using([[3, 3], [3]] if each is several else [3, 3]) == []


@pytest.mark.parametrize("per_page", [1, 2])
def test_keys_without_gpu_block_are_left_out(per_page: int) -> None:
    prefixes, tensor = make(per_page=per_page)
    keys, last = ["a", "b", "c", "d"], 4 * per_page - per_page // 2
    blocks = list(range(last))  # the last page is part full
    blocks[per_page - 1] = blocks[2 * per_page] = -1  # in the first and the third page
    with prefixes:
        prefixes.store(keys, blocks)
        prefixes.poll()
        assert [prefixes.lookup([key]).ready for key in keys] == [0, 1, 0, 1]
        tensor[:] = 0
        assert prefixes.load(keys, [15 if block < 0 else block for block in blocks]) is None
        prefixes.load(keys, blocks)
        expected = torch.zeros(BLOCKS)
        for page in (1, 3):
            of_page = slice(page * per_page, min((page + 1) * per_page, last))
            expected[of_page] = torch.arange(BLOCKS)[of_page]
        assert tensor[:, 0].tolist() == expected.tolist()
        prefixes.poll()
        held = prefixes.store(["x", *keys[1:]], blocks, hold=True)
        assert held.state == "present"  # the host has the two blocks that are on the GPU
        assert prefixes.stats().idle_pages == 0


def test_a_load_needs_all_blocks_of_its_prefix() -> None:
    layouts = [PagedLayout([torch.arange(8.0)[:, None].repeat(1, 4)]) for _ in range(2)]
    pools = [HostPool(layouts[0], 4), HostPool(layouts[1], 4, blocks_per_page=2)]
    groups = [BlockGroup(4), BlockGroup(4, block_tokens=2, window_tokens=2)]
    with PrefixCache(layouts, pools, groups) as prefixes:
        keys = [["a", "b", "c", "d"], ["B", "D"]]
        prefixes.store(keys, [[0, 1, 2, 3], [0, 1, 2, 3]])
        prefixes.poll()
        assert prefixes.needed_blocks(2) == [range(4), range(1, 2)]
        prefixes.load(keys, [[4, 5, 6, 7], [-1, -1, 6, 7]], prefix=2)
        assert layouts[1].tensors[0][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 2, 3]
        errors = [
            error_text(prefixes.load, keys, ids, prefix=2)
            for ids in (
                [[4, 5, -1, 7], [-1, -1, 6, 7]],
                [[4, 5, 6, 7], [-1, -1, 6, -1]],
                [[4, 5, 6, 8], [-1, -1, 6, 7]],
                [[4, 5, 6, 7], [-2, -1, 6, 7]],
            )
        ]
        prefixes.poll()
        assert [prefixes.stats(group).idle_pages for group in (0, 1)] == [4, 2]
    assert_expected_inline(
        "\n".join(errors),
        """\
ValueError: gpu_block_ids[0][2] is -1, but what follows the prefix needs this block;
pass a GPU block for each block of manager.needed_blocks(prefix)
ValueError: gpu_block_ids[1][3] is -1, but what follows the prefix needs this block;
pass a GPU block for each block of manager.needed_blocks(prefix)
IndexError: gpu_block_ids[0][3] is 8; there are 8 GPU blocks, 0 to 7, and -1 is a block
that is not on the GPU
IndexError: gpu_block_ids[1][0] is -2; there are 8 GPU blocks, 0 to 7, and -1 is a block
that is not on the GPU""",
    )


@pytest.mark.parametrize(
    ("other", "blocks"),
    [
        (BlockGroup(8, 2), [0, 1, 2, 3, 4]),
        (BlockGroup(8, 2, window_tokens=4), [-1, -1, -1, 3, 4]),
        (BlockGroup(8, 4, is_state=True), [-1, -1, 4]),
    ],
    ids=["full attention", "window", "state"],
)
def test_a_request_ending_inside_a_unit_is_pending(other: BlockGroup, blocks: list[int]) -> None:
    # 10 tokens; both groups have whole blocks at 4 and 8.
    layouts = [PagedLayout([torch.arange(8.0)[:, None].repeat(1, 4)]) for _ in range(2)]
    with PrefixCache(
        layouts, [HostPool(layout, 8) for layout in layouts], [BlockGroup(8, 4), other]
    ) as prefixes:
        keys = [["a", "b", "part"], [f"of {at}" for at in range(len(blocks))]]
        prefixes.store([its[:2] for its in keys], [[0, 1], blocks[:2]])
        prefixes.poll()
        prefixes.store(keys, [[0, 1, 2], blocks], hold=True)
        for layout in layouts:
            layout.tensors[0].zero_()
        assert prefixes.load(keys, [[0, 1, 2], blocks]) is None
        assert prefixes.lookup(keys, again=True).pending == 1 + sum(at > 1 for at in blocks)
        prefixes.poll()
        assert prefixes.lookup(keys, again=True).pending == 0
        assert prefixes.load(keys, [[0, 1, 2], blocks]) is not None
        for layout, its in zip(layouts, ([0, 1, 2], blocks), strict=True):
            assert [layout.tensors[0][at, 0] for at in its if at >= 0] == [
                at for at in its if at >= 0
            ]


def test_a_held_request_is_loaded_or_lost() -> None:
    prefixes, tensor = make()
    with prefixes:
        held = prefixes.store(["a", "b"], [1, 2], hold=True)
        assert resume(prefixes, held, ["a", "b"], [8, 9]) == "pending"
        prefixes.poll()
        assert prefixes.stats().idle_pages == 0
        assert resume(prefixes, held, ["a", "b"], [8, 9]) == "loaded"
        assert tensor[8:10, 0].tolist() == [1, 2]
        prefixes.poll()
        assert prefixes.stats().idle_pages == 2
        held = prefixes.store(["a", "b"], [8, 9], hold=True)
        prefixes.reset()
        assert resume(prefixes, held, ["a", "b"], [8, 9]) == "lost"
        assert prefixes.stats().free_pages == PAGES


def test_a_dropped_lease_ends_its_hold() -> None:
    prefixes, _ = make()
    with prefixes:
        held = prefixes.store(["a", "b"], [1, 2], hold=True)
        prefixes.poll()
        assert prefixes.stats().idle_pages == 0
        del held
        assert prefixes.stats().idle_pages == 2


def test_a_refused_store_holds_nothing() -> None:
    prefixes, _ = make()
    with prefixes:
        prefixes.store(["a"], [1])
        prefixes.poll()
        for keys, how in (["a"], {"after": object()}), (["a", "b"], {"after": object()}):
            with pytest.raises(TypeError) as error:
                prefixes.store(keys, [1, 2][: len(keys)], hold=True, **how)
            assert prefixes.stats().idle_pages == 1
            del error
        with pytest.raises(TypeError, match="hold"):
            prefixes.store(["a"], [1], hold=1)  # type: ignore[arg-type]


def test_a_request_that_left_its_window_is_loaded() -> None:
    tensor = torch.arange(float(BLOCKS))[:, None].repeat(1, 4)
    layout = PagedLayout([tensor])
    groups = [BlockGroup(PAGES, window_tokens=3)]
    with PrefixCache([layout], [HostPool(layout, PAGES)], groups) as prefixes:
        keys = [["a", "b", "c"]]
        held = prefixes.store(keys, [[-1, 1, 2]], hold=True)
        assert resume(prefixes, held, keys, [[-1, 8, 9]]) == "pending"
        prefixes.poll()
        assert resume(prefixes, held, keys, [[-1, 8, 9]]) == "loaded"
        assert tensor[8:10, 0].tolist() == [1, 2]


def test_no_call_works_in_a_forked_child() -> None:
    prefixes, _ = make()
    with prefixes:
        calls = [
            lambda: prefixes.lookup(["a"]),
            lambda: prefixes.load(["a"], [2]),
            lambda: prefixes.store(["a"], [1]),
            lambda: prefixes.jobs_using([1]),
            lambda: prefixes.jobs_using([]),
            lambda: prefixes.poll(),
        ]
        refused = "RuntimeError: this "
        assert in_child(lambda: all(error_text(call).startswith(refused) for call in calls)) == 1
        for call in calls:
            call()


def test_errors_say_what_was_wrong():
    prefixes, _ = make(per_page=2)
    layout = PagedLayout([torch.zeros(4, 4)])
    pool = HostPool(layout, 4)
    several = PrefixCache([layout], [pool], [BlockGroup(4)])
    with prefixes, several:
        errors = [
            error_text(PrefixCache, [layout], [pool]),
            error_text(PrefixCache, layout, pool, [BlockGroup(PAGES)]),
            error_text(PrefixCache, [layout], [pool], [BlockGroup(3)]),
            error_text(PrefixCache, [layout], [pool], [4]),
            error_text(PrefixCache, [layout], [pool], 4),
            error_text(several.store, [["a"]], [[1], [2]]),
            error_text(prefixes.jobs_using, [-2]),
            error_text(copy.copy, prefixes),
        ]
    assert_expected_inline(
        "\n".join(errors),
        """\
ValueError: groups is None, but gpu is a list of 1 layout; pass a BlockGroup for each
ValueError: groups is for a list of layouts; leave it out, or pass gpu as a list
ValueError: the groups have [3] pages, their pools [4]; make num_pages that of the pool
TypeError: groups[0] is an int; pass a BlockGroup
TypeError: groups is an int; pass a list with a BlockGroup for each layout
ValueError: gpu_block_ids has 2 items for 1 group; pass one for each group, an empty one
for a group without blocks
IndexError: gpu_block_ids[0] is -2; there are 16 GPU blocks, 0 to 15, and -1 is a block
that is not on the GPU
TypeError: PrefixCache cannot be copied or pickled: it owns memory of this process; pass
it by reference, or make another one""",
    )


# Encoded pages: blocks that do not fit


def make_encoded(per_page=1, kinds=("normal",) * 6, pages=6):
    """Blocks of these kinds; None does not fit."""
    cache = Bf16Cache()
    for block, kind in enumerate(kinds):
        cache.fill(block, kind, block)
    pool = HostPool(cache.layout, pages, per_page, encoding="lossless")
    return PrefixCache(cache.layout, pool), cache


def test_only_blocks_that_overflow_are_forgotten():
    prefixes, cache = make_encoded(kinds=["normal", "zeros", None, "normal"])
    with prefixes:
        keys = ["a", "b", "c", "d"]
        prefixes.store(keys, [0, 1, 2, 3])
        (result,) = prefixes.poll()
        assert (result.ok, result.rejected) == (False, (2,))
        assert prefixes.lookup(keys) == Lookup(2, 2, 0)  # not past the block that is missing
        stats = prefixes.stats()
        assert (stats.stored, stats.failed, stats.idle_pages, stats.free_pages) == (3, 1, 3, 3)
        prefixes.load(keys, [8, 9, 10, 11], prefix=2).synchronize()
        assert [cache.bytes_of(block) for block in (8, 9)] == list(map(cache.bytes_of, (0, 1)))
        cache.fill(2, "normal")
        assert prefixes.store(keys, [0, 1, 2, 3]).job.nbytes == cache.layout.block_bytes
        prefixes.poll()
        assert prefixes.lookup(keys).ready == 4  # the block behind was never lost


def test_missing_blocks_of_a_load_are_forgotten():
    prefixes, cache = make_encoded()
    with prefixes:
        prefixes.store(["a", "b", "c"], [0, 1, 2])
        prefixes.poll()
        prefixes.pools[0].pages[1].zero_()  # damaged
        prefixes.load(["a", "b", "c"], [8, 9, 10])
        (result,) = prefixes.poll()
        assert (result.direction, result.rejected) == ("load", (1,))
        assert prefixes.lookup(["a", "b", "c"]) == Lookup(1, 1, 0)
        assert cache.bytes_of(10) == cache.bytes_of(2)
        assert prefixes.stats().idle_pages == 2


def test_a_held_request_with_an_overflow_is_lost():
    prefixes, _ = make_encoded(kinds=["normal", None, "normal"])
    with prefixes:
        held = prefixes.store(["a", "b", "c"], [0, 1, 2], hold=True)
        prefixes.poll()
        assert resume(prefixes, held, ["a", "b", "c"], [8, 9, 10]) == "lost"
        stats = prefixes.stats()
        assert (stats.idle_pages, stats.free_pages) == (2, 4)


def test_rejected_blocks_of_each_group_are_forgotten():
    one, other = Bf16Cache(), Bf16Cache()
    one.fill(2, None)
    other.fill(1, None)
    pools = [HostPool(one.layout, 4, 2, encoding="lossless")]
    pools.append(HostPool(other.layout, 4, encoding="lossless"))
    with PrefixCache(
        [one.layout, other.layout], pools, [BlockGroup(4, 2), BlockGroup(4, 2)]
    ) as prefixes:
        prefixes.store([["a", "b"], ["s", "t"]], [[0, 1, 2], [0, 1]])
        (result,) = prefixes.poll()
        assert result.rejected == (2, 4)
        assert [prefixes.stats(group).failed for group in range(2)] == [1, 1]
        assert prefixes.lookup([["a", "b"], ["s", "t"]]) == Lookup(1, 1, 0)
