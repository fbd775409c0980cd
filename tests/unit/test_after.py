"""What `after=` accepts, and what may wait for a job."""

from __future__ import annotations

import torch
from error_text import error_text
from expecttest import assert_expected_inline
from simulated_cache import Event, Stream
from simulated_driver import without_cuda

from torch_kvswap.offload.streams import resolve_after, resolve_waiting

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@without_cuda
def test_the_driver_gets_stream_and_event_handles() -> None:
    assert resolve_after(Stream(42), CUDA) == [(False, 42)]
    assert resolve_after(Stream(0), CUDA) == [(False, 0)]
    assert resolve_after(Event(7), CUDA) == [(True, 7)]
    assert resolve_after((Stream(42), Event(7)), CUDA) == [(False, 42), (True, 7)]
    assert resolve_waiting(Stream(42), CUDA) == (42, 0)
    assert resolve_waiting(Stream(0, index=1), CUDA) == (0, 1)


def test_the_driver_looks_up_the_current_stream() -> None:
    for device in (CUDA, CPU):
        assert resolve_after(None, device) is None
        assert resolve_after((), device) == []
    assert resolve_waiting(None, CUDA) == (0, -1)


@without_cuda
def test_what_cannot_be_waited_for_is_refused() -> None:
    calls = [
        lambda: resolve_after(Event(0), CUDA),
        lambda: resolve_after(Stream(42, index=1), CUDA),
        lambda: resolve_after(42, CUDA),
        lambda: resolve_after((Stream(42), None), CUDA),
        lambda: resolve_after((Event(7), Event(0)), CUDA),
        lambda: resolve_after((Stream(42),), CPU),
        lambda: resolve_after(Stream(42), CPU),
        lambda: resolve_after(42, CPU),
        lambda: resolve_waiting(42, CUDA),
        lambda: resolve_waiting(torch.Stream("cpu"), CUDA),
        lambda: resolve_waiting(42, CPU),
    ]
    assert_expected_inline(
        "\n".join(error_text(call) for call in calls),
        """\
ValueError: after= is an event that was never recorded, so the transfer would wait for
nothing; record it behind the work it stands for, or pass that stream
ValueError: after= is a stream of cuda:1, the transfer is on cuda:0; record an event on
that stream and pass the event
TypeError: after= must be None (the current stream), a torch.cuda.Stream or a
torch.cuda.Event, or a tuple of them, not an int
TypeError: after[1] must be a torch.cuda.Stream or a torch.cuda.Event, not None
ValueError: after[1] is an event that was never recorded, so the transfer would wait for
nothing; record it behind the work it stands for, or pass that stream
TypeError: after[0] is a Stream, but transfers of a cache on the CPU run inside the call
and cannot wait for a stream; wait on the host first, and pass None or ()
TypeError: after= is a Stream, but transfers of a cache on the CPU run inside the call
and cannot wait for a stream; wait on the host first, and pass None or ()
TypeError: after= is an int, but transfers of a cache on the CPU run inside the call and
cannot wait for a stream; wait on the host first, and pass None or ()
TypeError: stream is an int; pass a torch.cuda.Stream or None
TypeError: stream is a Stream; pass a torch.cuda.Stream or None
TypeError: stream is an int, but the cache is on the CPU: its transfers have ended when
store() or load() returns, so no stream has to wait; pass None""",
    )
