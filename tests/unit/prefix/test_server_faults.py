"""Engines and servers that die, hang or talk nonsense, each a process of its own."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from below_engine import bytes_of, key_of
from error_text import error_text
from held_requests import resume
from interrupts import Interrupter
from logged import logged
from patience import PATIENCE, in_time
from served_engine import (
    PAGE_BYTES,
    ServedEngine,
    engine_process,
    server_process,
    serving,
)

from torch_kvswap import PagedLayout, PrefixCache
from torch_kvswap._native import process_lock, rendezvous
from torch_kvswap.cli import serve
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.prefix import peers, remote_manager, session
from torch_kvswap.prefix import server as page_server
from torch_kvswap.prefix.manager import Lookup
from torch_kvswap.prefix.protocol import HEAD, Op, Outcome, pack, pack_keys
from torch_kvswap.prefix.server import PageServer

PROMPT = list("abcdefgh")
KEYS = list(map(key_of, PROMPT))
NOTHING = Lookup(0, 0, 0)
# An engine stores a to d, and then has a load, a store and a lease in its hands.
HOLDS = """
engine.compute("abcd")
engine.prefixes.load(list(map(key_of, "ab")), [32, 33])
held = engine.prefixes.store([key_of("c")], [2], hold=True)
engine.hold("efgh")
"""
DYING = {
    "between messages": "",
    "inside a message": "engine.session._connection.sendall(b'1234567')",
    "with an answer unread": """
from torch_kvswap.prefix.protocol import Op, pack_keys
engine.session.poll = lambda: None
engine.session._connection.sendall(pack_keys(Op.RESERVE, [99, 0], [key_of("z")]))
""",
    "after it has lost the connection": "engine.session._connection.close()",
}


def counts(engine: ServedEngine) -> tuple[int, int, int, int]:
    """Pages that are free, idle, being filled, and otherwise held."""
    of = engine.pages
    held = of.pages - of.free_pages - of.idle_pages - of.filling_pages
    return of.free_pages, of.idle_pages, of.filling_pages, held


@pytest.mark.parametrize("dies", DYING)
def test_a_killed_engines_pages_come_back(dies: str, path: str) -> None:
    with serving(path) as server, ServedEngine(path) as engine:
        with engine_process(path, HOLDS + DYING[dies]) as other:
            if dies == "after it has lost the connection":  # its copies may still run
                (its,) = (of for of in server._sessions.values() if of.pid == other.pid)
                engine.until(lambda: its.connection is None)
            filling = 5 if dies == "with an answer unread" else 4
            engine.until(lambda: counts(engine) == (28 - filling, 1, filling, 3))
            assert engine.hold(range(30)) is None  # there are not as many pages
            other.send(signal.SIGKILL)
            engine.until(lambda: counts(engine) == (28, 4, 0, 0))
        assert engine.load("abcd") == 4
        assert engine.find("e").found == 0
        engine.compute("efgh")
        assert engine.load(PROMPT) == 8


def test_a_forked_child_keeps_its_engines_pages(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free, answers = peers.is_free, list[bool]()
    monkeypatch.setattr(peers, "is_free", lambda lock: answers.append(is_free(lock)) or answers[-1])
    monkeypatch.setattr(peers, "_LOCK_SECONDS", 0.001)
    monkeypatch.setattr(peers, "_FORK_SECONDS", 0.0)
    forks = f"""
import os, signal
child = os.fork()
if child == 0:
    os.close(1)
    signal.pause()
