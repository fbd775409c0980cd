"""vLLM engines that share the pages of a server, under vLLM's real scheduler."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE, in_time
from served_engine import server_process
from served_engine import serving as page_server
from vllm_engine import SPEC, KVSwapOffloadingSpec, base, caches, config, keys
from vllm_serving import (
    BLOCK,
    CHUNKS,
    IS_033,
    PROMPTS,
    Serving,
    check,
    expected_tokens,
    prompt,
    serving,
)

from torch_kvswap._C import fold_keys
from torch_kvswap.integrations.vllm.shared import _Asked
from torch_kvswap.prefix import client
from torch_kvswap.prefix.halves import SchedulerSession, WorkerSession
from torch_kvswap.prefix.protocol import Op

OURS: dict[str, Any] = {}
THEIRS = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
DOORS = pytest.mark.parametrize("door", [OURS, THEIRS], ids=["ours", "theirs"])
SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return tmp_path


@pytest.fixture
def path(folder: Path) -> str:
    return f"{folder}/pages"


@contextlib.contextmanager
def engine(folder: Path, name: str, door: dict[str, Any] = OURS, **how: Any) -> Iterator[Serving]:
    extra = {"host_server": f"unix:{folder}/pages", "cpu_bytes_to_use": None}
    extra |= how.pop("extra", {}) | (SPEC if door else {})
    recompute = {"engine_id": name, "kv_load_failure_policy": "recompute"}
    with serving(folder, transfer=recompute | door, extra=extra, **how) as made:
        yield made


def manager_of(engine: Serving) -> Any:
    return engine.scheduler.connector.connector_scheduler.manager


def again(turn: object, prompts: dict[str, list[int]] = PROMPTS) -> dict[str, list[int]]:
    return {f"{turn} {name}": one for name, one in prompts.items()}


def loaded(engine: Serving) -> int:
    """Blocks that came from the host."""
    return int(engine.worker._handler.metrics().loads.blocks)


def is_joined(engine: Serving) -> bool:
    return bool(manager_of(engine)._session.is_joined)


def stats(server: Any) -> Any:
    return server._manager.stats()


def nothing_is_held(server: Any) -> bool:
    of = stats(server)
    return bool(of.free_pages + of.idle_pages == of.pages)


@DOORS
@SCHEDULERS
@pytest.mark.parametrize("chunk", [1, 2])
def test_an_engine_finds_what_another_has_stored(folder, path, door, is_async, chunk):
    how: dict[str, Any] = {"is_async": is_async, "extra": {"blocks_per_chunk": chunk}}
    with page_server(path, 128) as server:
        with engine(folder, "a", door, **how) as a, engine(folder, "b", door, **how) as b:
            a.serve(PROMPTS)
            check(a, PROMPTS)
            chunks = sum(len(one) // (BLOCK * chunk) for one in PROMPTS.values())
            assert in_time(lambda: stats(server).stored == chunks)
            b.serve(PROMPTS)
            check(b, PROMPTS)
            assert (loaded(a), loaded(b)) == (0, chunks * chunk)
            assert stats(server).stored == chunks, "nothing is stored twice"
        assert in_time(lambda: nothing_is_held(server))


@DOORS
@pytest.mark.parametrize("pages", [12, 32])
def test_tokens_are_right_while_two_engines_evict_each_others_pages(folder, path, door, pages):
    """Steps of both take turns. Requests are aborted, and the GPU forgets."""
    chance = random.Random(pages)
    documents = [prompt(100 + n, 120) for n in range(12)]
    with page_server(path, pages) as server:
        how: dict[str, Any] = {"blocks": 32, "batched": 64}
        with engine(folder, "a", door, **how) as a, engine(folder, "b", door, **how) as b:
            asked: dict[tuple[int, str], list[int]] = {}
            for turn in range(120):
                which = chance.randrange(2)
                one, name = (a, b)[which], f"{turn}"
                asked[which, name] = chance.choice(documents)[: chance.randrange(20, 120)]
                one.add(name, asked[which, name], 2)
                for _ in range(chance.randrange(6)):
                    (a, b)[chance.randrange(2)].step()
                # vLLM 0.26 has an assertion of its own that fails after aborts (vllm#55503).
                if chance.random() < 0.1 and name not in one.ends and (IS_033 or not door):
                    one.abort(name)
                    del asked[which, name]
                if chance.random() < 0.1 and not one.is_busy:
                    one.forget_gpu()
            a.run()
            b.run()
            for (which, name), tokens in asked.items():
                assert (a, b)[which].tokens[name] == expected_tokens(tokens, 2)
            assert stats(server).evicted > pages
            assert loaded(a) > 0
            assert loaded(b) > 0
            held = stats(server)
            assert held.free_pages + held.idle_pages + held.filling_pages == held.pages
        assert in_time(lambda: nothing_is_held(server))


def serve_until(engine: Serving, prompts: dict[str, list[int]], moment: str) -> Any:
    """Serves until a step has scheduled such a job; the step, which is not executed."""
    jobs = engine.scheduler.connector.connector_scheduler
    for name, one in prompts.items():
        engine.add(name, one)
    for _ in range(100):
        scheduled = engine.scheduler.schedule()
        of = scheduled.kv_connector_metadata
        if moment == "lookup" and manager_of(engine)._is_asking and not jobs._jobs:
            return scheduled
        if (moment == "load" and of.load_jobs) or (moment == "store" and of.store_jobs):
            return scheduled
        engine._report(scheduled, engine.runner.execute(scheduled))
    raise AssertionError(moment)


@DOORS
@pytest.mark.parametrize("moment", ["lookup", "load", "store"])
def test_an_engine_goes_on_without_a_killed_server_and_begins_anew_with_the_next(
    folder, path, door, moment
):
    with (
        server_process(path, 128) as server,
        engine(folder, "a", door) as a,
        engine(folder, "b", door) as b,
    ):
        assert is_joined(a)
        a.serve(PROMPTS)
        found = PROMPTS if moment != "store" else again("new", {"x": prompt(77, 100)})
        scheduled = serve_until(b, found, moment)
        server.kill()
        with page_server(path, 128) as fresh:
            # The worker of the other engine has come, so that of this one could have.
            assert in_time(lambda: a.step() or is_joined(a))
            b._report(scheduled, b.runner.execute(scheduled))
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


def test_a_load_reads_the_next_servers_pages_if_its_worker_does_not_wait(folder, path, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(WorkerSession, "_await_jobs", lambda self, connection: None)
    with server_process(path, 128) as server, engine(folder, "b") as b:
        b.serve(PROMPTS)
        b.forget_gpu()
        scheduled = serve_until(b, again("again"), "load")
        pool = b.worker._pool
        server.kill()
        with page_server(path, 128):
            assert in_time(lambda: b.worker._pool is not pool and b.worker._pool.num_pages > 1)
            b._report(scheduled, b.runner.execute(scheduled))
            b.run()
            assert any(
                b.tokens[f"again {name}"] != expected_tokens(one, 4)
                for name, one in PROMPTS.items()
            )


@SCHEDULERS
def test_other_requests_go_on_while_a_server_does_not_answer(folder, path, is_async):
    """The server is stopped, and calls would wait for it much longer than this test."""
    assert client.DEADLINE == PATIENCE
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


def test_a_scheduler_that_waits_for_answers_hangs_with_the_server(folder, path, monkeypatch):
    """The control of the test above."""

    def hold(self: Any, *arguments: Any) -> None:
        send(self, *arguments)
        self._connection.setblocking(True)
        self._connection.settimeout(1)
        try:
            self._connection.recv(1, 2)  # MSG_PEEK
        except TimeoutError:
            hung.append(True)
        self._connection.setblocking(False)

    hung: list[bool] = []
    send = SchedulerSession.hold
    monkeypatch.setattr(SchedulerSession, "hold", hold)
    with server_process(path) as server, engine(folder, "a") as a:
        server.send(signal.SIGSTOP)
        a.add("asks", prompt(2, 40))
        a.step()
        assert hung
        server.send(signal.SIGCONT)
        a.run()


def test_a_server_that_hangs_is_given_up(folder, path, monkeypatch, caplog):
    with server_process(path, 128) as server, engine(folder, "a") as a:
        server.send(signal.SIGSTOP)
        monkeypatch.setattr(client, "DEADLINE", 0.01)
        a.serve(PROMPTS)
        check(a, PROMPTS)
        assert "is lost, and its pages: it did not answer within 0.01 s" in caplog.text
        monkeypatch.setattr(client, "DEADLINE", PATIENCE)
        server.send(signal.SIGCONT)
        assert in_time(lambda: a.step() or is_joined(a))
        a.forget_gpu()
        a.serve(again("again"))
        a.forget_gpu()
        a.serve(again("third"))
        check(a, again("third"))
        assert loaded(a) >= CHUNKS


def test_an_engine_starts_without_a_server_and_uses_one_that_comes(folder, path, caplog):
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


@DOORS
@SCHEDULERS
def test_a_reset_forgets_the_blocks_of_all_engines_and_loses_no_page(folder, path, door, is_async):
    how = {"is_async": is_async}
    with page_server(path, 128) as server:
        with engine(folder, "a", door, **how) as a, engine(folder, "b", door, **how) as b:
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
            held = stats(server)
            assert held.free_pages + held.idle_pages + held.filling_pages == held.pages
        assert in_time(lambda: nothing_is_held(server))


def test_what_was_found_before_a_reset_by_another_engine_is_no_hit(folder, path):
    with page_server(path, 64):
        of = caches([[(0, 4096)]], [4096], "cpu")
        a, b = (Replica(name, path, of, block_bytes=4096) for name in "ab")
        (key,) = keys(1)
        a.store([key])
        assert b.find([key]) == ["HIT"]
        a.manager.reset_cache()
        assert in_time(lambda: b.step() or b.find([key]) == ["MISS"])
        a.close()
        b.close()


def test_an_engine_has_pages_when_it_hears_what_there_is_to_compute(folder, path):
    with page_server(path, 64) as server:
        a = Replica("a", path, caches([[(0, 4096)]], [4096], "cpu"), block_bytes=4096)
        hold, lent = server._handlers[Op.HOLD], []

        def note_and_hold(session: Any, *message: Any) -> None:
            lent.append(len(session.lent))
            hold(session, *message)

        server._handlers[Op.HOLD] = note_and_hold
        assert a.find(keys(1)) == ["MISS"]
        assert lent[0] > 0
        a.close()


@DOORS
@SCHEDULERS
def test_an_engine_without_requests_has_no_page_and_stores_the_next_prompts(
    folder, path, door, is_async
):
    with page_server(path, 512) as server, engine(folder, "a", door, is_async=is_async) as a:
        for turn in range(1, 4):
            a.serve({f"{turn} {name}": [turn, *one] for name, one in PROMPTS.items()})
            assert in_time(lambda: nothing_is_held(server))
            assert stats(server).stored == turn * CHUNKS


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


def test_a_damaged_page_is_computed_again_and_forgotten_for_all(folder, path):
    how = {"extra": {"verify": "load"}}
    with (
        page_server(path, 128) as server,
        engine(folder, "a", **how) as a,
        engine(folder, "b", **how) as b,
    ):
        a.serve(PROMPTS)
        assert in_time(lambda: stats(server).stored == CHUNKS)
        b.worker._pool.pages[:, 0, 1000] ^= 4
        b.serve(PROMPTS)
        check(b, PROMPTS)
        assert b.worker._handler.metrics().loads.corrupted_blocks == CHUNKS
        for turn in range(2):
            a.forget_gpu()
            a.serve(again(turn))
            check(a, again(turn))
        assert a.worker._handler.metrics().loads.corrupted_blocks == 0
        assert loaded(a) >= CHUNKS


def test_a_request_of_an_earlier_server_ends_nothing_at_the_next(folder, path):
    """The reservations of both have numbers from 1 on."""

    def until(number: int) -> None:
        """Holds the key until a reservation has this number."""
        held: list[Any] = []
        while not held or held[-1].id < number:
            count = len(held)
            session.hold([fold_keys([key])], held.extend)
            assert in_time(lambda count=count: session.poll() or len(held) > count)
        assert held[-1].id == number
        session.end_hold(held[:-1])

    (key,) = keys(1)
    with server_process(path) as server:
        a = Replica("a", path, caches([[(0, 4096)]], [4096], "cpu"), block_bytes=4096)
        session = a.manager._session
        a.store([key])
        until(40)
        assert a.find([key]) == ["HIT"]
        (held,) = _Asked.of(a.context, a.manager, a.manager._cache).held
        server.kill()
        with server_process(path):
            assert in_time(lambda: a.step() or (session.losses == 1 and session.is_joined))
            a.store([key])
            until(held.id)
            idle: list[int] = []
            session.ask_stats(lambda stats: idle.append(stats.idle_pages))
            a.manager.on_request_finished(a.context)
            session.ask_stats(lambda stats: idle.append(stats.idle_pages))
            assert in_time(lambda: session.poll() or len(idle) == 2)
            assert idle[0] == idle[1]
            a.close()


@pytest.mark.parametrize("below_policy", ["all", "reused"])
def test_what_the_server_has_evicted_comes_from_the_store_below(folder, path, below_policy):
    pytest.importorskip("xxhash")
    below = {"below": f"file:{folder}/below", "below_policy": below_policy}
    with page_server(path, 8, **below) as server, engine(folder, "a") as a:
        turns = iter(range(1000))

        def serve() -> None:
            turn = next(turns)
            for name, one in PROMPTS.items():
                for part in ("first", "again"):  # a load makes chunks due that are to be reused
                    a.serve({f"{turn} {name} {part}": one})
                    check(a, {f"{turn} {name} {part}": one})
                    a.forget_gpu()

        assert in_time(lambda: serve() or stats(server).promoted > 0)
        assert stats(server).evicted > 0


@pytest.mark.parametrize(("seed", "found"), [("0", "HIT"), ("1", "MISS")])
def test_pages_below_are_those_of_equal_engines(folder, path, seed, found, monkeypatch):
    pytest.importorskip("xxhash")
    below: dict[str, Any] = {"below": f"file:{folder}/below", "below_policy": "all"}
    cache = caches([[(0, 1000)]], [1000], "cpu")
    with page_server(path, 64, **below) as server:
        a = Replica("a", path, cache)
        a.store(keys(1))
        assert in_time(lambda: server._pages.tier.stats().written == 1)
        a.close()
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    with page_server(path, 64, **below):
        a = Replica("a", path, cache)
        assert in_time(lambda: a.find(keys(1)) == [found])
        a.close()


class Replica:
    """A worker and a manager, without vLLM's scheduler."""

    def __init__(self, name: str, path: str, cache: Any, **how: Any) -> None:
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

        settings = replace(config(host_server=f"unix:{path}", **how), engine_id=name)
        self.spec = KVSwapOffloadingSpec(settings, repeats=False)
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            self.worker = self.spec.get_worker(cache)  # asks it for the KV layout
        self.manager: Any = self.spec.get_manager()
        self.context = base.ReqContext(name)
        self.manager.on_new_request(self.context)

    def copy(self, direction: str, blocks: list[int], spec: Any) -> set[int]:
        gpu = base.GPULoadStoreSpec(blocks, [len(blocks)], [0])
        pair = (gpu, spec) if direction == "store" else (spec, gpu)
        getattr(self.worker, f"submit_{direction}")(1, *pair)
        self.worker.wait({1})
        (one,) = self.worker.get_finished()
        assert one.success
        failures = self.worker.take_failures()
        return failures[1].pages if failures else set()

    def step(self) -> None:
        self.manager.on_schedule_end(base.ScheduleEndContext([], []))

    def reserve(self, named: list[bytes], context: Any) -> Any:
        """What prepare_store() returns as soon as there are pages."""
        outputs: list[Any] = []

        def is_reserved() -> bool:
            outputs.append(self.manager.prepare_store(named, context))
            self.step()
            return bool(outputs[-1] is not None and outputs[-1].keys_to_store)

        assert in_time(is_reserved)
        return outputs[-1]

    def store(self, named: list[bytes]) -> None:
        context = base.ReqContext("stores")
        self.reserve(named, context)
        self.manager.complete_store(named, context)

    def find(self, named: list[bytes]) -> list[str]:
        results: list[str] = []

        def known() -> bool:
            results[:] = [self.manager.lookup(key, self.context).name for key in named]
            self.step()
            return "RETRY" not in results

        assert in_time(known)
        results[:] = [self.manager.lookup(key, self.context).name for key in named]
        return results

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.shutdown()


