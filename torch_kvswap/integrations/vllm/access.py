"""What a request of vLLM has had of the cache, in the order of its prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any


class Access:
    """The keys of a request: `keys`, in the order of the prompt, and of these the `reused` ones,
    which another request had stored. What a request has stored itself is never a reuse.

    Lives as long as vLLM's ReqContext, with which it is kept: vLLM passes the same one at each call
    for a request, and drops it after the last one. Before 0.33 it says no position of a key; then
    keys are in the order in which they came, as vLLM names them from the front on.
    """

    def __init__(self, cache: object) -> None:
        self.cache = cache
        self.keys: list[bytes] = []
        self.reused: set[bytes] = set()
        self._inserted: set[bytes] = set()
        self._places: dict[bytes, int] = {}

    @classmethod
    def of(cls, context: Any, cache: object) -> Access:
        """That of a request. cache: another one than before forgets what the request has had."""
        access: Access | None = getattr(context, "_kvswap_access", None)
        if access is None or access.cache is not cache:
            access = context._kvswap_access = cls(cache)
        return access

    def insert(self, context: Any, keys: Iterable[bytes]) -> None:
        """The request stores these."""
        keys = list(keys)
        self._inserted.update(keys)
        self.reused.difference_update(keys)
        self.see(context, keys)

    def reuse(self, context: Any, keys: Iterable[bytes]) -> None:
        """The request has found these."""
        keys = list(keys)
        self.reused.update(key for key in keys if key not in self._inserted)
        self.see(context, keys)

    def before(self, key: bytes, is_ready: Callable[[bytes], bool]) -> bytes | None:
        """The last key in front of this one that is ready."""
        place = bisect_left(self.keys, self._places[key], key=self._places.__getitem__)
        fronts = (self.keys[at] for at in range(place - 1, -1, -1))
        return next(filter(is_ready, fronts), None)

    def sort(self, keys: Iterable[bytes]) -> list[bytes]:
        return sorted(keys, key=self._places.__getitem__)

    def see(self, context: Any, keys: Iterable[bytes]) -> None:
        """These are of its prompt, whatever is stored of them."""
        position_of = getattr(context, "get_offload_key_position", lambda key: None)
        last = self._places[self.keys[-1]] if self.keys else 0
        new = [key for key in dict.fromkeys(keys) if key not in self._places]
        for number, key in enumerate(new, last + 1):
            position = position_of(key)
            self._places[key] = number if position is None else position
        new = self.sort(new)
        is_behind = not new or self._places[new[0]] >= last
        self.keys += new
        if not is_behind:  # a sliding window is filled in later
            self.keys = self.sort(self.keys)
