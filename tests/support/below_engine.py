"""An engine whose prefix cache has a second tier. The bytes of a block say which key it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from patience import PATIENCE, in_time
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.below import threads
from torch_kvswap.encoding.slot import VerifyName
from torch_kvswap.prefix import BelowStats, Lookup, tier
from torch_kvswap.prefix.tier import Tier

threads.DEADLINE = PATIENCE  # no test depends on speed; those of deadlines set their own
BLOCK_BYTES = 5000  # no multiple of 4,096


def key_of(name: object) -> bytes:
    return sha256(str(name).encode()).digest()


def bytes_of(key: bytes) -> Tensor:
    repeated = key * (BLOCK_BYTES // len(key) + 1)
    return torch.frombuffer(bytearray(repeated[:BLOCK_BYTES]), dtype=torch.uint8)


def cache_at(folder: Path, *of: Any) -> PrefixCache:
    """A prefix cache that writes all its pages to a folder."""
    return PrefixCache(*of, below=f"file:{folder}", below_model="m", below_policy="all")


def find(prefixes: PrefixCache, keys: Any) -> Lookup:
    """What a lookup finds when the store has answered."""
    found = prefixes.lookup(keys)
    while found.asking or found.pending:
        prefixes.poll(timeout=PATIENCE)
        found = prefixes.lookup(keys, again=True)
    return found


class Engine:
    """Blocks 0 to 31 are computed into, blocks 32 to 63 loaded into."""

    def __init__(
        self,
        below: Any,
        pages: int = 32,
        policy: str = "all",
        device: str = "cpu",
        verify: VerifyName = "off",
        bytes_in_flight: int = tier.BYTES_IN_FLIGHT,
        **options: Any,
    ) -> None:
        self.tensor = torch.zeros(64, BLOCK_BYTES, dtype=torch.uint8, device=device)
        layout = PagedLayout([self.tensor])
        self.pool = HostPool(layout, pages, verify=verify)
        options = {"below_model": "m", **options}
        with mock.patch.object(tier, "BYTES_IN_FLIGHT", bytes_in_flight):
            self.prefixes = PrefixCache(
                layout, self.pool, below=below, below_policy=policy, **options
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.prefixes.close()

    @property
    def stats(self) -> BelowStats:
        return self.prefixes.below_stats()

    @property
    def tier(self) -> Tier:
        assert self.prefixes._below is not None
        return self.prefixes._below

    def compute(self, names: Sequence[object]) -> None:
        """Computes these blocks and stores them in host memory."""
        keys = list(map(key_of, names))
        for block, key in enumerate(keys):
            self.tensor[block] = bytes_of(key)
        job = self.prefixes.store(keys, list(range(len(keys)))).job
        if job is not None:
            job.synchronize()
        self.prefixes.poll()

    def share(self, names: Sequence[object]) -> None:
        """Computes these blocks, and waits until they are below."""
        before = self.stats.written
        self.compute(names)
        self.until(lambda: self.stats.written == before + len(names))

    def until(self, condition: Callable[[], bool]) -> None:
        """Goes on with steps until the condition holds."""
        assert in_time(lambda: not self.prefixes.poll() and condition()), self.stats

    def find(self, names: Sequence[object]) -> Lookup:
        return find(self.prefixes, list(map(key_of, names)))

    def load(self, names: Sequence[object]) -> int:
        """Finds and loads these blocks. Returns how many have come, and checks their bytes."""
        keys = list(map(key_of, names))
        count = self.find(names).ready
        if count:
            blocks = list(range(32, 32 + len(keys)))
            job = self.prefixes.load(keys, blocks, count)
            assert job is not None
            job.synchronize()
            self.prefixes.poll()
        for place in range(count):
            assert torch.equal(self.tensor[32 + place].cpu(), bytes_of(keys[place])), place
        return count


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines pass at once, and what is not there is not asked for again."""
    monkeypatch.setattr(threads, "DEADLINE", 0.0)
    monkeypatch.setattr(tier, "ABSENT_SECONDS", 1000.0)


def works_again(engine: Engine) -> None:
    """The store has time from now on, and nobody remembers that it had not."""
    threads.DEADLINE = PATIENCE
    below = engine.tier
    below._absent.clear()
    below._reads.end_pause()
    below._writes.end_pause()
    engine.prefixes.poll()
