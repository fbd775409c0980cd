"""Streams and events of the caller, for the native side."""

from __future__ import annotations

import torch

from torch_kvswap._native.arguments import kind_of

CURRENT = -1  # device number that stands for the current stream of the cache's GPU

# What a transfer starts after: all of these, or (None) the current stream.
After = (
    torch.cuda.Stream | torch.cuda.Event | tuple[torch.cuda.Stream | torch.cuda.Event, ...] | None
)


def resolve_after(after: object, device: torch.device) -> list[tuple[bool, int]] | None:
    """Converts an `after` argument for a cache on this device.

    Returns, for each stream or event, whether it is an event, and its handle; None for the current
    stream. The caller keeps `after` until the job was submitted.

    Raises:
        TypeError: after is something else, or a stream or event for a cache on the CPU.
        ValueError: an event was never recorded, or a stream is on another device.
    """
    if after is None:
        return None
    if isinstance(after, tuple):
        return [_resolve(item, f"after[{i}]", device) for i, item in enumerate(after)]
    return [_resolve(after, "after=", device)]


def _resolve(after: object, name: str, device: torch.device) -> tuple[bool, int]:
    if device.type == "cpu":
        raise TypeError(
            f"{name} is {kind_of(after)}, but transfers of a cache on the CPU run inside "
            "the call and cannot wait for a stream; wait on the host first, and pass None or ()"
        )
    if isinstance(after, torch.cuda.Event):
        if not after.cuda_event:  # created when first recorded; CUDA would ignore a wait before
            raise ValueError(
                f"{name} is an event that was never recorded, so the transfer would wait for "
                "nothing; record it after the work it stands for, or pass that stream"
            )
        return True, after.cuda_event
    if not isinstance(after, torch.cuda.Stream):
        expected = "a torch.cuda.Stream or a torch.cuda.Event"
        if name == "after=":
            expected = f"None (the current stream), {expected}, or a tuple of them"
        raise TypeError(f"{name} must be {expected}, not {kind_of(after)}")
    if after.device != device:
        raise ValueError(
            f"{name} is a stream of {after.device}, the transfer is on {device}; record "
            "an event on that stream and pass the event"
        )
    return False, after.cuda_stream


def resolve_waiting(stream: object, device: torch.device) -> tuple[int, int]:
    """Converts the stream that must wait: a torch.cuda.Stream of any GPU, or None for the current
    stream of the cache's GPU.

    Returns its handle and its GPU, (0, CURRENT) for None. The handle alone is not enough: 0 is the
    default stream of every GPU.

    Raises:
        TypeError: stream is something else.
    """
    if stream is None:
        return 0, CURRENT
    if not isinstance(stream, torch.cuda.Stream):  # torch would take any object as a stream
        if device.type == "cpu":
            raise TypeError(
                f"stream is {kind_of(stream)}, but the cache is on the CPU: its transfers have "
                "ended when store() or load() returns, so no stream has to wait; pass None"
            )
        raise TypeError(f"stream is {kind_of(stream)}; pass a torch.cuda.Stream or None")
    return stream.cuda_stream, stream.device.index
