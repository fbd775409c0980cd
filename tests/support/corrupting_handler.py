"""A handler that copies other blocks than it was asked to copy, for controls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_kvswap import OffloadHandler

Ids = list[int]


class CorruptingHandler:
    """Copies the blocks and pages that `corrupt(source ids, destination ids)` returns instead."""

    def __init__(
        self, handler: OffloadHandler, corrupt: Callable[[Ids, Ids], tuple[Ids, Ids]]
    ) -> None:
        self.handler = handler
        self.corrupt = corrupt

    def store(self, *, gpu_block_ids: Ids, page_ids: Ids, **options: Any) -> Any:
        blocks, pages = self.corrupt(gpu_block_ids, page_ids)
        return self.handler.store(gpu_block_ids=blocks, page_ids=pages, **options)

    def load(self, *, page_ids: Ids, gpu_block_ids: Ids, **options: Any) -> Any:
        pages, blocks = self.corrupt(page_ids, gpu_block_ids)
        return self.handler.load(page_ids=pages, gpu_block_ids=blocks, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handler, name)
