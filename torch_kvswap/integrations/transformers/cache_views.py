"""Views of the paged caches of transformers' continuous batching, one per supported layout."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torch_kvswap.layout import PagedLayout


class Cache(ABC):
    """What the manager needs from a cache of transformers.

    The cache is divided into units, and each block of each group of layers has a whole number of
    units. Groups share the memory: a block of one group may have been a block of another.

    Attributes:
        layout (PagedLayout): the cache; a block of the layout is a unit.
    """

    layout: PagedLayout

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    @property
    @abstractmethod
    def groups(self) -> Sequence[Any]:
        """transformers' allocators in their order, each with a block_table."""

    @abstractmethod
    def tokens_per_block(self, group: Any) -> int:
        """Tokens per block of a group."""

    @abstractmethod
    def units_per_block(self, group: Any) -> int:
        """Units per block of a group."""

    @abstractmethod
    def host_bytes(self, manager: Any, gib: float | None, threshold: float) -> int:
        """Bytes that transformers' own manager would use, given the user's two settings."""

    @abstractmethod
    def has_margin(self, scheduler: Any) -> bool:
        """Whether the scheduler's safety margin lets another request run."""

    @abstractmethod
    def fits(self, state: Any) -> bool:
        """Whether allocate() could succeed if the running requests needed nothing."""

    @abstractmethod
    def demand(self, scheduler: Any) -> Any:
        """What running requests need for the next batch, for allocate()."""

    @abstractmethod
    def allocate(self, state: Any, demand: Any) -> bool:
        """Gives a waiting request blocks for all its stored tokens and one more.

        Returns:
            bool: False if the running requests could then lack blocks.
        """

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Frees the blocks of a request."""

    @abstractmethod
    def mark_restored(self, future: Any) -> None:
        """Makes the blocks of a loaded request be hashed again after its next batch."""

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
            table, size = group.block_table, self.tokens_per_block(group)
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
            self.free(state.request_id)
        state.allocated_blocks = 0

    def _units(self, group: Any, blocks: Sequence[int]) -> Sequence[int]:
        units = self.units_per_block(group)
        if units == 1:
            return blocks
        ids = np.asarray(blocks, np.int64)[:, None] * units + np.arange(units)
        numbers: list[int] = ids.reshape(-1).tolist()
        return numbers


class TensorCache(Cache):
    """transformers 5.17: a key and a value tensor per layer of a group.

    All groups have the same number of layers and the same block size.
    """

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        pairs = zip(cache.key_cache, cache.value_cache, strict=True)
        self.layout = PagedLayout([tensor.view(*shape) for pair in pairs for tensor in pair], 0)

    @property
    def groups(self) -> Sequence[Any]:
        groups: list[Any] = self._cache.group_cache_managers
        return groups

    def tokens_per_block(self, group: Any) -> int:
        return int(self._cache.block_size)

    def units_per_block(self, group: Any) -> int:
        return 1

    def host_bytes(self, manager: Any, gib: float | None, threshold: float) -> int:
        return int(manager._compute_num_cpu_blocks(gib, threshold)) * self.layout.block_bytes

    def has_margin(self, scheduler: Any) -> bool:
        cache = self._cache
        crowded = cache.get_num_free_blocks() < scheduler.safety_margin * cache.num_blocks
        return not (crowded and scheduler.active_requests)

    def fits(self, state: Any) -> bool:
        return self._is_left(self._blocks(state))

    def demand(self, scheduler: Any) -> int:
        cache, size, needed = self._cache, self._cache.block_size, 0
        for other in scheduler.active_requests.values():
            tokens = len(other.remaining_prefill_tokens) or len(other.tokens_to_process)
            lacking = tokens + other.current_len() - other.allocated_blocks * size
            if lacking > 0:  # the scheduler then allocates this many
                needed += cache.blocks_needed((lacking + 1) // size + 1, other.allocated_blocks)
        return needed

    def allocate(self, state: Any, demand: Any) -> bool:
        count = self._blocks(state)
        if not self._is_left(count, demand):
            return False
        state.allocated_blocks = self._cache.allocate_blocks(count, state.request_id, 0)
        return True

    def free(self, request_id: str) -> None:
        self._cache.free_blocks(request_id)

    def mark_restored(self, future: Any) -> None:
        if self._cache.allow_block_sharing:
            future.complete_blocks += future.state.position_offset // self._cache.block_size

    def _blocks(self, state: Any) -> int:
        return int(state.current_len()) // int(self._cache.block_size) + 1

    def _is_left(self, count: int, demand: int = 0) -> bool:
        needed = self._cache.blocks_needed(count, 0) + demand
        return bool(self._cache.get_num_free_blocks() >= needed)


class SectorCache(Cache):
    """transformers 5.18 and later: one tensor of sectors, each used by one group at a time.

    A block has all layers of its group, so groups differ in block size.
    """

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self._unit_bytes = math.gcd(*(group.bytes_per_block for group in self.groups))
        units = cache.cache_tensor.view(-1, self._unit_bytes)
        self.layout = PagedLayout([units], 0, dtype=cache.dtype)  # the sectors are bytes

    @property
    def groups(self) -> Sequence[Any]:
        return list(self._cache.cache_allocators.values())

    def tokens_per_block(self, group: Any) -> int:
        return int(group.tokens_per_page)

    def units_per_block(self, group: Any) -> int:
        return int(group.bytes_per_block) // self._unit_bytes

    def host_bytes(self, manager: Any, gib: float | None, threshold: float) -> int:
        sectors = int(manager._compute_num_cpu_sectors(gib, threshold))
        return sectors * int(self._cache.bytes_per_sector)

    def has_margin(self, scheduler: Any) -> bool:
        has_margin = scheduler._try_to_meet_safety_margin()  # frees sectors with unused prefixes
        return bool(has_margin or not scheduler.active_requests)

    def fits(self, state: Any) -> bool:
        return bool(self._cache.can_store_request_tokens(state, 1, dry_run=True))

    def demand(self, scheduler: Any) -> dict[str, int]:
        needed = dict.fromkeys(self._cache.cache_allocators, 0)
        groups = list(self._cache.cache_allocators.items())
        for other in scheduler.active_requests.values():
            length = other.current_len()
            tokens = len(other.remaining_prefill_tokens) or len(other.tokens_to_process)
            for name, group in groups:
                needed[name] += group.needs_new_blocks(other.request_id, length, tokens)
        return needed

    def allocate(self, state: Any, demand: Any) -> bool:
        if any(demand.values()):
            needs = {
                name: group.needs_new_blocks(state.request_id, state.current_len(), 1)
                for name, group in self._cache.cache_allocators.items()
            }
            if self._cache.count_storable_requests([demand, needs]) < 2:
                return False
        return bool(self._cache.can_store_request_tokens(state, 1))

    def free(self, request_id: str) -> None:
        self._cache.free_blocks(request_id, no_cache=True)

    def mark_restored(self, future: Any) -> None:
        if not self._cache.use_prefix_sharing:
            return
        for name, group in self._cache.cache_allocators.items():
            blocks = future.state.position_offset // group.tokens_per_page
            if blocks:
                future.complete_blocks[name] = future.complete_blocks.get(name, 0) + blocks
