"""Carries out the commands of a queued device (csrc/device/queued.h) with torch."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_kvswap._native.arguments import kind_of
from torch_kvswap._native.kept import keep
from torch_kvswap._native.loader import ForkGuard, native
from torch_kvswap._native.log import log
from torch_kvswap.devices.blocks import GroupTensors, send_ids
from torch_kvswap.results import DeviceLostError

_Kind = native.CommandKind

# How long the thread that submits a job carries out commands before it leaves the others to the
# queue's thread, and how many blocks it copies by one command. The queue's thread may get the GIL
# only after milliseconds.
_SUBMIT_SECONDS, _SUBMIT_BLOCKS = 200e-6, 32
# Pauses between two looks at the events in flight: 1/8 of the time that nothing has happened.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
_NO_COMMANDS_SECONDS = 3600.0
_STOP_SECONDS = 5.0
_FOREVER = float("inf")


class Point:
    """An event that a job starts after. The caller keeps it until the job is submitted."""

    __slots__ = ("_commands", "handle")

    def __init__(self, queue: DeviceQueue, event: torch.Event) -> None:
        self._commands = queue.commands
        self.handle, number = self._commands.make_event()
        queue.records[number] = _Record(number, 1, event, None)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._commands.destroy_event(self.handle)


class _Record:
    """A recorded event.

    Attributes:
        event: None if it could not be recorded; it has then happened when its stream is idle.
        error: why something before it on its stream has failed; None if nothing has. Never None
            without an event.
        is_timed: the event measures time.
        transfer: the record of the start of the transfer that this one ends.
    """

    __slots__ = ("error", "event", "is_timed", "number", "record", "transfer")

    def __init__(
        self, number: int, record: int, event: torch.Event | None, error: str | None
    ) -> None:
        self.number, self.record, self.event, self.error = number, record, event, error
        self.is_timed = False
        self.transfer: _Record | None = None

    def is_of(self, command: native.Command) -> bool:
        return self.number == command.event and self.record == command.record


class _Stream:
    """A stream of the library."""

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream
        self.records: deque[_Record] = deque()  # not reported yet
        self.error: str | None = None  # why a wait failed; the next record takes it over
        self.transfer: _Record | None = None  # the start of the copies so far
        self.staging: Tensor | None = None
        self.timed: torch.Event | None = None  # the last one, and its time
        self.seconds = 0.0


class Waiting:
    """A stream of the caller that must wait for a job.

    Attributes:
        is_done: the stream was told to wait, or cannot be, or the device is lost.
        error: why the stream cannot wait.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream
        self.is_done = False
        self.error: BaseException | None = None


