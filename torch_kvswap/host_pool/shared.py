"""What a process needs to attach to the host pool of another one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import weakref

from torch_kvswap._native.arguments import INT32_MAX, NotCopyable, read_int
from torch_kvswap.host_pool.pages import Pages

_NUMBERS = struct.Struct("=6q")


class PoolHandle(NotCopyable):
    """Memory that several processes of one machine share, and how many pages it has.

    From `HostPool.share()`. send() and receive() take it through a connected Unix socket; the file
    behind it has no name, and is gone when the last process that has it ends. close() lets it go;
    pools that were attached stay, and every use of the handle raises RuntimeError.

    Attributes:
        num_pages, blocks_per_page, page_bytes (int): of the pool.
        world (int): processes that share it.
        replicated (bool): each process uses all pages, not only its part.
        huge_pages (bool): the kernel may put the pages on huge ones.
    """

    _instead = "send() it through a Unix socket"

    def __init__(
        self,
        fd: int,
        num_pages: int,
        blocks_per_page: int,
        page_bytes: int,
        world: int,
        replicated: bool,
        huge_pages: bool,
    ) -> None:
        self.num_pages = read_int("num_pages", num_pages, 1)
        self.blocks_per_page = read_int("blocks_per_page", blocks_per_page, 1)
        self.page_bytes = read_int("page_bytes", page_bytes, 1)
        self.world = read_int("world", world, 1)
        self.replicated, self.huge_pages = bool(replicated), bool(huge_pages)
        self._fd = read_int("fd", fd, 0, INT32_MAX)
        self.close = weakref.finalize(self, os.close, self._fd)

    @property
    def fd(self) -> int:
        """The file. Raises RuntimeError after close(): another file may have its number then."""
        if not self.close.alive:
            raise RuntimeError("the handle of the host pool is closed; share() the pool again")
        return self._fd

    def send(self, connection: socket.socket) -> None:
        """Lets receive() at the other end have a handle of its own; this one stays open."""
        shape = self.num_pages, self.blocks_per_page, self.page_bytes
        message = _NUMBERS.pack(*shape, self.world, self.replicated, self.huge_pages)
        socket.send_fds(connection, [message], [self.fd])

    @classmethod
    def receive(cls, connection: socket.socket) -> PoolHandle:
        """Waits for what send() sends at the other end. Raises ConnectionError when something else
        comes, or nothing any more."""
        message, fds, _, _ = socket.recv_fds(connection, _NUMBERS.size, 1)
        try:
            for fd in fds:
                os.set_inheritable(fd, False)
            while fds and message and len(message) < _NUMBERS.size:
                more = connection.recv(_NUMBERS.size - len(message))
                message = message + more if more else b""
            if len(fds) != 1 or len(message) != _NUMBERS.size:
                raise ConnectionError(
                    f"{len(message)} bytes and {len(fds)} files came where the handle of a host "
                    "pool was expected; send it with PoolHandle.send"
                )
            try:
                return cls(fds[0], *_NUMBERS.unpack(message))
            except ValueError as error:
                raise ConnectionError(f"no handle of a host pool came: {error}") from error
        except BaseException:  # a timeout, a signal
            for fd in fds:
                os.close(fd)
            raise

    def check(self, pages: Pages) -> None:
        """Checks that the handle can be attached to for these pages.

        Raises:
            ValueError: its pages have another size, or its file is smaller than they are or may
                shrink: a page beyond its end would kill the process.
        """
        if pages.size != self.page_bytes:
            raise ValueError(
                f"the handle is of pages of {self.page_bytes} bytes; this layout has pages of "
                f"{pages.size}"
            )
        nbytes, size = self.num_pages * self.page_bytes, os.fstat(self.fd).st_size
        try:
            is_fixed = fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:  # no memory file
            is_fixed = 0
        if size < nbytes or not is_fixed:
            raise ValueError(
                f"the file of the handle has {size} bytes, and {self.num_pages} pages need "
                f"{nbytes} that nobody can take away; pass what HostPool.share() returns"
            )


def check_handle(handle: object) -> PoolHandle:
    """Raises TypeError for what is no handle."""
    if not isinstance(handle, PoolHandle):
        raise TypeError(
            f"handle is a {type(handle).__name__}; it must be the PoolHandle that share() or "
            "receive() returned"
        )
    return handle
