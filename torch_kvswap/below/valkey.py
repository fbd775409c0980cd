"""A store in the memory of a Valkey or Redis server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from urllib.parse import unquote, urlsplit

from torch_kvswap.below.blocking import BlockingStore

# Seconds without a byte from the server; read at each use so that tests can set them.
TIMEOUT = 5.0
_PORT = 6379
_LONGEST_LINE = 4096  # bytes of an answer, other than of a page
_MOST_DIGITS = 20


class ValkeyStore(BlockingStore):
    """A PageStore in a Valkey or Redis server, which engines of several machines may share.

    Connects when it is first needed, and again after each failure, so that the server may come and
    go. Pages go straight from and into the memory that is passed. The connection is not encrypted.

    Args:
        url (str): "valkey://HOST", "valkey://HOST:PORT" or "valkey://USER:PASSWORD@HOST:PORT";
            without USER it is "default".

    Raises:
        ValueError: it is no such URL.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        behind = parts.path or parts.query or parts.fragment
        if parts.scheme != "valkey" or not parts.hostname or behind:
            raise ValueError(
                "below is no URL of a Valkey server; pass 'valkey://HOST:PORT' or "
                "'valkey://USER:PASSWORD@HOST:PORT'"
            )
        self._address = parts.hostname, parts.port or _PORT
        if parts.username and parts.password is None:
            raise ValueError(
                "below names a user of the Valkey server without a password, which cannot log in; "
                "pass 'valkey://USER:PASSWORD@HOST:PORT'"
            )
        self._login: list[bytes] = []
        if parts.username or parts.password:
            names = (parts.username or "default", parts.password or "")
            self._login = [b"AUTH", *(unquote(name).encode() for name in names)]
        self._local = threading.local()  # the connection of each thread
        self._breaks = 0  # how many connections broke: then those made before are not used again
        self._opened: set[_Connection] = set()
        self._opening = threading.Lock()  # of _opened
        super().__init__()

    def __str__(self) -> str:
        host, port = self._address
        return f"valkey://{host}:{port}"  # without the password

    def set(self, key: str, memory: memoryview) -> None:
        with self._connection() as server:
            server.send([b"SET", key.encode(), memory])
            server.answer(b"+")

    def get(self, key: str, memory: memoryview) -> bool:
        with self._connection() as server:
            server.send([b"GET", key.encode()])
            size = server.number(b"$")
            if size == len(memory):
                server.read_into(memory)
            elif size >= 0:
                self._drop(server)  # rather than read bytes that are of no use
            return size == len(memory)

    def exists(self, keys: list[str]) -> list[bool]:
        return self._call_each(b"EXISTS", keys)

    def delete(self, keys: list[str]) -> list[bool]:
        return self._call_each(b"UNLINK", keys)

    def _call_each(self, command: bytes, keys: list[str]) -> list[bool]:
        """Sends the command for all keys, then reads for each whether it was there."""
        with self._connection() as server:
            server.send(*([command, key.encode()] for key in keys))
            return [server.number(b":") == 1 for _ in keys]

    @contextlib.contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """The thread's connection. Closes it if an answer was not read, or is an error."""
        server: _Connection | None = getattr(self._local, "server", None)
        if server is not None and server.breaks != self._breaks:
            self._drop(server)
            server = None
        try:
            if server is None:
                server = _Connection(self._address, self._breaks)
                with self._opening:
                    self._opened.add(server)
                if self._is_closing:  # interrupt() may have come before
                    raise ConnectionAbortedError("the store was closed")
                if self._login:
                    server.send(self._login)
                    server.answer(b"+")
                self._local.server = server
            yield server
        except BaseException as error:  # its next answer would be that of another call
            if server is not None:
                self._drop(server)
            if isinstance(error, ConnectionError | TimeoutError):
                self._breaks += 1
            if isinstance(error, TimeoutError):
                host, port = self._address
                raise TimeoutError(f"no answer from {host}:{port} in {TIMEOUT:g} s") from error
            raise

    def _drop(self, server: _Connection) -> None:
        self._local.server = None
        with self._opening:
            self._opened.discard(server)
        server.close()

    def interrupt(self) -> None:
        with self._opening:
            for server in self._opened:
                server.interrupt()

    def close(self) -> None:
        super().close()
        for server in self._opened:
            server.close()
        self._opened.clear()


class _Connection:
    """Speaks RESP, the protocol of the server.

    Raises:
        ConnectionError: there is no server, or it has closed the connection.
        TimeoutError: it does not answer.
        OSError: it refuses.
    """

    def __init__(self, address: tuple[str, int], breaks: int) -> None:
        self.breaks = breaks  # of the store when this connection was made
        try:
            self._socket = socket.create_connection(address, TIMEOUT)
        except OSError as error:  # also a name that is not known
            host, port = address
            raise ConnectionError(f"cannot connect to {host}:{port}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb")

    def send(self, *commands: Sequence[bytes | memoryview]) -> None:
        self._socket.settimeout(TIMEOUT)
        text = b""
        for command in commands:
            text += b"*%d\r\n" % len(command)
            for part in command:
                text += b"$%d\r\n" % len(part)
                if isinstance(part, memoryview):
                    self._socket.sendall(text, socket.MSG_MORE)
                    self._socket.sendall(part, socket.MSG_MORE)
                    text = b"\r\n"
                else:
                    text += part + b"\r\n"
        self._socket.sendall(text)

    def answer(self, kind: bytes) -> bytes:
        """Reads a line of this kind, and returns it without the kind."""
        line: bytes = self._reader.readline(_LONGEST_LINE)
        if not line.endswith(b"\r\n") and len(line) < _LONGEST_LINE:
            raise ConnectionResetError("the server has closed the connection")
        if line.startswith(b"-"):
            raise OSError(line[1:].decode(errors="replace").strip())
        if not line.startswith(kind) or not line.endswith(b"\r\n"):
            raise ConnectionAbortedError(f"it is no Valkey server, which answers {line[:80]!r}")
        return line[1:-2]

    def number(self, kind: bytes) -> int:
        """Reads a line of this kind with a number."""
        line = self.answer(kind)
        if len(line) > _MOST_DIGITS or not line.removeprefix(b"-").isdigit():
            raise ConnectionAbortedError(f"it is no Valkey server, which answers {line[:80]!r}")
        return int(line)

    def read_into(self, memory: memoryview) -> None:
        """Reads the bytes of a value."""
        if self._reader.readinto(memory) < len(memory):
            raise ConnectionResetError("the server has closed the connection")
        self._reader.read(2)  # the end of its line

    def interrupt(self) -> None:
        """Ends what other threads wait for."""
        with contextlib.suppress(OSError):  # it is not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()
