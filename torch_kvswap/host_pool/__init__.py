"""Host memory for pages of a KV cache.

Public besides `torch_kvswap.HostPool`: `PoolHandle`, which a process receives to attach to a pool.
"""

from torch_kvswap.host_pool.shared import PoolHandle

__all__ = ["PoolHandle"]
