"""A model of the data that stores and loads move, in the order of their submission."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_kvswap.offload.handler import Job
    from torch_kvswap.results import Result


@dataclass(eq=False)
class Cell:
    """What a block or a slot of a page holds once its writer is done; without one anything."""

    writer: Flight | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the job that was to write it is known not to have done so."""
        return (
            self.writer is not None and self.writer.result is not None and not self.writer.is_done
        )


@dataclass(eq=False)
class Flight:
    """A job, what it reads, and what it leaves behind, by block or by slot."""

    job: Job
    is_store: bool
    sources: list[Cell]
    loads: list[Flight]  # of a store: the latest into its blocks that poll() has not told of
    targets: dict[int, Cell] = field(default_factory=dict)
    result: Result | None = None  # as it was reported
    cancelled: bool = False  # as cancel() said

    @property
    def is_done(self) -> bool:
        return self.result is not None and self.result.ok

    @property
    def bad_sources(self) -> dict[int, str]:
        """The jobs that were to write what this one reads and are not done, with their states."""
        writers = [cell.writer for cell in self.sources if cell.writer is not None]
        return states_of_the_bad(writers)

    @property
    def bad_loads(self) -> dict[int, str]:
        """The same, also where a kernel has overwritten what was loaded."""
        return states_of_the_bad(self.loads)


def states_of_the_bad(flights: list[Flight]) -> dict[int, str]:
    ended = [(flight.job.id, flight.result) for flight in flights if flight.result is not None]
    return {number: result.state for number, result in ended if not result.ok}


class Model:
    """Blocks and slots, and the jobs between them."""

    def __init__(self, slots: int) -> None:
        self.blocks: list[Cell] = []
        self.slots = [Cell() for _ in range(slots)]
        self.flights: dict[int, Flight] = {}
        self.latest_loads: dict[int, Flight] = {}  # by block, unless known to be bad
        self.direct_failures = 0  # of jobs with sound sources
        self.exact = True  # False: other threads call poll() while jobs are submitted

    def submit(self, job: Job, is_store: bool, blocks: list[int], slots: list[int]) -> Flight:
        assert job.id not in self.flights
        read, written = (self.blocks, self.slots) if is_store else (self.slots, self.blocks)
        from_, to = (blocks, slots) if is_store else (slots, blocks)
        loads = [self.latest_loads[block] for block in blocks if block in self.latest_loads]
        flight = Flight(job, is_store, [read[index] for index in from_], loads if is_store else [])
        for index in to:
            flight.targets[index] = written[index] = Cell(flight)
        if not is_store:
            self.latest_loads |= dict.fromkeys(blocks, flight)
        self.flights[job.id] = flight
        return flight

    def overwrite(self, block: int) -> None:
        self.blocks[block] = Cell()

    def set_blocks(self, count: int) -> None:
        """The cache has moved: other blocks, with anything in them."""
        self.blocks = [Cell() for _ in range(count)]
        self.latest_loads.clear()

    def settle(self) -> None:
        """All jobs were reported: forgets everything but which slots are invalid."""
        assert all(flight.result is not None for flight in self.flights.values())
        for cells in (self.blocks, self.slots):
            for index, cell in enumerate(cells):
                if cell.writer is not None and cell.writer.is_done:
                    cells[index] = Cell()
                elif cell.writer is not None:
                    cell.writer.sources, cell.writer.loads = [], []
        self.flights.clear()
        self.latest_loads.clear()

    def report(self, results: list[Result]) -> None:
        """poll() has returned these."""
        for result in results:
            flight = self.flights[result.job_id]
            assert flight.result is None, f"job {result.job_id} is reported twice"
            flight.result = result
            assert result.direction == ("store" if flight.is_store else "load")
            self._judge(flight, result)
        # From now on the caller knows that these blocks hold anything.
        for result in results:
            flight = self.flights[result.job_id]
            if result.ok or flight.is_store:
                continue
            for block, cell in flight.targets.items():
                if self.blocks[block] is cell:
                    self.blocks[block] = Cell()
                if self.latest_loads.get(block) is flight:
                    del self.latest_loads[block]

    def _judge(self, flight: Flight, result: Result) -> None:
        unreported = [
            cell.writer.job.id
            for cell in flight.sources
            if cell.writer is not None and cell.writer.result is None
        ]
        bad = flight.bad_sources
        if result.ok:
            if flight.is_store and not self.exact:
                bad = {}  # a load that failed may have been reported before
            assert not unreported, f"job {result.job_id} has ended before its sources {unreported}"
            assert not bad, f"{result.direction} {result.job_id} is done, but its sources are {bad}"
            assert not flight.cancelled, f"job {result.job_id} was cancelled, but is done"
        elif result.state == "cancelled":
            assert flight.cancelled, f"job {result.job_id} is cancelled, but nobody has asked"
            assert result.error is None
        elif "the device is lost" not in str(result.error):
            assert not flight.cancelled, f"job {result.job_id} was cancelled, but has failed"
            named = re.search(r"(?:store|load) (\d+) (was cancelled|failed: )", str(result.error))
            if named is None:
                self.direct_failures += 1
            else:
                bad |= flight.bad_loads
                assert int(named[1]) in bad, f"job {result.job_id}: {result.error}, but {bad}"
                said = "cancelled" if named[2] == "was cancelled" else "failed"
                assert bad[int(named[1])] == said
