"""Moves pages between the host pools of a prefix cache and a second tier."""

from __future__ import annotations

import contextlib
import math
import mmap
import operator
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from torch_kvswap._C import Reservation
from torch_kvswap._native.arguments import count_of, kind_of
from torch_kvswap._native.loader import ForkGuard
from torch_kvswap._native.log import log, warn_once
from torch_kvswap.below import threads
from torch_kvswap.below.format import PageFormat
from torch_kvswap.below.store import PageStore
from torch_kvswap.below.threads import StorePausedError, StoreThreads
from torch_kvswap.prefix.hashing import KEY_BYTES, split_keys
from torch_kvswap.prefix.manager import BlockManager, Lookup, needed_blocks
from torch_kvswap.prefix.protocol import Outcome

# Seconds, read at each use so that tests can set them.
ABSENT_SECONDS = 1.0  # before the store is asked again for a missing key

# In each direction, at most; a page at least.
BYTES_IN_FLIGHT = 256 << 20

# Of each direction. With more, pages are no faster, and lookups wait for the GIL.
# A call of the store moves such a part of the bytes in flight.
_THREADS = 4
_MAX_SHARE_IN_WRITES = 1 / 8  # of the pages of a pool; each thread may hold one


@dataclass(frozen=True)
class BelowStats:
    """Pages that a PrefixCache has moved to and from its second tier since the start.

    Attributes:
        promoted (int): read into host memory.
        damaged (int): refused and deleted, because the checksum or the trailer was wrong, or a load
            found a damaged block in a page that had been read.
        written (int): written, or found to be there already.
        failed (int): part of a call of the store that failed or timed out, or asked for by a lookup
            whose call did not begin in time. Writes are tried again while the pages are in memory.
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


class _Ask:
    """A lookup that has missed keys.

    Attributes:
        keys (list[bytes]): of the lookup, of each group, in a row.
        units (int): the length of the prefix that was found.
        missed (list[bytes]): the keys behind it, of each group.
        first_missed (bytes): the first one of the first group with any; without it the others
            cannot be used.
        resets (int): of the manager, before it.
        waits_since (float): for a thread that asks the store; infinity once it has one.
        reservation (Reservation | None): of the pages to read.
        open_tasks (int): of the threads, for it.
        rejected (list[int]): group and page of each page that did not come.
        absent_keys (list[bytes]): that the store lacks. They count as absent from the poll() on
            that has the answer: however slow a step is, its lookups do not ask again.
        is_abandoned (bool): lookups are told that nothing is there.
    """

    def __init__(
        self, keys: Sequence[bytes], units: int, missed: list[bytes], first: bytes, resets: int
    ) -> None:
        self.keys, self.units, self.missed, self.first_missed = keys, units, missed, first
        self.count = sum(map(len, missed)) // KEY_BYTES
        self.is_abandoned = False
        self.reservation: Reservation | None = None
        self.open_tasks, self.rejected, self.absent_keys = 1, list[int](), list[bytes]()
        self.resets, self.waits_since = resets, time.monotonic()

    @property
    def is_answered(self) -> bool:
        """Whether poll() can enter it."""
        return not (self.open_tasks or self.is_abandoned)


class Tier:
    """Reads from a store what lookups miss, and writes pages there before they are evicted.

    Threads call the store and compare checksums. The scheduler's threads call ask() and poll(),
    which call no store. Lookups find what was read after poll(). The pages for it are taken
    at any time: a block that a lookup has found, but does not hold, may be evicted before its load.

    Memory that the store uses is held: pages to write there, and pages to fill from there. Their
    reservations end when all calls have returned, however late.

    Args:
        store (PageStore): from start() on it is the tier's, and close() closes it.
        formats (Sequence[PageFormat]): of the pool of each group of the manager.
        manager (BlockManager): gives the pages.
        mark_written: OffloadHandler.mark_written().
        on_answer: called, in a thread of the tier, when poll() has something to do.
    """

    def __init__(
        self,
        store: PageStore,
        formats: Sequence[PageFormat],
        manager: BlockManager,
        mark_written: Callable[[Any], None],
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self._formats, self._manager, self._on_answer = formats, manager, on_answer
        self._mark_written = mark_written
        pools = [form.pool for form in formats]
        self._page_bytes = [pool.page_bytes for pool in pools]
        self._memory = [pool._all_bytes().numpy().data for pool in pools]
        self._batch = [max(BYTES_IN_FLIGHT // _THREADS // size, 1) for size in self._page_bytes]
        self._write_batch = [
            min(batch, max(int(pool.num_pages * _MAX_SHARE_IN_WRITES) // _THREADS, 1))
            for batch, pool in zip(self._batch, pools, strict=True)
        ]
        self._lock = threading.Lock()  # guards what follows
        self._asking: dict[bytes, _Ask] = {}  # by first_missed
        self._absent: dict[bytes, float] = {}  # keys, until when; oldest first
        self._damaged = self._written = self._failed = 0

        self._must_retry = False  # pages are due that could not be written
        self._store, self._process, self._has_warned = store, ForkGuard(), False
        self._random = secrets.token_hex(8)  # see _suffix()
        largest = max(map(operator.mul, self._batch, self._page_bytes))
        count = max(min(_THREADS, BYTES_IN_FLIGHT // largest), 1)
        self._running = 0  # threads that have not ended, of a tier that has started
        self._reads = StoreThreads(f"reading from {store}", count, self._end_thread)
        self._writes = StoreThreads(f"writing to {store}", count, self._end_thread)

    # What a PrefixCache calls.

    def start(self) -> None:
        """Starts the threads, and takes over the store. If it raises, no thread is left."""
        try:
            self._reads.start()
            self._writes.start()
            with self._lock:
                self._running += len(self._threads())
        except BaseException:
            self.close()
            raise

    def ask(self, found: Lookup, keys: Sequence[bytes]) -> Lookup:
        """Asks the store for what a lookup of these keys, of each group, has missed."""
        missed = self._behind(keys, found.found)
        first = _first(missed)
        if first is None:
            return found
        with self._lock:
            ask = self._asking.get(first)
            if ask is None:
                if self._absent.get(first, 0.0) > time.monotonic() or self._reads.is_away:
                    return found
                if self._reads.is_doubtful and self._asking:  # one finds out if it works again
                    return found
                ask = _Ask(keys, found.found, missed, first, self._manager.resets)
                # _find() waits for the lock. Submitted first, it misses no ask if Ctrl-C comes.
                self._reads.submit(partial(self._find, ask))
                self._asking[first] = ask
        return found._replace(asking=ask.count)

    def poll(self, some_ended: bool) -> None:
        """Enters pages that were read, and ends what has run out of time.

        Args:
            some_ended (bool): jobs have ended, so that pages may be due to be written.
        """
        if some_ended:
            self._delete_corrupted()
        self._writes.find_late()
        if some_ended or self._must_retry:
            self._wake_writers()
        if not self._asking:
            return
        with self._lock:
            before = time.monotonic() - threads.DEADLINE
            late = self._reads.find_late()
            are_all_hung = self._reads.are_all_hung  # then the others would wait for ever
            for ask in list(self._asking.values()):
                if ask.is_answered:
                    self._enter(ask)
                # It is over if a call before was interrupted.
                elif are_all_hung or ask.is_abandoned or ask in late:
                    self._give_up(ask)
                elif ask.waits_since <= before:  # calls return in time, but there are too many
                    self._give_up(ask)
                    warn_once(
                        f"lookups ask {self._store} faster than it answers: what it was not asked "
                        f"for within {threads.DEADLINE:g} s counts as missing; see `failed` of the "
                        "second tier's statistics"
                    )

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
            if thread.is_alive():  # not if start() was interrupted
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

    def _suffix(self, resets: int) -> str:
        """Of the names of pages in the store. After a reset they are random: a key may stand for
        other bytes than there."""
        return f"-{self._random}-{resets}" if resets else ""

    def _threads(self) -> list[threading.Thread]:
        return [*self._reads.threads, *self._writes.threads]

    def _delete_corrupted(self) -> None:
        """Deletes pages of which loads have found that they are not what was stored.

        They were read from the store, which may have the same bytes. Then they are written anew.
        """
        corrupted = self._manager._take_corrupted()
        with self._lock:
            self._damaged += len(corrupted)
        for group, key in corrupted:
            self._reads.submit(partial(self._delete, self._manager.resets, group, [key]))

    def _enter(self, ask: _Ask) -> None:
        """Pages with the right checksums can be loaded from now on."""
        held = ask.reservation
        if held is not None and held.is_held:  # else an interrupted call has entered them
            self._mark_written(held.pages)  # nobody finds rejected ones
            held._end(Outcome.DONE, ask.rejected)
        for key in ask.absent_keys:
            self._note_absent(key)
        self._asking.pop(ask.first_missed, None)

    def _give_up(self, ask: _Ask) -> None:
        """Tells lookups that nothing is there. What comes later is not entered."""
        ask.is_abandoned = True
        self._failed += ask.count
        if ask.reservation is not None and ask.open_tasks:  # the store may still write these pages
            self._manager._abandon(ask.reservation)
        self._note_absent(ask.first_missed)
        self._asking.pop(ask.first_missed, None)

    def _behind(self, keys: Sequence[bytes], units: int) -> list[bytes]:
        """The keys of each group behind a prefix."""
        tokens = units * self._manager.unit_tokens
        every = zip(keys, self._manager.groups, strict=True)
        return [of_group[KEY_BYTES * (tokens // its.block_tokens) :] for of_group, its in every]

    def _note_absent(self, key: bytes) -> None:
        now = time.monotonic()
        while self._absent and self._absent[oldest := next(iter(self._absent))] <= now:
            del self._absent[oldest]
        self._absent.pop(key, None)  # so that it becomes the newest
        self._absent[key] = now + ABSENT_SECONDS

    # What the threads do.

    def _end_thread(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running:  # or it has not started: the store is its caller's
                return
        self._memory.clear()  # so that the pools' memory can be unmapped
        self._store.close()

    def _find(self, ask: _Ask) -> None:
        """Finds out what is there of an ask, and starts to read it."""
        with self._lock:
            if self._asking.get(ask.first_missed) is not ask:  # given up, or Ctrl-C came
                return
            ask.waits_since = math.inf
        reads = list[Callable[[], None]]()
        try:
            units = self._ask_store(ask)
            if units == ask.units:  # else the reads show whether it works
                self._reads.end_pause()
            reads = self._reserve(ask, units)
        except Exception as error:  # whatever somebody else's store raises, and MemoryError
            ask.absent_keys.append(ask.first_missed)
            self._fail_read(ask, error, ask.count)
        for read in reads:
            self._reads.submit(read)
        with self._lock:
            self._end_task(ask)

    def _ask_store(self, ask: _Ask) -> int:
        """The length of the longest prefix that it completes."""
        keys = list(map(split_keys, ask.missed))
        names = list[str]()
        for form, of_group in zip(self._formats, keys, strict=True):
            names += form.names(of_group, self._suffix(ask.resets))
        rest = iter(self._call(self._reads, ask, self._store.exists, names))
        there = [bytes(islice(rest, len(of_group))) for of_group in keys]
        return self._manager._longest_prefix(ask.units, there)

    def _reserve(self, ask: _Ask, units: int) -> list[Callable[[], None]]:
        """Takes pages for what a prefix of this length lacks, or a shorter one if there is no room.
        After a reset there is none: the store has been asked for what was before it.

        Returns the tasks that read them.
        """
        needed, reservation = list[bytes](), None
        while units > ask.units and not ask.is_abandoned:
            ranges = zip(ask.keys, needed_blocks(self._manager.groups, units), strict=True)
            needed = [keys[its.start * KEY_BYTES : its.stop * KEY_BYTES] for keys, its in ranges]
            with contextlib.suppress(ValueError):  # a key occurs twice: nobody stores that
                reservation = self._manager._promote(needed, ask.resets)
            if reservation is not None:
                break
            units = (units + ask.units) // 2
        try:
            reads = [] if reservation is None else list(self._split(ask, reservation, needed))
            if (behind := _first(self._behind(ask.keys, units))) is not None:
                ask.absent_keys.append(behind)
        except BaseException:
            if reservation is not None:
                reservation.let_go()
            raise
        with self._lock:
            ask.reservation = reservation
            if ask.is_abandoned:
                return []
            ask.open_tasks += len(reads)
            return reads

    def _split(self, ask: _Ask, of: Reservation, keys: list[bytes]) -> Iterator[Callable[[], None]]:
        """The tasks that each read some of the pages that are reserved for these keys."""
        for group, pages in enumerate(of.pages):
            split = split_keys(keys[group])
            of_pages = [split[index] for index in of.key_indices[group].tolist()]
            size = min(self._batch[group], -(-len(pages) // len(self._reads.threads)) or 1)
            for start in range(0, len(pages), size):
                its = slice(start, start + size)
                yield partial(self._read, ask, group, of_pages[its], pages[its].tolist())

    def _read(self, ask: _Ask, group: int, keys: list[bytes], pages: list[int]) -> None:
        """Reads pages, compares their checksums, and leaves them to poll()."""
        rejected, was_read = list(range(len(keys))), False
        try:
            if not ask.is_abandoned:
                rejected, was_read = self._fill(ask, group, keys, pages), True
        except Exception as error:  # whatever somebody else's store raises
            self._fail_read(ask, error, len(rejected))
        with self._lock:
            for place in rejected:
                ask.rejected += (group, pages[place])
                ask.absent_keys += (keys[place], ask.first_missed)
            self._end_task(ask)
        if was_read and rejected:  # as long as the store has them, nobody writes them anew
            self._delete(ask.resets, group, [keys[place] for place in rejected])

    def _fill(self, ask: _Ask, group: int, keys: list[bytes], pages: list[int]) -> list[int]:
        """Reads pages. Returns the indices of the pages that are missing or damaged."""
        form, views = self._formats[group], self._views(group, pages)
        trailers = _zeros(form.trailer_bytes, len(keys))
        names = form.names(keys, self._suffix(ask.resets))
        came = self._call(self._reads, ask, self._store.get, names, views, trailers)
        self._reads.end_pause()
        rejected = []
        for place, (key, view, trailer) in enumerate(zip(keys, views, trailers, strict=True)):
            if came[place]:
                problem = form.problem(trailer, key, view)
                if problem is None:
                    form.enter_checksums(trailer, pages[place])
                    continue
                self._report(key, problem)
            rejected.append(place)
        return rejected

    def _delete(self, resets: int, group: int, keys: list[bytes]) -> None:
        names = self._formats[group].names(keys, self._suffix(resets))
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
        answers = direction.call(ask, method, *arguments)
        name = getattr(method, "__name__", repr(method))
        what = f"{name}() of {count_of(len(arguments[0]), 'key')} returned"
        if not isinstance(answers, Iterable):
            raise TypeError(f"{what} {kind_of(answers)}, not a list of bool")
        answers = [bool(answer) for answer in answers]
        if len(answers) != len(arguments[0]):
            raise ValueError(f"{what} {count_of(len(answers), 'answer')}")
        return answers

    def _fail_read(self, ask: _Ask, error: Exception, pages: int) -> None:
        """What was asked of the store for these pages has failed."""
        self._reads.fail(error)
        with self._lock:
            self._failed += 0 if ask.is_abandoned or isinstance(error, StorePausedError) else pages

    def _end_task(self, ask: _Ask) -> None:
        """A thread has done a task of it. The caller holds the lock."""
        ask.open_tasks -= 1
        if ask.is_answered:
            self._on_answer()
        elif not ask.open_tasks and ask.reservation is not None:
            ask.reservation.let_go()

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
        try:
            for group in range(len(self._formats)):
                count = self._write_batch[group]
                while not self._writes.is_away:
                    if (due := self._manager._hold_due(count, group)) is None:
                        break
                    self._wake_writers()  # there may be more
                    self._write(group, *due)
        except BaseException:
            self._must_retry = True
            raise

    def _write(self, group: int, held: Reservation, joined: bytes, resets: int) -> None:
        """Writes pages that the store does not have."""
        form, pages = self._formats[group], held.pages[group]
        is_below = [False] * len(pages)
        try:
            keys = split_keys(joined)
            names = form.names(keys, self._suffix(resets))
            is_below = self._call(self._writes, None, self._store.exists, names)
            left = [place for place, is_there in enumerate(is_below) if not is_there]
            if left:
                views = self._views(group, pages[left].tolist())
                trailers = _zeros(form.trailer_bytes, len(left))
                for place, view, trailer in zip(left, views, trailers, strict=True):
                    form.write_trailer(trailer, keys[place], int(pages[place]), view)
                names = [names[place] for place in left]
                self._writes.call(None, self._store.put, names, views, trailers)
                is_below = [True] * len(pages)
            self._writes.end_pause()
        except Exception as error:  # whatever somebody else's store raises
            self._writes.fail(error)
        failed = [place for place, is_there in enumerate(is_below) if not is_there]
        with self._lock:
            self._written += len(pages) - len(failed)
            self._failed += len(failed)
        held._end(Outcome.DONE, [x for at in failed for x in (group, int(pages[at]))])
        if failed:  # not |=, which would undo what another thread sets meanwhile
            self._must_retry = True

    def _views(self, group: int, pages: list[int]) -> list[memoryview]:
        size, memory = self._page_bytes[group], self._memory[group]
        return [memory[page * size : (page + 1) * size] for page in pages]


def _first(keys: Sequence[bytes]) -> bytes | None:
    """The first key of the first group that has any."""
    return next((of_group[:KEY_BYTES] for of_group in keys if of_group), None)


def _zeros(nbytes: int, count: int) -> list[memoryview]:
    """So many times so many bytes, aligned as pages are."""
    memory = memoryview(mmap.mmap(-1, count * nbytes))
    return [memory[place * nbytes : (place + 1) * nbytes] for place in range(count)]
