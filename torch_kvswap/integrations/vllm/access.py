"""Which keys a vLLM request has used, in the order of its prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable
from typing import Any


class Access:
    """The keys that a request has used.

    A key is reused if another request had stored it when this one found it.

    Kept in vLLM's ReqContext, which vLLM passes to every call for the request and drops after the
    last one. vLLM before 0.33 does not report the position of a key. Keys are then in the order of
    arrival, because vLLM names them from the front of the prompt.

    Attributes:
        keys (list[bytes]): in the order of the prompt.
        reused (set[bytes]): the reused keys.
        manager (object): the manager that keeps this in the ReqContext.
        cache (object): identifies the manager's contents; reset_cache() makes a new one.
    """

    def __init__(self, manager: object, cache: object) -> None:
        self.manager, self.cache = manager, cache
        self.keys: list[bytes] = []
        self.reused: set[bytes] = set()
        self._inserted: set[bytes] = set()
        self._places: dict[bytes, int] = {}

    @classmethod
    def of(cls, context: Any, manager: object, cache: object) -> Access:
        """The Access of a request; a new one if the cache was reset since."""
        access = cls.known(context, manager)
        if access is None or access.cache is not cache:
            access = cls(manager, cache)
            if hasattr(context, "set_state"):
                context.set_state(access)
            else:  # 0.26
                context._kvswap_access = access
        return access

    @classmethod
    def known(cls, context: Any, manager: object) -> Access | None:
        """The Access that a request has had so far.

        Raises:
            RuntimeError: another manager has put it there.
        """
        is_typed = hasattr(context, "get_state")
        access: Access | None = (
            context.get_state(cls) if is_typed else getattr(context, "_kvswap_access", None)
        )
        if access is not None and access.manager is not manager:
            raise RuntimeError(
                f"request {context.req_id}: its ReqContext holds the state of another "
                "KVSwapManager; make one ReqContext per request and manager"
            )
        return access

    def insert(self, context: Any, keys: Iterable[bytes]) -> None:
        """Records keys that the request stores."""
        keys = list(keys)
        self._inserted.update(keys)
        self.see(context, keys)

    def reuse(self, context: Any, keys: Iterable[bytes]) -> None:
        """Records keys that the request has found."""
        keys = list(keys)
        self.reused.update(key for key in keys if key not in self._inserted)
        self.see(context, keys)

    def before(self, key: bytes, known: Container[bytes]) -> bytes | None:
        """The last of the known keys in front of this one in the prompt."""
        place = bisect_left(self.keys, self._places[key], key=self._places.__getitem__)
        fronts = (self.keys[at] for at in range(place - 1, -1, -1))
        return next((front for front in fronts if front in known), None)

    def sort(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys in the order of the prompt."""
        return sorted(keys, key=self._places.__getitem__)

    def see(self, context: Any, keys: Iterable[bytes]) -> None:
        """Records keys of the prompt, stored or not."""
        position_of = getattr(context, "get_offload_key_position", lambda key: None)
        last = self._places[self.keys[-1]] if self.keys else 0
        new = [key for key in dict.fromkeys(keys) if key not in self._places]
        for number, key in enumerate(new, last + 1):
            position = position_of(key)
            self._places[key] = number if position is None else position
        new = self.sort(new)
        is_behind = not new or self._places[new[0]] >= last
        self.keys += new
        if not is_behind:  # vLLM names the keys of a sliding window later
            self.keys = self.sort(self.keys)
