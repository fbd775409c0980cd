"""Snapshots of what a handler has counted and timed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
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

    @property
    def mean(self) -> float:
        """Mean duration in seconds; NaN without durations."""
        return self.sum / self.count if self.count else math.nan


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
        rejected_blocks (int): encoded blocks that these jobs have rejected, because they do not fit
            into their slots, or because a slot held no valid block.
        corrupted_blocks (int): blocks of these jobs that are not what was stored, in pools with
            digests (HostPool.verify). They do not count as rejected.
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
    corrupted_blocks: int
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
        return _prometheus_text(channels, labels or {})


def read_metrics(handler: native.Handler) -> Metrics:
    """Reads the metrics of all channels."""
    return Metrics(*(_read_channel(handler.metrics(channel)) for channel in range(3)))


def _read_channel(of: dict[str, Any]) -> ChannelMetrics:
    for name in ("submit", "queue", "copy"):
        of[name] = Histogram(BOUNDS, *of[name])
    return ChannelMetrics(**of)


def _prometheus_text(channels: Mapping[str, ChannelMetrics], labels: Mapping[str, str]) -> str:
    """Metrics.prometheus()."""
    for name, text in labels.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"label {name!r} is {text!r}; both must be strings")
        if not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name, re.ASCII) or name in _TAKEN:
            raise ValueError(
                f"a label cannot be named {name!r}: letters, digits and _ are allowed, not a "
                f"digit or __ in front, and {', '.join(_TAKEN)} are in use"
            )
    lines: list[str] = []
    for name, kind, text, samples in _FAMILIES:
        lines += [f"# HELP kvswap_{name} {text}", f"# TYPE kvswap_{name} {kind}"]
        for of_channel, channel in channels.items():
            places = {"direction": _DIRECTION_OF[of_channel], "channel": of_channel}
            for suffix, own, value in samples(channel):
                shown = _labels({**places, **labels, **own})
                lines.append(f"kvswap_{name}{suffix}{{{shown}}} {value}")
    return "\n".join(lines) + "\n"


Sample = tuple[str, dict[str, str], float]  # suffix of the metric's name, extra labels, value
Samples = Callable[[ChannelMetrics], Iterator[Sample]]
# As in Result.direction, so that sums over a direction have the expedited loads too.
_DIRECTION_OF = {"stores": "store", "loads": "load", "expedited": "load"}
_TAKEN = ("direction", "channel", "state", "copy_method", "le")


def _one(field: str) -> Samples:
    """A sampler of one field."""
    return lambda channel: iter([("", {}, getattr(channel, field))])


def _states(channel: ChannelMetrics) -> Iterator[Sample]:
    for state in ("done", "failed", "cancelled"):
        yield "", {"state": state}, getattr(channel, state)


def _copy_methods(channel: ChannelMetrics) -> Iterator[Sample]:
    for copy_method, jobs in channel.jobs_by_copy_method.items():
        yield "", {"copy_method": copy_method}, jobs


def _histogram(field: str) -> Samples:
    """A sampler of one histogram, with cumulative buckets."""

    def samples(channel: ChannelMetrics) -> Iterator[Sample]:
        histogram: Histogram = getattr(channel, field)
        bounds = [*map(repr, histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
            yield "_bucket", {"le": bound}, count
        yield "_sum", {}, histogram.sum
        yield "_count", {}, histogram.count

    return samples


_FAMILIES: tuple[tuple[str, str, str, Samples], ...] = (
    ("jobs_submitted_total", "counter", "Jobs submitted.", _one("submitted")),
    ("jobs_ended_total", "counter", "Jobs ended, by how they ended.", _states),
    ("jobs_copied_total", "counter", "Jobs done, by copy method.", _copy_methods),
    ("copied_bytes_total", "counter", "Bytes of the blocks of jobs done.", _one("bytes")),
    ("link_bytes_total", "counter", "Bytes on the link of jobs done.", _one("link_bytes")),
    ("blocks_total", "counter", "Blocks of jobs done or with rejects.", _one("blocks")),
    ("encoded_blocks_total", "counter", "Blocks of them in encoded pages.", _one("encoded_blocks")),
    ("rejected_blocks_total", "counter", "Rejected blocks.", _one("rejected_blocks")),
    ("corrupted_blocks_total", "counter", "Corrupted blocks.", _one("corrupted_blocks")),
    ("transfers_total", "counter", "Copies given to the device.", _one("transfers")),
    ("jobs_queued", "gauge", "Jobs in the software queue.", _one("queued")),
    ("jobs_running", "gauge", "Jobs on the device.", _one("running")),
    ("streams", "gauge", "Existing device streams.", _one("streams")),
    ("events", "gauge", "Existing device events.", _one("events")),
    ("submit_seconds", "histogram", "Host time in the submitting call.", _histogram("submit")),
    ("queue_seconds", "histogram", "Time in the software queue.", _histogram("queue")),
    ("copy_seconds", "histogram", "Copy time, without the waits.", _histogram("copy")),
)


def _labels(labels: Mapping[str, str]) -> str:
    escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{value.translate(escape)}"' for name, value in labels.items())
