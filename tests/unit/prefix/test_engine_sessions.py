"""Engines whose scheduler and workers are sessions of their own at a server."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from below_engine import BLOCK_BYTES, key_of
from interrupts import Interrupter
from logged import logged
from patience import PATIENCE, in_time
from served_engine import Process, ServedEngine, server_process, serving

from torch_kvswap import PagedLayout
from torch_kvswap.integrations.vllm.scheduler_session import SchedulerSession
from torch_kvswap.prefix import server as page_server
from torch_kvswap.prefix import session
from torch_kvswap.prefix.manager import BlockStats
from torch_kvswap.prefix.protocol import KeyState, Op, pack
from torch_kvswap.prefix.remote_pools import RemotePools, describe
from torch_kvswap.prefix.server import PageServer, Stage
from torch_kvswap.prefix.session import RemoteReservation, Session


def new_worker(
    path: str, name: str, kind: type[RemotePools] = RemotePools, rank: int = 0, world: int = 1
) -> Session:
    layout = PagedLayout([torch.zeros(4, BLOCK_BYTES, dtype=torch.uint8)])
    cache = describe([layout], None, "m", 0, 1, 1, "raw", "off", bytes_of={}, parts=world)
    return Session(path, cache, kind([layout], {}, rank), engine=name, worker=rank)


def worker_of(path: str, name: str, *of: Any) -> Session:
    """A worker that has joined."""
    worker = new_worker(path, name, *of)
    worker.join()
    worker.start()
    return worker


class Scheduler(SchedulerSession):
    """A scheduler that has joined."""

    def __init__(self, path: str, name: str, workers: int = 1) -> None:
        super().__init__(path, name, workers)
        self.join()
        self.start()

    def keys(self, names: Sequence[object]) -> bytes:
        return b"".join(map(key_of, names))

    def until(self, condition: Callable[[], object]) -> None:
        assert in_time(lambda: self.poll() or bool(condition()))

    def find(self, names: Sequence[object]) -> RemoteReservation:
        answers: list[RemoteReservation] = []
        self.hold(self.keys(names), answers.append)
        self.until(lambda: answers)
        return answers[0]

    def take(self, count: int) -> list[int]:
        """Pages of a store."""
        taken: list[list[int]] = []

        def take() -> bool:
            taken.extend([pages] if (pages := self.begin_store(count)) is not None else [])
            self.end_step()
            return bool(taken)

        self.until(take)
        return taken[0]

    def end(self, pages: Sequence[int], names: Sequence[object]) -> None:
        """Ends a store; None stands for a block that was not stored."""
        stored = [page for page, name in zip(pages, names, strict=True) if name is not None]
        self.end_store(pages, stored, self.keys([name for name in names if name is not None]))

    def store(self, names: Sequence[object]) -> list[int]:
        """Publishes these keys. Their pages."""
        pages = self.take(len(names))
        self.end(pages, names)
        return pages

    def indices(self, names: Sequence[object]) -> list[int]:
        """Which of these keys are there."""
        held = self.find(names)
        self.end_hold([held])
        return [at for at, page in enumerate(held.answers) if page >= 0]


@contextlib.contextmanager
def split(path: str, name: str, workers: int = 1) -> Iterator[Scheduler]:
    made = [worker_of(path, name, RemotePools, rank, workers) for rank in range(workers)]
    scheduler = Scheduler(path, name, workers)
    try:
        yield scheduler
    finally:
        for one in (scheduler, *made):
            one.close()


def stats(server: PageServer) -> BlockStats:
    return server._manager.stats()


def test_what_one_publishes_another_holds_with_its_pages(path: str) -> None:
    with serving(path), split(path, "a") as a, split(path, "b") as b:
        pages = a.store("abcd")
        found = b.find("xcby")
        assert found.answers == [KeyState.ABSENT, pages[2], pages[1], KeyState.ABSENT]
        assert b.find("abx").answers == [*pages[:2], KeyState.ABSENT]
        assert b.find("abcd").answers == pages


def test_what_another_engine_is_storing_arrives(path: str) -> None:
    with serving(path), ServedEngine(path) as other, split(path, "a") as a:
        other.hold("ab")
        assert a.find("abx").answers == [*[KeyState.ARRIVES] * 2, KeyState.ABSENT]
        other.prefixes.poll()
        assert a.indices("abx") == [0, 1]


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


def test_no_page_is_given_back_twice(path: str) -> None:
    with serving(path) as server:
        with split(path, "a") as a:
            page = a.take(1)[0]
            with logged() as messages:
                a.send(pack(Op.GIVE_BACK, [0, page, page]))
                a.until(lambda: not a.is_joined)
            assert "it names a page that it has not borrowed, or one twice" in messages[0]
        assert in_time(lambda: stats(server).free_pages == stats(server).pages)


def test_a_key_stored_twice_keeps_one_page(path: str) -> None:
    with serving(path) as server:
        with split(path, "a") as a, split(path, "b") as b:
            pages, others = a.take(2), b.take(2)
            a.end(pages, "xy")
            a.until(lambda: stats(server).stored == 2)
            b.end(others, "xz")
            b.until(lambda: stats(server).stored == 3)
            assert b.find("xz").answers == [pages[0], others[1]]
        assert in_time(lambda: (stats(server).idle_pages, stats(server).free_pages) == (3, 29))


def test_unfilled_pages_are_used_again_without_keys(path: str) -> None:
    with serving(path), split(path, "a") as a:
        pages = a.take(3)
        a.end(pages, ["x", None, "z"])
        assert a.indices("xyz") == [0, 2]
        assert set(pages).intersection(a.take(8)) == {pages[1]}


def test_a_failed_load_makes_its_pages_unknown(path: str) -> None:
    with serving(path), split(path, "a") as a, split(path, "b") as b:
        pages = a.store("abc")
        held = [b.find("abc")]
        b.end_hold(held, {pages[1]})
        assert b.indices("abc") == [0, 2]
        assert a.indices("abc") == [0, 2]


def test_a_reset_forgets_what_was_reserved(path: str) -> None:
    with serving(path, 128) as server:
        with split(path, "a") as a, split(path, "b") as b:
            a.store("abc")
            held, pages, others = b.find("ab"), a.take(2), b.take(2)
            assert min(held.answers) >= 0
            a.reset()
            a.until(lambda: server._manager.resets == 1)
            a.end(pages, "xy")
            b.end(others, "uv")  # before it knows
            assert b.indices("abcxyuv") == []
            b.until(lambda: b.resets == server._index)
            b.end_hold([held])
            for one, names in ((a, "mn"), (b, "op")):
                one.store(names)
                assert one.indices(names) == [0, 1]
        assert in_time(lambda: stats(server).free_pages == 124)
        assert stats(server).idle_pages == 4


def process_of(path: str, made: str, does: str = "") -> Process:
    program = f"""
