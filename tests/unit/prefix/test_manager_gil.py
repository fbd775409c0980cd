"""How long the block manager holds the GIL and its own lock."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from torch_kvswap.prefix.block_groups import BlockGroup
from torch_kvswap.prefix.manager import BlockManager

FEW = 1024  # kFewKeys of csrc/prefix/manager.h
MANY = os.urandom(32 * (FEW + 1))
SECONDS = 60  # until a race that has to come up must have come up


@contextmanager
def no_forced_switch() -> Iterator[None]:
    """The GIL goes to another thread only where its holder lets it go."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def counting() -> Iterator[list[int]]:
    """A thread counts the times that it gets the GIL."""
    count, over = [0], threading.Event()

    def run() -> None:
        while not over.is_set():
            count[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()


@contextmanager
def watched() -> Iterator[Callable[..., bool]]:
    """What says of a call whether another thread ran meanwhile, which needs the GIL."""

    def lets_others_run(call: Callable[..., object], *arguments: object) -> bool:
        before = count[0]
        call(*arguments)
        return count[0] != before

    gc.collect()  # what it finalizes may let the GIL go
    gc.disable()
    with counting() as count, no_forced_switch():
        # The thread may have asked for the GIL before, by the old interval.
        asked_anew = count[0] + 2
        while count[0] < asked_anew:
            time.sleep(0.001)
        try:
            yield lets_others_run
        finally:
            gc.enable()


def until(is_true: Callable[[], bool]) -> None:
    """A thread that could have run need not have been fast enough."""
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0)  # another thread may need the GIL first


def test_only_calls_with_many_keys_release_the_gil() -> None:
    seen: set[str] = set()
    with watched() as lets_others_run:

        def call_all(keys: bytes) -> set[str]:
            manager, kept = BlockManager(2 * FEW), list[Any]()

            def note(name: str, call: Callable[..., Any], *arguments: Any) -> None:
                if lets_others_run(lambda: kept.append(call(*arguments))):
                    seen.add(name)

            note("lookup", manager.lookup, keys)
            note("prepare_store", manager.prepare_store, keys)
            # A store of all keys but one holds the pages of all.
            note("end of a store", manager.complete, kept[-1])
            note("touch", manager.touch, keys)
            note("order", manager.order, keys)
            note("hold", partial(manager.prepare_store, hold=True), keys)
            note("release", manager.complete, kept[-1].lease)
            note("prepare_load", manager.prepare_load, keys)
            note("end of a load", manager.fail, kept[-1])
            return seen

        for _ in range(20):
            assert call_all(MANY[:-32]) == set()
        until(lambda: len(call_all(MANY)) == 9)


def test_keys_of_all_groups_together_are_many() -> None:
    manager = BlockManager([BlockGroup(FEW), BlockGroup(FEW)])
    half = MANY[: 16 * FEW]
    with watched() as lets_others_run:
        for _ in range(20):
            assert not lets_others_run(manager.lookup, [half, half])
        more = [half, MANY[: 16 * FEW + 32]]
        until(lambda: lets_others_run(manager.lookup, more))


def test_a_waiting_call_releases_the_gil() -> None:
    manager, over = BlockManager(FEW), threading.Event()
    manager.complete(manager.prepare_store(MANY[:32]))
    keys = os.urandom(32 * 100_000)

    def hold_the_lock() -> None:
        while not over.is_set():
            manager.touch(keys)

    with watched() as lets_others_run:
        assert not lets_others_run(manager.lookup, MANY[:32])
        thread = threading.Thread(target=hold_the_lock)
        thread.start()
        try:
            until(lambda: lets_others_run(manager.lookup, MANY[:32]))
        finally:
            over.set()
            thread.join()


def test_no_lookup_waits_for_most_of_a_reset() -> None:
    manager, keys = BlockManager(300_000), os.urandom(32 * 300_000)
    shares = []
    for _ in range(20):  # a busy machine may stop this thread for as long as a reset takes
        manager.complete(manager.prepare_store(keys))
        shares.append(share_of_a_reset_in_one_lookup(manager, keys[:32]))
        if shares[-1] < 0.5:
            return
    raise AssertionError(f"lookups waited for these shares of a reset: {shares}")


def share_of_a_reset_in_one_lookup(manager: BlockManager, key: bytes) -> float:
    """How much of the CPU time of a reset passes within one lookup of another thread, at most."""
    started, over, seconds = threading.Event(), threading.Event(), []

    def reset() -> None:
        started.set()
        manager.reset()
        seconds.append(time.thread_time())
        over.wait()  # its clock goes with it

    thread = threading.Thread(target=reset)
    thread.start()
    started.wait()
    clock = time.pthread_getcpuclockid(thread.ident)
    times = [time.clock_gettime(clock)]
    while manager.lookup(key).found:
        times.append(time.clock_gettime(clock))
    times.append(time.clock_gettime(clock))
    over.set()
    thread.join()
    return max(after - before for before, after in pairwise(times)) / seconds[0]
