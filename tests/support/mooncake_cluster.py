"""A Mooncake master, and a process with the memory of its store, on loopback."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from patience import in_time
from processes import free_port


class MooncakeCluster:
    """Master and owner keep their ports when they are started again. Their memory starts empty."""

    def __init__(self) -> None:
        try:
            store = import_module("mooncake.store")
        except ImportError as error:
            pytest.skip(f"no Mooncake: {error}")
        self._programs = Path(str(store.__file__)).parent
        self.port, self._metrics, self._owners = (free_port() for _ in range(3))
        self.start_master()
        self.start_owner()

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def start_master(self) -> None:
        local = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self._metrics}"]
        self.master = self._start("mooncake_master", *local, *ports)
        assert in_time(lambda: is_open(self.port, self.master))

    def start_owner(self) -> None:
        self.owner = self._start(
            "mooncake_client",
            f"--master_server_address=127.0.0.1:{self.port}",
            "--host=127.0.0.1",
            "--metadata_server=P2PHANDSHAKE",
            "--global_segment_size=256MB",
            f"--port={self._owners}",
        )
        assert in_time(lambda: is_open(self._owners, self.owner))

    def close(self) -> None:
        for process in (self.owner, self.master):
            kill(process)

    def _start(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        command = [str(self._programs / program), *options, "--minloglevel=2"]
        (self._programs / program).chmod(0o755)
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def is_open(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "it has ended"
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionError:
        return False
    return True


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def cluster() -> Iterator[MooncakeCluster]:
    running = MooncakeCluster()
    yield running
    running.close()
