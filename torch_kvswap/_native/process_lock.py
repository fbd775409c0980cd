"""A lock that is held until this process, and all children forked from it, have ended.

The kernel frees it with the last descriptor of its file, which forked children inherit, as they
inherit what keeps copies of a GPU running: those of a process that has forked after CUDA started go
on for a while when it is killed, and a pidfd does not wait for them. A killed process closes the
descriptors that it has opened last first: import this before CUDA starts.
"""

from __future__ import annotations

import fcntl
import os

from torch_kvswap._native.descriptors import Descriptors

_files: list[int] = []  # of this process and those that it was forked from; they stay open


def _hold() -> None:
    _files.append(os.memfd_create("kvswap_process_lock", os.MFD_CLOEXEC))
    fcntl.flock(_files[-1], fcntl.LOCK_EX)


def open_lock() -> Descriptors:
    """Opens the lock of this process anew, for another one: see is_free()."""
    return Descriptors(os.open, f"/proc/self/fd/{_files[-1]}", os.O_RDWR | os.O_CLOEXEC)


def is_free(lock: int) -> bool:
    """Whether the process whose lock this is, and all that were forked from it, are gone.

    Raises OSError if the kernel cannot say, or the descriptor can be no lock.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_hold()
os.register_at_fork(after_in_child=_hold)
