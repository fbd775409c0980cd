"""Jobs of an engine that poll() has not reported, and the GPU blocks that they read and write."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from torch_kvswap._native.abi import Int64Array
from torch_kvswap.handler import Job, OffloadHandler
from torch_kvswap.prefix.manager import Load, Store

_NO_JOB = -1


@dataclass(eq=False, slots=True)
class OpenJob:
    """A job that poll() has not reported.

    Attributes:
        reservation (Load | Store): its pages.
        blocks (list[np.ndarray]): the GPU blocks of each group that it reads or writes.
        earlier (list[int]): of a store, ids of the stores before it that read some of its blocks.
        loads (list[int]): of a store, ids of the loads into blocks that its prompt has.
        job (Job | None): None until it was submitted.
        is_spoiled (bool): one of these loads has failed.
        recorded (list): of a load, the blocks of each group that were recorded for lazy storing and
            whose prompt has blocks of this load.
    """

    reservation: Load | Store
    blocks: list[Int64Array]
    earlier: list[int]
    loads: list[int]
    job: Job | None = None
    is_spoiled: bool = False
    recorded: list[Sequence[array[int]]] = field(default_factory=list)

    @property
    def is_load(self) -> bool:
        return isinstance(self.reservation, Load)


class OpenJobs:
    """The jobs of an engine that poll() has not reported. Not thread safe.

    Arrays have the newest store from each GPU block, and the newest load into it: a call names
    hundreds of blocks. A block of -1 is none: it is the last item of an array, which is no block.

    Args:
        handler (OffloadHandler): the engine's.
    """

    def __init__(self, handler: OffloadHandler) -> None:
        self._handler = handler
        self._jobs: dict[int, OpenJob] = {}  # by id, ascending
        self._newest_store: list[Int64Array] = []  # of each group
        self._newest_load: list[Int64Array] = []

    def prepare(
        self,
        reservation: Load | Store,
        blocks: list[Int64Array],
        named: Sequence[array[int]],
    ) -> OpenJob:
        """Makes the entry of a job that is about to be submitted.

        Args:
            reservation (Load | Store): its pages.
            blocks: the GPU blocks of each group that it reads or writes.
            named: of a store, the blocks of the prompt in each group.
        """
        self._fit_cache()
        if isinstance(reservation, Load):
            return OpenJob(reservation, blocks, [], [])
        return OpenJob(reservation, blocks, self._stores_from(blocks), self._loads_into(named))

    def add(self, job: Job, entry: OpenJob) -> None:
        """Adds the entry of a job, which is newer than all others."""
        entry.job = job
        newest = self._newest_load if entry.is_load else self._newest_store
        for numbers, blocks in zip(newest, entry.blocks, strict=True):
            numbers[blocks] = job.id
        self._jobs[job.id] = entry

    def pop(self, job_id: int) -> OpenJob | None:
        """Removes a job that is reported; None if it was not added."""
        return self._jobs.pop(job_id, None)

    def record(self, blocks: Sequence[array[int]]) -> None:
        """Has spoil() return these blocks of a prompt, if a load into one of them fails."""
        self._fit_cache()
        for number in self._loads_into(blocks):
            self._jobs[number].recorded.append(blocks)

    def spoil(self, failed: Collection[int]) -> list[Sequence[array[int]]]:
        """These loads failed: what was computed from their blocks is wrong.

        Marks the stores, and returns what was passed to record().
        """
        if not failed:
            return []
        for entry in self._jobs.values():
            if not set(failed).isdisjoint(entry.loads):
                entry.is_spoiled = True
        return [
            blocks
            for number in failed
            if number in self._jobs
            for blocks in self._jobs[number].recorded
        ]

    def stores_reading(self, blocks: Sequence[array[int]]) -> list[Job]:
        """The stores that still read one of these blocks of each group, the oldest first."""
        self._fit_cache()
        found: dict[int, Job] = {}
        left = self._stores_from(blocks)
        while left:
            number = left.pop()
            entry = self._jobs.get(number)
            if entry is not None and entry.job is not None and number not in found:
                found[number] = entry.job
                left += entry.earlier  # a job that fails may end before those in front of it
        return [found[number] for number in sorted(found) if not found[number].query()]

    def _fit_cache(self) -> None:
        """Makes arrays for the cache: at first, and after rebind(), when all jobs had ended."""
        counts = [layout.num_blocks for layout in self._handler.layouts]
        if counts != [len(numbers) - 1 for numbers in self._newest_store]:
            self._newest_store = [np.full(count + 1, _NO_JOB) for count in counts]
            self._newest_load = [np.full(count + 1, _NO_JOB) for count in counts]

    def _stores_from(self, blocks: Sequence[array[int] | Int64Array]) -> list[int]:
        """The newest stores from these blocks of each group."""
        return self._numbers_in(self._newest_store, blocks)

    def _loads_into(self, blocks: Sequence[array[int] | Int64Array]) -> list[int]:
        """The newest loads into these blocks of each group."""
        return self._numbers_in(self._newest_load, blocks)

    def _numbers_in(
        self, newest: Sequence[Int64Array], blocks: Sequence[array[int] | Int64Array]
    ) -> list[int]:
        """The open jobs among those that `newest` has for these blocks."""
        oldest = next(iter(self._jobs), None)
        if oldest is None:
            return []
        found: set[int] = set()
        for numbers, of_group in zip(newest, blocks, strict=True):
            ids = numbers[np.asarray(of_group, np.int64)]
            if len(ids) and ids.max() >= oldest:  # quick: most blocks are not being copied
                found.update(np.unique(ids).tolist())
        return sorted(found & self._jobs.keys())
