"""Pins the pages of a host pool in chunks, at once or in the background."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import torch

from torch_kvswap._native.arguments import bytes_text, read_switch
from torch_kvswap._native.loader import ForkGuard, native
from torch_kvswap._native.log import log
from torch_kvswap.host_pool import system
from torch_kvswap.host_pool.memory import Mapping, Registration
from torch_kvswap.host_pool.shape import PoolShape

CHUNK_BYTES = 1 << 30  # the most that the driver registers in one call
_LEAST_CHUNK_BYTES = 16 << 20
ONE_CHUNK = 1 << 62  # ReadyRange.chunk_blocks of memory that is not registered in chunks


class Pinning:
    """Touches and registers the pages, and publishes in `ready_range` which are ready.

    start() pins. If the driver refuses a chunk, it is tried again in halves. If the driver still
    refuses, or registers no memory at all, start() unregisters everything, logs a warning, and
    leaves the pages usable as pageable memory.
    In the background, start() returns after the first chunk; pages that the thread cannot pin later
    are never ready. close() unregisters everything; it does nothing in a forked child.
    """

    def __init__(
        self,
        mapping: Mapping,
        device: torch.device,
        shape: PoolShape,
        ready_range: native.ReadyRange,
    ) -> None:
        self.registration = Registration(mapping, device)
        self._mapping = mapping
        self._device = device
        self._shape = shape
        self._ready_range = ready_range
        self._chunk = 1
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._stopping = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._touching: _Touching | None = None
        self._process = ForkGuard()

    def start(self, in_background: bool) -> None:
        """Pins the pages; called once.

        Raises:
            NotImplementedError: the driver registers no memory, and this one is not shared, so that
                memory of the driver can take its place.
            RuntimeError: the driver refuses the checksums of pages that their owner has pinned.
        """
        shape, mapping = self._shape, self._mapping
        self._chunk = min(shape.chunk_of(CHUNK_BYTES), 1 << (shape.num_pages - 1).bit_length())
        self._publish(0)
        chunks = self._chunks()
        try:
            next(chunks)
            if in_background:
                thread = threading.Thread(
                    target=self._pin_rest, args=(chunks,), name="kvswap-pin", daemon=True
                )
                thread.start()  # close() joins only what has begun
                self._thread = thread
            else:
                for _ in chunks:
                    pass
        except (_RefusedError, NotImplementedError) as error:
            self.registration.remove()
            is_replaceable = not mapping.is_foreign and mapping.fd is None
            if isinstance(error, NotImplementedError) and is_replaceable:
                raise
            if mapping.pinned_pieces:
                raise RuntimeError(
                    f"the pages are pinned, but the driver did not pin their checksums: {error}; "
                    "use verify='off'"
                ) from None
            self._degrade(error)
        except BaseException:
            self.close()
            raise

    def wait(self, page: int, timeout: float | None) -> bool:
        """Waits until all pages before `page` are ready. Returns False after the timeout, in s.

        Raises:
            RuntimeError: pinning has stopped.
        """

        def is_over() -> bool:
            return self._ready_range.end_page >= page or self._error is not None or self._stopping

        if timeout is not None:
            timeout = min(timeout, threading.TIMEOUT_MAX)
        with self._changed:
            in_time = self._changed.wait_for(is_over, timeout)
        if in_time and self._ready_range.end_page < page:
            why = "the pool was closed" if self._error is None else _text_of(self._error)
            raise RuntimeError(f"{self._state()}, and no more will be: {why}") from self._error
        return in_time

    def close(self) -> None:
        """Stops pinning, joins the thread and unregisters everything.

        A thread of this object calls it if the garbage collector runs there. It cannot wait for
        itself: the background thread then unregisters everything when it ends.
        """
        self._is_closed = True
        if self._stop():
            self.registration.remove()

    def finish(self, owner: weakref.ref[object]) -> None:
        """Finalizer: closes, unless the process exits, when the memory of the pool is still alive.

        At exit it only stops pinning, because a handler may not have been able to wait for its
        jobs. The pages are unpinned when the process has ended.
        """
        if owner() is None:
            self.close()
        else:
            self._stop()

    def _stop(self) -> bool:
        """Stops pinning and joins the thread. False in a thread of this object."""
        if not self._process.is_current:
            return True
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if threading.current_thread() in (self._thread, self._touching):
            return False
        if self._thread is not None:
            self._thread.join()
        return True

    def _chunks(self) -> Iterator[None]:
        """Pins chunk after chunk, and yields after each."""
        begin, all_pages = 0, self._shape.num_pages
        self._register_table()
        if self._mapping.pinned_pieces:
            one = self._mapping.pinned_pieces == 1
            self._publish(all_pages, ONE_CHUNK if one else self._shape.blocks_per_page)
            yield
            return
        touching = self._touch(begin, self._end_of(begin))
        try:
            while begin < all_pages and not self._stopping:
                end = self._end_of(begin)
                touching.finish()
                # Touch the next chunk while the driver registers this one.
                touching = self._touch(end, self._end_of(end))
                begin = self._register(begin, end)
                self._publish(begin)
                yield
        finally:
            touching.join()

    def _publish(self, end_page: int, chunk_blocks: int | None = None) -> None:
        """Lets jobs use the pages before end_page, registered in pieces of chunk_blocks blocks.

        Native, because only a native release store orders it behind the registrations on every CPU.
        """
        blocks = chunk_blocks or self._chunk * self._shape.blocks_per_page
        with self._changed:
            self._ready_range.publish(end_page, blocks)
            self._changed.notify_all()

    def _end_of(self, begin: int) -> int:
        """The end of the chunk that contains page `begin`."""
        return min(begin - begin % self._chunk + self._chunk, self._shape.num_pages)

    def _touch(self, begin: int, end: int) -> _Touching:
        """Begins to touch pages."""
        self._touching = _Touching(self._mapping, *self._shape.bytes_of(begin, end))
        self._touching.start()
        return self._touching

    def _register(self, begin: int, end: int) -> int:
        """Registers pages, halving the chunk until the driver accepts it. Returns their end."""
        while True:
            reason = self.registration.add(*self._shape.bytes_of(begin, end))
            if reason is None:
                return end
            if self._chunk <= self._shape.chunk_of(_LEAST_CHUNK_BYTES):
                raise _RefusedError(reason)
            self._chunk //= 2
            end = self._end_of(begin)

    def _register_table(self) -> None:
        """Touches and registers the checksums, which jobs of all pages need."""
        first = self._shape.table_begin
        last = first + self._shape.table_bytes
        if first < last:
            self._mapping.touch(first, last)
            if reason := self.registration.add(first, last):
                raise _RefusedError(reason)

    def _pin_rest(self, chunks: Iterator[None]) -> None:
        """The body of the background thread."""
        try:
            for _ in chunks:
                pass
        except BaseException as error:  # whatever it is, or wait() would wait forever
            self._fail(error.with_traceback(None))  # the traceback's frames hold the memory
        finally:
            if self._is_closed:  # close() did not wait for this thread
                self.registration.remove()

    def _fail(self, error: BaseException) -> None:
        """Records that pinning has stopped, wakes waiting threads, and logs a warning."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
        remedy = f"; {self._advice(error)}" if isinstance(error, _RefusedError) else ""
        log.warning(
            "%s, and the others cannot be used: %s%s", self._state(), _text_of(error), remedy
        )

    def _state(self) -> str:
        return f"{self._ready_range.end_page} of {self._shape.num_pages} host pages are pinned"

    def _advice(self, error: BaseException) -> str:
        if self._mapping.is_foreign:
            return (
                f"{system.advice(self._shape.nbytes)}, or pin the memory before you make the pool"
            )
        if isinstance(error, NotImplementedError):
            return "the driver can pin a pool of one process there: leave shared=True out"
        return system.advice(self._shape.nbytes)

    def _degrade(self, error: Exception) -> None:
        """Makes all pages usable as pageable memory, and logs a warning."""
        # Its owner may have pinned some pages: no copy spans two.
        is_foreign = self._mapping.is_foreign
        self._publish(
            self._shape.num_pages, self._shape.blocks_per_page if is_foreign else ONE_CHUNK
        )
        log.warning(
            "the driver did not pin %s of host memory for %s: %s; %s. The pages are pageable now: "
            "the driver copies them through its own buffers and blocks the submitting thread, and "
            "kernels cannot access them",
            *(bytes_text(self._shape.nbytes), self._device, error, self._advice(error)),
        )


class _Touching(threading.Thread):
    """A thread that touches bytes of a memory.

    A ThreadPoolExecutor would not do: it takes no more work once the main thread has ended.
    """

    def __init__(self, mapping: Mapping, first: int, last: int) -> None:
        super().__init__(name="kvswap-touch", daemon=True)
        self._mapping, self._first, self._last = mapping, first, last
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            if self._first < self._last:
                self._mapping.touch(self._first, self._last)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Waits for the end; raises RuntimeError if there is not enough memory."""
        self.join()
        if self._error is not None:
            raise self._error


class _RefusedError(RuntimeError):
    """The driver does not register any more memory."""


def _text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, RuntimeError) else repr(error)


def read_in_background(value: object, device: torch.device) -> bool:
    """Checks the argument `pin_in_background` of a pool for a cache on this device.

    Raises:
        TypeError: it is not True or False.
        ValueError: it is True, but the cache is on the CPU.
    """
    in_background = read_switch("pin_in_background", value)
    if in_background and device.type == "cpu":
        raise ValueError(
            f"pin_in_background=True needs a cache on a device, this one is on {device}, where "
            "pages are not pinned; leave it out"
        )
    return in_background
