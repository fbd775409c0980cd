"""A handler that does something else than what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_kvswap import OffloadHandler

Ids = list[int]


class Spoiling:
    """Moves what `spoil` makes of the blocks and pages, or of the pages and blocks of a load."""

    def __init__(
        self, handler: OffloadHandler, spoil: Callable[[Ids, Ids], tuple[Ids, Ids]]
    ) -> None:
        self.handler = handler
        self.spoil = spoil

    def store(self, blocks: Ids, pages: Ids, **options: Any) -> Any:
        return self.handler.store(*self.spoil(blocks, pages), **options)

    def load(self, pages: Ids, blocks: Ids, **options: Any) -> Any:
        return self.handler.load(*self.spoil(pages, blocks), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handler, name)


def leave_one_out(first: Ids, second: Ids) -> tuple[Ids, Ids]:
    return first[1:], second[1:]
