"""A scheduler above a store that fails, hangs, and loses or damages pages at random."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any
from unittest import mock

from fuzz_cache import Group
from fuzz_devices import Device
from fuzz_prefixes import LONGEST, PROMPTS, Server, random_shapes
from memory_store import MemoryStore
from patience import PATIENCE, in_time

from torch_kvswap import HostPool, PrefixCache
from torch_kvswap.below import threads
from torch_kvswap.prefix import tier

RATES = dict.fromkeys(("exists", "get", "put", "delete"), (0.2, 0.1))


class FaultyStore(MemoryStore):
    """Objects in memory, which outlive the caches that use them.

    Args:
        seed: of the faults.
        rates: of calls of a method that fail, and of those that hang.

    Attributes:
        works (bool): nothing fails or hangs from now on.
        spoiled (set[str]): the keys of all pages that were lost or damaged, in hexadecimal.
    """

    def __init__(self, seed: int, rates: Mapping[str, tuple[float, float]]) -> None:
        super().__init__()
        self.rates, self.works = rates, False
        self.spoiled: set[str] = set()
        self.counts: Counter[str] = Counter()
        methods = ("exists", "get", "put", "delete", "spoil")
        self._rngs = {what: random.Random(f"{seed} {what}") for what in methods}

    def spoil(self) -> None:
        """A page is lost or damaged."""
        rng = self._rngs["spoil"]
        if not self.objects:
            return
        name = rng.choice(sorted(self.objects))
        self.spoiled.add(key_in(name))
        content = bytearray(self.objects.pop(name, b"!"))
        content[rng.randrange(len(content))] ^= 1
        if rng.random() < 0.7:
            self.objects[name] = bytes(content[: rng.choice([len(content), len(content) // 2])])

    def close(self) -> None:
        """Other caches use it afterwards."""

    def _begin(self, what: str, keys: list[str]) -> list[str]:
        go_on = threading.Event()
        with self._lock:
            rng, (fails, hangs) = self._rngs[what], self.rates.get(what, (0.0, 0.0))
            fate = 1.0 if self.works else rng.random()
            done = rng.randrange(len(keys)) if fate < fails else len(keys)
            if fails <= fate < fails + hangs:
                self.waiting.append(go_on.set)
            else:
                go_on.set()
            self.counts[f"{what} fails"] += done < len(keys)
            self.counts["hangs"] += not go_on.is_set()
        go_on.wait()
        return keys[:done]

    def _end(self, what: str, keys: list[str], done: list[str]) -> None:
        if len(done) < len(keys):
            raise OSError("as the test wants")


def key_in(name: str) -> str:
    """The key of the page with this name."""
    return name.rpartition("@")[2].partition("-")[0]


class BelowServer(Server):
    """A scheduler whose prefix cache has a FaultyStore below, and is made anew now and then."""

    has_below, says = True, ""  # anything, as the store fails

    def __init__(
        self,
        device: Device,
        seed: int,
        rates: Mapping[str, tuple[float, float]] = RATES,
    ) -> None:
        self.store_below, self.weights = FaultyStore(seed, rates), 0
        self.old_pools: list[HostPool] = []
        super().__init__(device, seed, steps=200)

    def make_cache(self) -> tuple[Group, HostPool]:
        self.shapes = random_shapes(self.rng, self.device, 1)
        self.per_page = self.rng.choice([1, 1, 2])
        self.below = {
            "below": self.store_below,
            "below_model": "m",
            "below_policy": self.rng.choice(["all", "all", "reused"]),
        }
        self.bytes_in_flight = self.rng.choice([1, 1 << 16])
        group = self.make_group()
        return group, self.make_pool(group, self.rng.randint(3, 6))

    def make_pool(self, group: Group, pages: int) -> HostPool:
        return self.device.pool(group.layout, pages, self.per_page, gap=0)

    def make_prefixes(self, **_: Any) -> PrefixCache:
        while True:
            try:
                with mock.patch.object(tier, "BYTES_IN_FLIGHT", self.bytes_in_flight):
                    return super().make_prefixes(**self.below)
            except ValueError:  # a call of the driver failed that was to hurt a job
                assert self.device.faults()[0]

    def change_contents(self) -> None:
        super().change_contents()
        self.weights += 1

    def key(self, key: tuple[int, int]) -> bytes:
        return sha256(str(key).encode()).digest()

    def named(self, keys: list[tuple[int, int]]) -> Any:
        return self.passed([self.key(key) for key in keys])

    # What a scheduler does

    def load(self, keys: list[tuple[int, int]] | None = None) -> bool:
        keys = keys or self.some_keys()
        if self.rng.random() < 0.7:
            self.ask(keys)
        return super().load(keys)

    def ask(self, keys: list[tuple[int, int]]) -> None:
        """Goes on with steps until the store has answered, or is not waited for any more."""

        def is_answered() -> bool:
            self.poll()
            found = self.prefixes.lookup(self.named(keys))
            return not found.asking and (not found.pending or bool(self.jobs))

        assert in_time(is_answered)

    def ask_again(self) -> None:
        """As if some time had passed."""
        assert self.prefixes._below is not None
        with self.prefixes._below._lock:
            self.prefixes._below._absent.clear()

    def restart(self, pages: int | None = None) -> None:
        """Another process goes on. Calls that hang still use the memory of this one."""
        self.end_jobs()
        self.count_pages()
        for of_jobs in (self.states, self.cancelled):
            of_jobs.clear()
        with self.device.running():
            self.prefixes.close()
        self.old_pools.append(self.pool)
        self.pool = self.make_pool(self.group, pages or self.rng.randint(3, 6))
        self.below["below_model"] = f"weights {self.weights}"
        self.prefixes = self.make_prefixes()
        self.counts["restarts"] += 1

    def count_pages(self) -> None:
        stats = self.prefixes.below_stats()
        self.counts.update(promoted=stats.promoted, damaged=stats.damaged, written=stats.written)
        self.counts["evicted"] += self.prefixes.stats().evicted

    def actions(self) -> dict[Callable[[], object], float]:
        return {
            **super().actions(),
            self.store_below.spoil: 0.5,
            self.store_below.release: 1,
            self.ask_again: 4,
            self.restart: 0.7,
        }

    def run(self) -> Counter[str]:
        times = {"DEADLINE": 0.02, "FIRST_PAUSE": 0.0, "LONGEST_PAUSE": 0.0}
        with (
            mock.patch.multiple(threads, **times),
            mock.patch.object(tier, "ABSENT_SECONDS", 1000.0),
        ):
            try:
                return super().run()
            finally:  # a cache that a failed run drops waits for calls that hang
                self.store_below.works = True
                self.store_below.release()

    # What must have come of it

    def check_pages(self) -> None:
        store = self.store_below
        store.works, threads.DEADLINE = True, PATIENCE
        store.release()
        assert in_time(self.is_settled), f"{self.prefixes.below_stats()}, {self.not_written()}"
        stats = self.prefixes.stats()
        assert stats.evicted <= stats.stored + stats.promoted
        self.restart(PROMPTS * LONGEST)
        for prompt in self.prompts:
            self.ask(prompt)
            there = [
                self.key(key).hex() not in store.spoiled and self.is_below(key) for key in prompt
            ]
            found = self.prefixes.lookup(self.named(prompt))
            assert found.ready >= [*there, False].index(False), f"{found}, but {there} are below"
            self.load(prompt)
            self.end_jobs()
        self.count_pages()
        self.prefixes.close()
        assert in_time(lambda: not self.old_pools or self.closes(self.old_pools[-1]))
        assert {*map(key_in, store.deleted)} <= store.spoiled, "good pages were deleted"
        self.counts.update(store.counts)

    def is_settled(self) -> bool:
        """Nothing uses a page, and what is in memory was written."""
        self.poll()
        below = self.prefixes._below
        assert below is not None
        if below._asking:  # it would be read into pages
            return False
        stats = self.prefixes.stats()
        is_unused = stats.free_pages + stats.idle_pages == self.pool.num_pages
        return is_unused and not self.prefixes.below_stats().hung and not self.not_written()

    def not_written(self) -> set[tuple[int, int]]:
        """Keys in memory that should be below."""
        if self.below["below_policy"] == "reused":
            return set()
        ready = [
            key
            for prompt in self.prompts
            for key in prompt[: self.prefixes._manager.lookup([list(map(self.key, prompt))]).ready]
        ]
        spoiled = self.store_below.spoiled
        return {key for key in ready if self.key(key).hex() not in spoiled} - set(
            filter(self.is_below, ready)
        )

    def is_below(self, key: tuple[int, int]) -> bool:
        assert self.prefixes._below is not None
        (form,) = self.prefixes._below._formats
        suffix = self.prefixes._below._suffix(self.prefixes._manager.resets)
        (name,) = form.names([self.key(key)], suffix)
        return name in self.store_below.objects

    def closes(self, pool: HostPool) -> bool:
        with suppress(RuntimeError):  # a call has not returned
            pool.close()
            self.old_pools.remove(pool)
        return not self.old_pools
