"""A view of the paged cache of transformers' continuous batching."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torch_kvswap.layout import PagedLayout


class CacheView:
    """What the manager needs from a cache of transformers.

    The cache is one tensor of sectors, each used by one group of layers at a time. A block has all
    layers of its group, so groups differ in block size. The tensor is divided into units, and each
    block has a whole number of units.

    Attributes:
        layout (PagedLayout): the cache; a block of the layout is a unit.
        groups (list): transformers' allocators in their order, each with a block_table.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.groups = list(cache.cache_allocators.values())
        self._unit_bytes = math.gcd(*(group.bytes_per_block for group in self.groups))
        units = cache.cache_tensor.view(-1, self._unit_bytes)
        self.layout = PagedLayout([units], 0, dtype=cache.dtype)  # the sectors are bytes

    def has_margin(self, scheduler: Any) -> bool:
        """Whether the scheduler's safety margin lets another request run."""
        has_margin = scheduler._try_to_meet_safety_margin()  # frees sectors with unused prefixes
        return bool(has_margin or not scheduler.active_requests)

    def fits(self, state: Any) -> bool:
        """Whether allocate() could succeed if the running requests needed nothing."""
        return bool(self._cache.can_store_request_tokens(state, 1, dry_run=True))

    def demand(self, scheduler: Any) -> dict[str, int]:
        """The blocks of each group that running requests need for the next batch."""
        needed = dict.fromkeys(self._cache.cache_allocators, 0)
        groups = list(self._cache.cache_allocators.items())
        for other in scheduler.active_requests.values():
            length = other.current_len()
            tokens = len(other.remaining_prefill_tokens) or len(other.tokens_to_process)
            for name, group in groups:
                needed[name] += group.needs_new_blocks(other.request_id, length, tokens)
        return needed

    def allocate(self, state: Any, demand: dict[str, int]) -> bool:
        """Gives a waiting request blocks for all its stored tokens and one more.

        Returns:
            bool: False if the running requests could then lack blocks.
        """
        if any(demand.values()):
            needs = {
                name: group.needs_new_blocks(state.request_id, state.current_len(), 1)
                for name, group in self._cache.cache_allocators.items()
            }
            if self._cache.count_storable_requests([demand, needs]) < 2:
                return False
        return bool(self._cache.can_store_request_tokens(state, 1))

    def mark_restored(self, future: Any) -> None:
        """Makes the blocks of a loaded request be hashed again after its next batch."""
        if not self._cache.use_prefix_sharing:
            return
        for name, group in self._cache.cache_allocators.items():
            blocks = future.state.position_offset // group.tokens_per_page
            if blocks:
                future.complete_blocks[name] = future.complete_blocks.get(name, 0) + blocks

    def tables(self, request_id: str) -> list[list[int]]:
        """The ids of a request's blocks in each group."""
        return [group.block_table.get(request_id, []) for group in self.groups]

    def units(self, tables: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The units of the blocks of each group."""
        pairs = zip(self.groups, tables, strict=True)
        return [self._units(group, blocks) for group, blocks in pairs]

    def written(self, requests: Sequence[Any]) -> Iterator[int]:
        """The units that a batch writes.

        A sliding window may write any of its blocks; other groups write from the current position
        on.
        """
        for group in self.groups:
            table, size = group.block_table, group.tokens_per_page
            is_window = hasattr(group, "sliding_window")
            blocks: list[int] = []
            for future in requests:
                state = future.state
                of_state = table.get(state.request_id)
                if of_state:
                    blocks += of_state[0 if is_window else state.position_offset // size :]
            yield from self._units(group, blocks)

    def release(self, state: Any) -> None:
        """Takes the blocks of a waiting request away, if it has any."""
        if any(self.tables(state.request_id)):
            self._cache.free_blocks(state.request_id, no_cache=True)
        state.allocated_blocks = 0

    def _units(self, group: Any, blocks: Sequence[int]) -> Sequence[int]:
        units = group.bytes_per_block // self._unit_bytes
        if units == 1:
            return blocks
        ids = np.asarray(blocks, np.int64)[:, None] * units + np.arange(units)
        numbers: list[int] = ids.reshape(-1).tolist()
        return numbers
