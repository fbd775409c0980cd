"""Transfers as jobs: what is copied, when it runs, and how it ended.

Public besides `torch_kvswap.OffloadHandler` and `Job`: what `metrics()` returns, for
annotations and exporters (`Metrics`, `ChannelMetrics`, `Histogram`).
"""

from torch_kvswap.offload.metrics import ChannelMetrics, Histogram, Metrics

__all__ = ["ChannelMetrics", "Histogram", "Metrics"]