open({path + ".child"!r}, "w").write(str(child))
"""
    with serving(path), ServedEngine(path) as engine, logged() as warnings:
        with engine_process(path, HOLDS + forks) as other:
            before = (24, 1, 4, 3)
            engine.until(lambda: counts(engine) == before)
            other.send(signal.SIGKILL)
            other.wait()
        child = int(Path(f"{path}.child").read_text())
        try:
            asked = len(answers)
            engine.until(lambda: len(answers) > asked + 10)
            assert not any(answers)
            assert counts(engine) == before
            (warning,) = (one for one in warnings if "forked" in one)
            assert f"process {other.pid} has ended" in warning
        finally:
            os.kill(child, signal.SIGKILL)
        engine.until(lambda: counts(engine) == (28, 4, 0, 0))


def test_a_lock_that_fails_is_asked_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = iter([OSError(errno.ENOLCK, "no memory")])

    def is_free(lock: int) -> bool:
        for error in fails:
            raise error
        return process_lock.is_free(lock)

    with serving(path), ServedEngine(path) as engine:
        with engine_process(path, HOLDS) as other:
            monkeypatch.setattr(peers, "is_free", is_free)
            other.send(signal.SIGKILL)
            engine.until(lambda: counts(engine) == (28, 4, 0, 0))
        assert not list(fails)


def test_pages_being_written_are_quarantined(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "QUARANTINE", 5.0)
    now = 0.0
    with serving(path) as server, ServedEngine(path) as engine:
        server._loop.clock = lambda: now
        with ServedEngine(path) as closed, engine_process(path, HOLDS) as other:
            closed.hold("xyz")
            other.send(signal.SIGKILL)
        engine.until(lambda: len(server._sessions) == 1)
        assert counts(engine) == (21, 4, 4, 3)  # the engine that was closed has none
        now = 4.9
        server._loop.wake()
        for _ in range(10):
            assert counts(engine) == (21, 4, 4, 3)
        now = 5.0
        server._loop.wake()
        engine.until(lambda: counts(engine) == (25, 7, 0, 0))


def test_an_engine_closed_without_connection_keeps_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FIRST_PAUSE", PATIENCE)  # before it comes again
    with serving(path), ServedEngine(path) as engine:
        with ServedEngine(path) as other:
            other.compute("abcd")
            held = other.prefixes.store([key_of("c")], [2], hold=True)
            assert held.lease is not None
            other.prefixes.poll()
            connection: Any = other.session._connection
            connection.shutdown(socket.SHUT_RDWR)
            assert other.prefixes.lookup(KEYS) == NOTHING
            assert counts(engine) == (28, 3, 0, 1)
        engine.until(lambda: counts(engine) == (28, 4, 0, 0))


def test_a_stopped_engine_keeps_its_pages(path: str) -> None:
    with serving(path), ServedEngine(path) as engine, engine_process(path, HOLDS) as other:
        other.send(signal.SIGSTOP)
        before = counts(engine)
        assert before == (24, 1, 4, 3)
        for _ in range(100):
            assert counts(engine) == before


def test_pages_of_a_lost_device_stay_held_without_connection(path: str) -> None:
    with serving(path, 4), ServedEngine(path) as engine, ServedEngine(path) as other:
        store = engine.prefixes._manager.prepare_store([b"".join(map(key_of, range(4)))])
        store._end(Outcome.LOST, [])
        engine.session.poll()
        engine.session._connection.shutdown(socket.SHUT_RDWR)
        engine.session.poll()
        assert engine.session._has_jobs()  # so it does not join again, which would free them
        assert other.prefixes.store([key_of(4)], [0]).state == "full"
        engine.prefixes.close()
        other.until(lambda: other.prefixes.store([key_of(4)], [0]).state == "storing")


class ShortSends:
    """A connection on which each send is cut short, as by a signal."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, data: bytes, flags: int = 0) -> int:
        return self._connection.send(data[:100], flags)


def test_a_request_cut_short_is_sent_to_its_end(path: str) -> None:
    with serving(path), ServedEngine(path) as engine:
        engine.session._connection = ShortSends(engine.session._connection)
        assert engine.prefixes.lookup(list(map(key_of, range(100)))).found == 0
        assert engine.is_served


