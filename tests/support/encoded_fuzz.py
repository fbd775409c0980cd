"""Random jobs of handlers with encoded and raw groups, many in flight, some of them cancelled,
against a model. The first two groups may share the pages of a pool.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from drained import drain
from encoded_cache import EncodedCache
from logged import logged
from torch import Tensor

from torch_kvswap.offload.handler import Job
from torch_kvswap.results import Result

if TYPE_CHECKING:
    from simulated_driver import Driver

ENCODINGS = ("lossless", "raw", "lossless")
LAYERS = (4, 3, 4)  # three raw ones fit into an encoded slot of four
GROUPS = range(len(ENCODINGS))
BLOCKS, PAGES, PER_PAGE = 12, 8, 2
IN_FLIGHT = 64  # transfers of a channel
# Warnings, as blocks are spoiled on purpose, and pages loaded into another group.
EXPECTED = re.compile("do not fit into slots|not what was stored")

Place = tuple[int, int]  # group and block, or the first group with this pool and slot


@dataclass(frozen=True, eq=False)
class Content:
    """Of a block. fits: into an encoded slot."""

    bits: Tensor
    fits: bool


@dataclass(frozen=True)
class Slot:
    """What a slot holds.

    Attributes:
        group (int): the last one that wrote it.
        content (Content | None): None is anything, or no block if the slot is empty.
        is_empty (bool): of an encoded group: nothing was stored, or the block was rejected.
        is_invalid (bool): its last store has failed or was cancelled, so that loads fail.
    """

    group: int
    content: Content | None
    is_empty: bool = False
    is_invalid: bool = False


@dataclass
class State:
    """Contents after all jobs that were submitted so far.

    Attributes:
        failed_loads (set[Place]): blocks whose latest load was not done.
    """

    slots: dict[Place, Slot]
    blocks: dict[Place, Content | None]  # None: anything
    failed_loads: set[Place]

    def copy(self) -> State:
        return State(dict(self.slots), dict(self.blocks), set(self.failed_loads))


@dataclass
class Submitted:
    """A job, and what became of it.

    Attributes:
        moves (list[tuple[int, int, int]]): group, block and slot, in the order of the job.
        is_cancelled (bool): as cancel() said.
        has_copied (bool): False if it was cancelled in the queue.
    """

    job: Job
    moves: list[tuple[int, int, int]]
    is_cancelled: bool = False
    has_copied: bool = True


class Fuzz:
    """Rounds of jobs. At the end of each, everything is compared.

    Args:
        driver: whose GPU has the cache; None is a real one.
        seed: of everything random.
        mode: of the driver.
        shares: whether the raw group has a view of the first encoded group's pool.
        verify: of the pools.
        rounds: how many.
        options: of the cache and its handler.
    """

    def __init__(
        self,
        driver: Driver | None,
        seed: int,
        mode: str = "",
        *,
        shares: bool = False,
        verify: str = "off",
        rounds: int = 6,
        **options: Any,
    ) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        if driver is not None:
            driver.reset()
        self.pool_of = [0, 0 if shares else 1, 2]  # by group
        self.has_checksums = verify != "off"
        self.rounds = rounds
        self.driver = driver
        self.cache = EncodedCache(
            driver,
            blocks=BLOCKS,
            pages=PAGES,
            per_page=PER_PAGE,
            layers=LAYERS,
            encodings=ENCODINGS,
            views={1: 0} if shares else {},
            verify=verify,
            submit_thread=self.rng.random() < 0.3,
            **options,
        )
        if driver is not None:
            driver.set_mode(mode, seed)
        self.state = State(
            {
                (pool, slot): self._slot_of_a_new_pool(pool)
                for pool in sorted(set(self.pool_of))
                for slot in range(PAGES * PER_PAGE)
            },
            {},
            set(),
        )
        self.counts: Counter[str] = Counter()

    def _slot_of_a_new_pool(self, group: int) -> Slot:
        if self._knows_its_slots(group):
            return Slot(group, None, is_empty=True)
        return Slot(group, Content(torch.zeros_like(self.cache.block(0, group)), fits=True))

    def _knows_its_slots(self, group: int) -> bool:
        """Whether loads reject slots without a block of this group."""
        return ENCODINGS[group] == "lossless" or self.has_checksums

    def run(self) -> Counter[str]:
        with logged() as warnings, self.cache:
            for number in range(self.rounds):
                self._round(number)
        assert all(map(EXPECTED.search, warnings)), warnings
        return self.counts

    def _round(self, number: int) -> None:
        cache, rng = self.cache, self.rng
        self._fill_blocks()
        cache.synchronize()
        self.before = self.state.copy()
        self.jobs: list[Submitted] = []
        hold = self._fill_the_channel() if self.driver is not None and number % 3 == 1 else None
        for _ in range(rng.randint(5, 40)):
            self._submit(is_store=rng.random() < 0.5)
            if rng.random() < 0.08:
                self._cancel(self.jobs[-1])
            if rng.random() < 0.08:
                self._cancel(rng.choice(self.jobs))
        if self.driver is not None and hold is not None:
            self.driver.release(hold)
        drain(cache.handler)
        results = {result.job_id: result for result in cache.handler.poll()}
        assert len(results) == len(self.jobs)
        self.state = self.before.copy()
        for submitted in self.jobs:
            result = results[submitted.job.id]
            submitted.has_copied = not submitted.is_cancelled or result.copy_seconds > 0
            self._judge(result, submitted, *self._apply(self.state, submitted))
        self._compare()

    def _fill_blocks(self) -> None:
        cache, rng = self.cache, self.rng
        self.state.failed_loads.clear()  # poll() has reported them
        for group in GROUPS:
            for block in range(BLOCKS):
                for layer in cache.tensors[group]:
                    layer[block] = torch.randn(layer.shape[1]).bfloat16()
                is_spoiled = rng.random() < 0.08
                if is_spoiled:
                    cache.spoil(block, group=group)
                self.state.blocks[group, block] = Content(
                    cache.block(block, group), fits=not is_spoiled
                )

    def _fill_the_channel(self) -> int:
        """Submits more stores than may be in flight, behind a hold, and cancels the last ones, which
        are in the queue. Returns the hold."""
        from simulated_cache import SIDE, Stream

        assert self.driver is not None
        hold = self.driver.hold(SIDE)
        for _ in range(IN_FLIGHT + 6):
            self._submit(is_store=True, counts=[1], after=Stream(SIDE))
        for submitted in self.jobs[IN_FLIGHT::2]:
            self._cancel(submitted)
            assert submitted.is_cancelled
            assert submitted.job.query()
        return hold

    def _submit(self, is_store: bool, counts: Sequence[int] = (0, 1, 2, 4), **options: Any) -> None:
        """counts: of blocks in a group."""
        rng = self.rng
        # Else rejected blocks and failures spread over all pages.
        avoids_bad = rng.random() < 0.9
        lists: list[tuple[list[int], list[int], int]] = []
        moves: list[tuple[int, int, int]] = []
        used: set[Place] = set()
        for group in GROUPS:
            count = rng.choice(counts)
            first = rng.randrange(PER_PAGE) if count else 0
            blocks = rng.sample(range(BLOCKS), count)
            pool = self.pool_of[group]
            usable = [
                page
                for page in range(PAGES)
                if (pool, page) not in used
                and (is_store or self._is_loadable(group, page, avoids_bad))
            ]
            needed = -(-(first + count) // PER_PAGE) if count else 0
            if needed > len(usable):
                blocks, needed, first = [], 0, 0
            pages = rng.sample(usable, needed)
            used.update((pool, page) for page in pages)
            lists.append((blocks, pages, first))
            for at, block in enumerate(blocks, first):
                moves.append((group, block, pages[at // PER_PAGE] * PER_PAGE + at % PER_PAGE))
        blocks_, pages_, firsts = ([of[part] for of in lists] for part in range(3))
        options["first_slot"] = firsts
        if is_store:
            job = self.cache.store(blocks_, pages_, **options)
        else:
            options["expedited"] = rng.random() < 0.3
            options["layer_groups"] = rng.choice([1, 1, 2, sum(LAYERS)])
            job = self.cache.load(pages_, blocks_, **options)
        self.jobs.append(Submitted(job, moves))
        self._apply(self.state, self.jobs[-1])  # as if it were not cancelled later

    def _is_loadable(self, group: int, page: int, avoids_bad: bool) -> bool:
        """A raw group must not load what an encoded one has stored, which nobody would notice."""
        slots = [
            self.state.slots[self.pool_of[group], slot]
            for slot in range(page * PER_PAGE, (page + 1) * PER_PAGE)
        ]
        is_own = all(slot.group == group for slot in slots)
        if avoids_bad:
            return is_own and not any(slot.is_empty or slot.is_invalid for slot in slots)
        return is_own or self._knows_its_slots(group)

    def _cancel(self, submitted: Submitted) -> None:
        if not self.cache.handler.cancel(submitted.job):
            assert submitted.job.result is not None
            return
        submitted.is_cancelled, submitted.has_copied = True, False
        self.state = self.before.copy()
        for each in self.jobs:
            self._apply(self.state, each)

    # The model.

    def _apply(self, state: State, submitted: Submitted) -> tuple[str, tuple[int, ...]]:
        """Changes the state by what the job does. Returns its state and its rejected blocks."""
        apply = self._store if submitted.job.direction == "store" else self._load
        source_failed, rejected = apply(state, submitted)
        if submitted.is_cancelled:
            return "cancelled", ()
        if source_failed:
            return "failed", ()
        return "failed" if rejected else "done", tuple(rejected)

    def _store(self, state: State, submitted: Submitted) -> tuple[bool, list[int]]:
        source_failed = any(
            (group, block) in state.failed_loads for group, block, _ in submitted.moves
        )
        is_invalid = source_failed or submitted.is_cancelled
        rejected = []
        for position, (group, block, slot) in enumerate(submitted.moves):
            place = self.pool_of[group], slot
            content = state.blocks[group, block]
            if source_failed and not submitted.is_cancelled:
                state.slots[place] = Slot(group, None)  # it may have copied something
            elif submitted.has_copied:
                if ENCODINGS[group] == "raw" or content is None or content.fits:
                    state.slots[place] = Slot(group, content)
                else:
                    state.slots[place] = Slot(group, None, is_empty=True)
                    rejected.append(position)
            state.slots[place] = replace(state.slots[place], is_invalid=is_invalid)
        return source_failed, rejected

    def _load(self, state: State, submitted: Submitted) -> tuple[bool, list[int]]:
        found = [state.slots[self.pool_of[group], slot] for group, _, slot in submitted.moves]
        source_failed = any(slot.is_invalid for slot in found)
        rejected = []
        for position, ((group, block, _), slot) in enumerate(
            zip(submitted.moves, found, strict=True)
        ):
            is_known = self._knows_its_slots(group)
            is_of_another = slot.group != group and (
                self.has_checksums or ENCODINGS[slot.group] == "raw"
            )
            if source_failed and not submitted.is_cancelled:
                state.blocks[group, block] = None  # it may have copied something
            elif not submitted.has_copied:
                pass
            elif is_known and (slot.is_empty or is_of_another):
                rejected.append(position)
                # Checksums are compared with what was copied.
                if self.has_checksums and (is_of_another or ENCODINGS[group] == "raw"):
                    state.blocks[group, block] = None
            else:
                state.blocks[group, block] = slot.content if slot.group == group else None
        places = {(group, block) for group, block, _ in submitted.moves}
        if source_failed or submitted.is_cancelled or rejected:
            state.failed_loads |= places
        else:
            state.failed_loads -= places
        return source_failed, rejected

    # Checks.

    def _judge(
        self, result: Result, submitted: Submitted, state: str, rejected: tuple[int, ...]
    ) -> None:
        assert (result.state, result.rejected) == (state, rejected), (submitted, result)
        self.counts[result.state] += 1
        self.counts["rejected"] += len(result.rejected)
        if submitted.is_cancelled:
            self.counts["cancelled, copied" if submitted.has_copied else "never copied"] += 1
        elif result.ok and result.direction == "load":
            self.counts.update(f"loaded {group}" for group, *_ in submitted.moves)

    def _compare(self) -> None:
        for (group, block), content in self.state.blocks.items():
            if content is not None:
                self._check(content.bits, self.cache.block(block, group), f"block {block}", group)
        for (_, number), slot in self.state.slots.items():
            page, of_page = divmod(number, PER_PAGE)
            pool = self.cache.pools[slot.group]
            if slot.is_empty and ENCODINGS[slot.group] == "raw":
                continue
            if slot.is_empty:
                with pytest.raises(ValueError, match="holds no encoded block"):
                    pool.read_block(page, of_page)
            elif slot.content is not None:
                found = pool.read_block(page, of_page).view(torch.int16)
                self._check(slot.content.bits, found, f"slot {number}", slot.group)

    def _check(self, expected: Tensor, found: Tensor, name: str, group: int) -> None:
        assert torch.equal(expected, found), f"{name} of group {group} is wrong"
        self.counts["compared"] += 1
