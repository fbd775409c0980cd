"""Moves whole requests between the device and the host through an OffloadHandler."""

from dataclasses import dataclass

from torch_kvswap.cli.block_allocator import BlockAllocator
from torch_kvswap.cli.request import Request
from torch_kvswap.handler import Job, OffloadHandler


@dataclass
class Traffic:
    """What went one way; `seconds` are the transfers' times on the device, added up."""

    transfers: int = 0
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Swapper:
    """Owns the host pages and knows which request each transfer belongs to. Not thread safe."""

    def __init__(self, handler: OffloadHandler) -> None:
        (self._host,) = handler.pools
        self.traffic = {"store": Traffic(), "load": Traffic()}
        self._handler = handler
        self.pages = BlockAllocator(self._host.num_pages)
        self._reserved = 0
        self._moving: dict[int, Request] = {}

    def reserve(self, request: Request) -> bool:
        """Sets aside what a request fills at its longest, so that it can always be preempted.

        The first one is let in even where the pages are too few for it: until it is released it
        stays alone, and nobody preempts it.
        """
        pages = self._pages_for(request.max_blocks)
        if self._reserved and self._reserved + pages > self._host.num_pages:
            return False
        self._reserved += pages
        return True

    def release(self, request: Request) -> None:
        self._reserved -= self._pages_for(request.max_blocks)

    def store(self, request: Request) -> None:
        """Ordered behind what the current stream was given so far. Its blocks may not be handed
        on before `finished` has reported it."""
        blocks = self._cached_blocks(request)
        request.pages = self.pages.take(self._pages_for(len(blocks)))
        self._track(self._handler.store(blocks, request.pages), request, len(blocks))

    def load(self, request: Request) -> None:
        """Into the first of its blocks, which are not to be used before `order_behind_load`."""
        blocks = self._cached_blocks(request)
        self._track(self._handler.load(request.pages, blocks), request, len(blocks))

    def order_behind_load(self, request: Request) -> None:
        """What the current stream is given from now on sees the loaded blocks."""
        if request.job is not None:  # else the host has seen it end
            request.job.wait_on()

    def finished(self) -> list[tuple[str, Request]]:
        """Direction and request of each transfer that ended since the last call. Raises when one
        failed: its request could only go on with keys and values that are not its own."""
        ended: list[tuple[str, Request]] = []
        for result in self._handler.finished():
            request = self._moving.pop(result.job_id)
            if not result.ok:
                message = f"the {result.direction} of request {request.id} failed: {result.error}"
                raise RuntimeError(message) from result.error
            self.traffic[result.direction].nbytes += result.nbytes
            self.traffic[result.direction].seconds += result.copy_seconds
            if result.direction == "load":
                self.pages.give(request.pages)
                request.pages = []
            request.job = None
            ended.append((result.direction, request))
        return ended

    @property
    def is_storing(self) -> bool:
        return any(r.job and r.job.direction == "store" for r in self._moving.values())

    @property
    def is_moving(self) -> bool:
        return bool(self._moving)

    def wait(self) -> None:
        """Blocks the host until every transfer has ended; raises when one failed."""
        self._handler.wait()

    def _track(self, job: Job, request: Request, blocks: int) -> None:
        request.job = job
        self._moving[job.id] = request
        self.traffic[job.direction].transfers += 1
        self.traffic[job.direction].blocks += blocks

    def _cached_blocks(self, request: Request) -> list[int]:
        return request.blocks[: request.blocks_for(request.cached)]

    def _pages_for(self, blocks: int) -> int:
        return -(-blocks // self._host.blocks_per_page)