class DeviceQueue:
    """The commands of the handlers of one device, and its streams and events.

    Commands are carried out, one after another, by the thread that has `_turn`: the queue's own
    thread, the one that submits a job, or one that waits. No native lock is held meanwhile, and
    nothing native waits for Python, so that a thread that keeps the GIL only delays transfers.

    The queue knows its handlers only by the groups of tensors, weakly. Any thread may call.

    Args:
        device (torch.device): an accelerator with torch.Stream and torch.Event.
        index (int): index of the native device.

    Attributes:
        is_timed (bool): events of the device measure time.
        groups: the tensors of the handlers' groups, by number.
        commands (native.CommandQueue): the native queue.
        records: the latest record of each event, by number.
        stop: ends the queue's thread.
        lost (str | None): why the device cannot be used any more.
    """

    def __init__(self, device: torch.device, index: int) -> None:
        self.device, self.index = device, index
        self.is_timed = _measures_time(device)
        self.groups: weakref.WeakValueDictionary[int, QueuedGroup] = weakref.WeakValueDictionary()
        self.records: dict[int, _Record] = {}
        self.lost: str | None = None
        self.commands = native.make_queue(index, str(device))
        self._streams: dict[int, _Stream] = {}
        self._waiting: dict[int, Waiting] = {}
        self._last_token = 0
        self._happened_at = 0.0
        self._turn: Any = threading.RLock()  # taken again only by _lose()
        self._callers: torch.Stream | None = None  # waits for the callers' events
        self._callers_lock = threading.Lock()
        self._process = ForkGuard()
        thread = threading.Thread(target=self._work, name="kvswap-queue", daemon=True)
        thread.start()
        # At exit the finalizers run in the reverse order of their creation: after those of the
        # handlers, whose jobs need the thread.
        self.stop = weakref.finalize(self, _stop, self._process, self.commands, thread)

    # Callers' streams.

    def resolve_after(self, after: object) -> tuple[list[tuple[bool, int]], Point | None]:
        """Converts an `after` argument: records an event on the caller's stream.

        Returns:
            tuple[list[tuple[bool, int]], Point | None]: True and the handle of an event, or nothing
                to wait for; and what must be kept until the job was submitted.

        Raises:
            TypeError: after is neither a stream nor an event of torch.
            ValueError: the event was never recorded, or the stream is on another device.
            DeviceLostError: the device is lost.
            RuntimeError: the device refuses a call.
        """
        self.check()
        try:
            event = self._event_after(after)
        except Exception as error:
            self.raise_if_dead(error)
            raise
        if event is None:
            return [], None
        point = Point(self, event)
        return [(True, point.handle)], point

    def _event_after(self, after: object) -> torch.Event | None:
        """An event for what `after` stands for; None if that has happened."""
        if not isinstance(after, tuple):
            return self._point_of(
                torch.accelerator.current_stream(self.device) if after is None else after,
                "after=",
                "None (the current stream), a torch.Stream, a torch.Event or a tuple of streams "
                "and events",
            )
        expected = "a torch.Stream or a torch.Event"
        named = [self._point_of(item, f"after[{i}]", expected) for i, item in enumerate(after)]
        events = [event for event in named if event is not None]
        return self._after_all(events) if len(events) > 1 else next(iter(events), None)

    def _point_of(self, after: object, name: str, expected: str) -> torch.Event | None:
        """An event for a stream or event; None if that has happened. The others are for errors."""
        if isinstance(after, torch.Event):
            return self._copy_event(after, name)
        stream = self._checked_stream(after, name, expected)
        if stream.query():
            return None
        event = self._new_event()
        event.record(stream)
        return event

    def _checked_stream(self, stream: object, name: str, expected: str) -> torch.Stream:
        if not isinstance(stream, torch.Stream):
            raise TypeError(f"{name} must be {expected}, not {kind_of(stream)}")
        if stream.device != self.device:
            raise ValueError(
                f"{name} is a stream of {stream.device}, the cache is on {self.device}; record an "
                "event on that stream, and let a stream of this device wait for it"
            )
        return stream

    def _copy_event(self, after: torch.Event, name: str) -> torch.Event:
        """An event for the same point: the caller may record the given one again at any time."""
        # An event is created when it is first recorded. The vendor's own class, such as
        # torch.cuda.Event, keeps its event elsewhere than torch.Event: it has no event_id then, but
        # a device once it is recorded.
        vendors = getattr(torch.get_device_module(self.device), "Event", torch.Event)
        is_vendors = vendors is not torch.Event and isinstance(after, vendors)
        if not is_vendors and after.device.type != self.device.type:
            raise ValueError(f"{name} is an event of {after.device}, the cache is on {self.device}")
        if not (after.device if is_vendors else after.event_id):
            raise ValueError(
                f"{name} is an event that was never recorded, so the transfer would wait for "
                "nothing; record it behind the work it stands for, or pass that stream"
            )
        return self._after_all([after])

    def _after_all(self, events: list[torch.Event]) -> torch.Event:
        """An event that happens after all of these."""
        with self._callers_lock:
            stream = self._callers_stream()
            for event in events:
                event.wait(stream)
            last = self._new_event()
            last.record(stream)
        return last

    def _callers_stream(self) -> torch.Stream:
        """The stream that waits for the callers' events. The caller holds _callers_lock."""
        if self._callers is None:
            # Events of the vendor's own class only take streams of its own class.
            module = torch.get_device_module(self.device)
            self._callers = getattr(module, "Stream", torch.Stream)(device=self.device)
        return self._callers

    def make_waiting(self, stream: object) -> tuple[int, Waiting]:
        """Prepares a command that lets a stream of the caller wait.

        Args:
            stream: of the device of the cache; None is the current stream.

        Returns:
            tuple[int, Waiting]: a token that stands for the stream in the command, to be given to
                forget(), and what becomes of the command.

        Raises:
            TypeError: stream is no stream of torch.
            ValueError: it is on another device.
            DeviceLostError: the device is lost.
        """
        self.check()
        if stream is None:
            stream = torch.accelerator.current_stream(self.device)
        expected = "None (the current stream) or a torch.Stream"
        waiting = Waiting(self._checked_stream(stream, "stream", expected))
        with self._callers_lock:
            self._last_token += 1
            self._waiting[self._last_token] = waiting
            return self._last_token, waiting

    def forget(self, token: int) -> None:
        """Drops a token that no command uses any more."""
        self._waiting.pop(token, None)

    # Carrying out commands.

    @property
    def is_running_here(self) -> bool:
        """Whether the calling thread is carrying out commands, which a finalizer interrupts."""
        return bool(self._turn._is_owned())

    def run_briefly(self) -> None:
        """Carries out some commands, and asks the device which events have happened.

        Does nothing if another thread has the turn: that one does it. Raises only what a signal
        handler raises, because the caller may have submitted a job: what fails here ends all jobs,
        as in the queue's thread.
        """
        if self.is_running_here or not _is_plain_thread():
            return
        try:
            if self._turn.acquire(blocking=False):
                self._run(time.perf_counter() + _SUBMIT_SECONDS)
                if self._has_events:
                    # The queue's thread was woken for the commands, and may have found none left.
                    self.commands.wake()
        except Exception as error:
            # The command is carried out once more. If it does not fail again, a signal handler has
            # raised the exception, as Ctrl-C does.
            if self._fails_again():
                self._on_failed_thread(error)
            else:
                raise
        finally:
            # Nothing is asked first: Ctrl-C may come behind any call, and would keep the turn.
            try:  # noqa: SIM105
                self._turn.release()
            except RuntimeError:  # another thread has the turn
                pass

    def _fails_again(self) -> bool:
        try:
            with self._turn:
                self._run(0)
        except Exception:
            return True
        return False

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Carries out commands, or lets another thread do so, until is_over() says so."""
        while not is_over():
            self.run_briefly()
            if not is_over():
                time.sleep(_SHORTEST_PAUSE)

    def _work(self) -> None:
        """The queue's thread."""
        pause = 0.0
        # A lost device keeps the command that failed, so that wait() returns at once.
        while self.commands.wait(pause) >= 0 and self.lost is None:
            try:
                pause = self._carry_out_all()
            except BaseException as error:
                self._on_failed_thread(error)
                raise

    def _carry_out_all(self) -> float:
        """Carries out all commands, and looks at the events in flight.

        Returns:
            float: seconds until the queue's thread must look again.
        """
        with self._turn:
            self._run(_FOREVER)
            if not self._has_events:
                return _NO_COMMANDS_SECONDS
            quiet = time.perf_counter() - self._happened_at
            return min(max(quiet / 8, _SHORTEST_PAUSE), _LONGEST_PAUSE)

    @property
    def _has_events(self) -> bool:
        """Whether events were recorded that have not been seen to happen."""
        return any(stream.records for stream in self._streams.values())

    def _run(self, until: float) -> None:
        with torch.inference_mode():
            while self.lost is None and (command := self.commands.first()) is not None:
                if until < _FOREVER and self._takes_long(command):
                    break  # the queue's thread does that
                self._carry_out(command)  # once more, if Ctrl-C interrupts it; that does no harm
                self.commands.done()
                if time.perf_counter() >= until:
                    break
            self._report()

    def _takes_long(self, command: native.Command) -> bool:
        """Whether the command copies many blocks, or pages that are not pinned, and so waits."""
        if command.kind is not _Kind.BLOCKS:
            return False
        group = self.groups.get(command.group)
        is_pinned = group is None or group.tensors.is_pinned
        return command.count > _SUBMIT_BLOCKS or not is_pinned

    def _carry_out(self, command: native.Command) -> None:
        kind = command.kind
        if kind is _Kind.DESTROY_EVENT:
            self.records.pop(command.event, None)
        elif kind is _Kind.DESTROY_STREAM:
            self._streams.pop(command.stream, None)
        elif kind is _Kind.CALLER_WAIT:
            self._let_caller_wait(command)
        else:
            stream = self._find_stream(command.stream)
            if stream is None:
                return
            if kind is _Kind.RECORD:
                self._record(command, stream)
            elif kind is _Kind.WAIT:
                self._wait(command, stream)
            else:
                self._copy(command, stream)

    def _find_stream(self, number: int) -> _Stream | None:
        found = self._streams.get(number)
        if found is None:
            try:
                found = self._streams[number] = _Stream(torch.Stream(device=self.device))
            except Exception as error:
                self._lose(f"no stream can be made: {_text_of(error)}")
        return found

    def _record(self, command: native.Command, stream: _Stream) -> None:
        if stream.records and stream.records[-1].is_of(command):
            return  # recorded already: Ctrl-C came between the record and commands.done()
        error = stream.error
        event: torch.Event | None = None
        try:
            event = self._new_event(command.timed)
            event.record(stream.stream)
        except Exception as problem:
            error, event = _text_of(problem), None
            self._lose_if_dead(stream.stream, error)
        record = _Record(command.event, command.record, event, error)
        record.is_timed = command.timed and self.is_timed
        record.transfer = stream.transfer
        # CPython raises KeyboardInterrupt only at calls and loop ends. There is none in the next
        # three lines, so they cannot be torn apart.
        self.records[command.event] = record
        stream.records += (record,)
        stream.error = None
        self._happened_at = time.perf_counter()  # something may happen soon

    def _wait(self, command: native.Command, stream: _Stream) -> None:
        record = self.records[command.event]
        if record.event is None or record.error is not None:
            stream.error = record.error
            return
        try:
            stream.stream.wait_event(record.event)
        except Exception as error:
            stream.error = _text_of(error)
            self._lose_if_dead(stream.stream, stream.error)

    def _let_caller_wait(self, command: native.Command) -> None:
        waiting = self._waiting.get(command.stream)
        if waiting is None:
            return
        try:
            record = self.records[command.event]
            if record.event is None:  # its copies may still run
                raise RuntimeError(record.error)
            waiting.stream.wait_event(record.event)
        except Exception as error:
            waiting.error = error
        waiting.is_done = True

    def _copy(self, command: native.Command, stream: _Stream) -> None:
        transfer = stream.transfer = self.records[command.event]
        if transfer.error is not None or command.count == 0:
            return
        try:
            with stream.stream:
                self._copy_blocks(command, stream)
        except Exception as error:
            transfer.error = _text_of(error)
            self._lose_if_dead(stream.stream, transfer.error)

    def _copy_blocks(self, command: native.Command, stream: _Stream) -> None:
        group = self.groups[command.group]
        blocks, slots = command.blocks, command.slots
        if not (slots[1:] > slots[:-1]).all():  # sorted, so that one copy takes adjacent slots
            order = np.argsort(slots)
            blocks, slots = blocks[order], slots[order]
        ids = send_ids(torch.from_numpy(blocks), self.device)
        slabs = command.first_slab, command.last_slab
        nbytes = group.tensors.slot_bytes_of(*slabs)
        staging = self._staging(stream, max(group.staging_bytes, nbytes))
        most = staging.numel() // nbytes
        copy = group.tensors.store if command.to_host else group.tensors.load
        for begin in range(0, command.count, most):
            of_piece = slice(begin, begin + most)
            copy(slabs, slots[of_piece], ids[of_piece], staging)

    def _staging(self, stream: _Stream, nbytes: int) -> Tensor:
        """The stream's staging memory; its copies are in order, so that one buffer is enough."""
        if stream.staging is None or stream.staging.numel() < nbytes:
            stream.staging = None  # freed before more is allocated
            stream.staging = torch.empty(-(-nbytes // 8) * 8, dtype=torch.uint8, device=self.device)
        return stream.staging

    def _report(self) -> None:
        """Tells the native side which events have happened."""
        for stream in list(self._streams.values()):
            while stream.records and self.lost is None:
                record = stream.records[0]
                try:
                    if not (record.event or stream.stream).query():
                        break
                except Exception as error:
                    self._lose(_text_of(error))
                    return
                error_text = record.error
                if error_text is None and record.transfer is not None:
                    error_text = record.transfer.error
                seconds = self._seconds(stream, record)
                self.commands.happened(record.number, record.record, seconds, error_text)
                stream.records.popleft()
                self._happened_at = time.perf_counter()

    def _seconds(self, stream: _Stream, record: _Record) -> float:
        """The time of a record, on a clock of the stream: the sum of the times between its events.

        Differences stay exact however long the process runs.
        """
        if not record.is_timed or record.event is None:
            return time.perf_counter()
        if stream.timed is not None:
            try:
                stream.seconds += stream.timed.elapsed_time(record.event) / 1e3
            except Exception as error:
                self._lose_if_dead(stream.stream, _text_of(error))
        stream.timed = record.event
        return stream.seconds

    # When the device fails.

    def _lose_if_dead(self, stream: torch.Stream, error: str) -> None:
        """Loses the device, because of this error, if it cannot be asked any more."""
        try:
            stream.query()
        except Exception:
            self._lose(error)

    def raise_if_dead(self, error: BaseException) -> None:
        """For the thread of a caller, whose call has failed with this error.

        A stream of the caller says too little: it may only be in a state in which it refuses calls.

        Raises:
            DeviceLostError: the device cannot be asked any more.
        """
        try:
            with self._callers_lock:
                self._callers_stream().query()
        except Exception:
            self._lose(_text_of(error))
        self.check()

    def _lose(self, error: str) -> None:
        """Ends all jobs of the device, now and from now on.

        Takes the turn, because the thread that has it uses what is dropped here. The memory of the
        copies is never freed: what was enqueued may still use it.
        """
        with self._turn:
            if self.lost is not None:
                return
            self.commands.lose(error)
            self.records.clear()
            for waiting in list(self._waiting.values()):
                waiting.is_done = True
            self.lost = error  # last: a call that Ctrl-C has interrupted is repeated

    def _on_failed_thread(self, error: BaseException) -> None:
        """Loses the device, because the command that failed would never be carried out."""
        self._lose(f"the thread that gives it commands has failed: {error!r}")

    def check(self) -> None:
        """Raises DeviceLostError if the device is lost, and RuntimeError in a forked child."""
        self._process.check("device queue")
        if self.lost is not None:
            raise DeviceLostError(
                f"the device is lost: {self.device}: {self.lost}; only a new process can use it "
                "again"
            )

    def _new_event(self, timed: bool = False) -> torch.Event:
        return torch.Event(self.device, enable_timing=timed and self.is_timed)


class QueuedGroup:
    """A group of a handler, as the commands find it.

    Attributes:
        number (int): native.GroupLayout.number.
        tensors (GroupTensors): its tensors and host slots.
        staging_bytes (int): device memory for staging, for each channel.
    """

    def __init__(self, queue: DeviceQueue, tensors: GroupTensors, staging_bytes: int) -> None:
        self.tensors, self.staging_bytes = tensors, staging_bytes
        self.number = next(_group_numbers)
        queue.groups[self.number] = self


_lock = threading.Lock()
_queues: dict[torch.device, DeviceQueue] = {}
_indices, _group_numbers = itertools.count(), itertools.count()


def queue_of(device: torch.device) -> DeviceQueue:
    """The queue of a device, which lives as long as the process.

    Raises:
        ValueError: torch has no streams or events for this device.
        RuntimeError: the process was forked from one that has used the device.
    """
    with _lock:
        if device not in _queues:
            queue = DeviceQueue(device, next(_indices))
            keep(queue)  # also while Python exits: copies use its staging memory
            _queues[device] = queue
        queue = _queues[device]
    queue._process.check("device queue")
    return queue


def _measures_time(device: torch.device) -> bool:
    """Whether events measure time. Raises ValueError if the device has no streams or events."""
    try:
        stream = torch.Stream(device=device)
        event = torch.Event(device)
        event.record(stream)
        event.synchronize()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"a cache on {device} is not supported: torch has no streams or events for it "
            f"({_text_of(error)})"
        ) from error
    try:
        first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
        first.record(stream)
        last.record(stream)
        last.synchronize()
        first.elapsed_time(last)
    except (RuntimeError, NotImplementedError) as error:
        log.warning(
            "events of %s measure no time (%s): Result.copy_seconds is measured on the host",
            *(device, _text_of(error)),
        )
        return False
    return True


def _is_plain_thread() -> bool:
    """Whether no mode of torch changes what its operations do in this thread."""
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._len_torch_function_stack() == 0


def _text_of(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _stop(process: ForkGuard, commands: native.CommandQueue, thread: threading.Thread) -> None:
    """Ends the thread: a thread that comes back from torch while Python exits is killed there."""
    if not process.is_current:
        return
    commands.stop()
    if thread is not threading.current_thread():
        thread.join(_STOP_SECONDS)