def test_encoded_blocks_that_do_not_fit_are_not_found(folder, path):
    layout = ([[(0, 2048), (1, 2048)]], [2048, 2048], "cpu", 12)
    how = {"block_bytes": 4096, "encoding": "lossless"}
    with page_server(path, 64):
        cache, empty = caches(*layout), caches(*layout)
        for one in cache.tensors:
            values = (1 + torch.rand(12, 1024)).bfloat16()
            values[2] = torch.exp2(torch.arange(1024) % 60).bfloat16()  # does not fit
            one.tensor.copy_(values.view(torch.int8))
        a, b = Replica("a", path, cache, **how), Replica("b", path, empty, **how)
        named = keys(1, 2, 3)
        output = a.reserve(named, a.context)
        assert output.keys_to_store == named
        a.manager.fail_pages(a.copy("store", [1, 2, 3], output.store_spec))
        a.manager.complete_store(set(named), a.context)
        assert b.find(named) == ["HIT", "MISS", "HIT"]
        ready = [named[0], named[2]]
        assert b.copy("load", [5, 6], b.manager.prepare_load(ready, b.context)) == set()
        b.manager.complete_load(set(ready), b.context)
        for one, its in zip(cache.tensors, empty.tensors, strict=True):
            assert torch.equal(one.tensor[[1, 3]], its.tensor[[5, 6]])
        a.close()
        b.close()


