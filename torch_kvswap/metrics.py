"""Snapshots of what a handler has counted and timed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_kvswap import prometheus
from torch_kvswap._native.loader import native

COPY_METHODS, BUCKETS = tuple(native.copy_methods()), native.BUCKETS
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

    @property
    def mean(self) -> float:
        """Mean duration in seconds; NaN if there is none."""
        return self.sum / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """Estimates a quantile, assuming that durations are spread evenly within a bucket.

        Args:
            q (float): 0 to 1.

        Returns:
            float: seconds, off by less than the width of the bucket. NaN if there is no duration;
                the last bound if the quantile is beyond it.

        Raises:
            ValueError: q is not in 0 to 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q is {q}; it must be 0 to 1")
        if not self.count:
            return math.nan
        rank, below, lower = q * self.count, 0, 0.0
        for upper, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (upper - lower) * (rank - below) / count
            below, lower = below + count, upper
        return self.bounds[-1]


@dataclass(frozen=True)
class ChannelMetrics:
    """The metrics of one channel since the handler was made.

    Attributes:
        submitted (int): jobs submitted.
        done (int): jobs that ended as done.
        failed (int): jobs that ended as failed.
        cancelled (int): jobs that ended as cancelled.
        bytes (int): bytes of the blocks of the jobs done.
        link_bytes (int): bytes in which these blocks crossed the link; fewer if they are encoded.
        blocks (int): blocks of the jobs that are done, or that failed because they rejected blocks.
        encoded_blocks (int): those of these blocks whose host pages are encoded.
        rejected_blocks (int): encoded blocks that these jobs have rejected, because they do not fit
            into their slots, or because a slot held no valid block.
        queued (int): jobs now in the software queue.
        running (int): jobs now on the device.
        transfers (int): copies given to the device. Jobs that were merged count as one copy.
        streams (int): streams that exist now.
        events (int): events that exist now.
        jobs_by_copy_method (dict[str, int]): jobs done, by copy method.
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
    queued: int
    running: int
    transfers: int
    streams: int
    events: int
    jobs_by_copy_method: dict[str, int]
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

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """Formats the metrics for a Prometheus server (text format 0.0.4).

        Every sample has the labels "direction" ("store" or "load") and "channel" ("stores", "loads"
        or "expedited"). Expedited loads have the direction "load".

        Args:
            labels (Mapping[str, str] | None): labels to add to every sample.

        Raises:
            TypeError: a label name or value is not a string.
            ValueError: a label name is invalid or already in use.
        """
        channels = {"stores": self.stores, "loads": self.loads, "expedited": self.expedited}
        return prometheus.text_of(channels, labels or {})


def read_metrics(handler: native.Handler) -> Metrics:
    """Reads the metrics of all channels."""
    return Metrics(*(_read_channel(handler.metrics(channel)) for channel in range(3)))


def _read_channel(of: dict[str, Any]) -> ChannelMetrics:
    for name in ("submit", "queue", "copy"):
        of[name] = Histogram(BOUNDS, *of[name])
    return ChannelMetrics(**of)
