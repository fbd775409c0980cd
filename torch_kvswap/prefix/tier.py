"""Moves pages between the host pools of a prefix cache and a second tier."""

from __future__ import annotations

import contextlib
import mmap
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from torch_kvswap._C import StoreReservation, WriteReservation
from torch_kvswap._native.arguments import count_of
from torch_kvswap._native.loader import ForkGuard
from torch_kvswap._native.log import log, warn_once
from torch_kvswap.below import threads
from torch_kvswap.below.files import FileStore
from torch_kvswap.below.format import PageFormat
from torch_kvswap.below.store import PageStore
from torch_kvswap.below.threads import StorePausedError, StoreThreads
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.prefix.hashing import KEY_BYTES, split_keys
from torch_kvswap.prefix.manager import BlockManager, Lookup

# Seconds, read at each use so that tests can set them.
LEASE = 30.0  # seconds that blocks from the store stay in memory if nobody loads them
ABSENT = 1.0  # seconds before the store is asked again for a missing key

# In each direction, at most; a page at least.
BYTES_IN_FLIGHT = 256 << 20

# Of each direction. With more, pages are no faster, and lookups wait for the GIL.
# A call of the store moves such a part of the bytes in flight.
_THREADS = 4
_MAX_SHARE_IN_WRITES = 1 / 8  # of the pages of a pool that may be held for writing


@dataclass(frozen=True)
class BelowStats:
    """Pages that a PrefixCache has moved to and from its second tier since the start.

    Attributes:
        promoted (int): read into host memory.
        damaged (int): refused and deleted, because the checksum or the trailer was wrong, an object
            was missing or had another size, or a load found a damaged block.
        written (int): written, or found to be there already.
        failed (int): part of a call of the store that failed or timed out. Writes are tried again
            while the pages are in memory.
        lost (int): evicted before they were written.
        hung (int): calls of the store, not pages, that have not returned in time and still hold
            their pages.
    """

    promoted: int
    damaged: int
    written: int
    failed: int
    lost: int
    hung: int


@dataclass(eq=False)
class _Promotion:
    """Pages of one group that are being read for a lookup.

    Attributes:
        keys (list[bytes]), pages (list[int]): of the pages.
        last_key (bytes): of those that are leased: a load of it ends the lease.
        rejected (list[int] | None): positions of pages that did not come; None until the store has
            answered.
    """

    reservation: StoreReservation
    group: int
    keys: list[bytes]
    pages: list[int]
    last_key: bytes
    rejected: list[int] | None = None


class _Ask:
    """The keys that a lookup has missed.

    Attributes:
        joined (list[bytes]): of each group, from its key `first[group]` on, in a row.
        keys (list[list[bytes]]): the same one by one, which a thread makes.
        units (int): the length of the prefix that was found.
        identity (bytes): the first missing key of the first group with any; without it the others
            cannot be used.
        has_begun (bool): a thread has taken it.
        left (int): batches that have not ended.
        is_over (bool): lookups are told that nothing is there.
    """

    def __init__(self, joined: list[bytes], identity: bytes, first: list[int], units: int) -> None:
        self.joined, self.identity, self.first, self.units = joined, identity, first, units
        self.keys: list[list[bytes]] = []
        self.count = sum(map(len, joined)) // KEY_BYTES
        self.left, self.has_begun, self.is_over = 0, False, False
        self.promotions: list[_Promotion] = []