import sys
from test_engine_sessions import *
one = {made.format(f"{path!r}, 'killed'")}
{does}
print("done", flush=True)
sys.stdin.read()
"""
    return Process(["-c", program], "done")


@pytest.mark.parametrize("last", [1, 2], ids=["worker", "scheduler"])
def test_pages_come_back_when_all_processes_ended(
    path: str, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are those of the workers, and what they copy the scheduler has reserved."""
    monkeypatch.syspath_prepend("tests/unit/prefix")
    with serving(path, 128) as server, split(path, "a", 2) as a, contextlib.ExitStack() as stack:
        a.store("abcd")
        a.until(lambda: stats(server).idle_pages == 4)
        before = stats(server)
        made = [f"worker_of({{}}, RemotePools, {rank}, 2)" for rank in range(2)]
        processes = [stack.enter_context(process_of(path, one)) for one in made]
        holds = "held = one.find('ab'); one.take(3)"
        processes.append(stack.enter_context(process_of(path, "Scheduler({}, 2)", holds)))
        ends = processes.pop(last)
        for one in reversed(processes):  # the scheduler before a worker
            one.send(signal.SIGKILL)
            one.wait()
        own = os.getpid(), ends.pid
        a.until(lambda: all(of.pid in own for of in [*server._sessions.values()]))
        assert stats(server).idle_pages == 2
        assert stats(server).filling_pages > before.filling_pages
        ends.send(signal.SIGKILL)
        a.until(lambda: stats(server).idle_pages == 4)
        assert stats(server).filling_pages == before.filling_pages


@pytest.mark.parametrize("reconnects", [False, True])
def test_a_leaving_scheduler_leaves_its_worker_pages(path: str, reconnects: bool) -> None:
    """At a shutdown the worker may still copy."""
    with serving(path) as server, split(path, "a") as a:
        a.store("ab")
        worker = worker_of(path, "b")
        b = Scheduler(path, "b")
        held = b.find("ab")
        assert min(held.answers) >= 0
        b.close()
        a.until(lambda: len(server._sessions) == 3)
        if reconnects:
            before = worker._session
            worker._connection.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
            a.until(lambda: worker.is_joined and worker._session != before)
        assert stats(server).idle_pages == 0
        worker.close()
        a.until(lambda: stats(server).idle_pages == 2)