@pytest.mark.parametrize("pages", [8, 32, 64])
def test_engines_outlive_a_killed_server(pages: int, path: str) -> None:
    """The next server has fewer pages, as many, or more."""
    with server_process(path) as server, ServedEngine(path) as engine:
        engine.compute(PROMPT)
        held = engine.prefixes.store(KEYS, range(8), hold=True)
        server.kill()
        assert engine.prefixes.lookup(KEYS) == NOTHING
        assert engine.hold("xyz") is None
        assert engine.prefixes.load(KEYS, range(8)) is None
        assert resume(engine.prefixes, held, KEYS, range(8)) == "lost"
        assert engine.prefixes.store(KEYS, range(8), hold=True).state == "full"
        engine.prefixes.touch(KEYS)
        assert (engine.pages.pages, engine.pages.refused) == (0, 2)
        with serving(path, pages):
            engine.until(lambda: engine.is_served)
            assert engine.pages.free_pages == pages
            assert engine.prefixes.lookup(KEYS) == NOTHING
            with ServedEngine(path) as other:
                for first in range(0, pages, 8):
                    names = [f"{first + place}" for place in range(8)]
                    engine.compute(names)
                    assert other.load(names) == 8
            assert engine.pages.free_pages == 0
            assert engine.prefixes.pools[0].num_pages == pages


