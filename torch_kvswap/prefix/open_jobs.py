"""Jobs of an engine that poll() has not reported, and the GPU blocks that they read and write."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torch_kvswap._native.arguments import Int64Array
from torch_kvswap.handler import Job, OffloadHandler
from torch_kvswap.prefix.manager import BlockManager, LoadReservation, Reservation

_NO_JOB = -1


@dataclass(eq=False, slots=True)
class OpenJob:
    """A job that poll() has not reported, or that is about to be submitted.

    Attributes:
        manager (BlockManager): of the pages.
        reservation (Reservation): the pages, from the manager.
        blocks (list[np.ndarray]): the GPU blocks of each group that the job reads or writes.
        number (int): its number among the jobs of OpenJobs, ascending.
        earlier (list[int]): of a store, the stores before it that read some of its blocks.
        replaced (list[np.ndarray]): for each block of each group, the job before this one.
        job (Job | None): None until it is about to be submitted.
        dependents (list[OpenJob]): of a load, the stores whose callers have named its blocks.
        is_spoiled (bool): of a store, such a load has failed.
        is_ending (bool): poll() has begun to end the reservation.
        removed_with (list[OpenJob]): later stores that are reported, and stay because they say that
            this store reads their blocks, too.
        recorded (list): of a load, the blocks of each group that were recorded for lazy storing and
            whose prompt has blocks of this load.
    """

    manager: BlockManager
    reservation: Reservation
    blocks: list[Int64Array]
    number: int = _NO_JOB
    earlier: list[int] = field(default_factory=list)
    replaced: list[Int64Array] = field(default_factory=list)
    job: Job | None = None
    dependents: list[OpenJob] = field(default_factory=list)
    is_spoiled: bool = False
    is_ending: bool = False
    recorded: list[Sequence[array[int]]] = field(default_factory=list)
    removed_with: list[OpenJob] = field(default_factory=list)

    @property
    def is_submitted(self) -> bool:
        return self.job is not None and self.job.is_submitted

    @property
    def is_load(self) -> bool:
        return isinstance(self.reservation, LoadReservation)


class OpenJobs:
    """The jobs of an engine that poll() has not reported. Not thread safe.

    Arrays have the newest store from each GPU block, and the newest load into it: a call names
    hundreds of blocks. A block of -1 is none: it is the last item of an array, which is no block.

    Args:
        handler (OffloadHandler): the engine's.
    """

    def __init__(self, handler: OffloadHandler) -> None:
        self._handler = handler
        self._jobs: dict[int, OpenJob] = {}  # by number, ascending
        self._next = 0
        self._newest_store: list[Int64Array] = []  # of each group
        self._newest_load: list[Int64Array] = []

    def add(self, entry: OpenJob, named: Sequence[array[int]]) -> None:
        """Adds a job that is about to be submitted: afterwards an interrupt could come first.

        Args:
            entry (OpenJob): the job.
            named: of a store, the blocks of the prompt in each group.
        """
        self._fit_cache()
        newest = self._newest_load if entry.is_load else self._newest_store
        if not entry.is_load:
            entry.earlier = self._numbers_in(newest, entry.blocks)
            for number in self._numbers_in(self._newest_load, named):
                self._jobs[number].dependents.append(entry)
        entry.replaced = [
            numbers[blocks] for numbers, blocks in zip(newest, entry.blocks, strict=True)
        ]
        entry.number, self._next = self._next, self._next + 1
        self._jobs[entry.number] = entry
        for numbers, blocks in zip(newest, entry.blocks, strict=True):
            numbers[blocks] = entry.number

    def undo(self, entry: OpenJob) -> None:
        """Removes the newest entry: its job was not submitted. add() may have been interrupted."""
        newest = self._newest_load if entry.is_load else self._newest_store
        for numbers, blocks, replaced in zip(newest, entry.blocks, entry.replaced, strict=False):
            numbers[blocks] = replaced
        self._jobs.pop(entry.number, None)

    def remove(self, entry: OpenJob) -> None:
        """Removes a job that is reported, unless it was removed before."""
        left = [entry]
        while left:
            ended = left.pop()
            # A store that failed or was cancelled may end before those in front of it, which are
            # found through it only.
            before = next(filter(None, map(self._jobs.get, ended.earlier)), None)
            if before is not None:
                before.removed_with.append(ended)
            else:
                self._jobs.pop(ended.number, None)
                left += ended.removed_with

    def record(self, blocks: Sequence[array[int]]) -> None:
        """Has spoil() return these blocks of a prompt, if a load into one of them fails."""
        self._fit_cache()
        for number in self._numbers_in(self._newest_load, blocks):
            self._jobs[number].recorded.append(blocks)

    def spoil(self, load: OpenJob) -> list[Sequence[array[int]]]:
        """This load has failed: what was computed from its blocks is wrong.

        Marks the stores, and returns what was passed to record().
        """
        for store in load.dependents:
            store.is_spoiled = True
        # Lazy storing names the blocks in front only as long as they have not left.
        for entry in self._jobs.values() if load.recorded else ():
            if not entry.is_load and entry.number > load.number:
                entry.is_spoiled |= any(_share_a_block(entry.blocks, of) for of in load.recorded)
        return load.recorded

    def stores_reading(self, blocks: Sequence[array[int]]) -> list[Job]:
        """The stores that still read one of these blocks of each group, the oldest first."""
        self._fit_cache()
        found: dict[int, Job | None] = {}
        left = self._numbers_in(self._newest_store, blocks)
        while left:
            number = left.pop()
            entry = self._jobs.get(number)
            if entry is not None and number not in found:
                # Without a job if Ctrl-C has interrupted undo(). A job that fails may end before
                # those in front of it.
                found[number] = entry.job
                left += entry.earlier
        jobs = [found[number] for number in sorted(found)]
        return [job for job in jobs if job is not None and job.is_submitted and not job.query()]

    def _fit_cache(self) -> None:
        """Makes arrays for the cache: at first, and after rebind(), when all jobs had ended."""
        counts = [layout.num_blocks for layout in self._handler.layouts]
        if counts != [len(numbers) - 1 for numbers in self._newest_store]:
            stores = [np.full(count + 1, _NO_JOB) for count in counts]
            loads = [np.full(count + 1, _NO_JOB) for count in counts]
            # Nothing is called between the two assignments, so that Ctrl-C cannot separate them.
            self._newest_store, self._newest_load = stores, loads

    def _numbers_in(
        self, newest: Sequence[Int64Array], blocks: Sequence[array[int] | Int64Array]
    ) -> list[int]:
        """The numbers of open jobs that `newest` has for these blocks of each group."""
        oldest = next(iter(self._jobs), None)
        if oldest is None:
            return []
        found: set[int] = set()
        for numbers, of_group in zip(newest, blocks, strict=True):
            some = numbers[np.asarray(of_group, np.int64)]
            if len(some) and some.max() >= oldest:  # quick: most blocks are not being copied
                found.update(np.unique(some).tolist())
        return sorted(found & self._jobs.keys())


def _share_a_block(blocks: Sequence[Int64Array], others: Sequence[array[int] | Int64Array]) -> bool:
    """Whether some block of a group is in both."""
    return any(np.isin(one, other).any() for one, other in zip(blocks, others, strict=True))