def test_pages_of_a_scheduler_that_has_left_are_quarantined(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "QUARANTINE", 5.0)
    now = 0.0
    with serving(path) as server:
        server._loop.clock = lambda: now
        worker, scheduler = worker_of(path, "a"), Scheduler(path, "a")
        scheduler.take(3)
        scheduler.close()
        worker.close()
        assert in_time(lambda: not server._sessions)
        assert stats(server).filling_pages > 0

        def are_free_later() -> bool:  # the server may read the clock when the session has gone
            nonlocal now
            now += 5.0
            server._loop.wake()
            return stats(server).filling_pages == 0

        assert in_time(are_free_later)


@pytest.mark.parametrize("lost", [["scheduler"], ["worker"], ["scheduler", "worker"]])
def test_an_engine_closed_without_connections_keeps_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch, lost: list[str]
) -> None:
    monkeypatch.setattr(session, "FIRST_PAUSE", PATIENCE)  # before it comes again
    with serving(path) as server:
        worker, scheduler = worker_of(path, "a"), Scheduler(path, "a")
        scheduler.store("ab")
        held = scheduler.find("a")
        assert min(held.answers) >= 0
        assert stats(server).idle_pages == 1
        for one in [{"scheduler": scheduler, "worker": worker}[name] for name in lost]:
            one._connection.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
            scheduler.until(lambda one=one: one._connection is None)  # type: ignore[misc]
        sessions = server._sessions.values
        assert in_time(lambda: sum(of.connection is None for of in [*sessions()]) == len(lost))
        scheduler.close()
        worker.close()
        assert in_time(lambda: (stats(server).idle_pages, stats(server).free_pages) == (2, 30))
        assert in_time(lambda: not server._sessions)


def test_a_worker_keeps_memory_until_its_scheduler_comes(path: str) -> None:
    with server_process(path) as server:
        worker = worker_of(path, "a")
        scheduler = Scheduler(path, "a")
        (pool,) = worker._pools.pools
        pages = scheduler.take(1)
        server.kill()
        with serving(path) as fresh:
            assert in_time(lambda: any(of.stage == Stage.WAITS for of in fresh._sessions.values()))
            scheduler.poll()
            assert not scheduler.is_joined
            assert worker._pools.pools == [pool]
            scheduler.end(pages, [None])
            scheduler.until(lambda: scheduler.is_joined)
            assert worker._pools.pools != [pool]
            scheduler.store("ab")
            assert scheduler.indices("abc") == [0, 1]
            scheduler.close()
            worker.close()


def test_a_scheduler_joins_behind_all_its_workers(path: str) -> None:
    class Slow(RemotePools):
        may_pin = threading.Event()

        def attach(self, handles: Any) -> None:
            assert self.may_pin.wait(PATIENCE)
            super().attach(handles)

    Slow.may_pin.set()
    with server_process(path) as server:
        kinds = enumerate((Slow, RemotePools))
        workers = [worker_of(path, "a", kind, rank, 2) for rank, kind in kinds]
        scheduler = Scheduler(path, "a", 2)
        Slow.may_pin.clear()
        server.kill()
        with serving(path) as fresh, split(path, "b", 2) as b:

            def has(is_so: Callable[[Any], bool]) -> bool:
                sessions = [*fresh._sessions.values()]
                return any(of.engine == "a" and is_so(of) for of in sessions)

            scheduler.until(lambda: has(lambda of: of.stage == Stage.READY))
            scheduler.until(lambda: has(lambda of: of.is_scheduler and of.stage == Stage.WAITS))
            b.indices("x")  # the server has answered all that it can
            assert has(lambda of: of.is_scheduler and of.stage == Stage.WAITS)
            Slow.may_pin.set()
            scheduler.until(lambda: scheduler.is_joined)
            scheduler.store("ab")
            assert b.indices("ab") == [0, 1]
            for one in (scheduler, *workers):
                one.close()


def test_waiting_sessions_can_be_closed(path: str) -> None:
    with server_process(path) as server:
        worker = worker_of(path, "a")
        scheduler = Scheduler(path, "a")
        pages = scheduler.take(1)
        server.kill()
        with serving(path) as fresh:
            assert in_time(lambda: any(of.stage == Stage.WAITS for of in fresh._sessions.values()))
            worker.close()  # it waits for the scheduler
            assert not worker._thread.is_alive()
            scheduler.poll()
            scheduler.end(pages, [None])
            assert in_time(lambda: any(of.is_scheduler for of in fresh._sessions.values()))
            scheduler.close()  # it waits for the worker
            assert not scheduler._thread.is_alive()
            assert in_time(lambda: not fresh._sessions)


