"""Streams and events of the caller, for the native side."""

from __future__ import annotations

import torch

from torch_kvswap._native.arguments import kind_of
from torch_kvswap._native.loader import native

CURRENT = -1  # device number that stands for the current stream of the cache's GPU

# What a transfer starts after: a stream, an event, nothing, or (None) the current stream.
# torch.cuda.Stream and the streams of other devices are torch.Streams; so with events.
After = torch.Stream | torch.Event | tuple[()] | None


def resolve_after(after: object, device: torch.device) -> tuple[native.After, int]:
    """Converts an `after` argument.

    Args:
        after: see After.
        device (torch.device): the device of the cache.

    Returns:
        tuple[native.After, int]: kind and handle of the stream or event; 0 for none.

    Raises:
        TypeError: after is something else, or a stream or event for a cache on the CPU.
        ValueError: the event was never recorded, or the stream is on another device.
    """
    if after is None:
        return native.After.CURRENT, 0
    if isinstance(after, tuple) and not after:
        return native.After.NOTHING, 0
    if device.type == "cpu":
        raise TypeError(
            f"after= is {kind_of(after)}, but transfers of a cache on the CPU run inside "
            "the call and cannot wait for a stream; wait on the host first, and pass None or "
            "AFTER_NOTHING"
        )
    if isinstance(after, torch.cuda.Event):
        if not after.cuda_event:  # created when first recorded; CUDA would ignore a wait before
            raise ValueError(
                "after= is an event that was never recorded, so the transfer would wait for "
                "nothing; record it behind the work it stands for, or pass that stream"
            )
        return native.After.EVENT, after.cuda_event
    if not isinstance(after, torch.cuda.Stream):
        raise TypeError(
            "after= must be None (the current stream), a torch.cuda.Stream, a "
            f"torch.cuda.Event or AFTER_NOTHING, not {kind_of(after)}"
        )
    if after.device != device:
        raise ValueError(
            f"after= is a stream of {after.device}, the transfer is on {device}; record "
            "an event on that stream and pass the event"
        )
    return native.After.STREAM, after.cuda_stream


def resolve_waiting(stream: object, device: torch.device) -> tuple[int, int]:
    """Converts the stream that is to wait.

    Args:
        stream: a torch.cuda.Stream of any GPU, or None for the current stream of the cache's GPU.
        device (torch.device): the device of the cache.

    Returns:
        tuple[int, int]: handle and GPU of the stream, (0, CURRENT) for None. The handle
            alone is not enough: 0 is the default stream of every GPU.

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
