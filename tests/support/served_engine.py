"""A page server and its engines, in this process and in others. The bytes of a block say its key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from below_engine import BLOCK_BYTES, Engine, bytes_of, key_of
from patience import PATIENCE, in_time
from processes import Process

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.prefix import BlockStats, peers, session
from torch_kvswap.prefix import server as page_server
from torch_kvswap.prefix.remote_manager import RemoteManager
from torch_kvswap.prefix.server import PageServer

# No test depends on speed; those of a server that hangs set their own.
session.JOINING = peers.JOINING = PATIENCE
session.FIRST_PAUSE = session.LONGEST_PAUSE = 0.01
page_server.QUARANTINE = 0.0
PAGE_BYTES = HostPool.page_bytes_of(PagedLayout([torch.zeros(1, BLOCK_BYTES, dtype=torch.uint8)]))


@contextmanager
def serving(path: str, pages: int = 32, **options: Any) -> Iterator[PageServer]:
    """A server in this process."""
    server = PageServer(path, pages * PAGE_BYTES, **{"deadline": PATIENCE, **options})
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def server_process(path: str, pages: int = 32, *options: str) -> Process:
    options = *("--memory", f"{pages * PAGE_BYTES}B", "--deadline", str(PATIENCE)), *options
    return Process(["-m", "torch_kvswap", "serve", "--socket", path, *options], "serving")


def engine_process(path: str, does: str, device: str = "cpu") -> Process:
    """An engine that does this, prints "done" and then lives on."""
    program = f"""
import sys
from served_engine import *
engine = ServedEngine({path!r}, {device!r})
{does}
print("done", flush=True)
sys.stdin.read()
"""
    return Process(["-c", program], "done")


class ServedEngine(Engine):
    """Engine, on the pages of a server."""

    def __init__(self, path: str, device: str = "cpu", **options: Any) -> None:
        self.tensor = torch.zeros(64, BLOCK_BYTES, dtype=torch.uint8, device=device)
        self.prefixes = PrefixCache.connect(
            path, PagedLayout([self.tensor]), **{"model": "m", **options}
        )

    @property
    def session(self) -> session.Session:
        assert isinstance(self.prefixes._manager, RemoteManager)
        return self.prefixes._manager._session

    @property
    def pages(self) -> BlockStats:
        return self.prefixes.stats()

    @property
    def is_served(self) -> bool:
        return self.pages.pages > 0

    def hold(self, names: Sequence[object]) -> Any:
        """Computes these blocks and begins to store them; no poll() reports the store."""
        keys = list(map(key_of, names))
        for block, key in enumerate(keys):
            self.tensor[block] = bytes_of(key)
        return self.prefixes.store(keys, list(range(len(keys)))).job

    def until(self, condition: Callable[[], bool]) -> None:
        assert in_time(condition), self.prefixes