def test_pages_that_no_step_needs_come_back(path: str) -> None:
    """Also if other pages of the same loan were used."""
    with serving(path, 4096) as server, split(path, "a") as a:
        pages = a.take(1000)
        a.end(pages, [None if place % 2 else place for place in range(1000)])
        a.until(lambda: stats(server).stored == 500)
        assert stats(server).filling_pages >= 500
        a.until(lambda: a.end_step() or stats(server).filling_pages <= 128)
        assert len(a.take(64)) == 64


def test_the_pages_of_an_idle_engine_serve_another(path: str) -> None:
    with serving(path, 64) as server, split(path, "a") as a, split(path, "b") as b:
        a.end(a.take(40), range(16))
        a.until(lambda: stats(server).stored == 16)
        pages = a.take(16)
        assert len(b.take(40)) == 8
        a.end(pages, [None] * 16)
        a.until(lambda: a.end_step(is_idle=True) or not (a.is_asking or a.has_free_pages))
        a.until(lambda: stats(server).filling_pages == 8)
        b.until(lambda: b.end_step() or stats(server).filling_pages == 16)


def test_engines_leave_pages_to_the_others(path: str) -> None:
    with serving(path, 64) as server, contextlib.ExitStack() as stack:
        for name in range(6):
            one = stack.enter_context(split(path, str(name)))
            one.end_step()
            one.until(lambda one=one: not one.is_asking)
        assert stats(server).filling_pages == 16 + 8 + 5 + 4 + 3 + 2
        assert len(stack.enter_context(split(path, "a")).take(2)) == 2


def test_a_store_takes_what_there_is(path: str) -> None:
    with serving(path, 64), split(path, "a") as a:
        assert len(a.take(40)) == 16


def test_filled_pages_are_no_part_of_a_share(path: str) -> None:
    with serving(path, 64) as server, split(path, "a") as a:
        a.store(range(10))
        a.until(lambda: stats(server).stored == 10)
        a.until(lambda: a.end_step() or stats(server).filling_pages == 16)
        a.until(lambda: not a.is_asking)
        assert len(a.take(16)) == 16


def test_a_step_gets_few_pages_more(path: str) -> None:
    with serving(path, 1024), split(path, "a") as a:
        for turn in range(4):
            count = 64 + 3 * turn
            a.store([f"{turn} {place}" for place in range(count)])


@pytest.mark.parametrize("when", ["it waits", "the server takes no more", "it has given up"])
def test_leaving_a_hung_server_keeps_no_page(path: str, when: str) -> None:
    with server_process(path) as server, split(path, "watch") as watch:
        with split(path, "a") as a:
            a.store("abcd")
            held = a.find("ab")
            assert min(held.answers) >= 0
            server.send(signal.SIGSTOP)
            a.hold(a.keys("cd"), lambda _: None)
            while when == "the server takes no more" and not a._outbox:
                a.touch(bytes(1 << 16))
            if when == "it has given up":
                a._deadline = 0.1
                a.until(lambda: not a.is_joined)
                a._deadline = PATIENCE
            a.close()
            server.send(signal.SIGCONT)
        answers: list[BlockStats] = []

        def are_all_idle() -> bool:
            watch.ask_stats(answers.append)
            return bool(answers) and answers[-1].idle_pages == 4

        watch.until(are_all_idle)


def take_all(connection: socket.socket) -> bytes:
    """What has come, so that there is room for more."""
    came = b""
    with contextlib.suppress(BlockingIOError):
        while some := connection.recv(1 << 20, socket.MSG_DONTWAIT):
            came += some
    return came


def test_no_byte_is_sent_twice_after_an_interrupted_poll(path: str) -> None:
    interrupter, message = Interrupter(), pack(Op.ORDER, range(1 << 17))
    for at in itertools.count(1):
        here, there = socket.socketpair()
        with here, there:
            scheduler = SchedulerSession(path, "one")
            scheduler._connection = here
            scheduler.send(message)
            received = take_all(there)
            is_interrupted = interrupter.stops(at, scheduler.poll)
            received += take_all(there)
            scheduler.poll()
            received += take_all(there)
            assert message.startswith(received), at
        if not is_interrupted:
            break
    assert at > 10


