"""What a handler has counted: a snapshot, and the same as text for Prometheus."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

BUCKETS = 26
PATHS = ("host", "batch", "strided", "staged", "kernel")  # ways of copying, by number
# Seconds: 1 us, 2 us, 4 us and so on. The last bucket has no bound.
BOUNDS = tuple(2**power / 1e6 for power in range(BUCKETS - 1))


class NativeHistogram(ctypes.Structure):
    """kvswap_histogram of csrc/capi.h."""

    _fields_ = [("counts", ctypes.c_uint64 * BUCKETS), ("sum", ctypes.c_double)]


_JOBS = ("submitted", "done", "failed", "cancelled", "bytes")
_DEVICE = ("queued", "running", "transfers", "streams", "events")


class NativeMetrics(ctypes.Structure):
    """kvswap_metrics of csrc/capi.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in _JOBS + _DEVICE),
        ("jobs_by_path", ctypes.c_uint64 * len(PATHS)),
        *((name, NativeHistogram) for name in ("submit", "queue", "copy")),
    ]


Fill = Callable[[int, Any], bool]  # a channel's number and a pointer to NativeMetrics


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
    one counted once. streams, events: that exist now. path_jobs: jobs done by each way of copying.
    submit, queue, copy: seconds in the call, in the software queue, and copying.
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
    path_jobs: dict[str, int]
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
        given = dict(labels or {})
        for name, text in given.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise TypeError(f"label {name!r} is {text!r}; both must be strings")
            if not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name, re.ASCII) or name in _TAKEN:
                raise ValueError(
                    f"a label cannot be named {name!r}: letters, digits and _ are allowed, not a "
                    f"digit or __ in front, and {', '.join(_TAKEN)} are in use"
                )
        channels = {"store": self.stores, "load": self.loads, "expedited": self.expedited}
        lines: list[str] = []
        for name, kind, text, samples in _FAMILIES:
            lines += [f"# HELP kvswap_{name} {text}", f"# TYPE kvswap_{name} {kind}"]
            for direction, channel in channels.items():
                for suffix, own, value in samples(channel):
                    said = _labels({"direction": direction, **given, **own})
                    lines.append(f"kvswap_{name}{suffix}{{{said}}} {value}")
        return "\n".join(lines) + "\n"


def read_metrics(fill: Fill) -> Metrics:
    """fill: writes the metrics of channel 0, 1 or 2 (store, load, expedited load) to a pointer to
    NativeMetrics, and says whether it did. Raises RuntimeError when it did not."""
    return Metrics(*(_read_channel(fill, channel) for channel in range(3)))


def _read_channel(fill: Fill, channel: int) -> ChannelMetrics:
    native = NativeMetrics()
    if not fill(channel, ctypes.pointer(native)):
        raise RuntimeError(f"the native handler gave no metrics of its channel {channel}")
    counts = {name: getattr(native, name) for name in _JOBS + _DEVICE}
    paths = dict(zip(PATHS, native.jobs_by_path, strict=True))
    seconds = (native.submit, native.queue, native.copy)
    submit, queue, copy = (Histogram(BOUNDS, tuple(h.counts), h.sum) for h in seconds)
    return ChannelMetrics(**counts, path_jobs=paths, submit=submit, queue=queue, copy=copy)


Sample = tuple[str, dict[str, str], float]  # a suffix of the name, labels of its own, the value
Samples = Callable[[ChannelMetrics], Iterator[Sample]]
_TAKEN = ("direction", "state", "path", "le")


def _one(field: str) -> Samples:
    return lambda channel: iter([("", {}, getattr(channel, field))])


def _states(channel: ChannelMetrics) -> Iterator[Sample]:
    for state in ("done", "failed", "cancelled"):
        yield "", {"state": state}, getattr(channel, state)


def _paths(channel: ChannelMetrics) -> Iterator[Sample]:
    for path, jobs in channel.path_jobs.items():
        yield "", {"path": path}, jobs


def _histogram(field: str) -> Samples:
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
    ("jobs_copied_total", "counter", "Jobs done, by the way of copying.", _paths),
    ("copied_bytes_total", "counter", "Bytes of the jobs done.", _one("bytes")),
    ("transfers_total", "counter", "Copies given to the device.", _one("transfers")),
    ("jobs_queued", "gauge", "Jobs in the software queue.", _one("queued")),
    ("jobs_running", "gauge", "Jobs on the device.", _one("running")),
    ("streams", "gauge", "Streams that exist.", _one("streams")),
    ("events", "gauge", "Events that exist.", _one("events")),
    ("submit_seconds", "histogram", "Host time in the call that submits.", _histogram("submit")),
    ("queue_seconds", "histogram", "Time in the software queue.", _histogram("queue")),
    ("copy_seconds", "histogram", "Time copying, without the waits.", _histogram("copy")),
)


def _labels(labels: Mapping[str, str]) -> str:
    escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{value.translate(escape)}"' for name, value in labels.items())
