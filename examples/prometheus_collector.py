"""A handler's metrics for Prometheus: `REGISTRY.register(Collector(handler, {"rank": "0"}))`.

Needs the package prometheus-client.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from torch_kvswap import HostPool, OffloadHandler, PagedLayout, PrefixCache
from torch_kvswap.offload import ChannelMetrics

COUNTERS = {
    "jobs_submitted": "submitted",
    "copied_bytes": "bytes",
    "link_bytes": "link_bytes",
    "blocks": "blocks",
    "encoded_blocks": "encoded_blocks",
    "rejected_blocks": "rejected_blocks",
    "corrupted_blocks": "corrupted_blocks",
    "exchanged_bytes": "exchanged_bytes",
    "transfers": "transfers",
}
GAUGES = {
    "jobs_queued": "queued",
    "jobs_running": "running",
    "streams": "streams",
    "events": "events",
}
HISTOGRAMS = {"submit_seconds": "submit", "queue_seconds": "queue", "copy_seconds": "copy"}


class Collector:
    """Reads a handler at each scrape. Each sample has `labels`, the direction and the channel."""

    def __init__(
        self, handler: OffloadHandler | PrefixCache, labels: Mapping[str, str] | None = None
    ) -> None:
        self._handler, self._labels = handler, dict(labels or {})

    def collect(self) -> Iterator[Metric]:
        metrics = self._handler.metrics()
        channels = {
            ("store", "stores"): metrics.stores,
            ("load", "loads"): metrics.loads,
            ("load", "expedited"): metrics.expedited,
        }
        families: dict[str, Metric] = {}
        for (direction, channel), numbers in channels.items():
            labels = {"direction": direction, "channel": channel, **self._labels}
            for kind, name, suffix, own, value in _samples(numbers):
                family = families.setdefault(name, Metric(f"kvswap_{name}", name, kind))
                family.add_sample(f"kvswap_{name}{suffix}", {**labels, **own}, value)
        yield from families.values()


def _samples(of: ChannelMetrics) -> Iterator[tuple[str, str, str, dict[str, str], float]]:
    """Kind and name of a family, then suffix, labels and value of a sample."""
    for name, field in COUNTERS.items():
        yield "counter", name, "_total", {}, getattr(of, field)
    for state in ("done", "failed", "cancelled"):
        yield "counter", "jobs_ended", "_total", {"state": state}, getattr(of, state)
    for method, jobs in of.jobs_by_copy_method.items():
        yield "counter", "jobs_copied", "_total", {"copy_method": method}, jobs
    for relay, relayed in of.relayed_bytes.items():
        yield "counter", "relayed_bytes", "_total", {"relay": str(relay)}, relayed
    for name, field in GAUGES.items():
        yield "gauge", name, "", {}, getattr(of, field)
    for name, field in HISTOGRAMS.items():
        durations = getattr(of, field)
        bounds = [*map(str, durations.bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(durations.counts), strict=True):
            yield "histogram", name, "_bucket", {"le": bound}, count
        yield "histogram", name, "_count", {}, durations.count
        yield "histogram", name, "_sum", {}, durations.sum


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    gpu = PagedLayout([torch.zeros(8, 16, 8, 128, device=parser.parse_args().device)])
    registry = CollectorRegistry()
    with OffloadHandler(gpu, HostPool(gpu, num_pages=8)) as handler:
        handler.store(gpu_block_ids=[3], page_ids=[0]).synchronize()
        registry.register(Collector(handler, {"rank": "0"}))
        print(generate_latest(registry).decode())


if __name__ == "__main__":
    main()
