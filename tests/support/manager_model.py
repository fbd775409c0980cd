"""A model of the block manager, made of dictionaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch_kvswap.prefix.manager import Lookup


@dataclass
class Model:
    """Keys are small integers. With `lru` it knows who is evicted, else only who may be."""

    num_pages: int
    lru: bool
    page_of: dict[int, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)  # keys
    holders: Counter[int] = field(default_factory=Counter)  # of a page
    content: dict[int, int] = field(default_factory=dict)  # page to the key that was written there
    places: list[int] = field(default_factory=list)  # keys, in the order of eviction
    placed_held: set[int] = field(default_factory=set)  # keys that got their place while held

    @property
    def free(self) -> int:
        return self.num_pages - len({*self.page_of.values(), *self.held()})

    def held(self) -> set[int]:
        return {page for page, count in self.holders.items() if count > 0}

    def lookup(self, keys: Sequence[int]) -> Lookup:
        found = leading(key in self.page_of for key in keys)
        ready = leading(key in self.ready for key in keys)
        return Lookup(found, ready, sum(key not in self.ready for key in keys[:found]))

    @property
    def idle(self) -> list[int]:
        return [key for key in self.places if not self.holders[self.page_of[key]]]

    def hold(self, pages: Iterable[int], in_place: bool = False, uses: bool = False) -> None:
        key_of = {page: key for key, page in self.page_of.items()}
        for page in pages:
            key = key_of.get(page)
            if uses or not (in_place or key in self.placed_held):
                self.unplace(key)
            self.holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        key_of = {page: key for key, page in self.page_of.items()}
        for page in reversed(pages):
            self.holders[page] -= 1
            assert self.holders[page] >= 0
            if self.holders[page] == 0 and page in key_of:
                self.placed_held.discard(key_of[page])
                if key_of[page] not in self.places:
                    self.places.append(key_of[page])

    def touch(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            if key in self.ready:
                self.unplace(key)
                if not self.holders[self.page_of[key]]:
                    self.places.append(key)

    def order(self, keys: Sequence[int], renew: bool) -> None:
        stored = [key for key in keys if key in self.page_of]
        if renew or (stored and stored[0] not in self.places):
            for key in stored[::-1] if renew else stored[:1]:
                self.put(key, len(self.places))
        for front, key in pairwise([] if renew else stored):
            self.put(key, self.places.index(front))

    def put(self, key: int, at: int) -> None:
        """Moves a key before the one that is there now."""
        at -= key in self.places[:at]
        self.unplace(key)
        self.places.insert(at, key)
        if self.holders[self.page_of[key]]:
            self.placed_held.add(key)

    def unplace(self, key: int | None) -> None:
        if key in self.places:
            self.places.remove(key)
        self.placed_held.discard(key)

    def fits(self, keys: Sequence[int]) -> bool:
        new = [key for key in keys if key not in self.page_of]
        return len(new) <= self.free + len(set(self.idle) - set(keys))

    def place(self, keys: Sequence[int], pages: Sequence[int], others: Sequence[int]) -> None:
        """New keys take these pages, while `others` stay."""
        assert len(set(pages)) == len(pages) == len(keys)
        assert not self.held() & set(pages), "somebody reads or writes them"
        candidates = [key for key in self.idle if key not in others]
        evicted = {key for key, page in self.page_of.items() if page in pages}
        assert evicted <= set(candidates)
        assert len(evicted) == max(len(keys) - self.free, 0)
        if self.lru:
            assert evicted == set(candidates[: len(evicted)])
        for key in evicted:
            self.forget(key)
        for key, page in zip(keys, pages, strict=True):
            self.page_of[key] = page

    def fill(self, key: int, page: int) -> None:
        self.content[page] = key  # the copy wrote there, whatever became of the key
        if self.page_of.get(key) == page:
            self.ready.add(key)

    def forget(self, key: int) -> None:
        del self.page_of[key]
        self.ready.discard(key)
        self.unplace(key)


def leading(truths: Iterable[bool]) -> int:
    count = 0
    for truth in truths:
        if not truth:
            break
        count += 1
    return count
