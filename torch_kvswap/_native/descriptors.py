"""File descriptors that no interruption leaves open."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Callable
from itertools import chain
from typing import Any


class Descriptors:
    """File descriptors of a call, closed by close() or when this object is dropped.

    KeyboardInterrupt comes between byte codes. From the call until the descriptors are stored here
    there is none, nor from closing until they are forgotten: both are one call of a C function.

    Args:
        call: returns a descriptor, or what socket.recvmsg() does.
        arguments: of the call.

    Attributes:
        returned (list): what the call has returned; empty after close().
    """

    def __init__(self, call: Callable[..., Any], *arguments: object) -> None:
        self.returned: list[Any] = []
        weakref.finalize(self, _close, self.returned)
        self.returned.extend(map(call, *([argument] for argument in arguments)))

    @property
    def fds(self) -> list[int]:
        """The descriptors that are open."""
        return _fds_in(self.returned)

    @property
    def fd(self) -> int:
        """The only one."""
        (fd,) = self.fds
        return fd

    def close(self) -> None:
        """Idempotent."""
        _close(self.returned)


def _fds_in(returned: list[Any]) -> list[int]:
    found = array("i")
    for one in returned:
        if isinstance(one, int):
            found.append(one)
        else:
            for *_, fds in one[1]:
                found.frombytes(fds[: len(fds) // found.itemsize * found.itemsize])
    return found.tolist()


def _close(returned: list[Any]) -> None:
    fds = _fds_in(returned)
    # Of one descriptor each: that ignores errors, after which Linux has closed it all the same.
    closed = map(os.closerange, fds, [fd + 1 for fd in fds])
    any(chain(closed, map(list.clear, [returned])))  # none is true
