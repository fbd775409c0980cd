"""What a block manager answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

EventKind = Literal["stored", "evicted", "cleared", "lost"]
EVENT_KINDS: tuple[EventKind, ...] = ("stored", "evicted", "cleared", "lost")


def event_bits(events: bool | Collection[EventKind]) -> int:
    """A bit for each kind that is asked for. Raises TypeError for no kinds at all, ValueError for
    what is no kind."""
    if isinstance(events, bool):
        events = EVENT_KINDS if events else ()
    if not isinstance(events, Iterable):
        raise TypeError(f"events is a {type(events).__name__}; pass True, False or a list of kinds")
    wanted: list[str] = [events] if isinstance(events, str) else list(events)
    unknown = sorted(repr(kind) for kind in wanted if kind not in EVENT_KINDS)
    if unknown:
        raise ValueError(f"events has {', '.join(unknown)}; kinds are {', '.join(EVENT_KINDS)}")
    if wanted:
        wanted += ["cleared", "lost"]
    return sum(1 << number for number, kind in enumerate(EVENT_KINDS) if kind in wanted)


class Lookup(NamedTuple):
    """Lengths of prefixes, in blocks (with several groups in units of `unit_tokens`): found, that
    is cached or on its way into the cache; ready, that can be loaded now. pending: blocks of
    `found` that are still on their way; while there are some, ask again later."""

    found: int
    ready: int
    pending: int


@dataclass(eq=False, slots=True)
class Load:
    """Pages to load, held until the load has ended. places: which of the keys they belong to; with
    several groups both are lists with an entry for each."""

    id: int
    places: Any
    pages: Any


@dataclass(eq=False, slots=True)
class Store:
    """Keys that are new, by their places among those given, and the pages that are to be filled
    with them, ascending; with several groups both are lists. id: 0 when there are none. lease: of
    preempt(), which has no end."""

    id: int
    places: Any
    pages: Any
    lease: int = 0


class BlockEvent(NamedTuple):
    """kind: a block was stored or evicted (key: its digest); all were "cleared"; events were "lost"
    because nobody took them, so that only a new start of the bookkeeping helps."""

    kind: EventKind
    group: int
    key: bytes


@dataclass(frozen=True)
class BlockStats:
    """Blocks of a group since the start: asked for in lookups, hits (those that a prefix needed and
    were ready), pending, stored, loaded, evicted, skipped (not asked for often enough), failed.
    refused: stores without room. Pages now: those that can be used, and of these the free, idle
    (can be evicted) and filling ones; what is left is held by loads and leases."""

    asked: int
    hits: int
    pending: int
    stored: int
    loaded: int
    evicted: int
    skipped: int
    refused: int
    failed: int
    pages: int
    free_pages: int
    idle_pages: int
    filling_pages: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0
