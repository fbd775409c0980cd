"""What a handler has counted: a snapshot."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_kvswap import prometheus
from torch_kvswap._native import abi

COPY_METHODS, BUCKETS = abi.COPY_METHODS, abi.BUCKETS
# Seconds: 1 us, 2 us, 4 us and so on. The last bucket has no bound.
BOUNDS = tuple(2**power / 1e6 for power in range(BUCKETS - 1))


Fill = Callable[[int, Any], bool]  # a channel's number and a pointer to abi.Metrics


@dataclass(frozen=True)
class Histogram:
    """How often which duration was seen.

    bounds: the upper bounds of the buckets in seconds, included; a last bucket has all that is
    longer. counts: of each bucket, one more than bounds. sum: of all values, in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """In seconds; NaN when nothing was seen."""
        return self.sum / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """An estimate in seconds, as if the values of a bucket lay evenly in it: it is off by less
        than the width of a bucket. NaN when nothing was seen, the last bound when the value is
        beyond it. q: 0 to 1, else ValueError."""
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile is asked for with a number from 0 to 1, not {q}")
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
    """One channel since the handler was made.

    submitted, done, failed, cancelled: jobs. bytes: of the jobs done. queued, running: jobs now in
    the software queue and on the device. transfers: copies given to the device, jobs merged into
    one counted once. streams, events: that exist now. jobs_by_copy_method: jobs done by each way of
    copying. submit, queue, copy: seconds in the call, in the software queue, and copying.
    """

    submitted: int
    done: int
    failed: int
    cancelled: int
    bytes: int
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
    """A handler's channels, read one after another."""

    stores: ChannelMetrics
    loads: ChannelMetrics
    expedited: ChannelMetrics

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """The text that a Prometheus server scrapes (format 0.0.4). labels: names and values that
        every sample gets beside its own; TypeError for what is no string, ValueError for a name
        that a label cannot have."""
        channels = {"store": self.stores, "load": self.loads, "expedited": self.expedited}
        return prometheus.text_of(channels, labels or {})


def read_metrics(fill: Fill) -> Metrics:
    """fill: writes the metrics of channel 0, 1 or 2 (store, load, expedited load) to a pointer to
    abi.Metrics, and says whether it did. Raises RuntimeError when it did not."""
    return Metrics(*(_read_channel(fill, channel) for channel in range(3)))


def _read_channel(fill: Fill, channel: int) -> ChannelMetrics:
    native = abi.Metrics()
    if not fill(channel, ctypes.pointer(native)):
        raise RuntimeError(f"the native handler gave no metrics of its channel {channel}")
    counts = {
        field[0]: getattr(native, field[0])
        for field in abi.Metrics._fields_
        if field[1] is ctypes.c_uint64
    }
    copy_methods = dict(zip(COPY_METHODS, native.jobs_by_copy_method, strict=True))
    seconds = (native.submit, native.queue, native.copy)
    submit, queue, copy = (Histogram(BOUNDS, tuple(h.counts), h.sum) for h in seconds)
    return ChannelMetrics(
        **counts, jobs_by_copy_method=copy_methods, submit=submit, queue=queue, copy=copy
    )
