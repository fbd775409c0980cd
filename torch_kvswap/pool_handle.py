"""What a process needs to attach to the host pool of another one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import weakref

from torch_kvswap.layout import Planes

_NUMBERS = struct.Struct("=5q")


class PoolHandle:
    """Memory that several processes of one machine share, and how many pages it has.

    From `HostPool.share()`. send() and receive() take it through a connected Unix socket; the file
    behind it has no name, and is gone when the last process that has it ends. close() lets it go;
    pools that were attached stay.
    """

    def __init__(
        self,
        fd: int,
        num_pages: int,
        blocks_per_page: int,
        page_bytes: int,
        world: int,
        replicated: bool,
    ) -> None:
        self.fd = fd
        self.num_pages = num_pages
        self.blocks_per_page = blocks_per_page
        self.page_bytes = page_bytes
        self.world = world
        self.replicated = replicated
        self.close = weakref.finalize(self, os.close, fd)

    def send(self, connection: socket.socket) -> None:
        numbers = self.num_pages, self.blocks_per_page, self.page_bytes, self.world
        message = _NUMBERS.pack(*numbers, self.replicated)
        socket.send_fds(connection, [message], [self.fd])

    @classmethod
    def receive(cls, connection: socket.socket) -> PoolHandle:
        """Waits for what send() sends at the other end. Raises ConnectionError when something else
        comes, or nothing any more."""
        message, fds, _, _ = socket.recv_fds(connection, _NUMBERS.size, 1)
        for fd in fds:
            os.set_inheritable(fd, False)
        while fds and message and len(message) < _NUMBERS.size:
            more = connection.recv(_NUMBERS.size - len(message))
            message = message + more if more else b""
        if len(fds) != 1 or len(message) != _NUMBERS.size:
            for fd in fds:
                os.close(fd)
            raise ConnectionError(
                f"{len(message)} bytes and {len(fds)} files came where the handle of a host pool "
                "was expected; send it with PoolHandle.send"
            )
        pages, blocks, page_bytes, world, replicated = _NUMBERS.unpack(message)
        return cls(fds[0], pages, blocks, page_bytes, world, bool(replicated))

    def check(self, layout: Planes, world: int) -> None:
        """Raises ValueError unless it is of pages for this layout and of this world, and its file
        is as large as they are and stays so: a page beyond its end would kill the process."""
        page_bytes = self.blocks_per_page * layout.block_bytes
        if (page_bytes, world) != (self.page_bytes, self.world):
            raise ValueError(
                f"the handle is of pages of {self.page_bytes} bytes for world={self.world}; this "
                f"layout has pages of {page_bytes}, and world={world}"
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
