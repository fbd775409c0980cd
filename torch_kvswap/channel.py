"""One direction of transfers: when each may start, when it has ended, what it leaves behind."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator

from torch_kvswap.device import Device
from torch_kvswap.pool import Pool, Ring
from torch_kvswap.process import Process
from torch_kvswap.transfer import Copy, Direction, Result, Transfer

# More would share the driver's queues, which take about 1,000 operations each (H200). All are made
# with the channel, because a busy GPU can hold up the creation of a stream.
STREAMS = 4


class Channel:
    """Runs copies one after another in the order of submission, on streams of its own.

    Transfers get their numbers from `ids`. Channels that order their transfers against each other
    share a `lock`. Any thread may call any method; each raises RuntimeError in a forked child and
    while the caller's current stream is being captured.
    """

    def __init__(
        self, direction: Direction, device: Device, ids: Iterator[int], lock: threading.RLock
    ) -> None:
        self.direction: Direction = direction
        self.events = Pool(device.new_event)
        self._streams = Ring(device.new_stream, device.free_stream, STREAMS)
        self._device = device
        self._ids = ids
        self._lock = lock
        self._running: OrderedDict[int, Transfer] = OrderedDict()  # by number
        self._unreported: deque[Transfer] = deque()
        self._closed = False
        self._process = Process()

    def submit(
        self, copy: Copy, nbytes: int, after: object, behind: Transfer | None, began: float
    ) -> Transfer:
        """Enqueues the copy behind `after`, behind the transfer before it, and behind `behind`.

        behind: a running transfer of a channel with the same lock, which the caller holds.
        began: time.perf_counter() when the caller's call began. A failure in here ends the
        transfer as failed, with nothing of it left on the device. A wrong `after`, a closed
        channel and a lost device raise, and there is no transfer.
        """
        self._check_usable()
        after_stream, after_event = self._device.resolve_after(after)
        with self._lock:
            self._advance()
            self._check_open()
            transfer = Transfer(next(self._ids), self.direction, nbytes, self._device.path)
            previous = next(reversed(self._running.values()), None)
            ends = [t.end for t in (previous, behind) if t is not None]
            waits = ends if after_event is None else [after_event, *ends]
            try:
                self._unreported.append(transfer)
                transfer.take(self._streams.next(), self.events)
                transfer.enqueue(self._device, copy, after_stream, waits)
                transfer.submit_seconds = time.perf_counter() - began
                self._running[transfer.id] = transfer
            except BaseException as error:
                transfer.submit_seconds = time.perf_counter() - began
                self._abandon(transfer, error)
                if not isinstance(error, Exception):
                    raise
        return transfer

    def running(self, number: int) -> Transfer | None:
        """The transfer of that number while it runs. The caller holds the lock."""
        self._advance()
        return self._running.get(number)

    def poll(self) -> None:
        """Sees which transfers have ended."""
        self._check_usable()
        with self._lock:
            self._advance()

    def take_results(self) -> list[Result]:
        """The results that are new since the last call, in the order of submission. Asks the
        device nothing, so that nothing can fail between taking a result and returning it."""
        results = []
        with self._lock:
            while self._unreported and (result := self._unreported[0].result) is not None:
                self._unreported.popleft()
                results.append(result)
        return results

    def unreported(self) -> list[Transfer]:
        """The transfers whose results have not been taken yet, in the order of submission."""
        self._check_usable()
        with self._lock:
            return list(self._unreported)

    def wait(self, transfer: Transfer, deadline: float | None) -> bool:
        """Blocks the host until the transfer has ended, or time.monotonic() has passed `deadline`
        (None: for ever). Says whether it has ended. The channel is free for others meanwhile."""
        self._check_usable()
        with self._lock:
            self._advance()
            if transfer.result is not None:
                return True
            transfer.waiters += 1  # `end` is not recorded again for another transfer meanwhile
        try:
            transfer.block(deadline)
        except Exception as error:
            if not self._device.is_lost_by(error):
                raise
            self._device.lost = error
        finally:
            with self._lock:
                transfer.waiters -= 1
                self._release_if_unused(transfer)
                self._advance()
        return transfer.result is not None

    def wait_on(self, transfer: Transfer, stream: object) -> None:
        """Makes the stream wait for the transfer, unless that has ended already."""
        self._check_usable()
        waiting = self._device.resolve_stream(stream)
        with self._lock:
            self._advance()
            if transfer.result is None:  # else its event may stand for another transfer by now
                transfer.end.wait(waiting)

    def drain(self) -> None:
        """Blocks the host until every transfer submitted so far has ended, ok or failed."""
        for transfer in self.unreported():
            self.wait(transfer, None)

    def close(self) -> None:
        """Takes no more transfers, drains, lets the streams and events go. Idempotent."""
        self._check_usable()
        with self._lock:
            self._closed = True
        self.drain()
        with self._lock:
            self.events.clear()
            self._streams.clear()

    def _check_usable(self) -> None:
        self._process.check("handler")
        if self._device.lost is None:
            self._device.check_not_capturing()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the handler is closed; make a new one")
        if self._device.lost is not None:
            raise RuntimeError(
                f"the device is lost: {self._device.lost}; only a new process can use it again"
            ) from self._device.lost

    def _abandon(self, transfer: Transfer, error: BaseException) -> None:
        """Ends a transfer that could not be submitted, once what was enqueued of it has run."""
        self._running.pop(transfer.id, None)  # it was interrupted right after its submission
        while transfer.stream is not None and self._device.lost is None:
            try:
                transfer.stream.synchronize()
                break
            except Exception as problem:
                if self._device.is_lost_by(problem):
                    self._device.lost = problem
                time.sleep(1e-3)  # else some thread captures a graph, and nobody may ask until then
        transfer.finish(0.0, error)
        self._release_if_unused(transfer)

    def _advance(self) -> None:
        """Ends the transfers whose end has happened; all of them when the device is lost."""
        while self._running:
            transfer = next(iter(self._running.values()))
            if self._device.lost is None:
                try:
                    if not transfer.end.query():
                        return
                    transfer.finish(transfer.start.elapsed_time(transfer.end) / 1e3, None)
                except Exception as error:
                    if not self._device.is_lost_by(error):
                        raise
                    self._device.lost = error
            if transfer.result is None:
                transfer.finish(0.0, self._device.lost)
            del self._running[transfer.id]
            self._release_if_unused(transfer)

    def _release_if_unused(self, transfer: Transfer) -> None:
        """The last thread that waits gives the events back."""
        if transfer.result is not None and not transfer.waiters:
            transfer.release(self.events)
