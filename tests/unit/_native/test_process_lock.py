"""The lock that says whether a process and all that were forked from it are gone."""

from __future__ import annotations

import os
import socket
from contextlib import closing

from processes import in_child

from torch_kvswap._native.process_lock import is_free, open_lock


def test_a_forked_child_has_its_own_lock() -> None:
    here, there = socket.socketpair()

    def send() -> int:
        with closing(open_lock()) as lock:
            return socket.send_fds(there, [b"!"], lock.fds)

    with here, there, closing(open_lock()) as own:
        assert in_child(send) == 1
        _, (of_child,), _, _ = socket.recv_fds(here, 1, 1)
        assert (is_free(own.fd), is_free(of_child)) == (False, True)
    os.close(of_child)
