"""What vLLM's scheduler holds and borrows at a server (docs/serve.md). Each worker has a session of
its own, which maps and pins the memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from torch_kvswap.prefix.manager import BlockStats
from torch_kvswap.prefix.protocol import Op, Outcome, pack, pack_keys
from torch_kvswap.prefix.session import RemoteReservation, Session

_MIN_BORROWED_PAGES = 64  # of an engine with requests, even if its recent steps took fewer


class SchedulerSession(Session):
    """The index of a server for a scheduler that never waits for it: it asks in one step, and takes
    the answers in a later one, by poll().

    One thread makes all calls.

    Args:
        path, engine, workers: see Session.
    """

    def __init__(self, path: str, engine: str, workers: int = 1) -> None:
        super().__init__(path, {}, None, engine=engine, workers=workers)
        self._storing: dict[int, int] = {}  # pages of open stores: resets when the store began

    def _forget(self) -> None:
        """See Session."""
        super()._forget()
        self._free: list[int] = []  # borrowed pages that no store uses
        self._is_borrowing = self._is_short = False  # is_short: it got fewer than it asked for
        self._demand = self._taken = 0  # pages of one step, and of this one

    def _has_jobs(self) -> bool:
        return super()._has_jobs() or bool(self._storing)

    @property
    def has_free_pages(self) -> bool:
        """Whether it has borrowed pages that no store uses."""
        return bool(self._free)

    def hold(self, keys: bytes, then: Callable[[RemoteReservation], None]) -> None:
        """Asks the server to hold the pages of those keys that are ready. then: gets the answer,
        and the pages, for end_hold().
        """
        made = self.reserve(is_load=True)

        def read(answer: array[int]) -> None:
            made.answers = answer.tolist()
            then(made)

        self.send(pack_keys(Op.HOLD, [made.id], [keys]), read)

    def end_hold(
        self,
        held: Iterable[RemoteReservation],
        failed: Collection[int] = (),
        is_damaged: bool = False,
    ) -> None:
        """Nothing reads these pages any more. Nobody finds the blocks on failed ones any more.

        Args:
            is_damaged (bool): these blocks have other bytes than were stored.
        """
        rejected = [number for page in failed for number in (0, page)]  # of the only group
        for one in held:
            one._end(Outcome.DAMAGED if is_damaged else Outcome.DONE, rejected)
        self.send()

    def begin_store(self, count: int) -> list[int] | None:
        """Pages for `count` blocks of a store, or fewer if the server lends no more.

        The store has them until end_store(). None if a later step will have enough.
        """
        self._taken += count
        if len(self._free) < count and not (self._free and self._is_short):
            return None
        pages = sorted(self._free[:count])  # neighbours are copied together
        del self._free[:count]
        self._storing.update(dict.fromkeys(pages, self.resets))
        return pages

    def end_store(self, pages: Sequence[int], stored: Sequence[int], keys: bytes) -> bool:
        """The copy has ended. Whether others find blocks of it now.

        Args:
            pages (Sequence[int]): of the store.
            stored (Sequence[int]): the pages whose blocks were copied.
            keys (bytes): of these blocks, which others find from now on, unless the server was
                reset since the store began.
        """
        with self.lock:
            began = {self._storing.pop(page) for page in pages}
            if began != {self.resets}:
                stored = ()
            if stored:
                self.send(pack(Op.GIVE_BACK, [self.resets, *stored], keys))
            if self.is_joined:
                self._free += set(pages).difference(stored)
            self._job_ended()
            return bool(stored)

    def end_step(self, is_idle: bool = False) -> None:
        """Borrows pages for the stores of later steps, or gives some back.

        Args:
            is_idle (bool): the engine has no requests, and keeps no page.
        """
        self._demand = max(self._taken, self._demand * 15 // 16)
        self._taken = 0
        wanted = 0 if is_idle else max(self._demand, _MIN_BORROWED_PAGES)
        missing = wanted - len(self._free)
        if -missing > wanted:
            self.send(pack(Op.GIVE_BACK, [self.resets, *self._free[wanted:]]))
            del self._free[wanted:]
        is_asking = missing >= wanted // 4 or len(self._free) < self._demand
        if is_asking and self.is_joined and not self._is_borrowing and not is_idle:
            self._is_borrowing = True
            self.send(pack(Op.BORROW, [missing]), partial(self._borrowed, missing))

    def _borrowed(self, asked: int, answer: array[int]) -> None:
        self._free += answer
        self._is_borrowing, self._is_short = False, len(answer) < asked

    def touch(self, keys: bytes) -> None:
        """See BlockManager.touch()."""
        self.send(pack_keys(Op.TOUCH, (), [keys]))

    def order(self, keys: bytes, *, renew: bool = False) -> None:
        """See BlockManager.order()."""
        self.send(pack_keys(Op.ORDER, [renew], [keys]))

    def ask_stats(self, then: Callable[[BlockStats], None]) -> None:
        """Asks for the statistics of the server, of all engines."""
        self.send(pack(Op.STATS, [0]), lambda numbers: then(BlockStats(*numbers)))
