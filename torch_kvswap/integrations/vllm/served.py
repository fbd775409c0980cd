"""The host pages of a server in a worker."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations import real_path
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.groups import Groups
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.prefix.remote_pools import RemotePools, describe
from torch_kvswap.prefix.session import Session

_log = logging.getLogger(__name__)


class ServedPool(RemotePools):
    """The pages of a server for all groups of layers: a page has a chunk of one of them, of all
    workers of an engine. Without a server, one page that nobody uses.

    Args:
        path (str): the server's socket.
        config (OffloadingConfig): vLLM's.
        engine (Mapping[str, Any]): describe_engine() of it.
        layouts (Sequence[PagedLayout]): of each group.
        largest (PagedLayout): the layout with the largest blocks.
        blocks_per_page (int): GPU blocks per page.
        how (dict[str, Any]): HostPool's encoding and verify.

    Raises:
        ValueError: the server refuses this cache, and says why.
        RuntimeError: the kernel does not map the memory.
    """

    def __init__(
        self,
        path: str,
        config: Any,
        engine: Mapping[str, Any],
        layouts: Sequence[PagedLayout],
        largest: PagedLayout,
        blocks_per_page: int,
        how: dict[str, Any],
    ) -> None:
        parallel = config.parallel
        # If all workers have the same cache, each has all of a page.
        rank, parts = (0, 1) if config.replicated_layout else (parallel.rank, parallel.world_size)
        bytes_of = {
            "vllm": importlib.metadata.version("vllm"),
            "cache_dtype": config.model.dtype,
            "kv_layout": config.kv_cache_layout,
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", ""),
            "groups": [layout._describe() for layout in layouts],
            "config": dict(engine),
        }
        shape = [largest], None, real_path(config.model.name), 0, 1, blocks_per_page
        cache = describe(*shape, **how, bytes_of=bytes_of, parts=parts)
        alone = {**how, "blocks_per_page": blocks_per_page}
        super().__init__([largest], alone, rank)
        names = {"engine": config.engine_id, "worker": parallel.rank}
        self._session = Session(path, cache, self, **names)
        try:
            self._session.join()
        except OSError as error:
            _log.warning("%s; until then this engine has no host memory", error)
            self.let_go()

    def start(self, handler: OffloadHandler) -> None:
        """Lets a thread join the server when it is lost, and give the handler its pages."""
        self.handler = handler
        self._session.start()

    def close(self) -> None:
        """Leaves the server. The handler must be closed."""
        self._session.close()

    def _groups(self, handler: OffloadHandler, pools: Sequence[HostPool]) -> Groups:
        layouts = handler.layouts
        return Groups(layouts, [pools[0].view_for(layout) for layout in layouts])
