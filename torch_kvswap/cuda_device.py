"""A CUDA device through torch's streams and events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_kvswap import _extension

_CAPTURING = (
    "{} is capturing a CUDA graph: a replay would neither copy nor wait; call this outside of "
    "the capture"
)


class CudaDevice:
    """What a channel asks of a device, answered by CUDA."""

    path = "batch"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lost: BaseException | None = None

    def new_stream(self) -> torch.cuda.Stream:
        # torch hands out the same 32 streams of a priority over and over: transfers would stand in
        # line behind each other, or behind somebody's kernels, on a stream that both were given.
        library = _extension.library()
        handle = library.kvswap_stream_create(self._device.index)
        if not handle:
            raise RuntimeError(library.kvswap_last_error().decode())
        return torch.cuda.ExternalStream(handle, self._device)  # type: ignore[no-untyped-call]

    def free_stream(self, stream: torch.cuda.Stream) -> None:
        # Not by a weakref.finalize: torch's streams do not clear their weak references.
        library = _extension.library()
        freed = library.kvswap_stream_destroy(self._device.index, stream.cuda_stream)
        if not freed and self.lost is None:
            raise RuntimeError(library.kvswap_last_error().decode())

    def new_event(self) -> torch.cuda.Event:
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

    def resolve_after(
        self, after: object
    ) -> tuple[torch.cuda.Stream | None, torch.cuda.Event | None]:
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

    def resolve_stream(self, stream: object) -> torch.cuda.Stream:
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
        # Only torch's own error has a code; any other was not said by CUDA. 900 to 908 mean that
        # some thread captures a graph; all the rest, of a query or of a synchronization, stay until
        # the process ends.
        code = getattr(error, "error_code", None)
        return code is not None and code not in range(900, 909)

    def _refuse_capture(self, stream: torch.cuda.Stream) -> None:
        with self.current(stream):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(_CAPTURING.format(stream))
