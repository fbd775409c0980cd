"""Which keys a vLLM request has used, in the order of its prompt."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import islice
from typing import Any


class Access:
    """The keys that a request has used.

    A key is reused if another request had stored it when this one found it.

    Kept in vLLM's ReqContext, which vLLM passes to every call for the request and drops after the
    last one, and which tells the position of a key. A call names the keys of a group of layers in
    the order of the prompt.

    Attributes:
        keys (list[bytes]): in the order of the prompt.
        is_reused (dict[bytes, bool]): whether it found a key before it stored it.
    """

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.is_reused: dict[bytes, bool] = {}

    @classmethod
    def of(cls, context: Any) -> Access:
        """The Access of a request."""
        access: Access | None = context.get_state(cls)
        if access is None:
            access = cls()
            context.set_state(access)
        return access

    def see(self, context: Any, keys: Iterable[bytes], is_reused: bool = False) -> None:
        """Records keys of the prompt. is_reused: the request found them."""

        def position(key: bytes) -> int:  # 0 if vLLM does not tell: then in the order of arrival
            return context.get_offload_key_position(key) or 0

        new = [key for key in keys if key not in self.is_reused]
        places = [position(key) for key in (*self.keys[-1:], *new)]
        self.keys += new
        self.is_reused.update(dict.fromkeys(new, is_reused))
        if places != sorted(places):  # vLLM names the keys of a sliding window later
            self.keys.sort(key=position)

    def sort(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys, all of them seen, in the order of the prompt."""
        keys = list(keys)
        if keys == self.keys[-len(keys) :]:  # as most are
            return keys
        wanted = set(keys)
        return [key for key in self.keys if key in wanted]

    def with_predecessor(self, keys: Iterable[bytes], known: Container[bytes]) -> list[bytes]:
        """The keys in the order of the prompt, after the nearest earlier one that is known."""
        keys, backwards = self.sort(keys), self.keys[::-1]
        fronts = islice(backwards, backwards.index(keys[0]) + 1, None)
        return [*islice(filter(known.__contains__, fronts), 1), *keys]
