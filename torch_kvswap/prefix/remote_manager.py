"""The block manager of a prefix cache whose pages a server has (docs/serve.md)."""

from __future__ import annotations

import dataclasses
from array import array
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from torch_kvswap._native.arguments import Int64Array, read_int, read_switch
from torch_kvswap._native.loader import native
from torch_kvswap.prefix.block_groups import BlockGroup, unit_tokens
from torch_kvswap.prefix.hashing import KEY_BYTES
from torch_kvswap.prefix.manager import BlockStats, Lookup
from torch_kvswap.prefix.protocol import Op, pack, pack_keys
from torch_kvswap.prefix.remote_pools import RemotePools
from torch_kvswap.prefix.session import RemoteReservation, Session


class RemoteManager:
    """The index of a server, with the methods of a BlockManager that has a list of groups.

    A call that needs an answer waits for it, at most for the server's deadline. Without a server
    lookups find nothing, and loads and stores get no pages. What one engine is storing is pending
    for all.

    Attributes:
        groups, unit_tokens: see BlockManager.
    """

    def __init__(
        self, session: Session, pools: RemotePools, groups: tuple[BlockGroup, ...]
    ) -> None:
        self.groups = groups
        self.unit_tokens = unit_tokens(groups)
        self._session, self._pools = session, pools
        self._dropped = 0  # stores without a server; guarded by the session's lock

    def __repr__(self) -> str:
        return f"RemoteManager({self._session!r})"

    def touch(self, keys: list[bytes]) -> None:
        self._session.wait(pack_keys(Op.TOUCH, (), keys))

    def order(self, keys: list[bytes], *, renew: bool = False) -> None:
        self._session.wait(pack_keys(Op.ORDER, [read_switch("renew", renew)], keys))

    def reset(self) -> None:
        self._session.reset()
        self._session.wait()

    def stats(self, group: int = 0) -> BlockStats:
        group = read_int("group", group, 0, len(self.groups) - 1)
        answer = self._session.ask(pack(Op.STATS, [group]))
        fields = len(dataclasses.fields(BlockStats))
        stats = BlockStats(*([0] * fields if answer is None else answer))
        return dataclasses.replace(stats, refused=stats.refused + self._dropped)

    def lookup(self, keys: list[bytes], *, again: bool = False, hold: bool = False) -> Lookup:
        session, is_again = self._session, read_switch("again", again)
        lease = session.reserve(is_load=True, is_lease=True) if read_switch("hold", hold) else None
        message = pack_keys(Op.LOOKUP, [is_again, 0 if lease is None else lease.id], keys)
        found, ready, pending, asking = session.ask(message) or (0, 0, 0, 0)
        return Lookup(found, ready, pending, asking, lease if ready else None)

    def prepare_load(self, keys: list[bytes]) -> RemoteReservation | None:
        made = self._session.reserve(is_load=True)
        answer = self._session.ask(pack_keys(Op.LOAD, [made.id], keys))
        if answer is None or len(answer) * KEY_BYTES < sum(map(len, keys)):
            return None
        made.pages = _split(answer, keys)
        return made

    def prepare_store(self, keys: list[bytes], *, hold: bool = False) -> RemoteReservation | None:
        session, holds = self._session, read_switch("hold", hold)
        made = session.reserve(is_load=False)
        lease = session.reserve(is_load=True, is_lease=True) if holds else None
        numbers = made.id, 0 if lease is None else lease.id
        answer = session.ask(pack_keys(Op.RESERVE, numbers, keys))
        if answer is None:
            with session.lock:
                self._dropped += 1
        if not answer:
            return None
        lent, pages = answer[0], _split(answer[1:], keys)
        indices: list[Any] = [range(len(of_group)) for of_group in pages]
        if lent < sum(map(len, pages)):
            indices = [np.flatnonzero(of_group >= 0) for of_group in pages]
            pages = [of_group[its] for of_group, its in zip(pages, indices, strict=True)]
        if not lent:
            made = RemoteReservation(0, native.EndedPages(), False)
        made.key_indices, made.pages, made.lease = indices, pages, lease
        return made


def _split(numbers: array[int], keys: list[bytes]) -> list[Int64Array]:
    """The numbers of the keys of each group."""
    every: Int64Array = np.asarray(numbers)
    ends = accumulate((len(of_group) // KEY_BYTES for of_group in keys), initial=0)
    return [every[start:end] for start, end in pairwise(ends)]
