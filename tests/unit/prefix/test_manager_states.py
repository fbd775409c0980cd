"""Random calls of a block manager against a model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from manager_model import Model

from torch_kvswap._C import Reservation
from torch_kvswap.prefix.manager import BlockManager

PAGES, KEYS = 6, 10
lists = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=5, unique=True)
positions = st.sets(st.integers(0, 5))
picks = st.integers(0, 1 << 16)


@dataclass
class Flight:
    job: Reservation
    pages: list[int]  # all that it holds
    fills: dict[int, int]  # key to page


class Machine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "arc"]), ready=st.integers(2, PAGES))
    def make(self, policy: str, ready: int) -> None:
        self.manager = BlockManager(PAGES, num_ready_pages=ready, eviction_policy=policy)
        self.model = Model(ready, policy == "lru")
        self.flights: list[Flight] = []
        self.leases: dict[Reservation, list[int]] = {}
        self.lent: list[int] = []

    @rule(ready=st.integers(0, PAGES))
    def grow(self, ready: int) -> None:
        self.manager.grow(ready)
        self.model.num_pages = max(self.model.num_pages, ready)

    @rule(keys=lists)
    def lookup(self, keys: list[int]) -> None:
        assert self.manager.lookup(keys) == self.model.lookup(keys)

    @rule(keys=lists)
    def touch(self, keys: list[int]) -> None:
        self.manager.touch(keys)
        self.model.touch(keys)

    @rule(keys=lists)
    def load(self, keys: list[int]) -> None:
        load = self.manager.prepare_load(keys)
        assert (load is not None) == (set(keys) <= self.model.ready)
        if load is None:
            return
        pages = load.pages.tolist()
        assert [self.model.content[page] for page in pages] == keys
        self.model.hold(pages, uses=True)
        self.flights.append(Flight(load, pages, {}))

    @rule(keys=lists)
    def hold(self, keys: list[int]) -> None:
        held = self.manager._hold(keys)
        assert (held is None) == self.model.ready.isdisjoint(keys)
        if held is None:
            return
        pages = held.pages.tolist()
        assert pages == [self.model.page_of[key] for key in keys if key in self.model.ready]
        self.model.hold(pages, in_place=True)
        self.flights.append(Flight(held, pages, {}))

    @rule(keys=lists, renew=st.booleans())
    def order(self, keys: list[int], renew: bool) -> None:
        self.manager.order(keys, renew=renew)
        self.model.order(keys, renew)

    @rule(keys=lists, keep=st.booleans())
    def store(self, keys: list[int], keep: bool) -> None:
        fits = self.model.fits(keys)
        store = self.manager.prepare_store(keys, hold=keep)
        assert (store is not None) == fits
        if store is None:
            return
        new = [keys[place] for place in store.key_indices]
        assert new == [key for key in keys if key not in self.model.page_of]
        assert store.pages.tolist() == sorted(store.pages)
        assert all(page < self.model.num_pages for page in store.pages)
        self.model.place(new, store.pages.tolist(), keys)
        pages = [self.model.page_of[key] for key in keys]
        keeps_place = not self.model.placed_held.isdisjoint(keys)
        self.model.hold(pages)
        if keeps_place:
            self.model.order(keys, renew=False)
        if keep:
            self.model.hold(pages)
            self.leases[store] = pages
        if store.id:
            fills = dict(zip(new, store.pages.tolist(), strict=True))
            self.flights.append(Flight(store, pages, fills))
        else:
            self.model.release(pages)

    @rule(keys=lists)
    def store_at_once(self, keys: list[int]) -> None:
        count = len(self.flights)
        self.store(keys, keep=False)
        if len(self.flights) > count:
            self.end(count, True, set())

    @precondition(lambda self: self.flights)
    @rule(pick=picks, well=st.booleans(), rejects=st.one_of(st.just(set()), positions))
    def end(self, pick: int, well: bool, rejects: set[int]) -> None:
        flight = self.flights.pop(pick % len(self.flights))
        before = dict(self.model.page_of)
        if well:
            copied = [*flight.fills.values()] if flight.job.fills else flight.pages
            rejected = sorted(position for position in rejects if position < len(copied))
            self.manager.complete(flight.job, rejected)
            lost = {copied[position] for position in rejected}
            for key, page in flight.fills.items():
                if page not in lost:
                    self.model.fill(key, page)
        else:
            self.manager.fail(flight.job)
            lost = flight.fills.values() if flight.job.fills else flight.pages
        for key, page in before.items():
            if page in lost:
                self.model.forget(key)
        self.model.release(flight.pages)
        with pytest.raises(ValueError, match="has ended before"):
            self.manager.complete(flight.job)

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        store = list(self.leases)[pick % len(self.leases)]
        self.model.release(self.leases.pop(store))
        assert store.lease is not None
        self.manager.complete(store.lease)
        with pytest.raises(ValueError, match="has ended before"):
            self.manager.complete(store.lease)

    @rule(count=st.integers(0, 4))
    def lend(self, count: int) -> None:
        pages = self.manager._lend(count).tolist()
        assert len(pages) == min(count, self.model.free + len(self.model.idle))
        keys = list(range(KEYS, KEYS + len(pages)))
        self.model.place(keys, pages, [])
        for key in keys:
            self.model.forget(key)
        self.model.hold(pages)
        self.lent += pages

    @precondition(lambda self: self.lent)
    @rule(keys=lists)
    def publish(self, keys: list[int]) -> None:
        pages, self.lent = self.lent[: len(keys)], self.lent[len(keys) :]
        keys = keys[: len(pages)]
        self.manager._take_back(pages, keys)
        for key, page in reversed(list(zip(keys, pages, strict=True))):
            self.model.page_of.setdefault(key, page)
            self.model.fill(key, page)
            self.model.release([page])

    @precondition(lambda self: self.lent)
    @rule(count=st.integers(1, 4))
    def take_back(self, count: int) -> None:
        pages, self.lent = self.lent[:count], self.lent[count:]
        self.manager._take_back(pages)
        self.model.release(pages)

    @rule(pick=picks)
    def reset(self, pick: int) -> None:
        if pick % 8:
            return
        self.manager.reset()
        for key in list(self.model.page_of):
            self.model.forget(key)

    def teardown(self) -> None:
        """All copies end, and all that can be evicted is, in its order."""
        if not hasattr(self, "manager"):
            return
        while self.flights:
            self.end(0, True, set())
        while self.leases:
            self.release(0)
        pages = [self.model.page_of[key] for key in self.model.idle]
        store = self.manager.prepare_store(range(100, 100 + self.model.free + len(pages)))
        assert store is not None
        assert store.evicted == pages if self.model.lru else set(store.evicted) == set(pages)

    @invariant()
    def the_counts_are_right(self) -> None:
        if not hasattr(self, "manager"):
            return
        stats = self.manager.stats()
        filling = [key for key in self.model.page_of if key not in self.model.ready]
        assert (stats.free_pages, stats.idle_pages) == (self.model.free, len(self.model.idle))
        assert stats.filling_pages == len(filling) + len(self.lent)
        assert stats.pages == self.model.num_pages

    @invariant()
    def the_keys_that_the_model_has_are_found(self) -> None:
        for key in range(KEYS if hasattr(self, "manager") else 0):
            assert self.manager.lookup([key], again=True) == self.model.lookup([key])


@pytest.mark.parametrize("examples", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_random_calls_do_what_the_model_does(examples):
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples, stateful_step_count=50, deadline=None)
    )
