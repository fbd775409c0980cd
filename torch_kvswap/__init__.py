"""Moves KV-cache blocks between GPU and host memory for LLM serving engines.

Here is what most programs use. Its packages have the other public names: `prefix` the block
manager, `offload` metrics, `host_pool` pools of several processes, `below` stores of pages,
`integrations` serving engines.
"""

try:
    import numpy  # noqa: F401
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error}; torch_kvswap needs PyTorch 2.11 or newer and numpy (docs/installation.md)"
    ) from error

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout, allocate_layers
from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.ops import (
    expand_block_ids,
    swap_blocks,
    swap_blocks_batch,
    swap_kv_blocks,
)
from torch_kvswap.prefix.cache import PrefixCache
from torch_kvswap.prefix.hashing import PrefixHasher
from torch_kvswap.results import (
    BlocksRejectedError,
    CorruptedPageError,
    DeviceLostError,
    Result,
    SourceFailedError,
    TransferError,
)

__version__ = "0.1.0"

__all__ = [
    "BlocksRejectedError",
    "CorruptedPageError",
    "DeviceLostError",
    "HostPool",
    "Job",
    "OffloadHandler",
    "PagedLayout",
    "PrefixCache",
    "PrefixHasher",
    "Result",
    "SourceFailedError",
    "TransferError",
    "__version__",
    "allocate_layers",
    "expand_block_ids",
    "swap_blocks",
    "swap_blocks_batch",
    "swap_kv_blocks",
]
