"""A Valkey server as a store of pages, also one that is full, hangs, or is killed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from error_text import error_text
from expecttest import assert_expected_inline
from store_calls import PAGE, check_set_get_and_delete, get_pages, outcome, pages, set_pages
from valkey_server import ValkeyServer, server

from torch_kvswap.below import ValkeyStore, valkey

__all__ = ["server"]


@pytest.fixture
def store(server: ValkeyServer) -> Iterator[ValkeyStore]:
    connected = ValkeyStore(server.url)
    yield connected
    server.go_on()
    connected.close()


def test_what_was_set_is_there_until_it_is_deleted(store: ValkeyStore) -> None:
    check_set_get_and_delete(store)


def test_a_page_that_is_larger_than_the_buffers_of_sockets_is_whole(store: ValkeyStore) -> None:
    (page,) = pages(b"x", nbytes=16 << 20)
    page[5_000_000:5_000_100] = b"y" * 100
    assert outcome(store, store.submit_batch_set(["key"], [page]))[1]
    (into,) = pages(b".", nbytes=16 << 20)
    assert outcome(store, store.submit_batch_get(["key"], [into]))[1]
    assert into == page


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE + 1])
def test_a_value_of_another_size_is_not_there(store: ValkeyStore, size: int) -> None:
    assert set_pages(store, ["g"])
    if size:
        assert outcome(store, store.submit_batch_set(["key"], pages(b"k", nbytes=size)))[1]
    else:
        assert outcome(store, store.submit_batch_set(["key"], [memoryview(b"")]))[1]
    _, is_right, error, are_right = outcome(
        store, store.submit_batch_get(["key", "g"], pages(b".", b"."))
    )
    assert (is_right, error, are_right) == (True, "", [False, True])
    assert get_pages(store, ["g"] * 8) == [True] * 8, "each connection is in step"


CALLS: list[Callable[[ValkeyStore], int]] = [
    lambda store: store.submit_batch_set(["a", "b"], pages(b"a", b"b")),
    lambda store: store.submit_batch_get(["a", "b"], pages(b".", b".")),
    lambda store: store.submit_batch_exists(["a", "b"]),
    lambda store: store.submit_batch_delete(["a", "b"]),
]


@pytest.mark.parametrize("call", CALLS, ids=["set", "get", "exists", "delete"])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_server_that_is_killed_answers_nothing_and_one_that_comes_back_does(
    when: str, call: Callable[[ValkeyStore], int], server: ValkeyServer, store: ValkeyStore
) -> None:
    assert set_pages(store, ["a", "b"])
    if when == "during":
        server.hang()
        number = call(store)
        server.kill()
        assert not any(outcome(store, number)[3] or ())
    else:
        if when == "after":
            assert outcome(store, call(store))[1]
        server.kill()
        _, is_right, error, are_right = outcome(store, call(store))
        assert (is_right, are_right) == (False, [False, False])
        assert "server" in error or "connect" in error or "Broken pipe" in error
    server.start()
    assert outcome(store, store.submit_batch_exists(["a", "b"]))[3] == [False, False], "empty"
    assert set_pages(store, ["a", "b"])
    assert get_pages(store, ["a", "b"]) == [True, True]


@pytest.mark.parametrize("call", CALLS, ids=["set", "get", "exists", "delete"])
def test_a_server_that_hangs_holds_up_each_thread_once(
    call: Callable[[ValkeyStore], int],
    server: ValkeyServer,
    store: ValkeyStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set_pages(store, ["a", "b"])
    store._tasks.put(None)  # one thread less, and so on: a single one is left
    store._tasks.put(None)
    store._tasks.put(None)
    monkeypatch.setattr(valkey, "TIMEOUT", 0.1)
    server.hang()
    number = store.submit_batch_get(list("ab" * 50), pages(*[b"."] * 100))
    _, is_right, error, are_right = outcome(store, number)
    assert (is_right, are_right) == (False, [False] * 100)
    assert error == f"no answer from 127.0.0.1:{server.port} in 0.1 s"
    _, is_right, error, _ = outcome(store, call(store))
    assert (is_right, "no answer" in error) == (False, True)
    monkeypatch.undo()
    server.go_on()
    assert set_pages(store, ["a", "b"])
    assert get_pages(store, ["a", "b"]) == [True, True]


def test_closing_does_not_wait_for_a_server_that_hangs(
    server: ValkeyServer, store: ValkeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey, "TIMEOUT", None)
    server.hang()
    into = pages(*[b"."] * 20)
    store.submit_batch_get(["a"] * 20, into)
    store.close()
    assert not [thread for thread in store._threads if thread.is_alive()]
    store.close()


@pytest.mark.parametrize(
    "answer", [b"+" * (1 << 20), b"$" + b"1" * 1000 + b"\r\n", b"$page\r\n", b"HTTP/1.1 400\r\n"]
)
def test_a_server_of_another_kind_is_refused_at_its_first_line(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = ValkeyStore(f"valkey://127.0.0.1:{listener.getsockname()[1]}")
        number = store.submit_batch_get(["a"], pages(b"."))
        server, _ = listener.accept()
        with server:
            server.sendall(answer)  # and no more: to wait for the end of the line takes for ever
            _, is_right, error, _ = outcome(store, number)
    store.close()
    assert (is_right, "it is no Valkey server, which answers" in error) == (False, True)


def test_a_full_server_refuses_and_keeps_what_it_has() -> None:
    running = ValkeyServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    store = ValkeyStore(running.url)
    assert set_pages(store, ["a"])
    large = [f"large {place}" for place in range(16)]
    _, is_right, error, taken = outcome(
        store, store.submit_batch_set(large, pages(*[b"x"] * 16, nbytes=1 << 20))
    )
    assert (is_right, error[:3]) == (False, "OOM")
    assert outcome(store, store.submit_batch_exists(large))[3] == taken
    assert get_pages(store, ["a", "a"]) == [True, True]
    store.close()
    running.kill()


def test_a_password_is_needed_if_the_server_has_one() -> None:
    running = ValkeyServer("--requirepass", "s@cret")
    address = running.url.removeprefix("valkey://")
    for login, expected in (("", "NOAUTH"), (":wrong@", "WRONGPASS"), ("default:s%40cret@", "")):
        store = ValkeyStore(f"valkey://{login}{address}")
        _, is_right, error, _ = outcome(store, store.submit_batch_set(["a"], pages(b"a")))
        assert (is_right, error.split(" ")[0]) == (not expected, expected)
        store.close()
    running.kill()


def test_a_user_logs_in_with_its_own_password(server: ValkeyServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"ACL SETUSER me on >s@cret ~* +@all\r\nACL SETUSER default off\r\n")
        assert client.recv(100) == b"+OK\r\n+OK\r\n"
    address = server.url.removeprefix("valkey://")
    for login, expected in (("me:s%40cret@", True), ("me:@", False), (":s%40cret@", False)):
        store = ValkeyStore(f"valkey://{login}{address}")
        assert outcome(store, store.submit_batch_set(["a"], pages(b"a")))[1] == expected
        store.close()


def test_a_user_without_a_password_is_refused() -> None:
    assert_expected_inline(
        error_text(ValkeyStore, "valkey://user@there"),
        """\
ValueError: below names a user of the Valkey server without a password, which cannot log
in; pass 'valkey://USER:PASSWORD@HOST:PORT'""",
    )


@pytest.mark.parametrize(
    "url",
    [
        "valkey:",
        "valkey://",
        "valkey://there/1",
        "redis://there",
        "valkey://user:part#secret@there",
    ],
)
def test_urls_that_name_no_server_are_refused(url: str) -> None:
    assert error_text(ValkeyStore, url).startswith("ValueError: below is no URL of a Valkey")
