"""Metrics are a consistent snapshot, which Prometheus can scrape."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from expecttest import assert_expected_inline
from prometheus_client import CollectorRegistry, generate_latest

from prometheus_collector import Collector
from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.offload.metrics import (
    BOUNDS,
    ChannelMetrics,
    Histogram,
    Metrics,
)

DOCS = Path(__file__).parents[2] / "docs"
EMPTY = Histogram((), (0,), 0.0)
IDLE = ChannelMetrics(*[0] * 15, {"batch": 0}, {}, 0, EMPTY, EMPTY, EMPTY)
BUSY = ChannelMetrics(
    submitted=9,
    done=4,
    failed=1,
    cancelled=2,
    bytes=4096,
    link_bytes=3104,
    blocks=5,
    encoded_blocks=3,
    rejected_blocks=1,
    corrupted_blocks=2,
    queued=1,
    running=1,
    transfers=3,
    streams=2,
    events=5,
    jobs_by_copy_method={"batch": 4},
    relayed_bytes={1: 1024},
    exchanged_bytes=512,
    submit=Histogram((1e-6, 2e-6), (3, 5, 1), 1.5e-05),
    queue=EMPTY,
    copy=EMPTY,
)


def test_a_handler_counts_by_channel() -> None:
    layout = PagedLayout([torch.zeros(4, 6), torch.zeros(4, 6)])
    with OffloadHandler(layout, HostPool(layout, 4)) as handler:
        handler.store(gpu_block_ids=[0, 1], page_ids=[0, 1])
        for expedited, count in ((False, 2), (True, 3)):
            for _ in range(count):
                handler.load(page_ids=[1, 0], gpu_block_ids=[2, 3], expedited=expedited)
        metrics, (store, *_) = handler.metrics(), handler.poll()
    for channel, jobs in ((metrics.stores, 1), (metrics.loads, 2), (metrics.expedited, 3)):
        times = channel.submit, channel.queue, channel.copy
        assert [(time.bounds, len(time.counts), time.count) for time in times] == [
            (BOUNDS, len(BOUNDS) + 1, jobs)
        ] * 3
        used = {name for name, number in channel.jobs_by_copy_method.items() if number}
        assert (used, channel.jobs_by_copy_method["host"]) == ({"host"}, jobs)
        counted = replace(channel, submit=EMPTY, queue=EMPTY, copy=EMPTY, events=0)
        assert replace(counted, jobs_by_copy_method={"batch": 0}) == replace(
            IDLE,
            submitted=jobs,
            done=jobs,
            bytes=96 * jobs,
            link_bytes=96 * jobs,
            blocks=2 * jobs,
            transfers=jobs,
        )
    sums = [time.sum for time in (metrics.stores.submit, metrics.stores.queue, metrics.stores.copy)]
    assert sums == [store.submit_seconds, store.queue_seconds, store.copy_seconds]


def test_a_histograms_count_is_of_all_buckets() -> None:
    assert Histogram((1.0, 2.0), (1, 2, 1), 8.0).count == 4


def scraped(metrics: Metrics, labels: dict[str, str] | None = None) -> str:
    registry = CollectorRegistry()
    handler = SimpleNamespace(metrics=lambda: metrics)
    registry.register(Collector(handler, labels))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def test_prometheus_gets_every_number_with_its_labels() -> None:
    lines = scraped(Metrics(BUSY, IDLE, IDLE), {"rank": "1"}).splitlines()
    of_loads = [line for line in lines if 'channel="loads"' in line]
    expedited = [line for line in lines if 'channel="expedited"' in line]
    assert expedited == [line.replace('"loads"', '"expedited"') for line in of_loads]
    assert_expected_inline(
        "\n".join(line for line in lines if 'channel="stores"' in line),
        """\
kvswap_jobs_submitted_total{channel="stores",direction="store",rank="1"} 9.0
kvswap_copied_bytes_total{channel="stores",direction="store",rank="1"} 4096.0
kvswap_link_bytes_total{channel="stores",direction="store",rank="1"} 3104.0
kvswap_blocks_total{channel="stores",direction="store",rank="1"} 5.0
kvswap_encoded_blocks_total{channel="stores",direction="store",rank="1"} 3.0
kvswap_rejected_blocks_total{channel="stores",direction="store",rank="1"} 1.0
kvswap_corrupted_blocks_total{channel="stores",direction="store",rank="1"} 2.0
kvswap_exchanged_bytes_total{channel="stores",direction="store",rank="1"} 512.0
kvswap_transfers_total{channel="stores",direction="store",rank="1"} 3.0
kvswap_jobs_ended_total{channel="stores",direction="store",rank="1",state="done"} 4.0
kvswap_jobs_ended_total{channel="stores",direction="store",rank="1",state="failed"} 1.0
kvswap_jobs_ended_total{channel="stores",direction="store",rank="1",state="cancelled"} 2.0
kvswap_jobs_copied_total{channel="stores",copy_method="batch",direction="store",rank="1"} 4.0
kvswap_relayed_bytes_total{channel="stores",direction="store",rank="1",relay="1"} 1024.0
kvswap_jobs_queued{channel="stores",direction="store",rank="1"} 1.0
kvswap_jobs_running{channel="stores",direction="store",rank="1"} 1.0
kvswap_streams{channel="stores",direction="store",rank="1"} 2.0
kvswap_events{channel="stores",direction="store",rank="1"} 5.0
kvswap_submit_seconds_bucket{channel="stores",direction="store",le="1e-06",rank="1"} 3.0
kvswap_submit_seconds_bucket{channel="stores",direction="store",le="2e-06",rank="1"} 8.0
kvswap_submit_seconds_bucket{channel="stores",direction="store",le="+Inf",rank="1"} 9.0
kvswap_submit_seconds_count{channel="stores",direction="store",rank="1"} 9.0
kvswap_submit_seconds_sum{channel="stores",direction="store",rank="1"} 1.5e-05
kvswap_queue_seconds_bucket{channel="stores",direction="store",le="+Inf",rank="1"} 0.0
kvswap_queue_seconds_count{channel="stores",direction="store",rank="1"} 0.0
kvswap_queue_seconds_sum{channel="stores",direction="store",rank="1"} 0.0
kvswap_copy_seconds_bucket{channel="stores",direction="store",le="+Inf",rank="1"} 0.0
kvswap_copy_seconds_count{channel="stores",direction="store",rank="1"} 0.0
kvswap_copy_seconds_sum{channel="stores",direction="store",rank="1"} 0.0""",
    )


def test_the_page_names_existing_metrics() -> None:
    text = scraped(Metrics(BUSY, IDLE, IDLE))
    samples = {line.partition("{")[0] for line in text.splitlines() if line[0] != "#"}
    # The page itself makes kvswap_prefix_*.
    page = re.findall(r"kvswap_(?!prefix_)\w+", (DOCS / "monitoring.md").read_text())
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert set(page) <= families | samples
