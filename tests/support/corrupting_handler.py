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

    def store(self, blocks: Ids, pages: Ids, **options: Any) -> Any:
        return self.handler.store(*self.corrupt(blocks, pages), **options)

    def load(self, pages: Ids, blocks: Ids, **options: Any) -> Any:
        return self.handler.load(*self.corrupt(pages, blocks), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handler, name)


def leave_one_out(first: Ids, second: Ids) -> tuple[Ids, Ids]:
    return first[1:], second[1:]
