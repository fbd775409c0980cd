"""The block manager of a prefix cache whose pages a server has (docs/serve.md)."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from torch_kvswap._native.arguments import Int64Array, NotCopyable, read_int, read_switch
from torch_kvswap._native.ids import split_groups
from torch_kvswap._native.loader import native
from torch_kvswap.prefix.block_groups import BlockGroup, unit_tokens
from torch_kvswap.prefix.hashing import KEY_BYTES, Keys
from torch_kvswap.prefix.manager import BlockStats, Lookup, needed_blocks
from torch_kvswap.prefix.protocol import Op, pack, pack_keys
from torch_kvswap.prefix.remote_pools import RemotePools
from torch_kvswap.prefix.session import RemoteReservation, Session


class RemoteManager(NotCopyable):
    """The index of a server, which other engines change, too: `manager` of PrefixCache.connect().

    A call that needs an answer waits for it, at most for the server's deadline. Without a server
    lookups find nothing, and loads and stores get no pages. What one engine is storing is pending
    for all.

    Any thread may call any method. In a forked child every call raises RuntimeError.

    Attributes:
        groups, unit_tokens: see BlockManager.
    """

    def __init__(
        self, session: Session, pools: RemotePools, groups: tuple[BlockGroup, ...], is_list: bool
    ) -> None:
        self.groups, self._is_list = groups, is_list
        self.unit_tokens = unit_tokens(groups)
        self._session, self._pools = session, pools
        self._dropped = 0  # stores without a server; guarded by the session's lock

    def __repr__(self) -> str:
        return f"RemoteManager({self._session!r})"

    # What anybody may call, with the keys of a group, or a list with those of each.

    def needed_blocks(self, prefix: int) -> range | list[range]:
        """See BlockManager.needed_blocks()."""
        needed = needed_blocks(self.groups, prefix)
        return needed if self._is_list else needed[0]

    def touch(self, keys: Keys | Sequence[Keys]) -> None:
        """See BlockManager.touch()."""
        self._session.wait(pack_keys(Op.TOUCH, (), self._read(keys)))

    def order(self, keys: Keys | Sequence[Keys], *, renew: bool = False) -> None:
        """See BlockManager.order()."""
        renews = read_switch("renew", renew)
        self._session.wait(pack_keys(Op.ORDER, [renews], self._read(keys)))

    def reset(self) -> None:
        """Forgets all blocks, also those of other engines.

        If the server does not answer, it forgets them when it is joined again.
        """
        self._session.reset()
        self._session.wait()

    def stats(self, group: int = 0) -> BlockStats:
        """The server's statistics of a group, of all engines; zeros without a server.

        `refused` also counts the stores of this engine that found no server.
        """
        group = read_int("group", group, 0, len(self.groups) - 1)
        answer = self._session.ask(pack(Op.STATS, [group]))
        fields = len(dataclasses.fields(BlockStats))
        stats = BlockStats(*([0] * fields if answer is None else answer))
        return dataclasses.replace(stats, refused=stats.refused + self._dropped)

    def _read(self, keys: Keys | Sequence[Keys]) -> list[bytes]:
        if not self._is_list:
            return [native.join_keys("keys", keys)]
        split = enumerate(split_groups("keys", keys, len(self.groups)))
        return [native.join_keys(f"keys[{group}]", of_group) for group, of_group in split]

    # What a PrefixCache calls, with the keys of each group. It gets lists with an item for each.

    def _lookup(self, keys: list[bytes], *, again: bool = False, hold: bool = False) -> Lookup:
        """See PrefixCache.lookup()."""
        session, is_again = self._session, read_switch("again", again)
        lease = session.reserve(is_load=True, is_lease=True) if read_switch("hold", hold) else None
        message = pack_keys(Op.LOOKUP, [is_again, 0 if lease is None else lease.id], keys)
        found, ready, pending, asking = session.ask(message) or (0, 0, 0, 0)
        return Lookup(found, ready, pending, asking, lease if ready else None)

    def _prepare_load(self, keys: list[bytes]) -> RemoteReservation | None:
        """See BlockManager.prepare_load()."""
        made = self._session.reserve(is_load=True)
        answer = self._session.ask(pack_keys(Op.LOAD, [made.id], keys))
        if answer is None or len(answer) * KEY_BYTES < sum(map(len, keys)):
            return None
        made.pages = _split(answer, keys)
        return made

    def _prepare_store(self, keys: list[bytes], *, hold: bool = False) -> RemoteReservation | None:
        """See BlockManager.prepare_store()."""
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
