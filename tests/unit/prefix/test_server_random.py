"""Random engines on one server with few pages: every load has the bytes of its keys."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from below_engine import bytes_of, key_of
from served_engine import ServedEngine, serving

from torch_kvswap.prefix.manager import Lookup

PROMPTS = ["abcde", "abcfg", "abhij", "klmno", "klpqr", "stuvw"]
PAGES, ENGINES, STEPS = 10, 3, 400

KINDS = [*["store", "load"] * 2, "lookup", "hold", "resume", "poll"]


class RandomEngine(ServedEngine):
    """Computes, stores and loads prompts in blocks that it takes at random. Jobs end late."""

    def __init__(self, path: str, rng: random.Random) -> None:
        super().__init__(path)
        self.rng = rng
        self.loads: list[tuple[Any, list[bytes], list[int]]] = []  # to be checked
        self.held: list[tuple[Any, list[bytes]]] = []  # leases
        self.found: tuple[Lookup, list[bytes], int] | None = None  # with a lease
        self.checked = 0

    def take(self, count: int) -> list[int]:
        """Blocks that no job uses any more."""
        blocks = self.rng.sample(range(64), count)
        for load in list(self.loads):
            if not set(blocks).isdisjoint(load[2]):
                self.check(load)
        for job in self.prefixes.jobs_using(blocks):
            job.synchronize()
        return blocks

    def check(self, load: tuple[Any, list[bytes], list[int]]) -> None:
        job, keys, blocks = load
        job.synchronize()
        for key, block in zip(keys, blocks, strict=False):
            assert torch.equal(self.tensor[block], bytes_of(key)), (key, block)
        self.loads.remove(load)
        self.checked += 1

    def step(self) -> None:
        prompt = self.rng.choice(PROMPTS)
        keys = list(map(key_of, prompt[: self.rng.randint(1, 5)]))
        kind = self.rng.choice(KINDS)
        if kind in ("store", "hold"):
            blocks = self.take(len(keys))
            for key, block in zip(keys, blocks, strict=True):
                self.tensor[block] = bytes_of(key)
            if kind == "store":
                self.prefixes.store(keys, blocks)
            elif len(self.held) < 2:
                held = self.prefixes.store(keys, blocks, hold=True)
                self.held += [] if held.state == "full" else [(held.lease, keys)]
        elif kind == "lookup":
            self.found = self.prefixes.lookup(keys, hold=True), keys, self.session.resets
        elif kind == "load":
            found, keys, resets = self.found or (self.prefixes.lookup(keys), keys, 0)
            blocks, ready, self.found = self.take(len(keys)), found.ready, None
            if ready and (job := self.prefixes.load(keys, blocks, ready)):
                self.loads.append((job, keys[:ready], blocks[:ready]))
            elif ready:
                assert found.lease is None or resets != self.session.resets
        elif kind == "poll":
            assert all(result.ok for result in self.prefixes.poll())
        elif self.held:
            lease, keys = self.held.pop(0)
            blocks = self.take(len(keys))
            pending = self.prefixes.lookup(keys, again=True).pending
            if job := self.prefixes.load(keys, blocks):
                self.loads.append((job, keys, blocks))
            elif pending:
                self.held.append((lease, keys))


def run(path: str, seed: int) -> int:
    """Runs engines at random, and the server too. Returns how many loads were right."""
    rng, checked = random.Random(seed), 0
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        server.enter_context(serving(path, PAGES))
        engines = [stack.enter_context(RandomEngine(path, rng)) for _ in range(ENGINES)]
        for _ in range(STEPS):
            rng.choice(engines).step()
            if rng.random() < 0.01:
                server.close()
                server.enter_context(serving(path, PAGES))
                for engine in rng.sample(engines, rng.randrange(ENGINES)):  # others find out later
                    engine.prefixes.poll()
                    engine.until(lambda engine=engine: engine.is_served)  # type: ignore[misc]
            if rng.random() < 0.01:
                left = rng.randrange(ENGINES)
                engines[left].prefixes.close()
                checked += engines[left].checked
                engines[left] = stack.enter_context(RandomEngine(path, rng))
        for engine in engines:
            for load in list(engine.loads):
                engine.check(load)
            engine.held.clear()
            engine.found = None
            engine.prefixes.poll()
        for engine in engines:
            engine.until(lambda engine=engine: engine.is_served)  # type: ignore[misc]
        pages = engines[0].pages
        assert pages.free_pages + pages.idle_pages == PAGES
        return checked + sum(engine.checked for engine in engines)


@pytest.mark.parametrize("seed", range(5))
def test_every_load_has_the_bytes_of_its_keys(seed: int, path: str) -> None:
    assert run(path, seed) > 10
