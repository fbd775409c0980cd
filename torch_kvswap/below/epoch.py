"""The epoch of the pages in a store: a part of their names that changes with each reset.

A reset says that a key stands for other bytes from now on, for example because the model has other
weights. Pages of an earlier epoch are not found any more, also not by a process that starts later:
the store has the epoch in an object of its own, NAMESPACE@RANK@epoch. If it loses this object, for
example by eviction, the next process begins a new epoch, because it cannot know whether there was a
reset.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch_kvswap._native.log import log
from torch_kvswap.below.format import zeros
from torch_kvswap.below.store import PageStore, answers_of

_CHARACTERS = 16
_TRIES = 4  # another thread may put an earlier epoch meanwhile
_NAME = re.compile(f"[0-9a-f]{{{_CHARACTERS}}}")
Call = Callable[..., Any]  # calls a method of the store with its arguments


class Named(NamedTuple):
    """An epoch, and how often the manager had been reset when it began."""

    resets: int
    name: str


class Epoch:
    """Knows the epoch, and keeps it in the store. Thread safe; no lock is held in a call of it.

    Args:
        store (PageStore): has the pages.
        name (str): of the pages, PageFormat.name.
        resets: returns how often the manager was reset.
    """

    def __init__(self, store: PageStore, name: str, resets: Callable[[], int]) -> None:
        self._store, self._object, self._count_resets = store, f"{name}@epoch", resets
        self._lock = threading.Lock()  # of what follows
        self._resets, self._has_warned = resets(), False
        self._name: str | None = None  # not known yet
        self._is_stored = self._is_due = False
        self._made = set[str]()  # by this process

    @property
    def is_due(self) -> bool:
        """Whether the store may still have the epoch from before a reset."""
        with self._lock:
            self._see_resets()
            return self._is_due

    @property
    def name(self) -> str | None:
        """As far as it is known."""
        with self._lock:
            self._see_resets()
            return self._name

    def read(self, call: Call) -> Named | None:
        """The epoch of the pages to be read. None if the store has none of it."""
        with self._lock:
            self._see_resets()
            must_ask = self._name is None
        there = self._get(call) if must_ask else None
        with self._lock:
            self._see_resets()
            if self._name is None and there is not None:
                self._name, self._is_stored = there, True
            return Named(self._resets, self._name) if self._name and self._is_stored else None

    def keep(self, call: Call) -> Named:
        """The epoch of pages to be written, which the store knows then."""
        made = None
        for _ in range(_TRIES):
            there = self._get(call)
            with self._lock:
                self._see_resets()
                if self._name is None and there is None:
                    self._name = made = self._new_name()
                elif there is not None and self._name == made:  # None, or another process made one
                    self._name, self._is_stored = there, True
                assert self._name is not None
                now, is_stored = Named(self._resets, self._name), self._is_stored
                is_ours = there in self._made  # an earlier one may have come late
            if is_stored and there == now.name:
                return now
            if is_stored and there is not None and not is_ours:
                self._warn_of_another()
                return now
            try:
                self._put(call, now.name)
            except Exception:
                if self.is_due:
                    self._delete(call)
                raise
        raise OSError(f"{self._object} is not there, though it was just stored")

    def _warn_of_another(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "another process that shares %s was reset; it and this one do not find each "
                "other's new pages until this one starts anew",
                self._store,
            )

    def _see_resets(self) -> None:
        """Begins an epoch if the manager was reset. The caller holds the lock."""
        resets = self._count_resets()
        if resets != self._resets:
            self._resets, self._name = resets, self._new_name()
            self._is_stored, self._is_due = False, True

    def _new_name(self) -> str:
        name = secrets.token_hex(_CHARACTERS // 2)
        self._made.add(name)
        return name

    def _get(self, call: Call) -> str | None:
        """What the store has; None if it has none, or no name of an epoch."""
        [buffer] = zeros(_CHARACTERS, 1)
        [is_there] = answers_of(self._store.get, 1, call(self._store.get, [self._object], [buffer]))
        name = bytes(buffer).decode(errors="replace")
        return name if is_there and _NAME.fullmatch(name) else None

    def _put(self, call: Call, name: str) -> None:
        [buffer] = zeros(_CHARACTERS, 1)
        buffer[:] = name.encode()
        has_it = False
        try:
            call(self._store.put, [self._object], [buffer])
            has_it = True
        finally:
            with self._lock:
                self._see_resets()
                if self._name != name:  # what is newer may be replaced
                    self._is_stored, self._is_due = False, True
                elif has_it:
                    self._is_stored, self._is_due = True, False
                elif not self._is_stored:
                    # A call that seems to have failed may still end, after a later one.
                    self._name = self._new_name()

    def _delete(self, call: Call) -> None:
        """Without an object nothing is found, either. This works on a full disk, too."""
        with self._lock:
            before = self._resets
        call(self._store.delete, [self._object])
        with self._lock:
            self._see_resets()
            self._is_due &= self._resets != before
