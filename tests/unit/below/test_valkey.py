"""A Valkey server as a store of pages, also one that is full, hangs, or is killed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from select import select

import pytest
from error_text import error_text
from expecttest import assert_expected_inline
from patience import in_time
from store_calls import PAGE, check_put_get_and_delete, get_pages, pages, put_pages, trailers
from valkey_server import ValkeyServer, server

from torch_kvswap.below import ValkeyStore, valkey

__all__ = ["server"]


@pytest.fixture
def store(server: ValkeyServer) -> Iterator[ValkeyStore]:
    connected = ValkeyStore(server.url)
    yield connected
    server.go_on()
    connected.close()


def test_what_was_put_stays_until_deleted(store: ValkeyStore) -> None:
    check_put_get_and_delete(store)


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 1])
def test_a_value_of_another_size_is_not_there(store: ValkeyStore, size: int) -> None:
    put_pages(store, ["g"])
    store.put(["key"], pages(b"k", nbytes=size) if size else [memoryview(b"")], trailers(b"t"))
    assert get_pages(store, ["key", "g", "g"]) == [False, True, True], "it is in step"


CALLS: list[Callable[[ValkeyStore], object]] = [
    lambda store: put_pages(store, ["a", "b"]),
    lambda store: get_pages(store, ["a", "b"]),
    lambda store: store.exists(["a", "b"]),
    lambda store: store.delete(["a", "b"]),
]


@pytest.mark.parametrize("call", CALLS, ids=["put", "get", "exists", "delete"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_killed_server_fails_calls_until_back(
    is_new: bool, call: Callable[[ValkeyStore], object], server: ValkeyServer, store: ValkeyStore
) -> None:
    put_pages(store, ["a", "b"])
    if is_new:
        store.close()  # which only closes connections
    server.kill()
    with pytest.raises(ConnectionError):
        call(store)
    server.start()
    assert store.exists(["a", "b"]) == [False, False], "empty"
    put_pages(store, ["a", "b"])
    assert get_pages(store, ["a", "b"]) == [True, True]


@pytest.mark.parametrize("call", CALLS, ids=["put", "get", "exists", "delete"])
def test_a_closed_idle_connection_is_replaced(
    call: Callable[[ValkeyStore], object], server: ValkeyServer, store: ValkeyStore
) -> None:
    put_pages(store, ["a", "b"])
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"CLIENT KILL TYPE normal\r\n")  # as its option `timeout` does
        assert client.recv(100).startswith(b":")
    (idle,) = store._idle
    assert in_time(lambda: bool(select([idle._socket], [], [], 0)[0]))
    call(store)
    assert store._idle != [idle]


@pytest.mark.parametrize("call", CALLS, ids=["put", "get", "exists", "delete"])
def test_a_server_that_hangs_is_waited_for_once(
    call: Callable[[ValkeyStore], object],
    server: ValkeyServer,
    store: ValkeyStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_pages(store, ["a", "b"])
    monkeypatch.setattr(valkey, "TIMEOUT", 0.1)
    server.hang()
    with pytest.raises(TimeoutError, match=f"no answer from 127.0.0.1:{server.port} in 0.1 s"):
        call(store)
    monkeypatch.undo()
    server.go_on()
    put_pages(store, ["a", "b"])
    assert get_pages(store, ["a", "b"]) == [True, True], "on another connection"


@pytest.mark.parametrize(
    "answer", [b"+" * (1 << 20), b"$" + b"1" * 1000 + b"\r\n", b"$page\r\n", b"HTTP/1.1 400\r\n"]
)
def test_a_foreign_server_is_refused_at_once(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            server, _ = listener.accept()
            with server, suppress(ConnectionError):  # the store may not wait for the rest
                server.sendall(answer)  # to wait for the end of this line takes for ever
                while server.recv(1 << 20):
                    pass

        serving = threading.Thread(target=serve)
        serving.start()
        store = ValkeyStore(f"valkey://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ConnectionAbortedError, match="not a Valkey server: it answers"):
            get_pages(store, ["a"])
        serving.join()


def test_a_full_server_keeps_what_it_has() -> None:
    running = ValkeyServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    store = ValkeyStore(running.url)
    put_pages(store, ["a"])
    large = [f"large {place}" for place in range(16)]
    with pytest.raises(OSError, match="OOM"):
        store.put(large, pages(*[b"x"] * 16, nbytes=1 << 20), trailers(*[b"t"] * 16))
    assert get_pages(store, ["a", "a"]) == [True, True]
    store.close()
    running.kill()


def test_a_password_is_needed_if_set() -> None:
    running = ValkeyServer("--requirepass", "s@cret")
    address = running.url.removeprefix("valkey://")
    for login, expected in (("", "NOAUTH"), (":wrong@", "WRONGPASS"), ("default:s%40cret@", "")):
        store = ValkeyStore(f"valkey://{login}{address}")
        with pytest.raises(OSError, match=expected) if expected else nullcontext():
            put_pages(store, ["a"])
        store.close()
    running.kill()


def test_a_user_logs_in_with_its_own_password(server: ValkeyServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"ACL SETUSER me on >s@cret ~* +@all\r\nACL SETUSER default off\r\n")
        assert client.recv(100) == b"+OK\r\n+OK\r\n"
    address = server.url.removeprefix("valkey://")
    store = ValkeyStore(f"valkey://me:s%40cret@{address}")
    put_pages(store, ["a"])
    store.close()
    for login in ("me:@", ":s%40cret@"):
        with pytest.raises(OSError, match="WRONGPASS"):
            put_pages(ValkeyStore(f"valkey://{login}{address}"), ["a"])


def test_a_user_without_a_password_is_refused() -> None:
    assert_expected_inline(
        error_text(ValkeyStore, "valkey://user@there"),
        """\
ValueError: below names a user of the Valkey server without a password, which cannot log
in; pass 'valkey://USER:PASSWORD@HOST:PORT'""",
    )


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("valkey:", "it names no host"),
        ("valkey://", "it names no host"),
        ("valkey://there/1", "something stands behind the port"),
        ("redis://there", "it names no host"),
        ("valkey://user:part#secret@there", "its port is not a number up to 65535"),
        ("valkey://there:port", "its port is not a number up to 65535"),
        ("valkey://there:65536", "its port is not a number up to 65535"),
        ("valkey://user:secret\u2100@there", "it cannot be parsed"),
    ],
)
def test_urls_that_name_no_server_are_refused(url: str, why: str) -> None:
    text = error_text(ValkeyStore, url)
    said = f"ValueError: below is not the URL of a Valkey server: {why}; pass"
    assert text.replace("\n", " ").startswith(said)
    assert "secret" not in text
