"""A host cache of prefix blocks as it is meant to be, in a few lines: what a server's hits have to
equal. Requests come one at a time, and what each stores has ended before the next one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class PrefixCacheModel:
    """pages: blocks that it holds. Evicts what was not used for longest, of a prompt the end."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()  # oldest first

    def serve(self, keys: Sequence[Hashable]) -> int:
        """How many blocks of a prompt are found, from the first one on; then it has all of them, if
        there is room."""
        found = 0
        while found < len(keys) and keys[found] in self._blocks:
            found += 1
        self._use(keys)
        new = [key for key in keys if key not in self._blocks]
        too_many = len(self._blocks) + len(new) - self.pages
        others = [key for key in self._blocks if key not in set(keys)]
        if too_many <= len(others):
            for key in others[: max(too_many, 0)]:
                del self._blocks[key]
            self._blocks.update(dict.fromkeys(new))
            self._use(keys)
        return found

    def _use(self, keys: Sequence[Hashable]) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)


def block_keys(tokens: Sequence[int], block_tokens: int) -> list[Hashable]:
    """Of the full blocks: all tokens up to the end of each."""
    ends = range(block_tokens, len(tokens) + 1, block_tokens)
    return [tuple(tokens[:end]) for end in ends]
