"""Moves KV-cache blocks between GPU and host memory for LLM serving engines."""

from torch_kvswap.devices.backend import DeviceBackend, register_device_backend
from torch_kvswap.handler import (
    AFTER_NOTHING,
    BlocksRejectedError,
    DeviceLostError,
    Gate,
    Job,
    OffloadHandler,
    Result,
    SourceFailedError,
    TransferError,
)
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.recommend import EncodingRecommendation, recommend_encoding
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.layout import PagedLayout, allocate_layers
from torch_kvswap.metrics import ChannelMetrics, Histogram, Metrics
from torch_kvswap.ops import (
    expand_block_ids,
    swap_blocks,
    swap_blocks_batch,
    swap_kv_blocks,
)
from torch_kvswap.prefix.engine import OffloadEngine, Preempted
from torch_kvswap.prefix.groups import BlockGroup
from torch_kvswap.prefix.hashing import DIGEST_BYTES, MultiModalItem, PrefixHasher
from torch_kvswap.prefix.manager import (
    BlockEvent,
    BlockManager,
    BlockStats,
    LoadReservation,
    Lookup,
    StoreReservation,
)

__version__ = "0.1.0"

__all__ = [
    "AFTER_NOTHING",
    "DIGEST_BYTES",
    "BlockEvent",
    "BlockGroup",
    "BlockManager",
    "BlockStats",
    "BlocksRejectedError",
    "ChannelMetrics",
    "DeviceBackend",
    "DeviceLostError",
    "EncodingRecommendation",
    "Gate",
    "Histogram",
    "HostPool",
    "Job",
    "LoadReservation",
    "Lookup",
    "Metrics",
    "MultiModalItem",
    "OffloadEngine",
    "OffloadHandler",
    "PagedLayout",
    "PoolHandle",
    "Preempted",
    "PrefixHasher",
    "Result",
    "SourceFailedError",
    "StoreReservation",
    "TransferError",
    "__version__",
    "allocate_layers",
    "expand_block_ids",
    "recommend_encoding",
    "register_device_backend",
    "swap_blocks",
    "swap_blocks_batch",
    "swap_kv_blocks",
]
