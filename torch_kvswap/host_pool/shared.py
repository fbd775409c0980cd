"""Handles with which a process attaches to another process's host pool."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import weakref

from torch_kvswap._native.arguments import INT32_MAX, NotCopyable, count_of, kind_of, read_int
from torch_kvswap.host_pool.encoding import EncodingName, encoding_of, read_encoding
from torch_kvswap.host_pool.pages import Pages

_NUMBERS = struct.Struct("=7q")


class PoolHandle(NotCopyable):
    """The shared memory of a host pool, and its shape.

    Made by HostPool.share(). send() and receive() pass it through a connected Unix socket. The
    memory is an unnamed file, which is freed when the last process that has it ends. close() closes
    this process's descriptor, after which send(), fd and attaching raise RuntimeError; pools that
    are already attached keep working.

    Attributes:
        num_pages (int): pages of the pool.
        blocks_per_page (int): blocks per page.
        page_bytes (int): bytes per page.
        world (int): processes that share the pool.
        replicated (bool): whether every process uses all pages.
        huge_pages (bool): whether the kernel may use transparent huge pages.
        encoding (str): HostPool.encoding.
        bits_per_value (float | None): HostPool.bits_per_value.
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
        encoding: EncodingName = "raw",
        bits_per_value: float | None = None,
    ) -> None:
        self.num_pages = read_int("num_pages", num_pages, 1)
        self.blocks_per_page = read_int("blocks_per_page", blocks_per_page, 1)
        self.page_bytes = read_int("page_bytes", page_bytes, 1)
        self.world = read_int("world", world, 1)
        self.replicated, self.huge_pages = bool(replicated), bool(huge_pages)
        self._encoding = read_encoding(encoding, bits_per_value)
        self.encoding, self.bits_per_value = self._encoding.name, self._encoding.bits_per_value
        self._fd = read_int("fd", fd, 0, INT32_MAX)
        self.close = weakref.finalize(self, os.close, self._fd)

    @property
    def fd(self) -> int:
        """The file descriptor.

        Raises RuntimeError after close(), when another file may have this number.
        """
        if not self.close.alive:
            raise RuntimeError("the handle of the host pool is closed; share() the pool again")
        return self._fd

    def send(self, connection: socket.socket) -> None:
        """Sends the handle to a receive() at the other end. This handle stays open.

        Args:
            connection (socket.socket): a connected Unix stream socket.
        """
        shape = self.num_pages, self.blocks_per_page, self.page_bytes
        sharing = self.world, self.replicated, self.huge_pages
        message = _NUMBERS.pack(*shape, *sharing, self._encoding.width_eighths)
        socket.send_fds(connection, [message], [self.fd])

    @classmethod
    def receive(cls, connection: socket.socket) -> PoolHandle:
        """Waits for a handle from send() at the other end.

        Args:
            connection (socket.socket): a connected Unix stream socket.

        Returns:
            PoolHandle: with a descriptor of its own.

        Raises:
            ConnectionError: the connection was closed, or something else was sent.
        """
        message, fds, _, _ = socket.recv_fds(connection, _NUMBERS.size, 1)
        try:
            for fd in fds:
                os.set_inheritable(fd, False)
            while fds and message and len(message) < _NUMBERS.size:
                more = connection.recv(_NUMBERS.size - len(message))
                message = message + more if more else b""
            if len(fds) != 1 or len(message) != _NUMBERS.size:
                raise ConnectionError(
                    f"received {len(message)} bytes and {len(fds)} files instead of the handle of "
                    "a host pool; send it with PoolHandle.send"
                )
            try:
                *numbers, width_eighths = _NUMBERS.unpack(message)
                encoding = encoding_of(width_eighths)
                numbers += [encoding.name, encoding.bits_per_value]
                return cls(fds[0], *numbers)
            except ValueError as error:
                raise ConnectionError(f"received an invalid host pool handle: {error}") from error
        except BaseException:  # a timeout, a signal
            for fd in fds:
                os.close(fd)
            raise

    def check(self, pages: Pages) -> None:
        """Checks that a pool with these pages can attach to the handle.

        The file must also be large enough and sealed against shrinking: an access beyond its end
        would kill the process.

        Raises:
            ValueError: the page size differs, or the file is too small or can shrink.
            RuntimeError: the handle is closed.
        """
        if pages.size != self.page_bytes:
            raise ValueError(
                f"the handle is for pages of {self.page_bytes} bytes; this layout has pages of "
                f"{pages.size}; attach with a layout of the cache that the pool was made for"
            )
        nbytes, size = self.num_pages * self.page_bytes, os.fstat(self.fd).st_size
        try:
            is_fixed = fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:  # not a memory file
            is_fixed = 0
        if size < nbytes or not is_fixed:
            raise ValueError(
                f"the handle's file has {size} bytes; it must have {nbytes} for "
                f"{count_of(self.num_pages, 'page')}, and be sealed against shrinking; pass what "
                "HostPool.share() returns"
            )


def check_handle(handle: object) -> PoolHandle:
    """Returns the handle; raises TypeError if it is not a PoolHandle."""
    if not isinstance(handle, PoolHandle):
        raise TypeError(
            f"handle is {kind_of(handle)}; it must be the PoolHandle that share() or "
            "receive() returned"
        )
    return handle