def test_an_earlier_servers_lease_ends_no_other(path: str) -> None:
    """Each server is a process, so that both count reservations from the same number on."""
    with server_process(path) as server, ServedEngine(path) as engine:
        lost = engine.prefixes.store(KEYS, range(8), hold=True)
        engine.prefixes.poll()
        server.kill()
        assert engine.prefixes.lookup(KEYS) == NOTHING
        with server_process(path):
            engine.until(lambda: engine.is_served)
            held = engine.prefixes.store([key_of("z")], [8], hold=True)
            engine.prefixes.poll()
            assert resume(engine.prefixes, lost, KEYS, range(8)) == "lost"
            assert held.lease is not None
            assert held.lease.let_go()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_jobs_end_before_new_pages_are_used(
    direction: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = defaultdict[session.Session, list[bool]](list)
    may_join_now = session.Session._may_join

    def note(of: session.Session) -> bool:
        answers[of].append(may_join_now(of))
        return answers[of][-1]

    monkeypatch.setattr(session.Session, "_may_join", note)
    with server_process(path) as server, ServedEngine(path) as engine:
        engine.compute(PROMPT)
        job = engine.hold("xyz")
        if direction == "load":
            engine.prefixes.poll()
            job = engine.prefixes.load(KEYS, list(range(32, 40)))
        server.kill()
        # The same pages of another memory. In another process: poll() ends the jobs of all handlers.
        with serving(path), engine_process(path, "engine.compute('stuvwxyz')"):
            may_join = answers[engine.session]
            asked = len(may_join)
            assert engine.prefixes.lookup(KEYS) == NOTHING
            engine.until(lambda: len(may_join) > asked)
            assert not any(may_join), "a job still uses the old pages"
            assert job.result is None  # query() would let it end
            assert [result.ok for result in engine.prefixes.poll()] == [True]
            if direction == "load":
                for place, key in enumerate(KEYS):
                    assert torch.equal(engine.tensor[32 + place], bytes_of(key))
            engine.until(lambda: engine.is_served)
            assert engine.load("stuvwxyz") == 8


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_hung_server_costs_one_deadline(
    path: str, monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    with server_process(path) as server, ServedEngine(path) as engine:
        engine.compute("abcd")
        engine.hold("efgh")
        held = engine.prefixes.store([key_of("z")], [9], hold=True)
        assert held.lease is not None
        memory = engine.prefixes.pools[0].pages.data_ptr()
        server.send(signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr(session, "JOINING", 0.1)
            error = error_text(ServedEngine, path)
        assert error.startswith(f"ConnectionError: no server answers at {path}: timed out")
        connection: Any = engine.session._connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 100_000))
        assert engine.prefixes.lookup(KEYS) == NOTHING
        assert not engine.is_served
        for _ in range(100):  # without waiting
            assert engine.prefixes.lookup(KEYS) == NOTHING
        if is_reset:
            engine.prefixes.reset()
        server.send(signal.SIGCONT)
        for _ in range(100):
            assert not engine.is_served  # its store was not reported
        engine.prefixes.poll()
        engine.until(lambda: engine.is_served)
        found = 0 if is_reset else 4
        assert engine.load("abcd") == found
        assert engine.prefixes.lookup(KEYS) == Lookup(found, found, 0)
        assert counts(engine) == (32 - found, found, 0, 0)
        assert engine.prefixes.pools[0].pages.data_ptr() == memory


def test_an_idle_engine_joins_the_next_server(path: str) -> None:
    with server_process(path) as server, ServedEngine(path) as engine:
        generation = engine.session._generation
        server.kill()
        with server_process(path):
            engine.until(lambda: engine.session._generation not in (0, generation))


def test_a_poll_finds_that_a_server_has_died(path: str) -> None:
    with server_process(path) as server, ServedEngine(path) as engine:
        server.kill()
        engine.until(lambda: not (engine.prefixes.poll() or engine.session.is_joined))


def test_engines_wait_as_long_as_their_server_says(path: str) -> None:
    with serving(path, deadline=2.5 * PATIENCE), ServedEngine(path) as engine:
        connection: Any = engine.session._connection
        seconds = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        assert struct.unpack("ll", seconds)[0] == engine.session._deadline == 2.5 * PATIENCE
    with pytest.raises(ValueError, match=r"deadline is 0; it must be 0\.001 to 3600 s"):
        PageServer(path, PAGE_BYTES, deadline=0)


@pytest.mark.parametrize(
    ("module", "within"), [(session, "next_message"), (remote_manager, "_split")]
)
def test_an_interrupted_call_reserves_nothing(
    module: Any, within: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(path), ServedEngine(path) as engine:
        engine.compute("abcd")

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(module, within, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.prefixes.store(KEYS, range(8), hold=True)
        engine.until(lambda: engine.is_served)
        assert engine.load("abcd") == 4
        assert counts(engine) == (28, 4, 0, 0)


CALLS: dict[str, Callable[[ServedEngine], object]] = {
    "store": lambda engine: engine.hold("ab"),
    "load": lambda engine: engine.prefixes.load(KEYS[4:6], [32, 33]),
    "lookup": lambda engine: engine.prefixes.lookup(KEYS[4:6], hold=True).ready,
    "hold": lambda engine: engine.prefixes.store(KEYS[6:8], [2, 3], hold=True),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_interrupted_call_keeps_a_page(call: str, path: str) -> None:
    interrupter = Interrupter()
    with serving(path) as server, ServedEngine(path) as engine:
        for at in count(1):
            engine.compute("efgh")
            is_interrupted = interrupter.stops(at, partial(CALLS[call], engine))
            engine.prefixes.synchronize()
            engine.prefixes.poll()
            engine.until(lambda: engine.is_served)  # an answer that was lost takes the server along
            assert counts(engine)[2:] == (0, 0), at
            (session,) = server._sessions.values()
            assert not session.has_pages
            engine.prefixes.reset()
            if not is_interrupted:
                break
    assert at > 20


def test_a_second_server_is_refused(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with server_process(path, 4), ServedEngine(path) as engine:
        engine.compute("abcd")
        with pytest.raises(RuntimeError, match="another server has the socket /"):
            PageServer(path, PAGE_BYTES)
        assert serve.main(["--socket", path, "--memory", "1GiB"]) == 1
        assert capsys.readouterr().err == (
            f"another server has the socket {path}; stop it, or pass another path\n"
        )
        assert engine.load("abcd") == 4
    with serving(path), ServedEngine(path) as engine:  # the first one was killed
        assert engine.find("abcd").found == 0


def test_memory_needs_a_unit(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("100", "64GB", "1.5GiB"):
        with pytest.raises(SystemExit):
            serve.main(["--socket", path, "--memory", text])
        assert f"'{text}' is not a whole number of B, KiB, MiB" in capsys.readouterr().err


def test_other_files_are_left_alone(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not a socket"):
        PageServer(str(tmp_path / "file"), PAGE_BYTES)
    with pytest.raises(
        ConnectionError, match=r"file is not a socket; pass the --socket of a server"
    ):
        ServedEngine(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


NONSENSE = {
    "bytes": b"GET / HTTP/1.1\r\n\r\n" * 100,
    "a length of 4 GiB": HEAD.pack((1 << 32) - 1, Op.LOOKUP, 0),
    "more numbers than bytes": HEAD.pack(8, Op.LOOKUP, 2) + bytes(8),
    "an unknown request": pack(99),
    "no request": pack(0),
    "a second hello": pack(Op.HELLO, data=b"{}"),
    "keys without a number": pack(Op.TOUCH, (), b"1"),
    "more keys than there are": pack(Op.RESERVE, [1, 0, 1 << 40]),
    "a negative number of keys": pack(Op.TOUCH, [-1]),
    "half a key": pack(Op.HOLD, [1, 1], b"1234"),
    "no keys": pack(Op.HOLD, [1]),
    "keys of two groups": pack_keys(Op.RESERVE, [1, 0], [KEYS[0], KEYS[1]]),
    "no reservation": pack(Op.END),
    "an unknown outcome": pack(Op.END, [1, 7]),
    "a rejected page without its group": pack(Op.END, [99, Outcome.DONE, 0]),
    "a group that is not there": pack(Op.STATS, [7]),
    "a page that was not borrowed": pack(Op.GIVE_BACK, [0, 3], KEYS[0]),
    "pages that were not borrowed": pack(Op.GIVE_BACK, [0, 7, 1]),
    "no page to give back": pack(Op.GIVE_BACK, [0, 1 << 40]),
}


def wait_until_closed(connection: socket.socket) -> None:
    connection.settimeout(PATIENCE)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(100):
            pass


@pytest.mark.parametrize("is_member", [False, True])
@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_harms_nobody_else(nonsense: str, is_member: bool, path: str) -> None:
    with serving(path) as server, ServedEngine(path) as engine, ServedEngine(path) as other:
        engine.compute("abcd")
        engine.hold("efgh")
        connection: Any = other.session._connection
        if not is_member:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
        with connection:
            connection.sendall(NONSENSE[nonsense])
            wait_until_closed(connection)
        engine.until(lambda: len(server._sessions) == 2 - is_member)
        engine.prefixes.poll()
        assert engine.load(PROMPT) == 8
        assert counts(engine) == (24, 8, 0, 0)


def test_the_collector_may_close_during_a_call(path: str) -> None:
    with serving(path) as server:
        engine: Any = ServedEngine(path)
        engine.itself, of_it = engine, engine.session
        of_it._deadline = 0.1
        del engine

        def call() -> None:
            with of_it._changed:
                gc.collect()

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert in_time(lambda: not server._sessions)


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_an_engine_gone_before_accept_is_harmless(
    has_pidfd: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_pidfd:  # as on kernels before 6.5
        monkeypatch.setattr(rendezvous, "_SO_PEERPIDFD", 9999)
    server = PageServer(path, 4 * PAGE_BYTES, deadline=PATIENCE)  # accepts nobody yet
    for message in (b"", pack(Op.LEAVE)):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(message)
    thread = threading.Thread(target=server.run)
    thread.start()
    with ServedEngine(path) as engine:
        engine.compute("abcd")
        assert engine.load("abcd") == 4
        engine.until(lambda: len(server._sessions) == 1)
    server.stop()
    thread.join(PATIENCE)


def test_an_engine_cannot_end_what_another_has_borrowed(path: str) -> None:
    with serving(path) as server, ServedEngine(path) as engine, ServedEngine(path) as other:
        engine.hold("abcd")
        (held,) = (of.held for of in server._sessions.values() if of.held)
        (store,) = held.values()
        pages = store.pages[0].tolist()
        connection: Any = other.session._connection
        for number in range(4):
            connection.sendall(pack(Op.END, [number, Outcome.DONE]))
        connection.sendall(pack(Op.GIVE_BACK, [0, min(pages)]))
        assert other.prefixes.lookup(KEYS[:4]) == NOTHING  # it has lost the server
        engine.prefixes.poll()
        assert engine.load("abcd") == 4


def test_an_interrupted_poll_ends_each_reservation_once(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(path), ServedEngine(path) as engine, ServedEngine(path) as other:
        engine.hold("abcd")
        send = engine.session.send

        def send_and_interrupt(*arguments: Any) -> None:
            send(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(engine.session, "send", send_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.prefixes.poll()
        engine.prefixes.poll()
        assert not engine.session._jobs
        assert other.load("abcd") == 4


def test_a_hello_that_is_none_is_no_engine(path: str) -> None:
    with serving(path) as server:
        for hello in (b"", b"{", b"[]", b"{}", b'{"session": 0, "groups": [{}]}'):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                connection.sendall(pack(Op.HELLO, data=hello))
                wait_until_closed(connection)
        with ServedEngine(path) as engine:
            engine.compute("a")
            assert engine.load("a") == 1
            assert len(server._sessions) == 1


def test_a_connection_that_says_nothing_is_closed(path: str) -> None:
    with serving(path) as server, ServedEngine(path) as engine:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(path)
            engine.until(lambda: len(server._sessions) == 2)
            engine.compute("a")
            with logged() as warnings:
                server._loop.clock = lambda: time.monotonic() + PATIENCE
                server._loop.wake()
                wait_until_closed(silent)
        assert warnings == [f"process {os.getpid()} has sent nothing for {PATIENCE:g} s"]
        assert engine.load("a") == 1


def test_a_descriptor_that_is_no_lock_is_refused(path: str) -> None:
    with serving(path), socket.socket(socket.AF_UNIX) as connection, logged() as warnings:
        connection.connect(path)
        no_lock = os.open(os.devnull, os.O_PATH)
        rendezvous.send(connection, pack(Op.MEET, data=b"{}")[:3], [no_lock])
        os.close(no_lock)
        wait_until_closed(connection)
    (warning,) = warnings
    assert "Bad file descriptor" in warning


def test_a_handle_without_room_ends_its_connection(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolHandle, "send", mock.Mock(side_effect=BlockingIOError))
    with serving(path), logged() as warnings:
        assert error_text(ServedEngine, path).startswith("ConnectionError: received 0 bytes")
    (warning,) = warnings
    assert warning.endswith("is closed: its socket has no room for the pages' handle")


def test_slow_engines_delay_nobody_and_take_no_memory(path: str) -> None:
    message = pack_keys(Op.LOOKUP, [0, 0], [b"".join(KEYS)])
    with serving(path) as server, ServedEngine(path) as engine, ServedEngine(path) as slow:
        (its,) = (of for of in server._sessions.values() if of.number == slow.session._session)
        connection: Any = slow.session._connection
        connection.setblocking(False)
        slow.session.poll = lambda: None  # type: ignore[method-assign]
        requests = memoryview(message * 20_000)  # it reads no answers
        sent = 0

        def send() -> bool:
            nonlocal sent
            with contextlib.suppress(BlockingIOError):
                sent += connection.send(requests[sent:])
            return bool(its._unsent)

        engine.until(send)
        with socket.socket(socket.AF_UNIX) as half:
            half.connect(path)
            half.sendall(message[: len(message) // 2])
            engine.compute(PROMPT)
            assert engine.load(PROMPT) == 8
        assert 0 < len(its._unsent) < len(message)  # an answer, and no more was received
        assert len(its._received) < 1 << 17
        assert sent < len(requests)
        # When it reads, all that it has sent is answered.
        answers = sent // len(message) * (HEAD.size + 4 * 8)
        connection.settimeout(PATIENCE)
        while answers > 0:
            answers -= len(connection.recv(1 << 16))
        assert answers == 0
        connection.settimeout(None)
        connection.sendall(requests[sent:][: -sent % len(message)])
        assert len(connection.recv(100)) == HEAD.size + 4 * 8


def test_long_answers_come_in_parts(path: str) -> None:
    """A prompt of 100,000 keys."""
    tensor = torch.zeros(100_000, 1, dtype=torch.uint8)
    with serving(path, 400):
        prefixes = PrefixCache.connect(path, PagedLayout([tensor]), model="m")
        keys = b"".join(number.to_bytes(32, "little") for number in range(90_000))
        tensor[:90_000] = torch.arange(90_000, dtype=torch.uint8)[:, None]
        prefixes.store(keys, range(90_000)).job.synchronize()  # type: ignore[union-attr]
        prefixes.poll()
        assert prefixes.lookup(keys) == Lookup(90_000, 90_000, 0)
        prefixes.load(keys, range(90_000)[::-1]).synchronize()  # type: ignore[union-attr]
        assert torch.equal(tensor[:90_000].flip(0)[:, 0], torch.arange(90_000, dtype=torch.uint8))
        prefixes.close()
