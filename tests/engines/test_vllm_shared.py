"""vLLM engines that share the pages of a server, under vLLM's real scheduler."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import served_engine
from patience import in_time
from served_engine import server_process
from served_engine import serving as page_server
from vllm_contract import bytes_of, submit
from vllm_engine import (
    KVSwapOffloadingSpec,
    base,
    bf16_cache,
    caches,
    config,
    folder,
    keys,
)
from vllm_serving import (
    BLOCK,
    CHUNKS,
    PROMPTS,
    SCHEDULERS,
    RandomRequests,
    Serving,
    again,
    check,
    expected_tokens,
    prompt,
    serving,
)

from torch_kvswap.prefix.protocol import Op

__all__ = ["folder"]

TWO: dict[str, Any] = {"workers": 2, "heads": 2}  # each rank has other bytes


@pytest.fixture(autouse=True)
def _page_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page has a block of two ranks."""
    monkeypatch.setattr(served_engine, "PAGE_BYTES", 8192)


@pytest.fixture
def path(folder: Path) -> str:
    return f"{folder}/pages"


@contextlib.contextmanager
def engine(folder: Path, name: str, **how: Any) -> Iterator[Serving]:
    extra = {"host_server": f"{folder}/pages", "cpu_bytes_to_use": None}
    extra |= how.pop("extra", {})
    recompute = {"engine_id": name, "kv_load_failure_policy": "recompute"}
    with serving(folder, transfer=recompute, extra=extra, **how) as made:
        yield made


def loaded(engine: Serving) -> int:
    """Blocks that came from the host, in each rank."""
    (blocks,) = {int(one._handler.metrics().loads.blocks) for one in engine.workers}
    return blocks


def is_joined(engine: Serving) -> bool:
    return bool(engine.manager._session.is_joined)


def stats(server: Any) -> Any:
    return server._manager.stats()


def nothing_is_read(server: Any) -> bool:
    """Pages may be lent, for stores."""
    of = stats(server)
    return bool(of.free_pages + of.idle_pages + of.filling_pages == of.pages)


def nothing_is_held(server: Any) -> bool:
    of = stats(server)
    return bool(of.free_pages + of.idle_pages == of.pages)