class Tier:
    """Reads from a store what lookups miss, and writes pages there before they are evicted.

    Threads call the store and compare checksums. The scheduler's threads call ask(), poll(),
    use_leases() and wait(), which call no store. Lookups find what was read after poll(). The pages
    for it are taken at any time: a block that a lookup has found may be evicted before its load.

    Memory that the store uses is held: pages that it reads by a reservation of hold_due(), pages
    that it writes by one of promote(). Both end when the call has returned, however late.

    Args:
        store (PageStore): is closed by close().
        formats (Sequence[PageFormat]): of each pool.
        pools (Sequence[HostPool]): one for each group of the manager.
        manager (BlockManager): gives the pages. Takes and returns lists, as does mark_written.
        mark_written: OffloadHandler.mark_written().
        on_answer: called, in a thread of the tier, when poll() has something to do.
    """

    def __init__(
        self,
        store: PageStore,
        formats: Sequence[PageFormat],
        pools: Sequence[HostPool],
        manager: BlockManager,
        mark_written: Callable[[Any], None],
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        if isinstance(store, FileStore):
            for form in formats:
                store._describe(form.name, form.description)
        self._formats, self._manager, self._on_answer = formats, manager, on_answer
        self._mark_written = mark_written
        self._page_bytes = [pool.page_bytes for pool in pools]
        self._memory = [pool._all_bytes().numpy().data for pool in pools]
        self._ratios = [manager.unit_tokens // group.block_tokens for group in manager.groups]
        self._batch = [max(BYTES_IN_FLIGHT // _THREADS // size, 1) for size in self._page_bytes]
        self._most_held = [max(int(pool.num_pages * _MAX_SHARE_IN_WRITES), 1) for pool in pools]
        self._write_batch = [
            min(batch, max(held // _THREADS, 1))
            for batch, held in zip(self._batch, self._most_held, strict=True)
        ]
        # Guarded by _lock. A Condition is not entered, only waited for: Ctrl-C may come between its
        # taking the lock and the block, and would leave it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._asking: dict[bytes, _Ask] = {}  # by identity
        self._absent: dict[bytes, float] = {}  # by identity: until when; oldest first
        self._answered: deque[_Promotion | _Ask] = deque()  # an ask: all of it was answered
        self._leases: deque[tuple[float, _Promotion]] = deque()
        self._writing = [0] * len(pools)  # pages in flight
        self._damaged = self._written = self._failed = 0

        self._must_retry = False  # pages are due that could not be written
        self._store, self._process, self._has_warned = store, ForkGuard(), False
        largest = max(map(operator.mul, self._batch, self._page_bytes))
        count = max(min(_THREADS, BYTES_IN_FLIGHT // largest), 1)
        self._running = 2 * count  # threads that have not ended
        self._reads = StoreThreads(f"reading from {store}", count, self._end_thread)
        self._writes = StoreThreads(f"writing to {store}", count, self._end_thread)

    # What a PrefixCache calls.

    def ask(self, found: Lookup, keys: Sequence[bytes]) -> Lookup:
        """Asks the store for what a lookup of these keys, of each group, has missed."""
        first = [found.found * ratio for ratio in self._ratios]
        missed = [group_keys[KEY_BYTES * at :] for group_keys, at in zip(keys, first, strict=True)]
        identity = next((group_keys[:KEY_BYTES] for group_keys in missed if group_keys), None)
        if identity is None:
            return found
        with self._lock:
            ask = self._asking.get(identity)
            if ask is None:
                if self._absent.get(identity, 0.0) > time.monotonic() or self._reads.is_away:
                    return found
                if self._reads.is_doubtful and self._asking:  # one finds out if it works again
                    return found
                ask = _Ask(missed, identity, first, found.found)
                # _find() waits for the lock. Submitted first, it misses no ask if Ctrl-C comes.
                self._reads.submit(self._find)
                self._asking[identity] = ask
        return Lookup(found.found, found.ready, found.pending, ask.count)

    def poll(self, some_ended: bool) -> None:
        """Enters pages that were read, and ends what has run out of time.

        Args:
            some_ended (bool): jobs have ended, so that pages may be due to be written.
        """
        if some_ended:
            self.delete(self._manager._take_corrupted())
        self._writes.find_late()
        if some_ended or self._must_retry:
            self._wake_writers()
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
            late = self._reads.find_late()
            are_all_hung = self._reads.are_all_hung  # then the others would wait for ever
            for ask in list(self._asking.values()):
                # It is over if a call before was interrupted.
                if are_all_hung or ask.is_over or ask in late:
                    self._give_up(ask)
            while self._leases and self._leases[0][0] <= now:
                self._manager.release(self._leases[0][1].reservation)
                self._leases.popleft()
            while self._absent and self._absent[oldest_key := next(iter(self._absent))] <= now:
                del self._absent[oldest_key]

    def wait(self, timeout: float | None) -> None:
        """Waits until an ask was answered or is late, if there is one."""
        with self._lock:
            if self._asking and not self._answered:
                # poll() then finds what is late.
                longest = self._reads.seconds_left + 0.001
                self._changed.wait(longest if timeout is None else min(timeout, longest))

    def use_leases(self, keys: Sequence[bytes]) -> None:
        """A load holds the pages of these keys: their leases end."""
        if not self._leases:
            return
        with self._lock:
            for lease in list(self._leases):
                if any(lease[1].last_key in of_group for of_group in keys):
                    self._manager.release(lease[1].reservation)
                    self._leases.remove(lease)

    def delete(self, pages: Sequence[tuple[int, bytes]]) -> None:
        """Loads have found that these pages, given by group and key, are not what was stored.

        What is below may be as wrong, so it is deleted and can be written anew.
        """
        with self._lock:
            self._damaged += len(pages)
        for group, key in pages:
            self._reads.submit(partial(self._delete, group, [key]))

    def stats(self) -> BelowStats:
        groups = [self._manager.stats(group) for group in range(len(self._formats))]
        return BelowStats(
            promoted=sum(group.promoted for group in groups),
            damaged=self._damaged,
            written=self._written,
            failed=self._failed,
            lost=sum(group.lost for group in groups),
            hung=self._reads.hung + self._writes.hung,
        )

    def check_open(self) -> None:
        """As a user of a HostPool: raises RuntimeError once the store uses no page any more."""
        if not any(thread.is_alive() for thread in self._threads()):
            raise RuntimeError("the prefix cache is closed")

    def close(self) -> None:
        """Ends the threads, the last of which closes the store. Any thread may call, again too.

        Waits for them until DEADLINE. A call that hangs then may still use memory, which its thread
        keeps.
        """
        if self._has_warned or not self._process.is_current:  # a forked child has no such threads
            return
        self._reads.close()
        self._writes.close()
        if threading.current_thread() in self._threads():  # a finalizer
            return
        until = time.monotonic() + threads.DEADLINE
        for thread in self._threads():
            thread.join(max(until - time.monotonic(), 0))
        hung = sum(thread.is_alive() for thread in self._threads())
        if hung:
            self._has_warned = True
            log.warning(
                "%s did not return from %s within %g s; until it does, the memory that it may "
                "still use stays mapped, and the prefix cache counts as open",
                self._store,
                count_of(hung, "call"),
                threads.DEADLINE,
            )

    def _threads(self) -> list[threading.Thread]:
        return [*self._reads.threads, *self._writes.threads]

    def _enter(self, promotion: _Promotion, now: float) -> None:
        """Pages with the right checksums can be loaded from now on."""
        rejected = promotion.rejected or ()
        pages: list[list[int]] = [[] for _ in self._formats]
        pages[promotion.group] = [
            page for place, page in enumerate(promotion.pages) if place not in rejected
        ]
        self._mark_written(pages)
        with contextlib.suppress(ValueError):  # it had ended when a call before was interrupted
            self._manager.complete(promotion.reservation, rejected)
        self._leases.append((now + LEASE, promotion))

    def _give_up(self, ask: _Ask) -> None:
        """Tells lookups that nothing is there. What comes later is not entered."""
        ask.is_over = True
        self._failed += ask.count
        for promotion in ask.promotions:
            if promotion.rejected is None:  # the store may still write the pages
                self._manager.abandon(promotion.reservation)
        self._note_absent(ask.identity)
        self._asking.pop(ask.identity, None)

    def _note_absent(self, identity: bytes) -> None:
        self._absent.pop(identity, None)  # so that it becomes the newest
        self._absent[identity] = time.monotonic() + ABSENT

    # What the threads do.

    def _end_thread(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running:
                return
        self._memory.clear()  # so that the pools' memory can be unmapped
        self._store.close()

    def _find(self) -> None:
        """Finds out what is there of an ask, and starts to read it."""
        with self._lock:
            ask = next((ask for ask in self._asking.values() if not ask.has_begun), None)
            if ask is None:
                return
            ask.has_begun = True
        ask.keys = list(map(split_keys, ask.joined))
        names = [
            self._formats[group].trailer_name(key)
            for group, keys in enumerate(ask.keys)
            for key in keys
        ]
        units = ask.units
        try:
            there = self._call(self._reads, ask, self._store.exists, names)
            rest = iter(there)
            units = self._manager._longest_prefix(
                units, [bytes(islice(rest, len(keys))) for keys in ask.keys]
            )
            if units == ask.units:  # else the reads show whether it works
                self._reads.end_pause()
        except Exception as error:  # whatever somebody else's store raises
            self._fail_read(ask, error, len(names))
        if ask.is_over:
            return
        batches = [
            (group, batch)
            for group, keys in enumerate(self._needed(ask, units))
            for batch in self._batches(group, keys)
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
        for group, batch in batches:
            self._reads.submit(partial(self._read_batch, ask, group, batch))

    def _batches(self, group: int, keys: list[bytes]) -> list[list[bytes]]:
        """Keys in the parts that the threads read at a time."""
        size = min(self._batch[group], -(-len(keys) // len(self._reads.threads)) or 1)
        return [keys[start : start + size] for start in range(0, len(keys), size)]

    def _needed(self, ask: _Ask, units: int) -> list[list[bytes]]:
        """The keys of each group that a prefix of this length needs, and that were missed."""
        if units == ask.units:
            return [[] for _ in ask.keys]
        of_groups = zip(ask.keys, ask.first, self._manager._needed_blocks(units), strict=True)
        return [
            keys[max(needed.start - first, 0) : max(needed.stop - first, 0)]
            for keys, first, needed in of_groups
        ]

    def _read_batch(self, ask: _Ask, group: int, keys: list[bytes]) -> None:
        """Reads pages, compares their checksums, and leaves them to poll()."""
        promotion = self._promote(ask, group, keys)
        wrong: list[bytes] = []
        if promotion is not None:
            rejected = list(range(len(promotion.keys)))
            try:
                rejected = self._fill(ask, promotion, wrong)
            except Exception as error:  # whatever somebody else's store raises
                self._fail_read(ask, error, len(rejected))
            self._hand_over(ask, promotion, rejected)
        with self._lock:
            ask.left -= 1
            is_last = not ask.left
        if is_last:
            self._answer(ask)
        if wrong:
            self._delete(group, wrong)

    def _fill(self, ask: _Ask, promotion: _Promotion, wrong: list[bytes]) -> list[int]:
        """Reads pages. Returns those that are rejected, and adds keys to be deleted to `wrong`."""
        keys, form = promotion.keys, self._formats[promotion.group]
        views = self._views(promotion.group, promotion.pages)
        trailers = _zeros(form.trailer_bytes, len(keys))
        names = [*map(form.page_name, keys), *map(form.trailer_name, keys)]
        came = self._call(self._reads, ask, self._store.get, names, [*views, *trailers])
        self._reads.end_pause()
        rejected = []
        for place, (key, view, trailer) in enumerate(zip(keys, views, trailers, strict=True)):
            of_page = came[place], came[len(keys) + place]
            problem = None
            if all(of_page):
                problem = form.problem(trailer, key, view)
                if problem is None:
                    form.enter_checksums(trailer, promotion.pages[place])
                    continue
            elif any(of_page):
                problem = "one of its two objects is missing, or has another size"
            rejected.append(place)
            # As long as there is a trailer, of whatever size, nobody would write the page anew.
            wrong.append(key)
            if problem is not None:
                self._report(key, problem)
        return rejected

    def _delete(self, group: int, keys: list[bytes]) -> None:
        form = self._formats[group]
        names = [*map(form.trailer_name, keys), *map(form.page_name, keys)]
        try:
            self._reads.call(None, self._store.delete, names)
        except StorePausedError:
            pass  # whoever reads them next tries again
        except Exception as error:  # whatever somebody else's store raises
            warn_once(f"damaged pages cannot be deleted from {self._store}: {error}")

    def _call(
        self,
        direction: StoreThreads,
        ask: _Ask | None,
        method: Callable[..., list[bool]],
        *arguments: Sequence[Any],
    ) -> list[bool]:
        """What the store answers for each key."""
        answers = [bool(answer) for answer in direction.call(ask, method, *arguments)]
        if len(answers) != len(arguments[0]):
            raise ValueError(f"{len(answers)} answers for {count_of(len(arguments[0]), 'key')}")
        return answers

    def _fail_read(self, ask: _Ask, error: Exception, pages: int) -> None:
        """What was asked of the store for these pages has failed."""
        self._reads.fail(error)
        with self._lock:
            self._failed += 0 if ask.is_over or isinstance(error, StorePausedError) else pages

    def _promote(self, ask: _Ask, group: int, keys: list[bytes]) -> _Promotion | None:
        """Takes pages for these keys. None if they are in memory, or there is no room."""
        of_groups: list[list[bytes]] = [[] for _ in self._formats]
        of_groups[group] = keys
        with self._lock:
            if ask.is_over:
                return None
            try:
                reservation = self._manager.promote(of_groups)
            except ValueError:  # a key occurs twice: such prompts are not stored either
                return None
            if reservation is None:
                self._note_absent(ask.identity)
                return None
            if reservation.id == 0:
                self._manager.release(reservation)
                return None
            places, pages = reservation.key_indices[group], reservation.pages[group]
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
        with self._lock:
            self._damaged += 1
            is_first = self._damaged == 1
        if is_first:
            log.warning(
                "refused and deleted a page of the second tier: %s (key %s)", problem, key.hex()
            )

    def _wake_writers(self) -> None:
        if self._writes.is_idle and not self._writes.is_away:  # else one comes anyway, or later
            self._must_retry = False
            self._writes.submit(self._write_due)

    def _write_due(self) -> None:
        for group in range(len(self._formats)):
            while (held := self._hold_due(group)) is not None:
                self._wake_writers()  # there may be more
                self._write(group, held)

    def _hold_due(self, group: int) -> WriteReservation | None:
        """Pages for a batch, unless enough are held."""
        if self._writes.is_away:
            return None
        with self._lock:
            room = self._most_held[group] - self._writing[group]
            count = min(self._write_batch[group], room)
            held = self._manager.hold_due(count, group) if count > 0 else None
            if held is not None:
                self._writing[group] += len(held.pages)
            return held

    def _write(self, group: int, held: WriteReservation) -> None:
        """Writes pages that the store does not have, and then their trailers."""
        form, keys, pages = self._formats[group], split_keys(held.keys), held.pages.tolist()
        is_below = [False] * len(pages)
        try:
            names = list(map(form.trailer_name, keys))
            is_below = self._call(self._writes, None, self._store.exists, names)
            left = [place for place, is_there in enumerate(is_below) if not is_there]
            if left:
                views = self._views(group, [pages[place] for place in left])
                trailers = _zeros(form.trailer_bytes, len(left))
                for place, view, trailer in zip(left, views, trailers, strict=True):
                    form.write_trailer(trailer, keys[place], pages[place], view)
                page_names = [form.page_name(keys[place]) for place in left]
                self._writes.call(None, self._store.put, page_names, views)
                names = [names[place] for place in left]
                self._writes.call(None, self._store.put, names, trailers)
                is_below = [True] * len(pages)
            self._writes.end_pause()
        except Exception as error:  # whatever somebody else's store raises
            self._writes.fail(error)
        failed = [place for place, is_there in enumerate(is_below) if not is_there]
        with self._lock:
            self._writing[group] -= len(pages)
            self._written += len(pages) - len(failed)
            self._failed += len(failed)
        self._manager.complete(held, failed)
        if failed:  # not |=, which would undo what another thread sets meanwhile
            self._must_retry = True

    def _notify(self) -> None:
        self._changed.notify_all()
        self._on_answer()

    def _views(self, group: int, pages: list[int]) -> list[memoryview]:
        size, memory = self._page_bytes[group], self._memory[group]
        return [memory[page * size : (page + 1) * size] for page in pages]


def _zeros(nbytes: int, count: int) -> list[memoryview]:
    """So many times so many bytes, aligned as pages are."""
    memory = memoryview(mmap.mmap(-1, count * nbytes))
    return [memory[place * nbytes : (place + 1) * nbytes] for place in range(count)]