def refused(**how: Any) -> str:
    repeats = how.pop("repeats", False)
    with pytest.raises(ValueError, match="kv_connector_extra_config") as error:
        KVSwapOffloadingSpec(config(**{"host_server": "unix:/s", **how}), repeats=repeats)
    return str(error.value)


def test_what_engines_cannot_share_is_refused(folder, monkeypatch):
    assert "the 2 workers of this engine would need a part of each page" in refused(world=2)
    for option in ({"encoding": "lossless", "block_bytes": 4096}, {"verify": "load"}):
        assert "leave these out, or use KVSwapConnector" in refused(**option, repeats=True)
    assert refused(cpu_bytes_to_use=10) == (
        "kv_connector_extra_config: cpu_bytes_to_use is 10, but the server at unix:/s has the host "
        "memory and its index; leave cpu_bytes_to_use out"
    )
    assert "eviction_policy is 'arc'" in refused(eviction_policy="arc")
    assert "host_server is '/s'; it must be \"unix:PATH\"" in refused(host_server="/s")
    monkeypatch.delenv("PYTHONHASHSEED")
    if not IS_033:
        assert "set the environment variable PYTHONHASHSEED=0 in all of them" in refused()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"block_bytes": 2000}, "have groups[0].slab_sizes[0] 1000, and this engine has 2000"),
        ({"verify": "load"}, "have groups[0].verify 'off', and this engine has 'load'"),
        ({"chunk": 2}, "have groups[0].blocks_per_page 1, and this engine has 2"),
        ({"seed": "1"}, "have bytes_of.PYTHONHASHSEED '0', and this engine has '1'"),
    ],
)
def test_a_server_refuses_an_engine_with_other_pages(folder, path, how, said, monkeypatch):
    def cache(nbytes: int) -> Any:
        return caches([[(0, nbytes)]], [nbytes], "cpu")

    with page_server(path, 64):
        first = Replica("a", path, cache(1000), block_bytes=1000)
        monkeypatch.setenv("PYTHONHASHSEED", how.pop("seed", "0"))
        nbytes = how.get("block_bytes", 1000)
        with pytest.raises(ValueError, match="the pages at") as error:
            Replica("b", path, cache(nbytes), **{"block_bytes": 1000, **how})
        assert str(error.value) == (f"the pages at {path} {said}; start a server of its own for it")
        first.close()
