"""The Prometheus text format (0.0.4) of a handler's metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_kvswap.metrics import ChannelMetrics, Histogram


def text_of(channels: Mapping[str, ChannelMetrics], labels: Mapping[str, str]) -> str:
    """Formats the samples of all channels.

    Args:
        channels (Mapping[str, ChannelMetrics]): by name: "stores", "loads" and "expedited".
        labels (Mapping[str, str]): labels to add to every sample.

    Raises:
        TypeError: a label name or value is not a string.
        ValueError: a label name is invalid or already in use.
    """
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
            places = {"direction": _DIRECTIONS[of_channel], "channel": of_channel}
            for suffix, own, value in samples(channel):
                shown = _labels({**places, **labels, **own})
                lines.append(f"kvswap_{name}{suffix}{{{shown}}} {value}")
    return "\n".join(lines) + "\n"


Sample = tuple[str, dict[str, str], float]  # suffix of the metric's name, extra labels, value
Samples = Callable[["ChannelMetrics"], Iterator[Sample]]
# As in Result.direction, so that sums over a direction have the expedited loads too.
_DIRECTIONS = {"stores": "store", "loads": "load", "expedited": "load"}
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
