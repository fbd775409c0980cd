"""Ctrl-C in calls of a prefix cache with a second tier."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from below_engine import Engine, key_of
from interrupts import Interrupter
from memory_store import MemoryStore
from patience import PATIENCE, in_time

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.below import threads
from torch_kvswap.prefix import tier

PROMPT = list("abcdefgh")
KEYS = list(map(key_of, PROMPT))


def begin(engine: Engine, store: MemoryStore) -> None:
    """Nothing was asked for."""


def have_answer(engine: Engine, store: MemoryStore) -> None:
    """The pages have been read, and a poll is to enter them."""
    below = engine.tier
    engine.prefixes.lookup(KEYS)
    assert in_time(lambda: [ask.is_answered for ask in below._asking.values()] == [True])


def be_late(engine: Engine, store: MemoryStore) -> None:
    """The store does not answer, and the next poll gives up."""
    store.held = {"get"}
    engine.prefixes.lookup(KEYS)
    assert in_time(lambda: len(store.waiting) == 4)
    threads.DEADLINE = 0.0


def works_again(engine: Engine) -> None:
    """The store answers in time from now on, and what was asked for has ended."""
    below = engine.tier
    engine.until(lambda: not engine.prefixes.poll() and not below._asking)
    threads.DEADLINE = PATIENCE
    below._absent.clear()
    below._reads.end_pause()


def finds_all(engine: Engine) -> bool:
    engine.prefixes.poll()
    return engine.prefixes.lookup(KEYS).ready == len(PROMPT)


def holds_nothing(engine: Engine) -> bool:
    stats = engine.prefixes.stats()
    return stats.free_pages + stats.idle_pages == stats.pages


CALLS: dict[str, tuple[Callable[[Engine, MemoryStore], None], Callable[[Engine], object]]] = {
    "lookup": (begin, lambda engine: engine.prefixes.lookup(KEYS)),
    "poll with an answer": (have_answer, lambda engine: engine.prefixes.poll()),
    "poll without one": (be_late, lambda engine: engine.prefixes.poll()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_store_below_works_after_any_interrupted_call(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, do = CALLS[call]
    objects: dict[str, bytes] = {}
    with Engine(MemoryStore(objects)) as writer:
        writer.share(PROMPT)
    interrupter = Interrupter()
    for at in count(1):
        monkeypatch.setattr(threads, "DEADLINE", PATIENCE)
        store = MemoryStore(objects)
        with Engine(store) as engine:
            prepare(engine, store)
            gc.disable()  # a finalizer of an earlier engine is not part of the call
            is_interrupted = interrupter.stops(at, lambda engine=engine: do(engine))
            gc.enable()
            store.release()
            if call == "poll without one":
                engine.until(lambda engine=engine: engine.stats.hung == 0)
            works_again(engine)
            engine.until(lambda engine=engine: finds_all(engine))
            assert engine.load(PROMPT) == len(PROMPT)
            engine.until(lambda engine=engine: holds_nothing(engine))
        if not is_interrupted:
            break
    assert at > 5


def test_an_interrupted_constructor_leaves_no_thread_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier, "BYTES_IN_FLIGHT", 1)  # two threads instead of eight
    layout = PagedLayout([torch.zeros(8, 16, dtype=torch.uint8)])
    interrupter = Interrupter()

    def is_interrupted(at: int, **below: Any) -> bool:
        made = partial(PrefixCache, layout, HostPool(layout, 4), **below)
        try:
            return interrupter.stops(at, made)
        except RuntimeError:  # of Python's own Condition, when Thread.start() is interrupted
            return True

    def are_all_ended() -> bool:
        # Python lists threads, too, whose start was interrupted.
        ours = [each for each in threading.enumerate() if each.name == "kvswap-below"]
        if any(each.is_alive() for each in ours):
            gc.collect()  # perhaps a finalizer is to close the cache
            return False
        return True

    assert not is_interrupted(0)
    points = count(interrupter.points)  # without a tier, which is made last
    while is_interrupted(next(points), below=MemoryStore({}), below_model="m"):
        assert in_time(are_all_ended)
    assert in_time(are_all_ended)