@pytest.mark.parametrize("is_full", [False, True])
def test_a_deadline_begins_when_the_question_is_sent(
    is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now * session.JOINING))
    ours, server = socket.socketpair()
    with server:
        a = SchedulerSession("", "a")
        a._connection = ours
        while is_full and not a._outbox:
            a.touch(bytes(1 << 16))
        a.hold(key_of("x"), lambda _: None)
        now = 0.9
        a.touch(key_of("x"))  # needs no answer
        while a._outbox:
            server.recv(1 << 16)
            a.poll()
        now = 1.8 if is_full else 0.95
        a.poll()
        assert a.is_joined
        now = 2.0 if is_full else 1.1
        a.poll()
        assert not a.is_joined


def test_a_lost_server_is_tried_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "FIRST_PAUSE", 1.0)
    monkeypatch.setattr(session, "LONGEST_PAUSE", 8.0)
    a, pauses, now = SchedulerSession("", "a"), list[float](), [0.0]
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))
    fails = OSError("it is not there")
    # It is back for 7 s twice, gone for hours, back for 8 s, and gone.
    monkeypatch.setattr(a, "join", Mock(side_effect=[None, None, fails, fails, None, fails]))
    lasts = iter([0.0, 7.0, 7.0, 3600.0, 3600.0, 8.0, 3600.0])

    def until_lost() -> None:
        now[0] += next(lasts)

    def is_closing(_: object, pause: float) -> bool:
        pauses.append(pause)
        return len(pauses) == 7

    monkeypatch.setattr(a, "_until_lost", until_lost)
    monkeypatch.setattr(a._changed, "wait_for", is_closing)
    a._run()
    assert pauses == [1, 2, 4, 8, 8, 1, 2]


def test_a_reset_with_an_earlier_number_is_noticed(
    path: str,
) -> None:
    with server_process(path) as server, split(path, "a") as a:
        a.reset()
        a.until(lambda: not a.is_asking)
        server.kill()
        with serving(path) as fresh, split(path, "b") as b:
            a.until(lambda: a.is_joined and a._generation == fresh._generation)
            a.store("x")  # there are pages for the next store
            b.reset()
            b.until(lambda: not b.is_asking)
            a.indices("x")
            a.store("y")
            assert a.indices("y") == [0]


def test_a_reset_right_behind_joining_is_noticed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(path) as server, split(path, "a") as a, contextlib.closing(worker_of(path, "b")):
        receive, calls = session.receive, itertools.count()

        def late(*arguments: Any) -> Any:
            if next(calls) == 1:  # behind the greeting
                sessions = server._sessions.values
                assert in_time(lambda: sum(one.is_scheduler for one in sessions()) == 2)
                a.reset()
                a.until(lambda: not a.is_asking)
            return receive(*arguments)

        monkeypatch.setattr(session, "receive", late)
        with contextlib.closing(Scheduler(path, "b")) as b:
            b.store("x")
            assert b.indices("x") == [0]


@pytest.mark.parametrize("when", ["it is lost", "it hangs"])
def test_an_unheard_reset_is_told_again(
    path: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with server_process(path) as server, split(path, "a") as a:
        a.store("abc")
        assert a.indices("abc") == [0, 1, 2]
        server.send(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(a, "_deadline", 0.1)
            if when == "it hangs":
                a.reset()
            a.hold(a.keys("a"), lambda _: None)
            a.until(lambda: not a.is_joined)
        if when == "it is lost":
            a.reset()
        server.send(signal.SIGCONT)
        a.until(lambda: a.is_joined)
        assert a.indices("abc") == []
        a.store("abc")
        assert a.indices("abc") == [0, 1, 2]
        before = a._session
        a._connection.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        a.until(lambda: a.is_joined and a._session != before)
        assert a.indices("abc") == [0, 1, 2], "it has heard of the reset"


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_worker_that_could_not_pin_joins_later(path: str, error: type[Exception]) -> None:
    class Pools(RemotePools):
        can_pin, has_failed = True, False

        def attach(self, handles: Any) -> None:
            if not Pools.can_pin:
                Pools.has_failed = True
                raise error("not pinned")
            super().attach(handles)

    with server_process(path) as server:
        worker, scheduler = worker_of(path, "a", Pools), Scheduler(path, "a")
        Pools.can_pin = False
        server.kill()
        with serving(path), contextlib.closing(worker), contextlib.closing(scheduler):
            scheduler.until(lambda: Pools.has_failed)
            Pools.can_pin = True
            scheduler.until(lambda: scheduler.is_joined)
            scheduler.store("ab")
            assert scheduler.indices("ab") == [0, 1]


def test_two_engines_of_one_name_are_refused(path: str) -> None:
    with serving(path), split(path, "a"):
        for join in (worker_of, Scheduler):
            with pytest.raises(
                ValueError, match=r"another engine, process .* has the name 'a' at "
            ):
                join(path, "a")
