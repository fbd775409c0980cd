"""Engines whose scheduler and worker are two sessions at a server."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from below_engine import BLOCK_BYTES, key_of
from patience import in_time
from served_engine import Process, server_process, serving

from torch_kvswap import PagedLayout
from torch_kvswap.prefix.client import RemotePools, describe
from torch_kvswap.prefix.halves import Held, SchedulerSession, SplitStore, WorkerSession
from torch_kvswap.prefix.manager import BlockStats
from torch_kvswap.prefix.server import PageServer


def worker_of(path: str, name: str) -> WorkerSession:
    """A worker that has joined."""
    layout = PagedLayout([torch.zeros(4, BLOCK_BYTES, dtype=torch.uint8)])
    cache = describe([layout], None, "m", 0, 1, 1, "raw", None, "off", bytes_of={})
    worker = WorkerSession(path, name, cache, RemotePools([layout], False, {}))
    worker.join()
    worker.start()
    return worker


class Scheduler(SchedulerSession):
    """A scheduler that has joined."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(path, name)
        self.join()
        self.start()

    def digests(self, names: Sequence[object]) -> bytes:
        return b"".join(map(key_of, names))

    def until(self, condition: Callable[[], object]) -> None:
        assert in_time(lambda: self.poll() or bool(condition()))

    def find(self, names: Sequence[object]) -> Held:
        answers: list[Held] = []
        self.hold([self.digests(names)], answers.extend)
        self.until(lambda: answers)
        return answers[0]

    def take(self, count: int) -> SplitStore:
        stores: list[SplitStore | None] = []

        def taken() -> bool:
            stores.append(self.begin_store(count))
            self.end_step()
            return stores[-1] is not None

        self.until(taken)
        store = stores[-1]
        assert store is not None
        return store

    def store(self, names: Sequence[object]) -> list[int]:
        """Publishes these keys. Their pages."""
        store = self.take(len(names))
        assert len(store.pages) == len(names)
        self.end_store(store, self.digests(names), range(len(names)))
        return list(map(int, store.pages))

    def indices(self, names: Sequence[object]) -> list[int]:
        """Which of these keys are there."""
        held = self.find(names)
        self.end_hold([held])
        return list(held.indices)


@contextlib.contextmanager
def split(path: str, name: str) -> Iterator[Scheduler]:
    worker = worker_of(path, name)
    scheduler = Scheduler(path, name)
    try:
        yield scheduler
    finally:
        scheduler.close()
        worker.close()


def stats(server: PageServer) -> BlockStats:
    return server._manager.stats()


def test_what_one_publishes_another_holds_with_its_pages(path: str) -> None:
    with serving(path), split(path, "a") as a, split(path, "b") as b:
        pages = a.store("abcd")
        found = b.find("xcby")
        assert (found.indices, found.pages) == ([1, 2], [pages[2], pages[1]])
        assert found.in_front == 0
        assert b.find("abx").in_front == 2
        assert list(b.find("abcd").indices) == [0, 1, 2, 3]


def test_held_pages_are_not_evicted(path: str) -> None:
    with serving(path, 64), split(path, "a") as a, split(path, "b") as b:
        a.store("abcd")
        held = b.find("d")
        for name in range(80):
            a.store([name])
        a.find([0])  # the server has done all of it
        assert b.indices("abcd") == [3]
        b.end_hold([held])
        for name in range(100, 180):
            a.store([name])
        a.find([0])
        assert b.indices("abcd") == []


def test_a_key_that_two_engines_have_stored_keeps_one_page(path: str) -> None:
    with serving(path) as server:
        with split(path, "a") as a, split(path, "b") as b:
            store, other = a.take(2), b.take(2)
            a.end_store(store, a.digests("xy"), [0, 1])
            a.until(lambda: stats(server).stored == 2)
            b.end_store(other, b.digests("xz"), [0, 1])
            b.until(lambda: stats(server).stored == 3)
            assert b.find("xz").pages == [int(store.pages[0]), int(other.pages[1])]
        assert in_time(lambda: (stats(server).idle_pages, stats(server).free_pages) == (3, 29))


