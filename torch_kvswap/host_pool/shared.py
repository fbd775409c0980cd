"""Handles with which a process attaches to another process's host pool."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Sequence

from torch_kvswap._native import rendezvous
from torch_kvswap._native.arguments import (
    INT32_MAX,
    NotCopyable,
    count_of,
    kind_of,
    read_int,
)
from torch_kvswap._native.descriptors import Descriptors
from torch_kvswap.encoding.slot import (
    ENCODINGS,
    RAW,
    VERIFY,
    Encoding,
    EncodingName,
    VerifyName,
    read_encoding,
    read_verify,
)
from torch_kvswap.host_pool.description import FORMAT_VERSION, describe_page, difference
from torch_kvswap.host_pool.shape import PoolShape
from torch_kvswap.layout import PagedLayout

# The last number counts the bytes of the description of the tensors, which follows.
_HEAD = struct.Struct("=8s8q")
_MAGIC = b"KVSWPOOL"
_READ_BYTES = 1 << 16
_MAX_BYTES = 1 << 26  # of the description
# What the error advises if the blocks of the attaching layout do not fit into the pool.
ATTACH_ADVICE = "attach with a layout of the cache that the pool was made for"


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
        tensors (list[str]): what a block has in each tensor of the cache that the pool was made
            for: type, shape, and the order of the dimensions in memory.
        encoding (str): HostPool.encoding.
        verify (str): HostPool.verify.
        parts (int): number of ranks that have a part of each slot; 0 without HostPool's `part`.
    """

    _instead = "send() it through a Unix socket"

    def __init__(
        self,
        fd: int,
        num_pages: int,
        blocks_per_page: int,
        page_bytes: int,
        tensors: Sequence[str],
        encoding: Encoding = RAW,
        verify: VerifyName = "off",
        parts: int = 0,
    ) -> None:
        self.num_pages = read_int("num_pages", num_pages, 1)
        self.blocks_per_page = read_int("blocks_per_page", blocks_per_page, 1)
        self.page_bytes = read_int("page_bytes", page_bytes, 1)
        self.tensors = list(tensors)
        self._encoding = encoding
        self.encoding: EncodingName = encoding.name
        self.verify: VerifyName = read_verify(verify)
        self.parts = read_int("parts", parts, 0)
        self._file = Descriptors(os.dup, read_int("fd", fd, 0, INT32_MAX))

    def __repr__(self) -> str:
        return (
            f"PoolHandle(num_pages={self.num_pages}, blocks_per_page={self.blocks_per_page}, "
            f"page_bytes={self.page_bytes}, encoding={self.encoding!r}, "
            f"{f'fd={self.fd}' if self._file.fds else 'closed'})"
        )

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        self._file.close()

    @property
    def fd(self) -> int:
        """The file descriptor.

        Raises RuntimeError after close(), when another file may have this number.
        """
        if not self._file.fds:
            raise RuntimeError("the handle of the host pool is closed; share() the pool again")
        return self._file.fd

    def send(self, connection: socket.socket) -> None:
        """Sends the handle to a receive() at the other end. This handle stays open.

        Args:
            connection (socket.socket): a connected Unix stream socket.

        Raises:
            TypeError: connection is not a socket.
            ValueError: it is not a Unix stream socket.
            ConnectionError: it is not connected, or the other end was closed.
            PermissionError: the other end belongs to another user.
            RuntimeError: the handle is closed.
        """
        _check_connection(connection)
        shape = self.num_pages, self.blocks_per_page, self.page_bytes
        encoding = ENCODINGS.index(self.encoding), VERIFY.index(self.verify)
        text = json.dumps(self.tensors).encode()
        numbers = FORMAT_VERSION, *shape, *encoding, self.parts, len(text)
        message = _HEAD.pack(_MAGIC, *numbers) + text
        rendezvous.send(connection, message, [self.fd])

    @classmethod
    def receive(cls, connection: socket.socket) -> PoolHandle:
        """Waits for a handle from send() at the other end.

        Args:
            connection (socket.socket): see send().

        Returns:
            PoolHandle: with a descriptor of its own.

        Raises:
            TypeError, ValueError, ConnectionError, PermissionError: see send(); also if something
                else was sent, or the memory belongs to another user.
        """
        _check_connection(connection)
        data, came = rendezvous.receive(connection, _HEAD.size)
        with contextlib.closing(came):
            for fd in came.fds:
                rendezvous.check_owner("the memory of the host pool", os.fstat(fd).st_uid)
            message = _receive_rest(connection, data, came.fds, _HEAD.size)
            magic, version, *numbers, encoded, verify, parts, nbytes = _HEAD.unpack(message)
            try:
                # Anything else must not make us wait for more bytes.
                if magic != _MAGIC:
                    raise ValueError("it does not begin like one")
                if version != FORMAT_VERSION:
                    raise ValueError(
                        f"its format is {version}, that of this library {FORMAT_VERSION}; use the "
                        "same release in both processes"
                    )
                encoding = read_encoding(
                    ENCODINGS[read_int("encoding", encoded, 0, len(ENCODINGS) - 1)]
                )
                verified = VERIFY[read_int("verify", verify, 0, len(VERIFY) - 1)]
                nbytes = read_int("the size of its description", nbytes, 1, _MAX_BYTES)
                tensors = json.loads(_receive_rest(connection, b"", came.fds, nbytes))
                if not isinstance(tensors, list) or not all(isinstance(it, str) for it in tensors):
                    raise ValueError("it describes no tensors")
                numbers += [tensors, encoding, verified, parts]
                return cls(came.fd, *numbers)
            except ValueError as error:
                raise ConnectionError(f"received an invalid host pool handle: {error}") from error

    def _check(self, shape: PoolShape, layout: PagedLayout) -> None:
        """Checks that a pool of this shape can attach to the handle.

        Processes read each other's blocks, so their bytes must mean the same. The file must also be
        large enough and sealed against shrinking: an access beyond its end would kill the process.
        """
        here = describe_page(layout._describe(), shape, self._encoding)
        slot_bytes = self.page_bytes // self.blocks_per_page
        there = {**here, "tensors": self.tensors, "slot_bytes": slot_bytes}
        different = difference(here, there, ("here", "in the pool"))
        if different is not None:
            raise ValueError(f"the handle is for other pages: {different}; {ATTACH_ADVICE}")
        nbytes, size = shape.file_bytes, os.fstat(self.fd).st_size
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


