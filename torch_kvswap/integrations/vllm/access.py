"""Which keys a vLLM request has used, in the order of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from itertools import islice
from typing import Any, TypeVar

_Access = TypeVar("_Access", bound="Access")
_GROUP = slice(-4, None)  # the bytes of a key with the number of its group of layers


class Access:
    """The keys that a request has used.

    A key is reused if another request had stored it when this one found it.

    Kept in vLLM's ReqContext, which vLLM passes to every call for the request and drops after the
    last one. It reports the position of a key. A call names the keys of a group of layers in the
    order of the prompt.

    Attributes:
        keys (list[bytes]): in the order of the prompt.
        is_reused (dict[bytes, bool]): of the keys that it found or stored, whether it found them.
        unreadable (set[bytes]): keys that no tier could read for it.
        manager (object): the manager that keeps this in the ReqContext.
        cache (object): identifies the manager's contents; reset_cache() makes a new one.
    """

    def __init__(self, manager: object, cache: object) -> None:
        self.manager, self.cache = manager, cache
        self.keys: list[bytes] = []
        self.is_reused: dict[bytes, bool] = {}
        self.unreadable: set[bytes] = set()
        # By key. None while each call has named a part of `keys`, or what follows: for a long
        # prompt a dictionary takes longer than all that is done with it.
        self._places: dict[bytes, int] | None = None

    @classmethod
    def of(cls: type[_Access], context: Any, manager: object, cache: object) -> _Access:
        """The Access that a request has had so far in this manager, or a new one."""
        access: _Access | None = context.get_state(cls)
        if access is None or access.manager is not manager:
            return cls.start(context, manager, cache)
        return access

    @classmethod
    def start(cls: type[_Access], context: Any, manager: object, cache: object) -> _Access:
        """A new Access, which the request keeps."""
        access = cls(manager, cache)
        context.set_state(access)
        return access

    def use(self, keys: Iterable[bytes], is_reused: bool) -> None:
        """Records keys that the request has found, or stores. What it did first counts."""
        for key in keys:
            self.is_reused.setdefault(key, is_reused)

    def sort(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys in the order of the prompt."""
        keys, places = list(keys), self._places
        if places is None:
            if self._has(keys):
                return keys
            places = {key: place for place, key in enumerate(self.keys)}
        return sorted(keys, key=places.__getitem__)

    def behind_known(self, keys: Iterable[bytes], known: Container[bytes]) -> list[bytes]:
        """The keys in the order of the prompt, behind the last known one in front of them."""
        keys, backwards = self.sort(keys), self.keys[::-1]
        fronts = islice(backwards, backwards.index(keys[0]) + 1, None)
        return [*islice(filter(known.__contains__, fronts), 1), *keys]

    def see(self, context: Any, keys: Iterable[bytes]) -> None:
        """Records keys of the prompt, stored or not."""
        keys = list(keys)
        position_of = getattr(context, "get_offload_key_position", lambda key: None)
        if not keys or (self._places is None and self._follow(keys, position_of)):
            return
        if self._places is None:
            self._places = {}
            _place(self.keys, self._places, position_of)
        places = self._places
        new = [key for key in keys if key not in places]
        _place(new, places, position_of)
        new = self.sort(new)
        is_behind = not new or not self.keys or places[self.keys[-1]] <= places[new[0]]
        self.keys += new
        if not is_behind:  # vLLM names the keys of a sliding window later
            self.keys = self.sort(self.keys)

    def _follow(self, keys: list[bytes], position_of: Callable[[bytes], Any]) -> bool:
        """Records keys that are a part of `keys`, or go on behind it. False if they are others."""
        known = self.keys
        if len({key[_GROUP] for key in (*known[:1], keys[0], keys[-1])}) > 1:
            return False
        if self._has(keys):
            return True
        at, end, begin = len(known), position_of(known[-1]) if known else 0, position_of(keys[0])
        has_positions = None not in (end, begin)
        if not (has_positions and end < begin) and keys[0] in known:
            at = known.index(keys[0])
        more = keys[len(known) - at :]
        if known[at:] != keys[: len(known) - at]:
            return False
        if has_positions:
            is_new: bool = end < position_of(more[0])
        else:
            is_new = not known or set(more).isdisjoint(known)
        if is_new:
            known += more
        return is_new

    def _has(self, keys: list[bytes]) -> bool:
        """Whether `keys` has these side by side. Most are the last ones."""
        known, count = self.keys, len(keys)
        if not keys or known[-count:] == keys:
            return True
        if keys[0] not in known:
            return False
        at = known.index(keys[0])
        return known[at : at + count] == keys


def _place(
    keys: list[bytes], places: dict[bytes, int], position_of: Callable[[bytes], int | None]
) -> None:
    for key in keys:
        place = position_of(key)
        places[key] = len(places) if place is None else place
