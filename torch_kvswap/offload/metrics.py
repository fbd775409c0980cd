"""Snapshots of what a handler has counted and timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_kvswap._native.loader import native

BUCKETS = native.BUCKETS
# In seconds: 1 us, 2 us, 4 us and so on. The last bucket has no bound.
BOUNDS = tuple(2**power / 1e6 for power in range(BUCKETS - 1))


@dataclass(frozen=True)
class Histogram:
    """A histogram of durations.

    Attributes:
        bounds (tuple[float, ...]): inclusive upper bounds of the buckets, in seconds. One more
            bucket counts all longer durations.
        counts (tuple[int, ...]): durations per bucket; one entry more than bounds.
        sum (float): sum of all durations, in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)


@dataclass(frozen=True)
class ChannelMetrics:
    """The metrics of one channel since the handler was made.

    Attributes:
        submitted (int): jobs submitted.
        done (int): jobs that ended as done.
        failed (int): jobs that ended as failed.
        cancelled (int): jobs that ended as cancelled.
        bytes (int): bytes of the blocks of the jobs done.
        link_bytes (int): bytes that these blocks moved over the link; fewer if encoded.
        blocks (int): blocks of the jobs that are done, or that failed because they rejected blocks.
        encoded_blocks (int): how many of these blocks have encoded host pages.
        rejected_blocks (int): blocks that these jobs have rejected, because they do not fit into
            their encoded slots, or because a slot held no valid block.
        corrupted_blocks (int): blocks of these jobs that no longer match what was stored, in pools
            with checksums (HostPool.verify). They do not count as rejected.
        queued (int): jobs now in the software queue.
        running (int): jobs now on the device.
        transfers (int): copies given to the device. Jobs that were merged count as one copy.
        streams (int): streams that exist now.
        events (int): events that exist now.
        jobs_by_copy_method (dict[str, int]): jobs done, by copy method.
        relayed_bytes (dict[int, int]): bytes given to each relay so far, by its GPU.
        exchanged_bytes (int): bytes that came from other ranks so far, by an exchange. All others
            went over the link of the cache's GPU.
        submit (Histogram): host time in the submitting call.
        queue (Histogram): time in the software queue.
        copy (Histogram): time copying, without the waits before the copy.
    """

    submitted: int
    done: int
    failed: int
    cancelled: int
    bytes: int
    link_bytes: int
    blocks: int
    encoded_blocks: int
    rejected_blocks: int
    corrupted_blocks: int
    queued: int
    running: int
    transfers: int
    streams: int
    events: int
    jobs_by_copy_method: dict[str, int]
    relayed_bytes: dict[int, int]
    exchanged_bytes: int
    submit: Histogram
    queue: Histogram
    copy: Histogram


@dataclass(frozen=True)
class Metrics:
    """The metrics of a handler. Channels are read one after another, not at one instant.

    Attributes:
        stores (ChannelMetrics): the channel of stores.
        loads (ChannelMetrics): the channel of loads.
        expedited (ChannelMetrics): the channel of expedited loads.
    """

    stores: ChannelMetrics
    loads: ChannelMetrics
    expedited: ChannelMetrics


def read_metrics(handler: native.Handler) -> Metrics:
    """Reads the metrics of all channels."""
    return Metrics(*(_read_channel(handler.metrics(channel)) for channel in range(3)))


def _read_channel(numbers: dict[str, Any]) -> ChannelMetrics:
    for name in ("submit", "queue", "copy"):
        numbers[name] = Histogram(BOUNDS, *numbers[name])
    return ChannelMetrics(**numbers)
