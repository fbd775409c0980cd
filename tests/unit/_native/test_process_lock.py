"""The lock that says whether a process and all that were forked from it are gone."""

from __future__ import annotations

import os
import socket

from processes import in_child

from torch_kvswap._native.process_lock import is_free, open_lock


def send_lock(connection: socket.socket) -> bool:
    lock = open_lock()
    return socket.send_fds(connection, [b"!"], lock.fds) == 1


def test_a_process_and_its_forked_child_have_a_lock_each() -> None:
    lock, (here, there) = open_lock(), socket.socketpair()
    (own,) = lock.fds
    with here, there:
        assert in_child(lambda: send_lock(there))
        _, (of_child,), _, _ = socket.recv_fds(here, 1, 1)
    assert (is_free(own), is_free(of_child)) == (False, True)
    os.close(of_child)
