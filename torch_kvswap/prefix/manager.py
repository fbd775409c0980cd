"""Bookkeeping of prefix blocks on host pages: lookups, stores, loads and eviction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, SupportsIndex, get_args

from torch_kvswap._C import Reservation
from torch_kvswap._native.arguments import (
    INT64_MAX,
    UINT32_MAX,
    NotCopyable,
    kind_of,
    read_int,
    read_name,
    read_switch,
)
from torch_kvswap._native.loader import native
from torch_kvswap.prefix.block_groups import (
    BlockGroup,
    read_groups,
    read_ready_pages,
    unit_tokens,
)

POLICIES = ("lru", "arc")  # index: native number
BelowPolicy = Literal["reused", "all"]
BELOW_POLICIES: tuple[BelowPolicy, ...] = get_args(BelowPolicy)  # index + 1: native number


class Lookup(NamedTuple):
    """The cached prefix of a prompt.

    Lengths are in units of BlockManager.unit_tokens tokens. With one group a unit is one key, which
    stands for one block.

    Attributes:
        found (int): length of the prefix that is stored or being stored, in units.
        ready (int): length of the prefix that can be loaded now, in units.
        pending (int): blocks of the keys, in all groups, that are still being stored, or read from
            a second tier, including blocks after `found`. With full attention, keys after the first
            missing one do not count. If it is not 0, a later lookup may find more. If it is 0 and
            load() or prepare_load() has returned None, a block is missing that no job is storing.
        asking (int): keys after `found` that the second tier of a PrefixCache is being asked for.
            If it is not 0, a lookup after a later poll() may find more.
        lease (Reservation | None): with hold=True, unless nothing is ready: keeps the blocks that
            the prefix `ready` needs on the host until its let_go(), or until it is dropped.
    """

    found: int
    ready: int
    pending: int
    asking: int = 0
    lease: Reservation | None = None


def needed_blocks(groups: Sequence[BlockGroup], prefix: int) -> list[range]:
    """The blocks of each group that must be on the GPU to go on after a prefix.

    Raises what BlockManager.needed_blocks() does.
    """
    if isinstance(prefix, Lookup):
        raise TypeError("prefix is a Lookup; pass a length in units, such as its `ready`")
    tokens = unit_tokens(groups)
    end_token = read_int("prefix", prefix, 0, INT64_MAX // tokens) * tokens
    ends = [end_token // group.block_tokens for group in groups]
    return [
        range(max(end - group.window, 0) if group.window else 0, end)
        for group, end in zip(groups, ends, strict=True)
    ]


native.set_python(
    Lookup=Lookup,
    kind_of=kind_of,
    read_int=read_int,
    read_switch=read_switch,
)


@dataclass(frozen=True)
class BlockStats:
    """Statistics of one group: block counts since the start, and its pages now.

    Attributes:
        asked (int): blocks asked for in lookups; lookups with again=True do not count.
        hits (int): blocks that were ready and needed by the prefix found. Blocks that a second tier
            delivers after the lookup are no hits; `promoted` counts them.
        pending (int): blocks asked for in lookups that were still being stored, or read from a
            second tier.
        stored (int): blocks stored.
        loaded (int): blocks of loads that ended with complete(), including loads that were
            cancelled or not submitted.
        evicted (int): blocks evicted.
        skipped (int): blocks not stored because of store_threshold.
        refused (int): how often there was no room for blocks to store, or to read from a
            second tier. Such a read tries again with a shorter prefix, and can count several times.
        failed (int): blocks of loads and stores that ended with fail(), whose reservations were
            dropped, or whose GPU or relay was lost; also of stores that were cancelled or not
            submitted; rejected blocks; and blocks that a second tier was to deliver, but which did
            not arrive or were damaged.
        pages (int): pages that can be used.
        free_pages (int): pages without a block.
        idle_pages (int): pages that can be evicted.
        filling_pages (int): pages being stored, or lent for stores. The rest, neither free nor
            idle, is held by loads, by leases, or by writes to a second tier.
        promoted (int): blocks that were read from a second tier.
        lost (int): blocks that were evicted before they were written to a second tier.
    """

    asked: int
    hits: int
    pending: int
    stored: int
    loaded: int
    evicted: int
    skipped: int
    refused: int
    failed: int
    pages: int
    free_pages: int
    idle_pages: int
    filling_pages: int
    promoted: int
    lost: int


class BlockManager(NotCopyable, native.BlockManager):
    """Keeps track of which prefix blocks are on which host pages. Copies nothing.

    A caller that copies blocks reserves pages first (prepare_load(), prepare_store()), and reports
    the end of the copy with complete() or fail(). Until then nobody else gets these pages. Every
    reservation must be ended after its copy, even after reset(); may_be_dropped says what happens
    to one that is dropped before.

    A key stands for the contents of a block, and the caller guarantees that they match. The keys of
    a prompt come from a PrefixHasher; or are a list of None, bool, int, float, str, bytes and
    tuples of them; or bytes that hold keys of 32 bytes one after another (PrefixKeys.joined). A
    block is only used together with the blocks before it.

    A manager needs no close(). It cannot be copied or pickled, and raises RuntimeError in a forked
    child.

    Threads: any thread may call any method, and each call is atomic.

    Args:
        groups (int | Sequence[BlockGroup]): number of pages; for a hybrid model one BlockGroup per
            group of layers. Keys, key_indices and pages are then lists with one entry per group.
        num_ready_pages (int | Sequence[int] | None): pages of each group, from the first one on,
            that can be used already; None is all. grow() adds more.
        eviction_policy (str): "lru" or "arc".
        store_threshold (int): from 2 on, a block is stored once this many lookups have asked for
            it. Only the latest keys are counted, as many as there are pages.
        below_policy (str | None): which blocks a second tier gets: "reused", those that a load or
            touch() has used since they were stored; "all"; None is none.
        may_be_dropped (bool): a reservation that is dropped ends as if nothing was copied. By
            default its blocks are forgotten, and its pages are never used again: the copy may still
            run.

    Attributes:
        groups (tuple[BlockGroup, ...]): the groups.
        unit_tokens (int): tokens per unit of a prefix's length.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        groups: int | Sequence[BlockGroup],
        *,
        num_ready_pages: int | Sequence[int] | None = None,
        eviction_policy: str = "lru",
        store_threshold: int = 1,
        below_policy: BelowPolicy | None = None,
        may_be_dropped: bool = False,
    ) -> None:
        self.groups = read_groups(groups)
        self.unit_tokens = unit_tokens(self.groups)
        read_name("eviction_policy", eviction_policy, POLICIES)
        if below_policy is not None:
            read_name("below_policy", below_policy, BELOW_POLICIES)
        threshold = read_int("store_threshold", store_threshold, 1, UINT32_MAX)
        ready = read_ready_pages(self.groups, num_ready_pages)
        self._is_list = not isinstance(groups, SupportsIndex)
        native_groups = [
            (group.num_pages, self.unit_tokens // group.block_tokens, group.window)
            for group in self.groups
        ]
        policy = POLICIES.index(eviction_policy)
        below = 0 if below_policy is None else BELOW_POLICIES.index(below_policy) + 1
        of_all = threshold, below, read_switch("may_be_dropped", may_be_dropped)
        native.BlockManager.__init__(self, native_groups, self._is_list, policy, *of_all)
        self._grow(ready)

    def __repr__(self) -> str:
        pages = [group.num_pages for group in self.groups]
        return f"BlockManager(num_pages={pages if self._is_list else pages[0]})"

    def grow(self, num_ready_pages: int | Sequence[int] | None = None) -> None:
        """Makes more pages usable.

        Args:
            num_ready_pages (int | Sequence[int] | None): pages of each group that can be used from
                now on; None is all. A smaller number than before changes nothing.

        Raises:
            TypeError: num_ready_pages is not a number or a list of numbers.
            ValueError: a group does not have this many pages.
        """
        self._grow(read_ready_pages(self.groups, num_ready_pages))

    def needed_blocks(self, prefix: int) -> range | list[range]:
        """The blocks that must be on the GPU to go on after a prefix.

        The other blocks of the prefix lie before a window or a state, and are not needed.

        Args:
            prefix (int): length in units, such as `Lookup.ready`.

        Returns:
            range | list[range]: positions among the keys; with several groups a list with one range
                per group.

        Raises:
            TypeError, ValueError: prefix is no number of units.
        """
        needed = needed_blocks(self.groups, prefix)
        return needed if self._is_list else needed[0]

    def stats(self, group: int = 0) -> BlockStats:
        """The statistics of a group.

        Args:
            group (int): its position in `groups`.

        Raises:
            ValueError: there is no such group.
        """
        group = read_int("group", group, 0, len(self.groups) - 1)
        return BlockStats(*self._stats(group))
