"""What a channel asks of a device: streams, events, and which stream is current."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from torch_kvswap.cpu_device import CpuDevice
from torch_kvswap.cuda_device import CudaDevice


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
    def free_stream(self, stream: Any) -> None: ...
    def new_event(self) -> Event: ...
    def check_not_capturing(self) -> None: ...
    def resolve_after(self, after: object) -> tuple[Stream | None, Event | None]: ...
    def resolve_stream(self, stream: object) -> Stream: ...
    def current(self, stream: Any) -> AbstractContextManager[None]: ...
    def is_lost_by(self, error: BaseException) -> bool: ...


def open_device(device: torch.device) -> Device:
    if device.type == "cuda":
        return CudaDevice(device)
    if device.type == "cpu":
        return CpuDevice()
    raise ValueError(f"a cache on {device} cannot be moved; its tensors must be on cuda or cpu")
