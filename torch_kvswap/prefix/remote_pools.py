"""The pools of a prefix cache on a server's memory, and what a server compares of a cache."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch_kvswap._native.arguments import kind_of, read_int
from torch_kvswap.encoding.slot import EncodingName, VerifyName, read_encoding, read_verify
from torch_kvswap.host_pool.description import describe_page
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.host_pool.shape import PoolShape
from torch_kvswap.host_pool.shared import PoolHandle
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.groups import Groups
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.prefix.block_groups import BlockGroup, describe_contents


class RemotePools:
    """The pools of a prefix cache on a server's memory. Without a server, pools of one page each.

    Args:
        layouts (Sequence[PagedLayout]): of the cache; changes with rebind().
        options: of the pools of one page.
        rank (int): which part of each page this process has: see HostPool.attach().

    Attributes:
        pools (list[HostPool]): changes in place.
        handler (OffloadHandler | None): once there is one, it gets the pools too.
        changing (Lock): held while the handler is rebound.
    """

    def __init__(
        self,
        layouts: Sequence[PagedLayout],
        options: dict[str, Any],
        rank: int = 0,
    ) -> None:
        self.layouts, self._options = layouts, options
        self._rank = rank
        self.pools: list[HostPool] = []
        self.handler: OffloadHandler | None = None
        self.changing = threading.Lock()

    def attach(self, handles: Sequence[PoolHandle]) -> None:
        """Maps and pins the server's memory, and uses it."""
        both = zip(self.layouts, handles, strict=True)
        self._use([HostPool.attach(layout, one, rank=self._rank) for layout, one in both])

    def let_go(self) -> None:
        """Frees the memory of a server that is gone. No job may be in flight."""
        self._use([HostPool(layout, 1, **self._options) for layout in self.layouts])

    def rebind(self, gpu: PagedLayout | Sequence[PagedLayout]) -> None:
        """OffloadHandler.rebind(): later servers get the new cache, and the old one is let go."""
        assert self.handler is not None
        with self.changing:
            self.handler.rebind(gpu)
            self.layouts = self.handler.layouts

    def close(self) -> None:
        """Frees the memory. The handler must be closed."""
        for pool in self.pools:
            pool.close()

    def _use(self, pools: list[HostPool]) -> None:
        with self.changing:
            if self.handler is not None:
                self.handler._rebind_to(self._groups(self.handler, pools))
            self.pools[:] = pools

    def _groups(self, handler: OffloadHandler, pools: Sequence[HostPool]) -> Groups:
        """What the handler gets."""
        return Groups(handler.layouts, pools)


def read_model(name: str, model: object) -> tuple[str, int, int]:
    """The model of which others get the pages, the part of it, and the number of parts."""
    whole, rank, parts = model if isinstance(model, tuple) and len(model) == 3 else (model, 0, 1)
    if not isinstance(whole, str):
        raise TypeError(
            f"{name} is {kind_of(model)}; name the model and its revision, because others may use "
            "the same pages, or pass (name, rank, number of ranks)"
        )
    if not whole:
        raise ValueError(f"{name} is {model!r}, which has no name; name the model and its revision")
    parts = read_int(f"{name}[2]", parts, 1)
    return whole, read_int(f"{name}[1]", rank, 0, parts - 1), parts


def describe(
    layouts: Sequence[PagedLayout],
    groups: Sequence[BlockGroup] | None,
    model: str,
    rank: int,
    world: int,
    blocks_per_page: int,
    encoding: EncodingName,
    verify: VerifyName,
    bytes_of: Mapping[str, Any] | None = None,
    parts: int = 1,
) -> dict[str, object]:
    """What must be equal for engines to share pages; see PrefixCache.connect().

    Args:
        groups (Sequence[BlockGroup] | None): one for each layout. None: the server decides how many
            pages the only one has.
        bytes_of (Mapping[str, Any] | None): what else the bytes of a block depend on.
        parts (int): ranks that have a part of each page: see `part` of HostPool.
        others: see PrefixCache.connect().

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    contents = describe_contents(groups or [BlockGroup(1)], model, rank, world, bytes_of)
    slot_encoding, part = read_encoding(encoding), (0, parts) if parts > 1 else None
    pages = []
    for layout, of_group in zip(layouts, contents, strict=True):
        verify = read_verify(verify, layout.device)
        shape = PoolShape(layout, 1, blocks_per_page, slot_encoding, verify, part)
        pages.append(describe_page(layout._describe(), shape, slot_encoding, of_group))
    return {
        "pages": pages,
        "num_pages": [0] if groups is None else [group.num_pages for group in groups],
        "verify": verify,
    }
