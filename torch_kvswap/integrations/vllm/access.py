"""Which keys a vLLM request has used, in the order of its prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable
from itertools import islice
from typing import Any, TypeVar

_Access = TypeVar("_Access", bound="Access")


class Access:
    """The keys that a request has used.

    A key is reused if another request had stored it when this one found it.

    Kept in vLLM's ReqContext, which vLLM passes to every call for the request and drops after the
    last one. vLLM before 0.33 does not report the position of a key. Keys are then in the order of
    arrival, because vLLM names them from the front of the prompt.

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
        self._places: dict[bytes, int] = {}
        self._last = 0  # the greatest place

    @classmethod
    def of(cls: type[_Access], context: Any, manager: object, cache: object) -> _Access:
        """The Access that a request has had so far in this manager, or a new one."""
        if hasattr(context, "get_state"):
            access: _Access | None = context.get_state(cls)
        else:  # 0.26
            access = getattr(context, "_kvswap_access", None)
        if access is None or access.manager is not manager:
            return cls.start(context, manager, cache)
        return access

    @classmethod
    def start(cls: type[_Access], context: Any, manager: object, cache: object) -> _Access:
        """A new Access, which the request keeps."""
        access = cls(manager, cache)
        if hasattr(context, "set_state"):
            context.set_state(access)
        else:  # 0.26
            context._kvswap_access = access
        return access

    def use(self, keys: Iterable[bytes], is_reused: bool) -> None:
        """Records keys that the request has found, or stores. What it did first counts."""
        for key in keys:
            self.is_reused.setdefault(key, is_reused)

    def sort(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys in the order of the prompt."""
        return sorted(keys, key=self._places.__getitem__)

    def behind_known(self, keys: Iterable[bytes], known: Container[bytes]) -> list[bytes]:
        """The keys in the order of the prompt, behind the last known one in front of them."""
        keys = self.sort(keys)
        at = bisect_left(self.keys, self._places[keys[0]], key=self._places.__getitem__)
        fronts = (self.keys[i] for i in range(at - 1, -1, -1))
        return [*islice(filter(known.__contains__, fronts), 1), *keys]

    def see(self, context: Any, keys: Iterable[bytes]) -> None:
        """Records keys of the prompt, stored or not."""
        position_of = getattr(context, "get_offload_key_position", None)
        places, last, is_sorted = self._places, self._last, True
        new = [key for key in keys if key not in places]
        for key in new:
            place = position_of(key) if position_of else None
            if place is None:
                place = last + 1
            places[key] = place
            if place < last:  # vLLM names the keys of a sliding window later
                is_sorted = False
            else:
                last = place
        self.keys += new
        self._last = last
        if not is_sorted:
            self.keys = self.sort(self.keys)
