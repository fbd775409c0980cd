"""The host pages of a server in a worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.groups import Groups
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.prefix.client import RemotePools, describe
from torch_kvswap.prefix.engine_sessions import WorkerSession

_log = logging.getLogger(__name__)


class HostServer(NamedTuple):
    """A server that engines share.

    Attributes:
        path (str): its socket.
        engine_id (str): name of this engine, unique at the server.
        rank (int): this worker, 0 to world - 1.
        world (int): workers of the engine.
        is_split (bool): each worker has a part of each page; else all of them have the same cache.
        model (str): name of the model.
        bytes_of (Mapping[str, Any]): what else the key and the bytes of a block depend on.
    """

    path: str
    engine_id: str
    rank: int
    world: int
    is_split: bool
    model: str
    bytes_of: Mapping[str, Any]


class ServedPool(RemotePools):
    """The pages of a server for all groups of layers: a page has a chunk of one of them, of all
    workers of an engine. Without a server, one page that nobody uses.

    Args:
        server (HostServer): where the pages are.
        layouts (Sequence[PagedLayout]): of each group.
        largest (PagedLayout): of the layouts that with the largest blocks.
        blocks_per_page (int): GPU blocks per page.
        how (dict[str, Any]): encoding and verify of HostPool.

    Raises:
        ValueError: the server refuses this cache, and says why.
        RuntimeError: the kernel does not map the memory.
    """

    def __init__(
        self,
        server: HostServer,
        layouts: Sequence[PagedLayout],
        largest: PagedLayout,
        blocks_per_page: int,
        how: dict[str, Any],
    ) -> None:
        shape = [largest], None, server.model, 0, 1, blocks_per_page
        rank, parts = (server.rank, server.world) if server.is_split else (0, 1)
        bytes_of = {**server.bytes_of, "groups": [layout._describe() for layout in layouts]}
        cache = describe(*shape, **how, bytes_of=bytes_of, parts=parts)
        alone = {**how, "blocks_per_page": blocks_per_page}
        super().__init__([largest], alone, rank)
        self._session = WorkerSession(server.path, server.engine_id, cache, self, server.rank)
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
