"""What a channel asks of a device: streams, events, and which stream is current."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Stream(Protocol):
    def synchronize(self) -> None: ...


class Event(Protocol):
    """torch.cuda.Event as far as channels use it: recorded on a stream, waited for by streams."""

    def record(self, stream: Any) -> None: ...
    def wait(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...  # milliseconds


class Device(Protocol):
    """lost: the error after which the device runs nothing any more, for every channel on it.
    path: how copies run there, as `Result.path` reports it."""

    lost: BaseException | None

    @property
    def path(self) -> str: ...
    def new_stream(self) -> Stream: ...
    def new_event(self) -> Event: ...
    def check_not_capturing(self) -> None: ...
    def resolve_after(self, after: object) -> tuple[Stream | None, Event | None]: ...
    def resolve_stream(self, stream: object) -> Stream: ...
    def current(self, stream: Any) -> AbstractContextManager[None]: ...
    def is_lost_by(self, error: BaseException) -> bool: ...


_CAPTURING = (
    "{} is capturing a CUDA graph: a replay would neither copy nor wait; call this outside of "
    "the capture"
)


class CudaDevice:
    """A CUDA device through torch's streams and events."""

    path = "batch"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lost: BaseException | None = None

    def new_stream(self) -> Stream:
        # torch hands out the same 32 streams of a priority over and over. Those of high priority
        # are seldom anyone's compute stream, which would stand still behind the transfers; copy
        # engines take no notice of a priority.
        return torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def new_event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def check_not_capturing(self) -> None:
        """Raises RuntimeError when the caller's current stream of the device is captured."""
        try:
            with torch.cuda.device(self._device):
                capturing = torch.cuda.is_current_stream_capturing()
        except RuntimeError as error:
            if not self.is_lost_by(error):
                raise
            self.lost, capturing = error, False
        if capturing:
            raise RuntimeError(_CAPTURING.format(f"the current stream of {self._device}"))

    def resolve_after(self, after: object) -> tuple[Stream | None, Event | None]:
        """The stream, or else the event, that a transfer waits for; (None, None) for nothing."""
        if isinstance(after, tuple) and not after:
            return None, None
        if isinstance(after, torch.cuda.Event):
            if not after.cuda_event:  # created when first recorded; a wait before is no wait
                raise ValueError(
                    "after= is an event that was never recorded, so that nothing would be waited "
                    "for; record it behind the work that it stands for, or pass that stream"
                )
            return None, after
        if after is None:
            return torch.cuda.current_stream(self._device), None
        if not isinstance(after, torch.cuda.Stream):
            raise TypeError(
                "after= must be None (the current stream), a torch.cuda.Stream, a "
                f"torch.cuda.Event or () for nothing, not {type(after).__name__}"
            )
        if after.device != self._device:
            raise ValueError(
                f"after= is a stream of {after.device}, the transfer is on {self._device}; record "
                "an event on that stream and pass the event"
            )
        self._refuse_capture(after)
        return after, None

    def resolve_stream(self, stream: object) -> Stream:
        """The stream that is to wait for a transfer, of any device; None is the current one."""
        if stream is None:
            stream = torch.cuda.current_stream(self._device)
        if not isinstance(stream, torch.cuda.Stream):  # torch would read any object as a stream
            raise TypeError(
                f"a torch.cuda.Stream (or None) can wait, {type(stream).__name__} cannot"
            )
        self._refuse_capture(stream)
        return stream

    @contextmanager
    def current(self, stream: Any) -> Iterator[None]:
        """Makes the stream and its device current; leaves them as they were for the caller."""
        # The device first: torch.cuda.stream alone, called from another device, would make a
        # context there on its way back.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    def is_lost_by(self, error: BaseException) -> bool:
        # 900 to 908 only say that some thread captures a graph; all other errors of a query or
        # of a synchronization stay until the process ends.
        return getattr(error, "error_code", None) not in range(900, 909)

    def _refuse_capture(self, stream: torch.cuda.Stream) -> None:
        with self.current(stream):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(_CAPTURING.format(stream))


class CpuStream:
    def synchronize(self) -> None:
        pass


class CpuEvent:
    """A moment: what was to happen before it has happened when it is recorded."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self, stream: object) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: CpuEvent) -> float:
        return (end_event.seconds - self.seconds) * 1e3


class CpuDevice:
    """Host memory on both sides: a transfer has ended when its submission returns."""

    path = "host"
    lost: BaseException | None = None

    def new_stream(self) -> Stream:
        return CpuStream()

    def new_event(self) -> Event:
        return CpuEvent()

    def check_not_capturing(self) -> None:
        pass

    def resolve_after(self, after: object) -> tuple[Stream | None, Event | None]:
        if after is None or (isinstance(after, tuple) and not after):
            return None, None
        raise TypeError(
            "after= must be None or () for a cache on the CPU, whose transfers run inside the "
            f"call and can wait for no stream; it is {type(after).__name__}: wait for it first"
        )

    def resolve_stream(self, stream: object) -> Stream:
        return CpuStream()

    def current(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def is_lost_by(self, error: BaseException) -> bool:
        return False


def open_device(device: torch.device) -> Device:
    if device.type == "cuda":
        return CudaDevice(device)
    if device.type == "cpu":
        return CpuDevice()
    raise ValueError(f"a cache on {device} cannot be moved; its tensors must be on cuda or cpu")
