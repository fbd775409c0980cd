"""Moves pages between the host pools of a prefix cache and a store below them."""

from __future__ import annotations

import contextlib
import mmap
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

from torch_kvswap._C import StoreReservation, WriteReservation
from torch_kvswap._native.arguments import count_of
from torch_kvswap._native.log import log
from torch_kvswap.below import thread
from torch_kvswap.below.format import PageFormat
from torch_kvswap.below.store import PageStore
from torch_kvswap.below.thread import Pause, Steps, StoreError, StoreThread
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.prefix.hashing import DIGEST_BYTES, Keys, read_digests, split_digests
from torch_kvswap.prefix.manager import BlockManager, Lookup

# Seconds, read at each use so that tests can set them.
LEASE = 30.0  # how long blocks that were read stay in memory if nobody loads them
ABSENT = 1.0  # for how long the store is not asked again for what it does not have

_PARTS = 4  # a batch has such a part of the bytes in flight, so that the store is never idle
_LEAST_SHARE = 8  # of the pages of a pool, one in so many is held at most to be written


@dataclass(frozen=True)
class BelowStats:
    """What a PrefixCache has moved to the store below it and from there, in pages since the start.

    Attributes:
        promoted (int): read into host memory.
        damaged (int): refused, because the digest or the trailer was wrong, one of the two objects
            was missing or had another size, or by a load, because a block was not what was stored;
            and deleted.
        written (int): written, or found to be there already.
        failed (int): not taken by the store, or asked for or read when it failed or did not answer
            in time. What was not taken is tried again while it is in memory.
        lost (int): evicted before they were written.
    """

    promoted: int
    damaged: int
    written: int
    failed: int
    lost: int


@dataclass(eq=False)
class _Promotion:
    """Pages of one group that are being read for a lookup.

    Attributes:
        keys (list[bytes]), pages (list[int]): of the pages.
        last_key (bytes): of those that are leased: a load of it ends the lease.
        rejected (list[int] | None): positions of pages that did not come; None until the store has
            answered.
        is_ending (bool): poll() has begun to end the reservation.
    """

    reservation: StoreReservation
    group: int
    keys: list[bytes]
    pages: list[int]
    last_key: bytes
    rejected: list[int] | None = None
    is_ending: bool = False


class _Ask:
    """The keys that a lookup has missed.

    Attributes:
        digests (list[bytes]): of each group, from its key `first[group]` on.
        keys (list[list[bytes]]): the same as keys, which the thread makes.
        units (int): the length of the prefix that was found.
        identity (bytes): the first key of the first group with any. The others are of no use
            without it.
        began (float): when the lookup was.
        has_begun (bool): the thread has taken it.
        left (int): batches that have not ended.
        is_over (bool): lookups are told that nothing is there.
    """

    def __init__(self, digests: list[bytes], identity: bytes, first: list[int], units: int) -> None:
        self.digests, self.identity, self.first, self.units = digests, identity, first, units
        self.keys: list[list[bytes]] = []
        self.count = sum(map(len, digests)) // DIGEST_BYTES
        self.began = time.monotonic()
        self.left, self.has_begun, self.is_over = 0, False, False
        self.promotions: list[_Promotion] = []