def test_pages_that_were_not_filled_are_used_again_and_no_key_is_on_them(path: str) -> None:
    with serving(path), split(path, "a") as a:
        store = a.take(3)
        a.end_store(store, a.digests("xz"), [0, 2])
        assert a.indices("xyz") == [0, 2]
        pages = {int(page) for page in store.pages}
        again = a.take(8)
        assert int(store.pages[1]) in again.pages
        assert pages.intersection(map(int, again.pages)) == {int(store.pages[1])}


def test_a_failed_load_makes_its_pages_unknown_to_all(path: str) -> None:
    with serving(path), split(path, "a") as a, split(path, "b") as b:
        pages = a.store("abc")
        load = b.begin_load([b.find("abc")])
        b.end_load(load, {pages[1]})
        assert b.indices("abc") == [0, 2]
        assert a.indices("abc") == [0, 2]


def test_after_a_reset_nothing_is_found_that_was_reserved_before(path: str) -> None:
    with serving(path, 128) as server:
        with split(path, "a") as a, split(path, "b") as b:
            a.store("abc")
            held, store, other = b.find("ab"), a.take(2), b.take(2)
            assert held.pages
            a.reset()
            a.until(lambda: a.resets == 1)
            a.end_store(store, a.digests("xy"), [0, 1])
            b.end_store(other, b.digests("uv"), [0, 1])
            assert b.indices("abcxyuv") == []
            b.end_hold([held])
            for one, names in ((a, "mn"), (b, "op")):  # not on pages of leases from before
                one.store(names)
                assert one.indices(names) == [0, 1]
        assert in_time(lambda: stats(server).free_pages == 124)
        assert stats(server).idle_pages == 4


def half_process(path: str, half: str, does: str = "") -> Process:
    program = f"""
import sys
from test_halves import *
half = {"worker_of" if half == "worker" else "Scheduler"}({path!r}, "killed")
{does}
print("done", flush=True)
sys.stdin.read()
"""
    return Process(["-c", program], "done")