@SCHEDULERS
@pytest.mark.parametrize(("ranks", "chunk"), [({}, 1), (TWO, 2)], ids=["one rank", "two ranks"])
def test_an_engine_finds_what_another_has_stored(folder, path, is_async, ranks, chunk):
    how: dict[str, Any] = {"is_async": is_async, "extra": {"blocks_per_chunk": chunk}, **ranks}
    with (
        page_server(path, 128) as server,
        engine(folder, "a", **how) as a,
        engine(folder, "b", **how) as b,
    ):
        a.serve(PROMPTS)
        check(a, PROMPTS)
        chunks = sum(len(one) // (BLOCK * chunk) for one in PROMPTS.values())
        assert in_time(lambda: stats(server).stored == chunks)
        b.serve(PROMPTS)
        check(b, PROMPTS)
        assert (loaded(a), loaded(b)) == (0, chunks * chunk)
        assert stats(server).stored == chunks, "nothing is stored twice"
        assert in_time(lambda: nothing_is_held(server)), "idle engines have no page"
        assert a.agree
        assert b.agree


@pytest.mark.parametrize(("ranks", "pages"), [({}, 12), (TWO, 12)])
def test_tokens_are_right_while_engines_evict_each_other(folder, path, ranks, pages):
    chosen = random.Random(pages)
    with page_server(path, pages * ranks.get("workers", 1)) as server:
        how: dict[str, Any] = {"blocks": 32, "batched": 64, **ranks}
        with engine(folder, "a", **how) as a, engine(folder, "b", **how) as b:
            both = [RandomRequests(one, chosen) for one in (a, b)]
            for _ in range(30):
                chosen.choice(both).go_on(chosen.randrange(1, 5), aborts=0.3)
            for one in both:
                one.engine.run()
                check(one.engine, one.served, one.TOKENS)
                assert one.engine.agree
                assert loaded(one.engine) > 0
            assert stats(server).evicted > pages
            assert nothing_is_read(server)
        assert in_time(lambda: nothing_is_held(server))


def test_a_rank_without_connection_stores_its_part(folder, path):
    with (
        page_server(path, 128) as server,
        engine(folder, "a", **TWO) as a,
        engine(folder, "b", **TWO) as b,
    ):
        sessions = server._sessions.values()
        (one,) = [of for of in sessions if (of.engine, of.worker, of.workers) == ("a", 1, 0)]
        one.connection.shutdown(socket.SHUT_RDWR)
        a.serve(PROMPTS)
        assert in_time(lambda: stats(server).stored == CHUNKS)
        b.serve(PROMPTS)
        check(b, PROMPTS)
        assert b.agree
        assert loaded(b) == CHUNKS
        assert in_time(lambda: one not in [*server._sessions.values()])


def serve_until(engine: Serving, prompts: dict[str, list[int]], moment: str) -> Any:
    """Serves until a step has scheduled such a job; the step, which is not executed."""
    jobs = engine.scheduler.connector.connector_scheduler
    for name, one in prompts.items():
        engine.add(name, one)
    for _ in range(100):
        scheduled = engine.scheduler.schedule()
        of = scheduled.kv_connector_metadata
        if moment == "lookup" and engine.manager._unanswered and not jobs._jobs:
            return scheduled
        if (moment == "load" and of.load_jobs) or (moment == "store" and of.store_jobs):
            return scheduled
        engine._report(scheduled, engine.execute(scheduled))
    raise AssertionError(moment)


@pytest.mark.parametrize("ranks", [{}, TWO])
@pytest.mark.parametrize("moment", ["lookup", "load", "store"])
def test_an_engine_outlives_a_killed_server(folder, path, ranks, moment):
    with (
        server_process(path, 128) as server,
        engine(folder, "a", **ranks) as a,
        engine(folder, "b", **ranks) as b,
    ):
        assert is_joined(a)
        a.serve(PROMPTS)
        found = PROMPTS if moment != "store" else again("new", {"x": prompt(77, 100)})
        scheduled = serve_until(b, found, moment)
        server.kill()
        with page_server(path, 128) as fresh:
            # The worker of the other engine has come, so that of this one could have.
            assert in_time(lambda: a.step() or is_joined(a))
            b._report(scheduled, b.execute(scheduled))
            b.run()
            check(b, found)
            assert in_time(lambda: b.step() or is_joined(b))
            assert (loaded(b) > 0) == (moment == "load")
            more = again("later")
            a.forget_gpu()
            a.serve(more)
            check(a, more)
            assert loaded(a) == 0, "the pages of the next server are empty"
            assert in_time(lambda: stats(fresh).stored >= CHUNKS)
            b.forget_gpu()
            b.serve(more)
            check(b, more)
            assert loaded(b) >= CHUNKS


@SCHEDULERS
def test_a_silent_server_stops_no_other_request(folder, path, is_async):
    """The server is stopped, and calls would wait for it much longer than this test."""
    one, other = prompt(1, 40), prompt(2, 40)
    with server_process(path) as server, engine(folder, "a", is_async=is_async) as a:
        a.add("running", one, 30)
        assert in_time(lambda: a.step() or len(a.tokens["running"]) > 0)
        server.send(signal.SIGSTOP)
        a.add("asks", other)
        while "running" not in a.ends:
            a.step()
        assert a.tokens["running"] == expected_tokens(one, 30)
        assert a.tokens["asks"] == []
        server.send(signal.SIGCONT)
        a.run()
        assert a.tokens["asks"] == expected_tokens(other, 4)


def test_an_engine_uses_a_server_that_comes_later(folder, path, caplog):
    with engine(folder, "a") as a:
        assert f"no server answers at {path}" in caplog.text
        a.serve(PROMPTS)
        check(a, PROMPTS)
        with page_server(path, 128):
            assert in_time(lambda: a.step() or is_joined(a))
            for turn in range(2):
                a.forget_gpu()
                a.serve(again(turn))
                check(a, again(turn))
            assert loaded(a) == CHUNKS


@SCHEDULERS
def test_a_reset_forgets_all_blocks_and_loses_none(folder, path, is_async):
    how = {"is_async": is_async}
    with page_server(path, 128) as server:
        with engine(folder, "a", **how) as a, engine(folder, "b", **how) as b:
            b.serve(PROMPTS)
            for turn in range(6):  # each reset finds jobs that have not ended
                more = {f"{turn} {name}": [turn, *one] for name, one in PROMPTS.items()}
                for name, one in more.items():
                    a.add(name, one)
                jobs = a.scheduler.connector.connector_scheduler
                assert in_time(lambda jobs=jobs: a.step() or jobs._jobs)
                a.scheduler.connector.reset_cache()
                a.run()
                check(a, more)
                a.forget_gpu()
            a.scheduler.connector.reset_cache()
            a.step()
            assert in_time(lambda: stats(server).idle_pages == 0)
            b.forget_gpu()
            b.serve(again("again"))
            check(b, again("again"))
            assert loaded(b) == 0
            a.run()
            b.run()
            assert nothing_is_read(server)
        assert in_time(lambda: nothing_is_held(server))


def test_chunks_that_others_have_evicted_are_stored_again(folder, path):
    """The GPU of the engine still has them, so it does not look them up."""
    with page_server(path, 32) as server, engine(folder, "a") as a, engine(folder, "b") as b:
        one = {"first": prompt(1, 100)}
        a.serve(one)
        for n in range(12):  # a step has few pages
            b.serve({f"{n}": prompt(50 + n, 200)})
        assert in_time(lambda: stats(server).evicted > 6)
        before = stats(server).stored
        a.serve(again("again", one))  # hears that they are gone
        a.run()
        a.serve(again("third", one))
        assert in_time(lambda: stats(server).stored > before)
        b.serve(again("other", one))
        check(b, again("other", one))
        assert loaded(b) > 0


class ServedRanks(contextlib.AbstractContextManager):
    """The workers of an engine on the pages of a server, made in threads, and its manager, without
    vLLM's scheduler.

    Args:
        caches: of each rank, as bf16_cache().
        how: of config().
    """

    def __init__(self, name: str, path: str, *caches: Any, **how: Any) -> None:
        def spec(rank: int) -> KVSwapOffloadingSpec:
            options = {"block_bytes": 4096, "host_server": path, **how}
            settings = config(len(caches), rank=rank, **options)
            return KVSwapOffloadingSpec(replace(settings, engine_id=name), {})

        with ThreadPoolExecutor(len(caches)) as threads:
            made = threads.map(lambda rank: spec(rank).get_worker(caches[rank]), range(len(caches)))
            self.workers = list(made)
        self.manager: Any = spec(0).get_manager()
        self.storing = self.workers[: 1 if how.get("replicated") else None]
        self.caches, self.context, self.number = caches, base.ReqContext(name), 0
        self.manager.on_new_request(self.context)

    def copy(self, direction: str, blocks: list[int], spec: Any) -> set[int]:
        """Copies on all ranks, tells the manager which pages failed on a rank, and returns these."""
        self.number, failed = self.number + 1, set[int]()
        for worker in self.storing if direction == "store" else self.workers:
            submit(worker, self.number, direction, blocks, spec)
            worker.wait({self.number})
            assert [one.success for one in worker.get_finished()] == [True]
            for failure in worker.take_failures():
                self.manager.fail_pages(failure.pages, failure.reason)
                failed |= failure.pages
        return failed

    def step(self) -> None:
        self.manager.on_schedule_end(base.ScheduleEndContext([], []))

    def __exit__(self, *_: object) -> None:
        self.manager.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def reserve(self, named: list[bytes], context: Any) -> Any:
        """What prepare_store() returns as soon as there are pages."""
        outputs: list[Any] = []

        def is_reserved() -> bool:
            outputs.append(self.manager.prepare_store(named, context))
            self.step()
            return bool(outputs[-1] is not None and outputs[-1].keys_to_store)

        assert in_time(is_reserved)
        return outputs[-1]

    def store(self, named: list[bytes], blocks: list[int], is_damaged: bool = False) -> None:
        context = base.ReqContext("stores")
        output = self.reserve(named, context)
        assert output.keys_to_store == named
        self.copy("store", blocks, output.store_spec)
        for page in output.store_spec.block_ids if is_damaged else ():
            self.workers[-1]._pool.pages[int(page), 0, 1000] ^= 4
        self.complete("store", named, context)

    def complete(self, direction: str, named: list[bytes], context: Any) -> None:
        """Until the server knows it, too: it may read first what another engine sends later."""
        getattr(self.manager, f"complete_{direction}")(named, context)
        answers: list[Any] = []
        self.manager._session.ask_stats(answers.append)
        assert in_time(lambda: self.step() or bool(answers))

    def load(self, named: list[bytes], blocks: list[int]) -> Any:
        """Loads what find() has found. The pages, and which of them were not loaded."""
        spec = self.manager.prepare_load(named, self.context)
        failed = self.copy("load", blocks, spec)
        self.complete("load", named, self.context)
        return spec.block_ids.tolist(), failed

    def bytes_of(self, block: int) -> list[bytes]:
        """Of each rank."""
        return [bytes_of(cache, block) for cache in self.caches]

    def find(self, named: list[bytes]) -> list[str]:
        results: list[str] = []

        def known() -> bool:
            results[:] = [self.manager.lookup(key, self.context).name for key in named]
            self.step()
            return "RETRY" not in results

        assert in_time(known)
        results[:] = [self.manager.lookup(key, self.context).name for key in named]
        return results


def test_requests_that_another_engines_reset_overtakes_store_nothing(folder, path):
    with (
        page_server(path, 64),
        ServedRanks("a", path, bf16_cache()) as a,
        ServedRanks("b", path, bf16_cache()) as b,
    ):
        old, new = base.ReqContext("old"), base.ReqContext("new")
        before, control, after = keys(1, 2, 3)
        a.reserve([before], old)
        resets = a.manager._resets
        b.manager.reset_cache()
        assert in_time(lambda: a.step() or b.step() or a.manager._resets != resets)
        a.reserve([control], new)  # there are pages
        assert a.manager.prepare_store([after], old).keys_to_store == []
        for key, context in ((before, old), (control, new)):
            a.complete("store", [key], context)
        assert b.find([before, control]) == ["MISS", "HIT"]


def test_pages_are_lent_before_a_miss_is_told(folder, path):
    with page_server(path, 64) as server, ServedRanks("a", path, bf16_cache()) as a:
        hold, lent = server._handlers[Op.HOLD], []

        def note_and_hold(session: Any, *message: Any) -> None:
            lent.append(len(session.lent))
            hold(session, *message)

        server._handlers[Op.HOLD] = note_and_hold
        assert a.find(keys(1)) == ["MISS"]
        assert lent[0] > 0


def test_what_no_step_looks_for_is_let_go(folder, path):
    with page_server(path, 64) as server, ServedRanks("a", path, bf16_cache()) as a:
        a.store(keys(1), [1])
        assert a.find(keys(1)) == ["HIT"]
        assert not nothing_is_read(server)
        assert in_time(lambda: a.step() or nothing_is_read(server))


@pytest.mark.parametrize("verify", ["off", "load"])
@pytest.mark.parametrize("encoding", ["raw", "lossless"])
@pytest.mark.parametrize("wide", [[(2,)], [(), (2,)]], ids=["one rank", "two ranks"])
def test_a_page_needs_the_blocks_of_all_ranks(folder, path, wide, encoding, verify):
    """And is not, if one of them did not fit, or was damaged."""
    how: dict[str, Any] = {"encoding": encoding, "verify": verify}
    named, fits = keys(1, 2, 3), encoding == "raw"
    ranks = [bf16_cache(rank, wide=blocks) for rank, blocks in enumerate(wide)]
    others = [bf16_cache(rank + 2) for rank in range(len(wide))]
    with (
        page_server(path, 128),
        ServedRanks("a", path, *ranks, **how) as a,
        ServedRanks("b", path, *others, **how) as b,
    ):
        a.store(named, [1, 2, 3])
        assert b.find(named) == ["HIT", "HIT" if fits else "MISS", "HIT"]
        pages, failed = b.load(named if fits else named[::2], [5, 6, 7] if fits else [5, 7])
        assert failed == set()
        for block in (1, 2, 3) if fits else (1, 3):
            assert a.bytes_of(block) == b.bytes_of(block + 4)
        if verify == "load":
            b.workers[-1]._pool.pages[pages[0], 0, 1000] ^= 4
            assert b.find(named[:1]) == ["HIT"]
            assert b.load(named[:1], [8])[1] == {pages[0]}
            assert a.find(named[::2]) == ["MISS", "HIT"]


def test_ranks_with_equal_caches_share_one_copy(folder, path):
    with (
        page_server(path, 64),
        ServedRanks("a", path, bf16_cache(0), bf16_cache(0), replicated=True) as a,
        ServedRanks("b", path, bf16_cache(1), bf16_cache(2), replicated=True) as b,
        ServedRanks("c", path, bf16_cache(3)) as c,
    ):
        a.store(keys(1), [1])
        for one in (b, c):
            assert one.find(keys(1)) == ["HIT"]
            assert one.load(keys(1), [5])[1] == set()
            assert set(one.bytes_of(5)) == set(a.bytes_of(1))


def server_over_files(folder: Path, path: str, pages: int) -> Any:
    pytest.importorskip("xxhash")
    return page_server(path, pages, below=f"file:{folder}/below", below_policy="all")


@pytest.mark.parametrize("verify", ["off", "load"])
def test_pages_of_two_ranks_come_from_below(folder, path, verify):
    """With checksums, one is damaged before it is written there, and deleted when it has come."""
    with (
        server_over_files(folder, path, 24) as server,
        ServedRanks("a", path, bf16_cache(0, 40), bf16_cache(1, 40), verify=verify) as a,
    ):
        tier, (pool,) = server._pages.tier, server._pages.pools
        damaged = {13} if verify == "load" else set[int]()

        def has_come(number: int) -> bool:
            (result,) = a.find(keys(number))
            assert result != "MISS", "it arrives"
            return result == "HIT"

        assert pool.nbytes <= server._memory, "checksums are in the pages"
        for number in range(20):
            a.store(keys(number), [number], is_damaged=number in damaged)
            assert in_time(lambda number=number: tier.stats().written == number + 1)
        for number in range(20):
            assert in_time(lambda number=number: has_come(number))
            pages, failed = a.load(keys(number), [30])
            assert failed == (set(pages) if number in damaged else set())
            assert failed or a.bytes_of(30) == a.bytes_of(number)
        assert stats(server).promoted > 0
        for number in damaged:
            assert in_time(lambda number=number: a.find(keys(number)) == ["MISS"])


@pytest.mark.parametrize(
    ("seed", "ranks", "found"), [("0", 1, "HIT"), ("1", 1, "MISS"), ("0", 2, "MISS")]
)
def test_pages_below_are_those_of_equal_engines(folder, path, seed, ranks, found, monkeypatch):
    """Pages of one and of two ranks have as many bytes."""
    with (
        server_over_files(folder, path, 64) as server,
        ServedRanks("a", path, bf16_cache()) as a,
    ):
        a.store(keys(1), [1])
        assert in_time(lambda: server._pages.tier.stats().written == 1)
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    caches = [bf16_cache() for _ in range(ranks)]
    with server_over_files(folder, path, 64), ServedRanks("a", path, *caches) as a:
        assert in_time(lambda: a.find(keys(1)) == [found])


def test_a_server_compares_all_groups_of_layers(folder, path):
    """Pages have the size of the largest blocks, and blocks of any group."""

    def ranks(name: str, *layers: int) -> ServedRanks:
        cache = caches([[(0, 1000)], list(enumerate(layers, 1))], [1000, *layers], "cpu")
        return ServedRanks(name, path, cache, block_bytes=1000, windows=(None, None))

    said = r"bytes_of.groups\[1\]\[0\]: a: int8 \[blocks, 600\]"
    with (
        page_server(path, 64),
        ranks("a", 300, 600),
        ranks("c", 300, 600),
        pytest.raises(ValueError, match=said),
    ):
        ranks("b", 600, 300)
