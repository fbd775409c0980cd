"""A store in the memory of a Valkey or Redis server."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

from torch_kvswap.below.store import PageStore, split_url

# Seconds without a byte from the server; read at each use so that tests can set them.
TIMEOUT = 5.0
_PORT = 6379
_LONGEST_LINE = 4096  # bytes of a line, which a page is not
_MOST_DIGITS = 20


class ValkeyStore(PageStore):
    """A PageStore in a Valkey or Redis server, which engines of several machines may share.

    Connects at the first call, and again after each failure and where the server has closed an idle
    connection. Pages are sent from and received into the given memory. The connection is not
    encrypted.

    Args:
        url (str): "valkey://HOST", "valkey://HOST:PORT" or "valkey://USER:PASSWORD@HOST:PORT";
            without USER it is "default".

    Raises:
        ValueError: url is not such a URL.
    """

    def __init__(self, url: str) -> None:
        is_no_url = (
            "below is not the URL of a Valkey server: {why}; pass 'valkey://HOST:PORT' or "
            "'valkey://USER:PASSWORD@HOST:PORT'"
        )
        parts, self._address = split_url(url, "valkey", _PORT, is_no_url)
        if parts.username and parts.password is None:
            raise ValueError(
                "below names a user of the Valkey server without a password, which cannot log in; "
                "pass 'valkey://USER:PASSWORD@HOST:PORT'"
            )
        self._login: list[bytes] = []
        if parts.username or parts.password:
            names = (parts.username or "default", parts.password or "")
            self._login = [b"AUTH", *(unquote(name).encode() for name in names)]
        self._idle: list[_Connection] = []

    def __str__(self) -> str:
        host, port = self._address
        return f"valkey://{host}:{port}"  # without the password

    def exists(self, keys: list[str]) -> list[bool]:
        return [number == 1 for number in self._numbers(b"EXISTS", keys)]

    def get(
        self, keys: list[str], pages: list[memoryview], trailers: list[memoryview]
    ) -> list[bool]:
        return [self._get(*one) for one in zip(keys, pages, trailers, strict=True)]

    def put(self, keys: list[str], pages: list[memoryview], trailers: list[memoryview]) -> None:
        with self._connection() as server:
            for key, page, trailer in zip(keys, pages, trailers, strict=True):
                server.send([b"SET", key.encode(), (page, trailer)])
                server.answer(b"+")

    def delete(self, keys: list[str]) -> None:
        self._numbers(b"UNLINK", keys)

    def close(self) -> None:
        with contextlib.suppress(IndexError):  # other threads take from it
            while True:
                self._idle.pop().close()

    def _get(self, key: str, page: memoryview, trailer: memoryview) -> bool:
        with self._connection() as server:
            server.send([b"GET", key.encode()])
            return server.value(page, trailer)

    def _numbers(self, command: bytes, keys: list[str]) -> list[int]:
        """Sends the command for all keys, then reads the answers."""
        with self._connection() as server:
            server.send(*([command, key.encode()] for key in keys))
            return [server.number(b":") for _ in keys]

    def _take_idle(self) -> _Connection | None:
        """A connection that the server has not closed since it was used, if there is one."""
        with contextlib.suppress(IndexError):  # other threads take from it
            while True:
                server = self._idle.pop()
                if server.is_open:
                    return server
                server.close()
        return None

    @contextlib.contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """A connection of this thread for now. Closes it if an answer was not read."""
        server = self._take_idle() or _Connection(self._address)
        try:
            if not server.is_logged_in:
                if self._login:
                    server.send(self._login)
                    server.answer(b"+")
                server.is_logged_in = True
            yield server
        except BaseException as error:  # its next answer would be that of another call
            server.close()
            if isinstance(error, ConnectionError | TimeoutError):
                self.close()  # the others are broken, too
            if isinstance(error, TimeoutError):
                host, port = self._address
                raise TimeoutError(f"no answer from {host}:{port} in {TIMEOUT:g} s") from error
            raise
        if server.is_in_step:
            self._idle.append(server)
        else:
            server.close()


class _Connection:
    """Speaks RESP, the protocol of the server.

    Raises:
        ConnectionError: there is no server, or it has closed the connection.
        TimeoutError: it does not answer.
        OSError: it refuses.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.is_logged_in, self.is_in_step = False, True
        try:
            self._socket = socket.create_connection(address, TIMEOUT)
        except OSError as error:  # also a name that is not known
            host, port = address
            raise ConnectionError(f"cannot connect to {host}:{port}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self._socket.makefile("rb")

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent. A server may close connections that are idle for long."""
        self._socket.settimeout(0)  # until send()
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:  # neither an end nor an answer that nobody has asked for
            return True
        except OSError:
            return False
        return False

    def send(self, *commands: Sequence[bytes | tuple[memoryview, ...]]) -> None:
        self._socket.settimeout(TIMEOUT)
        text = b""
        for command in commands:
            text += b"*%d\r\n" % len(command)
            for part in command:
                if isinstance(part, bytes):
                    text += b"$%d\r\n%b\r\n" % (len(part), part)
                    continue
                self._socket.sendall(text + b"$%d\r\n" % sum(map(len, part)), socket.MSG_MORE)
                for buffer in part:
                    self._socket.sendall(buffer, socket.MSG_MORE)
                text = b"\r\n"
        self._socket.sendall(text)

    def answer(self, kind: bytes) -> bytes:
        """Reads a line of this kind, and returns it without the kind."""
        line: bytes = self._reader.readline(_LONGEST_LINE)
        if not line.endswith(b"\r\n") and len(line) < _LONGEST_LINE:
            raise ConnectionResetError("the server has closed the connection")
        if line.startswith(b"-"):
            raise OSError(line[1:].decode(errors="replace").strip())
        if not line.startswith(kind) or not line.endswith(b"\r\n"):
            raise ConnectionAbortedError(f"not a Valkey server: it answers {line[:80]!r}")
        return line[1:-2]

    def number(self, kind: bytes) -> int:
        """Reads a line of this kind with a number."""
        line = self.answer(kind)
        if len(line) > _MOST_DIGITS or not line.removeprefix(b"-").isdigit():
            raise ConnectionAbortedError(f"not a Valkey server: it answers {line[:80]!r}")
        return int(line)

    def value(self, *buffers: memoryview) -> bool:
        """Reads a value into the buffers. False if there is none of their size."""
        size = self.number(b"$")
        if size != sum(map(len, buffers)):
            self.is_in_step = size < 0  # else the value is left unread
            return False
        if sum(map(self._reader.readinto, buffers)) < size:
            raise ConnectionResetError("the server has closed the connection")
        self._reader.read(2)  # the end of its line
        return True

    def close(self) -> None:
        self._reader.close()
        self._socket.close()
