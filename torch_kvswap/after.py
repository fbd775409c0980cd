"""What a job starts behind, and which stream waits for one: streams and events as the driver has
them."""

from __future__ import annotations

import torch

from torch_kvswap._native import abi

CURRENT = -1  # in place of a GPU: the current stream of the cache's GPU

After = torch.cuda.Stream | torch.cuda.Event | tuple[()] | None


def resolve_after(after: object, device: torch.device) -> tuple[int, int | None]:
    """Kind and handle of a point in time for `Request`. Raises TypeError or ValueError for what
    cannot be waited for."""
    if after is None:
        return abi.AFTER_CURRENT, None
    if isinstance(after, tuple) and not after:
        return abi.AFTER_NOTHING, None
    if device.type == "cpu":
        raise TypeError(
            "after= must be None or () for a cache on the CPU, whose transfers run inside the "
            f"call and can wait for no stream; it is {type(after).__name__}: wait for it first"
        )
    if isinstance(after, torch.cuda.Event):
        if not after.cuda_event:  # created when first recorded; a wait before is no wait
            raise ValueError(
                "after= is an event that was never recorded, so that nothing would be waited "
                "for; record it behind the work that it stands for, or pass that stream"
            )
        return abi.AFTER_EVENT, after.cuda_event
    if not isinstance(after, torch.cuda.Stream):
        raise TypeError(
            "after= must be None (the current stream), a torch.cuda.Stream, a "
            f"torch.cuda.Event or () for nothing, not {type(after).__name__}"
        )
    if after.device != device:
        raise ValueError(
            f"after= is a stream of {after.device}, the transfer is on {device}; record "
            "an event on that stream and pass the event"
        )
    return abi.AFTER_STREAM, after.cuda_stream


def resolve_waiting(stream: object) -> tuple[int | None, int]:
    """Names the stream that is to wait.

    Args:
        stream: a torch.cuda.Stream of any GPU, or None for the current stream of the cache's GPU.

    Returns:
        The handle and the GPU, both of which name a stream: handle 0 is the default stream of every
        GPU. (None, -1) for the current stream.

    Raises:
        TypeError: it is no stream.
    """
    if stream is None:
        return None, CURRENT
    if not isinstance(stream, torch.cuda.Stream):  # torch would read any object as a stream
        raise TypeError(f"a torch.cuda.Stream (or None) can wait, {type(stream).__name__} cannot")
    return stream.cuda_stream, stream.device.index
