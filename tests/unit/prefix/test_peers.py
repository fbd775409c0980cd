"""Processes that connect to a socket, their messages and their ends, without a server's pages."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import socket
import threading
from array import array
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest import mock

import pytest
from logged import logged
from patience import PATIENCE, in_time

from torch_kvswap.prefix.peers import EventLoop, Listener, Peer
from torch_kvswap.prefix.protocol import Status, pack
from torch_kvswap.prefix.session import receive


class Echo(Peer):
    """Sends what it gets."""

    def take(self, kind: int, numbers: array[int], data: bytes) -> None:
        self.send(pack(kind, numbers, data))

    def lost(self) -> None:
        self.drop()

    def ended(self) -> None:
        raise AssertionError


class Service:
    """Accepts peers in a thread.

    Attributes:
        peers (list[Echo]): that were accepted.
    """

    def __init__(self, path: str) -> None:
        self.path, self.loop, self.peers = path, EventLoop(), list[Echo]()
        self.listener = Listener(path, self.loop, self.admit)
        self.thread = threading.Thread(target=self.loop.run, args=[lambda: None])
        self.thread.start()

    def admit(self, *of: Any) -> None:
        self.peers.append(Echo(self.loop, *of))

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        for peer in self.peers:
            peer.drop()
        self.listener.close()
        self.loop.close()

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        connection.connect(self.path)
        return connection


@pytest.fixture
def service(path: str) -> Iterator[Service]:
    with contextlib.closing(Service(path)) as made:
        yield made


def answer(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(pack(Status.DONE, data=data))
    return receive(connection, bytearray())[2]


def refusal(connection: socket.socket) -> str:
    try:
        receive(connection, bytearray())
    except ValueError as error:
        return str(error)
    raise AssertionError("it is served")


def test_a_message_may_come_in_parts(service: Service) -> None:
    message = pack(Status.DONE, [1, 2], b"data")
    with service.connect() as connection:
        for at in range(len(message)):
            connection.sendall(message[at : at + 1])
        assert receive(connection, bytearray())[1:] == (array("q", [1, 2]), b"data")


def test_a_service_without_descriptors_says_so_and_waits(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    now = 0.0
    service.loop.clock = lambda: now
    with contextlib.ExitStack() as stack, logged() as warnings:
        for connection in connections:
            stack.enter_context(connection).settimeout(PATIENCE)
        gc.collect()  # frees no descriptor later
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while (filler := os.open(os.devnull, os.O_RDONLY)) < highest:
            stack.callback(os.close, filler)
        stack.callback(os.close, filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (filler + 1, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        watched = service.loop._selector.get_map()
        for connection in connections[:3]:
            assert in_time(lambda: service.listener._socket in watched)
            if connection is connections[2]:  # another thread takes the one in reserve
                monkeypatch.setattr(os, "dup", mock.Mock(side_effect=OSError(errno.EMFILE, "none")))
            connection.connect(service.path)
            assert "this server has no file descriptors left; raise" in refusal(connection)
        assert in_time(lambda: not service.loop._timers.empty())  # it has paused
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connections[3].connect(service.path)
        assert not service.peers
        now = 1.0
        service.loop.wake()
        assert answer(connections[3], b"x") == b"x"
        assert len(warnings) == 1


@pytest.mark.parametrize("watched", [0, 1])
def test_a_process_that_cannot_be_watched_is_refused(watched: int, service: Service) -> None:
    calls, watch = count(), service.loop.watch

    def fail(*arguments: Any) -> None:
        if next(calls) == watched:
            raise OSError(errno.ENOSPC, "no space")
        watch(*arguments)

    before = set(os.listdir("/proc/self/fd"))
    patch = mock.patch.object(service.loop, "watch", fail)
    with patch, logged() as warnings, service.connect() as connection:
        assert "the kernel watches no more engines" in refusal(connection)
    assert len(warnings) == 1
    assert in_time(lambda: set(os.listdir("/proc/self/fd")) <= before)
    with service.connect() as connection:
        assert answer(connection, b"x") == b"x"


def test_a_dropped_process_unwatches_no_other(service: Service) -> None:
    with service.connect() as connection, service.connect() as other:
        assert [answer(connection, b"x"), answer(other, b"y")] == [b"x", b"y"]
        dropped, alive = service.peers
        number = dropped._process
        connection.close()
        assert in_time(lambda: dropped._process is None)
        assert number is not None
        assert alive._process is not None
        os.dup2(alive._process, number)  # the kernel gives the number again
        service.loop.watch(number, lambda _: None)
        dropped._process_ended(0)  # select() had returned before
        assert number in service.loop._selector.get_map()
        service.loop.unwatch(number)
        os.close(number)


def test_an_error_in_a_timer_ends_no_loop(service: Service) -> None:
    with logged() as warnings, service.connect() as connection:
        service.loop.later(0.0, mock.Mock(side_effect=MemoryError))
        service.loop.wake()
        assert in_time(lambda: warnings == ["an error in the server, which goes on"])
        assert answer(connection, b"x") == b"x"