def _receive_rest(
    connection: socket.socket, message: bytes, fds: Sequence[int], nbytes: int
) -> bytes:
    """Reads the rest of a part of a handle that has `nbytes` bytes.

    Raises:
        ConnectionError: the connection was closed, or no single file came with the message.
    """
    parts, missing = [message], nbytes - len(message)
    while len(fds) == 1 and missing:
        more = connection.recv(min(missing, _READ_BYTES))
        if not more:
            break
        parts.append(more)
        missing -= len(more)
    message = b"".join(parts)
    if len(fds) != 1 or missing:
        raise ConnectionError(
            f"received {len(message)} bytes and {len(fds)} files instead of the handle of a host "
            "pool; send it with PoolHandle.send"
        )
    return message


def _check_connection(connection: object) -> None:
    """Raises what send() and receive() do if this is not a connected Unix stream socket."""
    remedy = "pass a connected Unix stream socket"  # only these pass descriptors, in order
    if not isinstance(connection, socket.socket):
        raise TypeError(f"connection is {kind_of(connection)}; {remedy}")
    if connection.fileno() < 0:
        raise ConnectionError(f"connection is closed; {remedy}")
    kind = connection.family, connection.type
    if kind != (socket.AF_UNIX, socket.SOCK_STREAM):
        names = ", ".join(getattr(part, "name", str(part)) for part in kind)
        raise ValueError(f"connection is a socket of {names}; {remedy}")
    try:
        connection.getpeername()
    except OSError as error:
        raise ConnectionError(
            "connection is not connected; connect it to the other process first"
        ) from error
    rendezvous.check_peer(connection, "process {pid} at the other end of the socket")
