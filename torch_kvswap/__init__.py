"""Moves KV-cache blocks between GPU and host memory for LLM serving engines."""

from torch_kvswap.handler import Job, OffloadHandler, Result, TransferError
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.layout import PagedLayout
from torch_kvswap.ops import (
    expand_block_ids,
    swap_blocks,
    swap_blocks_batch,
    swap_kv_blocks,
)
from torch_kvswap.prefix.engine import OffloadEngine
from torch_kvswap.prefix.hashing import MultiModalItem, PrefixHasher
from torch_kvswap.prefix.manager import BlockGroup, BlockManager

__version__ = "0.1.0"

__all__ = [
    "BlockGroup",
    "BlockManager",
    "HostPool",
    "Job",
    "MultiModalItem",
    "OffloadEngine",
    "OffloadHandler",
    "PagedLayout",
    "PoolHandle",
    "PrefixHasher",
    "Result",
    "TransferError",
    "__version__",
    "expand_block_ids",
    "swap_blocks",
    "swap_blocks_batch",
    "swap_kv_blocks",
]