class Tier:
    """Reads from a store what lookups miss, and writes pages there before they are evicted.

    A thread calls the store and checks digests. The scheduler's threads call ask(), poll(),
    use_leases() and wait(), which call no store. What a lookup finds changes only in poll().

    Memory that the store uses is held: pages that it reads by a reservation of hold_due(), pages
    that it writes by one of promote(). Both end when the store has answered, however late.

    Args:
        store (PageStore): is closed by close().
        formats (Sequence[PageFormat]): of each pool.
        pools (Sequence[HostPool]): one for each group of the manager.
        manager (BlockManager): gives the pages.
        mark_written: OffloadHandler.mark_written().
        join: makes of a list with an item for each pool what manager and handler take.
        below_bytes (int): bytes in flight at most, in each direction; a page at least.
        on_answer: called, in the tier's thread, when poll() has something to do.
    """

    def __init__(
        self,
        store: PageStore,
        formats: Sequence[PageFormat],
        pools: Sequence[HostPool],
        manager: BlockManager,
        mark_written: Callable[[Any], None],
        join: Callable[[Sequence[Any]], Any],
        below_bytes: int,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self._formats, self._manager, self._on_answer = formats, manager, on_answer
        self._mark_written, self._join = mark_written, join
        self._page_bytes = [pool.page_bytes for pool in pools]
        self._memory = [pool._all_bytes().numpy().data for pool in pools]
        self._ratios = [manager.unit_tokens // group.block_tokens for group in manager.groups]
        self._below_bytes = below_bytes
        self._batch = [max(below_bytes // _PARTS // size, 1) for size in self._page_bytes]
        self._most_held = [max(pool.num_pages // _LEAST_SHARE, 1) for pool in pools]
        self._write_batch = [
            min(batch, max(held // _PARTS, 1))
            for batch, held in zip(self._batch, self._most_held, strict=True)
        ]
        has_name = type(store).__str__ is not object.__str__
        name = str(store) if has_name else f"a {type(store).__name__}"
        self._reads, self._writes = Pause(f"reading from {name}"), Pause(f"writing to {name}")

        # Guarded by _lock. A Condition is not entered, only waited for: Ctrl-C may come between its
        # taking the lock and the block, and would leave it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._asking: dict[bytes, _Ask] = {}  # by identity
        self._absent: dict[bytes, float] = {}  # by identity: until when; oldest first
        self._wrong: deque[tuple[int, bytes]] = deque()  # groups and keys of pages to be deleted
        self._answered: deque[_Promotion | _Ask] = deque()  # an ask: all of it was answered
        self._late: deque[_Ask] = deque()  # a call of each was not answered in time
        self._leases: deque[tuple[float, _Promotion]] = deque()
        self._failed = 0

        # Of the thread.
        self._reading = 0  # bytes in flight
        self._writing = [0] * len(pools)  # pages in flight
        self._damaged = self._written = 0
        self._thread = StoreThread(store, self._on_wake)
        self._thread.start()

    # What a PrefixCache calls.

    def ask(self, found: Lookup, keys: Sequence[Keys]) -> Lookup:
        """Asks the store for what a lookup of these keys, of each group, has missed."""
        first = [found.found * ratio for ratio in self._ratios]
        missed = list(map(_digests_from, keys, first))
        identity = next((of[:DIGEST_BYTES] for of in missed if of), None)
        if identity is None:
            return found
        with self._lock:
            ask = self._asking.get(identity)
            if ask is None:
                if self._absent.get(identity, 0.0) > time.monotonic() or self._reads.is_on:
                    return found
                if self._reads.is_over and self._asking:  # one ask finds out if it works again
                    return found
                ask = _Ask(missed, identity, first, found.found)
                # The thread waits for the lock. Woken first, it misses no ask if Ctrl-C comes.
                self._thread.wake()
                self._asking[identity] = ask
        return Lookup(found.found, found.ready, found.pending, ask.count)

    def poll(self, some_ended: bool) -> None:
        """Enters pages that were read, and ends what has run out of time.

        Args:
            some_ended (bool): jobs have ended, so that pages may be due to be written.
        """
        if some_ended:
            self._thread.wake()
        if not self._asking and not self._leases and not self._absent:
            return
        now = time.monotonic()
        with self._lock:
            while self._answered:  # each is taken when it has ended: Ctrl-C may come in between
                answered = self._answered[0]
                if isinstance(answered, _Ask):
                    self._asking.pop(answered.identity, None)
                else:
                    self._enter(answered, now)
                self._answered.popleft()
            # An ask may have to wait for others. But if the store goes on with none of them, or
            # the thread hangs in a call, all are over.
            while self._late:
                late = self._late.popleft()
                if self._asking.get(late.identity) is late:  # it was not answered meanwhile
                    self._give_up(late)
            while (oldest := next(iter(self._asking.values()), None)) is not None:
                if max(oldest.began, self._reads.progress) + thread.DEADLINE > now:
                    break
                self._give_up(oldest)
            while self._leases and self._leases[0][0] <= now:
                self._manager.release(self._leases[0][1].reservation)
                self._leases.popleft()
            while self._absent and self._absent[oldest_key := next(iter(self._absent))] <= now:
                del self._absent[oldest_key]

    def wait(self, timeout: float | None) -> None:
        """Waits until an ask was answered or is late, if there is one; for DEADLINE at most."""
        with self._lock:
            if self._asking and not self._answered and not self._late:
                longest = thread.DEADLINE if timeout is None else min(timeout, thread.DEADLINE)
                self._changed.wait(longest)

    def use_leases(self, digests: Sequence[bytes]) -> None:
        """A load holds the pages of these keys: their leases end."""
        if not self._leases:
            return
        with self._lock:
            for lease in list(self._leases):
                if any(lease[1].last_key in of_group for of_group in digests):
                    self._manager.release(lease[1].reservation)
                    self._leases.remove(lease)

    def delete(self, pages: Sequence[tuple[int, bytes]]) -> None:
        """Loads have found that these pages, given by group and key, are not what was stored.

        What is below may be as wrong, so it is deleted and can be written anew.
        """
        with self._lock:
            self._wrong.extend(pages)
            self._thread.wake()

    def stats(self) -> BelowStats:
        of_groups = [self._manager.stats(group) for group in range(len(self._formats))]
        return BelowStats(
            promoted=sum(of.promoted for of in of_groups),
            damaged=self._damaged,
            written=self._written,
            failed=self._failed,
            lost=sum(of.lost for of in of_groups),
        )

    def check_open(self) -> None:
        """As a user of a HostPool: raises RuntimeError once the store uses no page any more."""
        if not self._thread.is_alive:
            raise RuntimeError("the prefix cache is closed")

    def close(self) -> None:
        """Closes the store. See StoreThread.close()."""
        if self._thread.close():
            self._memory.clear()  # so that the pools' memory can be unmapped

    def _enter(self, promotion: _Promotion, now: float) -> None:
        """Pages with the right digests can be loaded from now on. Called again if interrupted."""
        is_again, promotion.is_ending = promotion.is_ending, True
        rejected = promotion.rejected or ()
        pages: list[list[int]] = [[] for _ in self._formats]
        pages[promotion.group] = [
            page for place, page in enumerate(promotion.pages) if place not in rejected
        ]
        try:
            self._mark_written(self._join(pages))
            self._manager.complete(promotion.reservation, rejected)
        except ValueError:  # it had ended when the call before was interrupted
            if not is_again:
                raise
        self._leases.append((now + LEASE, promotion))

    def _give_up(self, ask: _Ask) -> None:
        """Tells lookups that nothing is there. What comes later is not entered."""
        ask.is_over = True
        self._failed += ask.count
        self._reads.begin(f"no answer for {count_of(ask.count, 'key')} in {thread.DEADLINE:g} s")
        for promotion in ask.promotions:
            if promotion.rejected is None:  # the store may still write the pages
                self._manager.abandon(promotion.reservation)
        self._note_absent(ask.identity)
        self._asking.pop(ask.identity, None)

    def _note_absent(self, identity: bytes) -> None:
        self._absent.pop(identity, None)  # so that it becomes the newest
        self._absent[identity] = time.monotonic() + ABSENT

    # What the thread does.

    def _on_wake(self) -> float:
        """Starts what is to be done. Returns when there may be more."""
        with self._lock:
            new = [ask for ask in self._asking.values() if not ask.has_begun]
        for ask in new:
            ask.has_begun = True
            self._thread.run(self._read(ask))
        while self._wrong:
            group, key = self._wrong.popleft()
            self._damaged += 1
            self._thread.run(self._delete(group, [key]))
        for group in range(len(self._formats)):
            while not self._writes.is_on and (held := self._hold_due(group)) is not None:
                self._thread.run(self._write(group, held))
        return self._writes.until if self._writes.is_on else float("inf")

    def _hold_due(self, group: int) -> WriteReservation | None:
        """Pages for a batch, unless enough are in flight."""
        size, batch = self._page_bytes[group], self._write_batch[group]
        in_flight = sum(map(operator.mul, self._writing, self._page_bytes))
        room = (self._below_bytes - in_flight) // size if in_flight else batch
        count = min(room, batch, self._most_held[group] - self._writing[group])
        return self._manager.hold_due(count, group) if count > 0 else None

    def _read(self, ask: _Ask) -> Steps:
        """Finds out what is there, and starts to read it."""
        ask.keys = list(map(split_digests, ask.digests))
        names = [
            self._formats[group].trailer_name(key)
            for group, keys in enumerate(ask.keys)
            for key in keys
        ]
        there = [False] * len(names)
        try:
            there = yield self._begin_read("exists", names, (), ask)
            error = self._thread.error
        except StoreError as refused:
            error = str(refused)
        self._end_read(ask, error, len(names))
        rest = iter(there)
        units = self._manager._longest_prefix(
            ask.units, [bytes(islice(rest, len(keys))) for keys in ask.keys]
        )
        batches = [
            (group, keys[start : start + self._batch[group]])
            for group, keys in enumerate(self._needed(ask, units))
            for start in range(0, len(keys), self._batch[group])
        ]
        ask.left = len(batches)
        with self._lock:
            for keys, first, ratio in zip(ask.keys, ask.first, self._ratios, strict=True):
                behind = keys[units * ratio - first :]
                if behind:
                    self._note_absent(behind[0])
                    break
        if not batches:
            self._answer(ask)
        for group, keys in batches:
            self._thread.run(self._read_batch(ask, group, keys))

    def _needed(self, ask: _Ask, units: int) -> list[list[bytes]]:
        """The keys of each group that a prefix of this length needs, and that were missed."""
        if units == ask.units:
            return [[] for _ in ask.keys]
        needed = self._manager.needed_blocks(units)
        several = needed if isinstance(needed, list) else [needed]
        return [
            keys[max(of.start - first, 0) : max(of.stop - first, 0)]
            for keys, first, of in zip(ask.keys, ask.first, several, strict=True)
        ]

    def _read_batch(self, ask: _Ask, group: int, keys: list[bytes]) -> Steps:
        """Reads pages, checks their digests, and leaves them to poll()."""
        size, form = self._page_bytes[group], self._formats[group]
        nbytes = len(keys) * size
        while self._reading and self._reading + nbytes > self._below_bytes:
            yield None
        self._reading += nbytes
        promotion = self._promote(ask, group, keys)
        damaged: list[bytes] = []
        if promotion is not None:
            keys, count = promotion.keys, len(promotion.keys)
            views = self._views(group, promotion.pages)
            trailers = _zeros(form.trailer_bytes, count)
            names = [*map(form.page_name, keys), *map(form.trailer_name, keys)]
            came = [False] * len(names)
            was_late = False
            try:
                came = yield self._begin_read("get", names, [*views, *trailers], ask)
                error, was_late = self._thread.error, self._thread.was_late
            except StoreError as refused:
                error = str(refused)
            rejected = []
            for place, (key, view, trailer) in enumerate(zip(keys, views, trailers, strict=True)):
                problem = None
                if came[place] and came[count + place]:
                    problem = form.problem(trailer, key, view)
                    if problem is None:
                        form.enter_digests(trailer, promotion.pages[place])
                        continue
                elif came[place] != came[count + place] and not error and not was_late:
                    # As long as the trailer is there, nobody would write the page anew.
                    problem = "one of its two objects is missing, or has another size"
                if problem is not None:
                    damaged.append(key)
                    self._report(key, problem)
                rejected.append(place)
            self._end_read(ask, error, len(rejected))
            self._hand_over(ask, promotion, rejected)
        self._reading -= nbytes
        ask.left -= 1
        if not ask.left:
            self._answer(ask)
        if damaged:
            yield from self._delete(group, damaged)

    def _delete(self, group: int, keys: list[bytes]) -> Steps:
        form = self._formats[group]
        names = [*map(form.trailer_name, keys), *map(form.page_name, keys)]
        with contextlib.suppress(StoreError):
            yield self._thread.begin("delete", names, (), self._reads)

    def _promote(self, ask: _Ask, group: int, keys: list[bytes]) -> _Promotion | None:
        """Takes pages for these keys. None if they are in memory, or there is no room."""
        of_groups: list[list[bytes]] = [[] for _ in self._formats]
        of_groups[group] = keys
        with self._lock:
            if ask.is_over:
                return None
            try:
                reservation = self._manager.promote(self._join(of_groups))
            except ValueError:  # a key occurs twice: such prompts are not stored either
                return None
            if reservation is None:
                self._note_absent(ask.identity)
                return None
            if reservation.id == 0:
                self._manager.release(reservation)
                return None
            places, pages = reservation.key_indices, reservation.pages
            if isinstance(pages, list):
                places, pages = places[group], pages[group]
            of_pages = [keys[place] for place in places.tolist()]
            promotion = _Promotion(reservation, group, of_pages, pages.tolist(), keys[-1])
            ask.promotions.append(promotion)
            return promotion

    def _hand_over(self, ask: _Ask, promotion: _Promotion, rejected: list[int]) -> None:
        """The store has answered for all of these pages."""
        with self._lock:
            promotion.rejected = rejected
            if ask.is_over:
                self._manager.fail(promotion.reservation)
                self._manager.release(promotion.reservation)
                return
            for place in rejected:
                self._note_absent(promotion.keys[place])
            if rejected:
                self._note_absent(ask.identity)
            self._answered.append(promotion)
            self._notify()

    def _answer(self, ask: _Ask) -> None:
        with self._lock:
            if not ask.is_over:
                self._answered.append(ask)
                self._notify()

    def _report(self, key: bytes, problem: str) -> None:
        """Warns of the first page that is refused."""
        if not self._damaged:
            log.warning("a page below is refused and deleted: %s (key %s)", problem, key.hex())
        self._damaged += 1

    def _write(self, group: int, held: WriteReservation) -> Steps:
        """Writes pages that the store does not have, and then their trailers."""
        form, keys, pages = self._formats[group], split_digests(held.digests), held.pages.tolist()
        count, error = len(pages), "it was refused"
        self._writing[group] += count
        is_below = [False] * count
        try:
            names = list(map(form.trailer_name, keys))
            is_below = yield self._thread.begin("exists", names, (), self._writes)
            left = [place for place in range(count) if not is_below[place]]
            if left:
                views = self._views(group, [pages[place] for place in left])
                names = [form.page_name(keys[place]) for place in left]
                writing = self._thread.begin("set", names, views, self._writes)
                trailers = _zeros(form.trailer_bytes, len(left))
                for place, view, trailer in zip(left, views, trailers, strict=True):
                    # While the store writes the page.
                    form.write_trailer(trailer, keys[place], pages[place], view)
                taken = yield writing
                error = self._thread.error
                left, trailers = list(compress(left, taken)), list(compress(trailers, taken))
            if left:
                names = [form.trailer_name(keys[place]) for place in left]
                taken = yield self._thread.begin("set", names, trailers, self._writes)
                error = self._thread.error or error
                for place in compress(left, taken):
                    is_below[place] = True
        except StoreError:
            pass  # its pause has begun
        failed = [place for place in range(count) if not is_below[place]]
        self._writing[group] -= count
        self._written += count - len(failed)
        with self._lock:
            self._failed += len(failed)
        if failed:
            self._writes.begin(f"{count_of(len(failed), 'page')} could not be written: {error}")
        else:
            self._end_pause(self._writes)
        self._manager.complete(held, failed)

    def _begin_read(
        self, what: str, names: list[str], memory: Sequence[memoryview], ask: _Ask
    ) -> int:
        def on_late() -> None:
            with self._lock:
                self._late.append(ask)
                self._notify()

        return self._thread.begin(what, names, memory, self._reads, on_late)

    def _end_read(self, ask: _Ask, error: str, failed: int) -> None:
        """The store has answered, or has failed for this number of pages."""
        if error:
            self._reads.begin(error)
            with self._lock:
                self._failed += 0 if ask.is_over else failed
        else:
            self._end_pause(self._reads)

    def _notify(self) -> None:
        self._changed.notify_all()
        self._on_answer()

    def _end_pause(self, pause: Pause) -> None:
        """The store has answered the last call, perhaps in time."""
        if not self._thread.was_late:
            pause.end()

    def _views(self, group: int, pages: list[int]) -> list[memoryview]:
        size, memory = self._page_bytes[group], self._memory[group]
        return [memory[page * size : (page + 1) * size] for page in pages]


def _digests_from(keys: Keys, first: int) -> bytes:
    """The digests of the keys from this one on."""
    return read_digests("keys", keys[first * (DIGEST_BYTES if isinstance(keys, bytes) else 1) :])


def _zeros(nbytes: int, count: int) -> list[memoryview]:
    """So many times so many bytes, aligned as pages are."""
    memory = memoryview(mmap.mmap(-1, count * nbytes))
    return [memory[place * nbytes : (place + 1) * nbytes] for place in range(count)]
