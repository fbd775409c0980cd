"""What lookups find in a second tier and read from it, and what can go wrong."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from below_engine import BLOCK_BYTES, Engine, bytes_of, cache_at, find, hurry, key_of, works_again
from host_pools import in_chunks
from logged import logged
from memory_store import MemoryStore
from patience import PATIENCE, in_time
from pinning_steps import PinningSteps
from processes import free_port
from simulated_driver import Driver, place, simulated
from valkey_server import ValkeyServer, server

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap._native.loader import native
from torch_kvswap._native.log import warn_once
from torch_kvswap.below import threads
from torch_kvswap.prefix import BlockGroup, tier
from torch_kvswap.prefix.manager import Lookup

__all__ = ["server"]

PROMPT = list("abcdefgh")


def name_of(store: MemoryStore, name: object) -> str:
    """Of this block's page in the store."""
    return next(key for key in store.objects if key.endswith(f"@{key_of(name).hex()}"))


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu"},
        pytest.param({"device": "cuda"}, marks=pytest.mark.gpu),
        pytest.param({"device": "cuda", "verify": "load"}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_an_engine_loads_what_another_one_has_computed(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with Engine(f"file:{tmp_path}", **options) as one, Engine(f"file:{tmp_path}", **options) as two:
        one.share(PROMPT)
        assert two.load([*PROMPT, "x"]) == len(PROMPT)
        assert (two.stats.promoted, two.stats.damaged) == (len(PROMPT), 0)
        assert two.stats.written == 0, "it is below already"


def test_a_lookup_asks_once_until_a_poll(store: MemoryStore, reader: Engine) -> None:
    store.held = {"exists"}
    keys = list(map(key_of, PROMPT))
    for again in (False, True):
        assert reader.prefixes.lookup(keys, again=again) == Lookup(0, 0, 0, len(PROMPT))
    assert in_time(lambda: len(store.waiting) == 1)
    store.held = {"get"}
    store.waiting.popleft()()
    assert in_time(lambda: len(store.waiting) == 4)
    assert reader.prefixes.lookup(keys) == Lookup(8, 0, 8), (
        "they have pages, and wait for their bytes"
    )
    assert reader.prefixes.load(keys, list(range(8))) is None
    store.release()
    assert in_time(lambda: [ask.is_answered for ask in reader.tier._asking.values()] == [True])
    assert reader.prefixes.lookup(keys).ready == 0, "only poll() changes what a lookup finds"
    reader.prefixes.poll()
    assert reader.prefixes.lookup(keys) == Lookup(8, 8, 0)
    assert store.calls == ["exists", *["get"] * 4]


def test_a_slow_step_asks_once_for_what_is_not_there(
    reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a request that waits while it is asking could wait for ever."""
    passed = [0.0]
    monkeypatch.setattr(
        tier, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    )
    keys = list(map(key_of, "xyz"))
    assert reader.prefixes.lookup(keys).asking == 3
    assert in_time(lambda: [ask.is_answered for ask in reader.tier._asking.values()] == [True])
    passed[0] = 10 * tier.ABSENT_SECONDS  # the step goes on
    reader.prefixes.poll()
    assert reader.prefixes.lookup(keys, again=True).asking == 0


@pytest.mark.parametrize("call", ["lookup", "submit", "a control that gives it away"])
def test_waking_a_thread_keeps_the_gil(call: str, store: MemoryStore) -> None:
    """Beside threads that compute in Python, getting it back takes 5 ms."""
    interval, fd, others = sys.getswitchinterval(), os.eventfd(0), []

    def wait() -> None:
        os.eventfd_read(fd)
        others.append("ran")

    waiting = threading.Thread(target=wait)
    # No thread makes another one give it away, not even one that waits for it already.
    sys.setswitchinterval(1000.0)
    try:
        with Engine(store) as engine:
            engine.share("a")  # then the threads have nothing to do
            reads, key, task = engine.tier._reads, [key_of("a")], engine.prefixes.below_stats
            calls: dict[str, Any] = {
                "lookup": lambda: engine.prefixes.lookup(key),
                "submit": lambda: reads.submit(task),
            }
            do = calls.get(call, engine.prefixes._manager.grow)
            waiting.start()
            native.wake(fd)
            # A short release is taken once in some thousand times, on a busy machine less often.
            tries, until = 50_000, time.monotonic() + PATIENCE
            while not others and (tries > 0 or (call not in calls and time.monotonic() < until)):
                do()
                tries -= 1
            assert others == ([] if call in calls else ["ran"])
    finally:
        sys.setswitchinterval(interval)
        native.wake(fd)
        waiting.join()
        os.close(fd)


def test_what_is_missing_is_asked_for_once(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(MemoryStore(store.objects)) as writer:
        writer.share("x")
    with Engine(store) as engine:
        monkeypatch.setattr(tier, "ABSENT_SECONDS", 1000.0)
        assert engine.find(PROMPT).found == 0
        assert engine.find(PROMPT) == Lookup(0, 0, 0)
        assert store.calls == ["exists"]
        now = time.monotonic
        monkeypatch.setattr(tier.time, "monotonic", lambda: now() + 2000)
        engine.prefixes.poll()
        engine.find(PROMPT)
        assert store.calls == ["exists", "exists"]


@pytest.mark.parametrize("hold", [True, False], ids=["", "control"])
def test_reading_evicts_nothing_that_a_lookup_holds(hold: bool, store: MemoryStore) -> None:
    with Engine(MemoryStore(store.objects)) as writer:
        writer.share(PROMPT)
    with Engine(store, pages=8, policy="reused") as engine:
        engine.compute("vwxyz")
        keys = list(map(key_of, "vwxyz"))
        found = engine.prefixes.lookup(keys, hold=hold)
        assert found[:4] == (5, 5, 0, 0)
        # There is room for 3. 2 are tried if 4 have none, and then the next one, or not.
        assert engine.find(PROMPT).ready in ((2, 3) if hold else (8,))
        assert engine.load("vwxyz") == (5 if hold else 0)


@pytest.mark.parametrize(("pages", "least", "most"), [(8, 8, 8), (5, 4, 5), (1, 1, 1)])
def test_as_much_is_read_as_has_room(pages: int, least: int, most: int, store: MemoryStore) -> None:
    with Engine(MemoryStore(store.objects)) as writer:
        writer.share(PROMPT)
    with Engine(store, pages=pages) as engine:
        assert engine.load(PROMPT) >= least  # half as many are tried if there is no room
        engine.tier._absent.clear()
        assert engine.load(PROMPT) == most  # later blocks never evict the first ones


@simulated
def test_reads_use_pages_that_are_pinned_later(driver: Driver) -> None:
    """Also in an engine that stores nothing."""
    objects, keys, blocks = dict[str, bytes](), list(map(key_of, PROMPT)), list(range(8))
    rows = torch.randint(256, (8, 4096), dtype=torch.uint8)
    layout, kept = place(driver, PagedLayout([rows])), rows.clone()
    options: dict[str, Any] = {"below_model": "m", "below_policy": "all"}
    with HostPool(layout, 8) as pool:
        writer = PrefixCache(layout, pool, below=MemoryStore(objects), **options)
        writer.synchronize(writer.store(keys, blocks).job)
        writer.poll()
        assert in_time(lambda: writer.below_stats().written == 8)
    rows.zero_()
    steps = PinningSteps()
    with (
        in_chunks(4 * 4096, layout, 8, pin_in_background=True) as pool,
        PrefixCache(layout, pool, below=MemoryStore(objects), **options) as reader,
    ):
        steps.pin_more()
        assert pool.wait_ready(PATIENCE)
        reader.poll()
        assert find(reader, keys).ready == 8
        reader.synchronize(reader.load(keys, blocks))
        assert torch.equal(rows, kept)


def test_each_group_reads_what_the_prefix_needs(tmp_path: Path) -> None:
    sizes = (4096, 8192)

    def engine() -> tuple[list[torch.Tensor], PrefixCache]:
        tensors = [torch.zeros(32, size, dtype=torch.uint8) for size in sizes]
        layouts = [PagedLayout([tensor]) for tensor in tensors]
        pools = [HostPool(layout, 32) for layout in layouts]
        groups = [BlockGroup(32, 4), BlockGroup(32, 4, window_tokens=9)]
        return tensors, cache_at(tmp_path, layouts, pools, groups)

    keys = [[key_of((group, place)) for place in range(8)] for group in range(2)]
    tensors, writer = engine()
    with writer:
        for group, tensor in enumerate(tensors):
            tensor[:8] = torch.arange(8)[:, None] + 10 * group
        writer.store(keys, [list(range(8))] * 2)
        writer.poll()
        assert in_time(lambda: writer.below_stats().written == 16)
    # The window of the prefix of 7 blocks is incomplete, so that one of 6 is the longest. Its window
    # does not have block 1.
    for block in (1, 6):
        (missing,) = tmp_path.glob(f"*@{keys[1][block].hex()}")
        missing.unlink()
    tensors, reader = engine()
    with reader:
        assert find(reader, keys) == Lookup(6, 6, 0)
        assert reader.below_stats().promoted == 6 + 2
        blocks = [list(range(20, 26)), [-1] * 4 + [24, 25]]
        job = reader.load([of[:6] for of in keys], blocks, 6)
        assert job is not None
        job.synchronize()
        assert tensors[0][20:26, 0].tolist() == list(range(6))
        assert tensors[1][24:26, -1].tolist() == [14, 15]


@pytest.mark.parametrize("encoding", ["raw", "lossless"])
def test_encoded_pages_are_shared_as_they_are(encoding: Any, tmp_path: Path) -> None:
    def engine() -> tuple[torch.Tensor, PrefixCache]:
        tensor = torch.zeros(16, 2048, dtype=torch.bfloat16)
        layout = PagedLayout([tensor])
        pool = HostPool(layout, 12, 2, encoding=encoding)
        return tensor, cache_at(tmp_path, layout, pool)

    keys = [key_of(place) for place in range(4)]
    one, writer = engine()
    with writer:
        one[:8] = 1 + torch.rand(8, 2048)  # of one exponent, so that each block fits
        writer.store(keys, list(range(8)))
        writer.poll()
        assert in_time(lambda: writer.below_stats().written == 4)
    two, reader = engine()
    with reader:
        assert find(reader, keys).ready == 4
        job = reader.load(keys, list(range(8, 16)))
        assert job is not None
        job.synchronize()
    assert torch.equal(one[:8], two[8:])


@pytest.mark.parametrize("when", ["", "before it is written", "after it was read"])
def test_pages_keep_the_checksums_of_their_blocks(when: str, store: MemoryStore) -> None:
    """So that a load finds damage in host memory, in the engine that stored the block or in any."""
    with Engine(store, verify="load") as writer:
        store.held = {"exists"}
        writer.compute(PROMPT)
        if when == "before it is written":
            damage(writer, PROMPT[3])
        store.release()
        writer.until(lambda: writer.stats.written == len(PROMPT))
    with Engine(MemoryStore(store.objects), verify="load") as reader, logged() as messages:
        reader.share(range(20))  # pages and numbers of stores are others
        assert reader.find(PROMPT).ready == len(PROMPT)
        if when == "after it was read":
            damage(reader, PROMPT[3])
        job = reader.prefixes.load(list(map(key_of, PROMPT)), list(range(32, 40)))
        assert job is not None
        reader.prefixes.poll()
        assert job.result is not None
        assert job.result.rejected == ((3,) if when else ())
        assert len(messages) == bool(when)
        good = [place for place in range(8) if not when or place != 3]
        for place in good:
            assert torch.equal(reader.tensor[32 + place], bytes_of(key_of(PROMPT[place])))
        reader.until(lambda: len(store.objects) == len(good) + 20)
        assert reader.stats.damaged == bool(when)
        reader.compute(PROMPT)
        reader.until(lambda: len(store.objects) == len(PROMPT) + 20)
    with Engine(MemoryStore(store.objects), verify="load") as third:
        assert third.load(PROMPT) == len(PROMPT)
    with Engine(MemoryStore(store.objects)) as other:
        assert other.find(PROMPT).found == 0, "these pages have no checksums"


def damage(engine: Engine, name: object) -> None:
    """A block in host memory."""
    page = next(page for page in range(32) if stored_in(engine, page, name))
    engine.pool.pages[page, 0, 1000] ^= 1


@pytest.mark.parametrize("when", ["before it is written", "after it was written"])
def test_a_page_damaged_in_memory_is_read_below(when: str, store: MemoryStore) -> None:
    with Engine(store, verify="load") as engine:
        if when == "before it is written":
            store.held = {"exists"}
            engine.compute(PROMPT)
            damage(engine, "d")
            store.release()
            engine.until(lambda: engine.stats.written == len(PROMPT))
        else:
            engine.share(PROMPT)
            damage(engine, "d")
        for is_read in (False, True):
            assert engine.find(PROMPT).ready == len(PROMPT)
            assert engine.stats.promoted == is_read
            assert engine.stats.damaged == 0
            engine.prefixes.load(list(map(key_of, PROMPT)), list(range(32, 40)))
            (result,) = engine.prefixes.poll()
            is_good = is_read and when == "after it was written"
            assert result.rejected == (() if is_good else (3,))
        engine.until(lambda: len(store.objects) == len(PROMPT) - (not is_good))
        assert engine.stats.damaged == (not is_good)


def stored_in(engine: Engine, page: int, name: object) -> bool:
    return torch.equal(engine.pool.read_block(page), bytes_of(key_of(name)))


def test_a_trailer_has_room_for_many_checksums(tmp_path: Path) -> None:
    slabs = [torch.zeros(4, 5 << 20, dtype=torch.uint8) for _ in range(2)]
    layouts = [PagedLayout([slab]) for slab in slabs]
    slabs[0].random_(256)
    one, two = (cache_at(tmp_path, of, HostPool(of, 2, 2, verify="load")) for of in layouts)
    with one, two:
        one.store([key_of("a")], [1, 2])
        one.poll()
        assert in_time(lambda: one.below_stats().written == 1)
        (file,) = filter(Path.is_file, tmp_path.iterdir())
        assert file.stat().st_size == (10 << 20) + (12 << 10)
        assert find(two, [key_of("a")]).ready == 1
        job = two.load([key_of("a")], [2, 3])
        assert job is not None
        job.synchronize()
    assert torch.equal(slabs[0][1:3], slabs[1][2:4])


def test_a_server_below_may_come_and_go(server: ValkeyServer) -> None:
    with Engine(server.url) as one, Engine(server.url) as two:
        one.share(PROMPT)
        assert two.load(PROMPT) == len(PROMPT)
        server.kill()
        assert two.find("xyz").found == 0
        one.compute("xyz")
        one.until(lambda: one.stats.failed > 0)
        server.start()
        for engine in (one, two):
            works_again(engine)
        one.until(lambda: one.stats.written == len(PROMPT) + 3)
        with Engine(server.url) as three:
            for engine in (two, three):
                assert engine.load("xyz") == 3
            assert three.find(PROMPT).found == 0, "it has lost them"


def test_pages_asked_for_before_a_reset_are_not_read(store: MemoryStore, reader: Engine) -> None:
    store.held = {"exists"}
    reader.prefixes.lookup(list(map(key_of, PROMPT)))
    assert in_time(lambda: len(store.waiting) == 1)
    reader.prefixes.reset()
    store.release()
    assert reader.find(PROMPT).found == 0
    assert reader.prefixes.stats().free_pages == 32


def flip(at: int) -> Callable[[bytes, bytes], bytes]:
    """A bit of the object, whose trailer follows the block."""
    return lambda content, _: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip(1234), "its trailer has the checksum "),
        (flip(BLOCK_BYTES + 4000), "its trailer is damaged"),
        (flip(BLOCK_BYTES + 8), "its trailer has the version 5 instead of 4"),
        (lambda own, other: other, "its trailer has the key "),
        (lambda own, other: own[:4096], "its trailer has the magic 00"),
    ],
)
def test_a_damaged_page_is_deleted_and_written_anew(
    damage: Callable[[bytes, bytes], bytes], problem: str, store: MemoryStore, reader: Engine
) -> None:
    name = name_of(store, "d")
    store.objects[name] = damage(store.objects[name], store.objects[name_of(store, "e")])
    with logged() as messages:
        assert reader.load(PROMPT) == 3
        assert reader.stats.damaged == 1
    assert [message for message in messages if problem in message], messages
    assert len(messages) == 1
    assert in_time(lambda: store.deleted == [name])
    reader.compute(PROMPT)
    reader.until(lambda: len(store.objects) == len(PROMPT))
    assert reader.load(PROMPT) == len(PROMPT)


def test_a_missing_page_is_written_anew(store: MemoryStore, reader: Engine) -> None:
    name = name_of(store, "d")
    del store.objects[name]
    store.lying = {name}
    assert reader.load(PROMPT) == 3
    assert reader.stats.damaged == 0
    assert in_time(lambda: store.deleted == [name])
    store.lying.clear()
    reader.compute(PROMPT)
    assert reader.load(PROMPT) == len(PROMPT)
    reader.until(lambda: reader.stats.written == 1)
    with Engine(MemoryStore(store.objects)) as third:
        assert third.load(PROMPT) == len(PROMPT)


@pytest.mark.parametrize(
    "other", [{"below_model": other} for other in ("other", ("m", 1, 2), ("m", 0, 2))]
)
def test_another_model_or_rank_finds_nothing(
    other: dict[str, Any], store: MemoryStore, reader: Engine
) -> None:
    with Engine(MemoryStore(store.objects), **other) as engine:
        assert engine.find(PROMPT).found == 0
    assert reader.find(PROMPT).found == len(PROMPT)


@pytest.mark.parametrize("operation", ["exists", "get"])
def test_a_failed_read_is_told_and_pauses(
    operation: str, store: MemoryStore, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "FIRST_PAUSE", 1000.0)
    reader.tier._reads.end_pause()
    store.failing = {operation}
    with logged() as messages:
        assert reader.load(PROMPT) == 0
    assert messages == [f"reading from MemoryStore pauses for 1000 s: no {operation} today"]
    assert 0 < reader.stats.failed <= len(PROMPT), "a get that waits its turn is left out"
    store.failing.clear()
    assert reader.prefixes.lookup([key_of("x")]).asking == 0
    works_again(reader)
    assert reader.load(PROMPT) == len(PROMPT), "no page was lost"


@pytest.mark.parametrize("where", ["_reserve", "_split", "any task"])
def test_a_lookup_without_memory_ends(
    where: str, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = list(map(key_of, PROMPT))
    with monkeypatch.context() as patched, logged() as warnings:
        if where == "any task":
            for _ in reader.tier._reads.threads:
                reader.tier._reads.submit(Mock(side_effect=MemoryError))
        else:
            patched.setattr(reader.tier, where, Mock(side_effect=MemoryError))
            assert reader.prefixes.lookup(keys).asking == len(PROMPT)
            reader.until(lambda: reader.prefixes.lookup(keys, again=True).asking == 0)
        reader.until(lambda: bool(warnings))
    assert "MemoryError()" in warnings[0]
    assert reader.prefixes.stats().filling_pages == 0
    reader.until(lambda: works_again(reader) or reader.prefixes.lookup(keys).ready == len(PROMPT))
    assert reader.load(PROMPT) == len(PROMPT)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "TypeError('exists() of 8 keys returned None, not a list of bool')"),
        ([True], "ValueError('exists() of 8 keys returned 1 answer')"),
    ],
)
def test_a_method_that_forgets_its_answers_has_failed(
    answer: Any, problem: str, store: MemoryStore, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(keys: list[str]) -> Any:
        return answer

    monkeypatch.setattr(store, "exists", exists)
    with logged() as messages:
        assert reader.load(PROMPT) == 0
    assert messages[0].startswith(f"reading from MemoryStore pauses for 1 s: {problem}")


def test_a_dead_server_is_named_without_its_password() -> None:
    port = free_port()
    with logged() as messages, Engine(f"valkey://user:secret@127.0.0.1:{port}") as engine:
        assert engine.find(PROMPT).found == 0
        assert engine.stats.failed == len(PROMPT)
    (message,) = messages
    assert message.startswith(f"reading from valkey://127.0.0.1:{port} pauses for 1 s: cannot conn")
    assert "secret" not in message


@pytest.mark.parametrize("operation", ["exists", "get"])
def test_a_hung_read_keeps_its_pages(
    operation: str, store: MemoryStore, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    manager = reader.prefixes._manager
    store.held = {operation}
    keys = list(map(key_of, PROMPT))
    calls = 4 if operation == "get" else 1
    with logged() as messages:
        reader.prefixes.lookup(keys)
        assert in_time(lambda: len(store.waiting) == calls)
        reader.prefixes.poll()
        assert reader.prefixes.lookup(keys) == Lookup(0, 0, 0)
    assert messages == ["reading from MemoryStore pauses for 1 s: no answer within 0 s"]
    assert (reader.stats.failed, reader.stats.hung) == (8, calls)
    written = 8 if operation == "get" else 0  # the store may still write these pages
    assert manager.stats().pages - manager.stats().free_pages == written
    assert manager.prepare_store([[str(i) for i in range(33 - written)]]) is None
    if operation == "get":
        store.release()
        assert in_time(lambda: manager.stats().free_pages == 32)
        assert reader.prefixes.lookup(keys).found == 0, "it came too late"
    store.release()
    works_again(reader)
    assert reader.load(PROMPT) == len(PROMPT)
    reader.until(lambda: reader.stats.hung == 0)


def test_an_ask_behind_answers_is_not_late(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(MemoryStore(store.objects)) as writer:
        writer.share(PROMPT)
    now, added = time.monotonic, [0.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: now() + added[0])
    with Engine(store, bytes_in_flight=8192) as engine:  # one page at a time
        store.held = {"get"}
        engine.prefixes.lookup(list(map(key_of, PROMPT)))
        for answered in range(1, 9):
            assert in_time(lambda: len(store.waiting) == 1)
            added[0] += 0.6 * threads.DEADLINE
            engine.prefixes.poll()
            store.waiting.popleft()()
            engine.until(lambda answered=answered: store.calls.count("get") >= min(answered + 1, 8))
        store.held.clear()
        assert engine.load(PROMPT) == len(PROMPT)


def test_a_late_call_ends_its_own_lookup_only(
    store: MemoryStore, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, added = time.monotonic, [0.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: now() + added[0])
    store.held = {"exists"}
    for asked in range(2):
        assert reader.prefixes.lookup([key_of(asked)]).asking == 1
        assert in_time(lambda asked=asked: len(store.waiting) == asked + 1)
        added[0] += 0.6 * threads.DEADLINE
    reader.prefixes.poll()
    assert [reader.prefixes.lookup([key_of(asked)]).asking for asked in range(2)] == [0, 1]
    assert reader.stats.hung == 1
    store.release()


def test_a_lookup_does_not_wait_long_for_others(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow a store is that answers each call in time."""
    now, added = time.monotonic, [0.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: now() + added[0])
    monkeypatch.setattr(tier, "ABSENT_SECONDS", 1000.0)
    warn_once.cache_clear()
    with Engine(store, bytes_in_flight=8192) as engine, logged() as messages:  # one thread
        store.held = {"exists"}
        for asked in range(3):
            assert engine.prefixes.lookup([key_of(asked)]).asking == 1
            assert in_time(lambda: len(store.waiting) == 1)
        added[0] += 0.6 * threads.DEADLINE
        engine.prefixes.poll()
        store.waiting.popleft()()
        assert in_time(lambda: len(store.waiting) == 1)
        added[0] += 0.6 * threads.DEADLINE
        for _ in range(2):
            engine.prefixes.poll()
            found = [engine.prefixes.lookup([key_of(asked)]).asking for asked in range(3)]
            assert found == [0, 1, 0]
        assert (engine.stats.failed, engine.stats.hung) == (1, 0)
        (message,) = messages
        assert message.startswith("lookups ask MemoryStore faster than it answers: what it was not")
        store.release()
        engine.until(lambda: engine.prefixes.lookup([key_of(1)]).asking == 0)
        assert store.calls == ["exists"] * 2, "nobody asks for what was given up"


def test_after_a_hang_one_lookup_tries(
    store: MemoryStore, reader: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "FIRST_PAUSE", 0.0)
    reader.tier._reads.end_pause()
    store.held = {"exists"}
    reader.tier._reads.pause("a test")
    assert reader.prefixes.lookup([key_of("a")]).asking == 1
    assert reader.prefixes.lookup([key_of("x")]).asking == 0
    store.release()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_store_that_ends_its_thread_is_a_failure(
    error: type[BaseException], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(store) as engine, logged() as messages:
        monkeypatch.setattr(store, "exists", Mock(side_effect=error))
        assert engine.find(PROMPT) == Lookup(0, 0, 0)
    text = f"reading from MemoryStore pauses for 1 s: RuntimeError('the store raised {error()!r}')"
    assert messages == [text]