@pytest.mark.parametrize("first", ["worker", "scheduler"])
def test_the_pages_of_a_killed_engine_come_back_when_both_processes_have_ended(
    path: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are the worker's, and what they copy the scheduler has reserved."""
    monkeypatch.syspath_prepend("tests/unit/prefix")
    with serving(path) as server, split(path, "a") as a:
        a.store("abcd")
        a.until(lambda: stats(server).idle_pages == 4)
        before = stats(server)
        worker = half_process(path, "worker")
        holds = "half.begin_load([half.find('ab')]); half.take(3)"
        scheduler = half_process(path, "scheduler", holds)
        with worker, scheduler:
            one, other = (worker, scheduler) if first == "worker" else (scheduler, worker)
            assert stats(server).idle_pages == 2
            number = len(server._sessions)
            one.send(signal.SIGKILL)
            one.wait()
            of_scheduler = next(of for of in server._sessions.values() if of.is_scheduler)
            assert of_scheduler is not None
            if first == "scheduler":
                a.until(lambda: any(of.is_over for of in server._sessions.values()))
            else:
                a.until(lambda: len(server._sessions) == number - 1)
            assert stats(server).idle_pages == 2
            assert stats(server).filling_pages > before.filling_pages
            other.send(signal.SIGKILL)
            a.until(lambda: stats(server).idle_pages == 4)
            assert stats(server).filling_pages == before.filling_pages


def test_a_scheduler_that_leaves_gives_its_pages_to_its_worker(path: str) -> None:
    """At a shutdown the worker may still copy."""
    with serving(path) as server, split(path, "a") as a:
        a.store("ab")
        worker = worker_of(path, "b")
        b = Scheduler(path, "b")
        b.begin_load([b.find("ab")])
        b.close()
        a.until(lambda: any(of.is_over for of in server._sessions.values()))
        assert stats(server).idle_pages == 0
        worker.close()
        a.until(lambda: stats(server).idle_pages == 2)


def test_a_worker_keeps_the_old_memory_until_its_scheduler_has_come(path: str) -> None:
    with server_process(path) as server:
        worker = worker_of(path, "a")
        scheduler = Scheduler(path, "a")
        (pool,) = worker._pools.pools
        load = scheduler.begin_load([])
        server.kill()
        with serving(path) as fresh:
            assert in_time(lambda: any(of.waits for of in fresh._sessions.values()))
            scheduler.poll()
            assert not scheduler.is_joined
            assert worker._pools.pools == [pool]
            scheduler.end_load(load)
            scheduler.until(lambda: scheduler.is_joined)
            assert worker._pools.pools != [pool]
            scheduler.store("ab")
            assert scheduler.indices("abc") == [0, 1]
            scheduler.close()
            worker.close()


def test_sessions_that_wait_for_each_other_can_be_closed(path: str) -> None:
    with server_process(path) as server:
        worker = worker_of(path, "a")
        scheduler = Scheduler(path, "a")
        load = scheduler.begin_load([])
        server.kill()
        with serving(path) as fresh:
            assert in_time(lambda: any(of.waits for of in fresh._sessions.values()))
            worker.close()  # it waits for the scheduler
            assert not worker._thread.is_alive()
            scheduler.poll()
            scheduler.end_load(load)
            assert in_time(lambda: any(of.is_scheduler for of in fresh._sessions.values()))
            scheduler.close()  # it waits for the worker
            assert not scheduler._thread.is_alive()
            assert in_time(lambda: not fresh._sessions)


def test_an_idle_engine_gives_most_of_its_pages_back(path: str) -> None:
    with serving(path, 4096) as server, split(path, "a") as a:
        a.store(range(200))
        a.take(200)  # there are as many for the next step
        a.until(lambda: a.end_step() or stats(server).filling_pages >= 400)
        a.until(lambda: a.end_step() or stats(server).filling_pages <= 200 + 128)


def test_idle_engines_leave_pages_to_the_others(path: str) -> None:
    with serving(path, 64) as server, contextlib.ExitStack() as stack:
        for name in range(6):
            idle = stack.enter_context(split(path, str(name)))
            idle.end_step()
            idle.until(lambda idle=idle: not idle.is_asking)
        assert stats(server).filling_pages == 16 + 8 + 5 + 4 + 3 + 2
        assert len(stack.enter_context(split(path, "a")).take(2).pages) == 2


def test_a_store_takes_what_there_is_if_the_server_gives_no_more(path: str) -> None:
    with serving(path, 64), split(path, "a") as a:
        assert len(a.take(40).pages) == 16


def test_pages_that_have_their_blocks_are_no_part_of_a_share(path: str) -> None:
    with serving(path, 64) as server, split(path, "a") as a:
        a.store(range(10))
        a.until(lambda: stats(server).stored == 10)
        a.until(lambda: a.end_step() or stats(server).filling_pages == 16)
        a.until(lambda: not a.is_asking)
        assert len(a.take(16).pages) == 16


def test_a_step_that_needs_few_pages_more_than_are_there_gets_them(path: str) -> None:
    with serving(path, 1024), split(path, "a") as a:
        for turn in range(4):
            count = 64 + 3 * turn
            a.store([f"{turn} {place}" for place in range(count)])


def test_a_scheduler_that_leaves_before_its_answers_come_keeps_no_page(path: str) -> None:
    with server_process(path) as server, split(path, "watch") as watch:
        with split(path, "a") as a:
            a.store("abcd")
            assert a.find("ab").pages
            server.send(signal.SIGSTOP)
            a.hold([a.digests("cd")], lambda _: None)
            a.close()
            server.send(signal.SIGCONT)
        answers: list[BlockStats] = []

        def are_all_idle() -> bool:
            watch.ask_stats(answers.append)
            return bool(answers) and answers[-1].idle_pages == 4

        watch.until(are_all_idle)


def test_a_reset_of_the_next_server_is_noticed_that_has_the_number_of_an_earlier_one(
    path: str,
) -> None:
    with server_process(path) as server, split(path, "a") as a:
        a.reset()
        a.until(lambda: a.resets == 1)
        server.kill()
        with serving(path), split(path, "b") as b:
            a.until(lambda: a.losses == 1 and a.is_joined)
            a.store("x")  # there are pages for the next store
            b.reset()
            b.until(lambda: b.resets == 1)
            a.indices("x")
            a.store("y")
            assert a.indices("y") == [0]


def test_two_engines_of_one_name_are_refused(path: str) -> None:
    with serving(path), split(path, "a"):
        for join in (worker_of, Scheduler):
            with pytest.raises(
                ValueError, match=r"another engine, process .* has the name 'a' at "
            ):
                join(path, "a")
