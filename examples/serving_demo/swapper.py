"""Moves whole requests between the device and the host through an OffloadEngine."""

from dataclasses import dataclass

from serving_demo.request import Request
from torch_kvswap.handler import Job
from torch_kvswap.prefix.engine import OffloadEngine
from torch_kvswap.prefix.hashing import PrefixHasher


@dataclass
class Traffic:
    """What was moved in one direction.

    Blocks that the host already had are not stored again, and not counted.

    Attributes:
        requests (int): requests moved.
        blocks (int): blocks copied.
        nbytes (int): bytes copied.
        link_bytes (int): bytes in which they crossed the link.
        seconds (float): sum of the transfers' times on the device.
    """

    requests: int = 0
    blocks: int = 0
    nbytes: int = 0
    link_bytes: int = 0
    seconds: float = 0.0


class Swapper:
    """Moves requests, and knows which request each transfer belongs to. Not thread safe.

    Args:
        engine (OffloadEngine): used by nobody else.
        block_size (int): tokens per block.

    Attributes:
        traffic (dict[str, Traffic]): by direction.
    """

    def __init__(self, engine: OffloadEngine, block_size: int) -> None:
        ((self._host,), (layout,)) = engine.handler.pools, engine.handler.layouts
        self.traffic = {"store": Traffic(), "load": Traffic()}
        self._engine = engine
        self._block_bytes = layout.block_bytes
        tokens = block_size * self._host.blocks_per_page
        self._hasher = PrefixHasher("demo", str(layout.dtype), tokens)
        self._reserved = 0
        self._moving: dict[int, Request] = {}
        self._stored: list[Request] = []  # stored without a transfer: the host had all blocks

    def reserve(self, request: Request) -> bool:
        """Reserves host pages for the request at its longest, so that it can always be preempted.

        The first request is admitted even if there are too few pages for it. It then stays alone
        until it is released, so it is never preempted.

        Returns:
            bool: False if there are too few pages.
        """
        pages = self._pages_for(request.max_blocks)
        if self._reserved and self._reserved + pages > self._host.num_pages:
            return False
        self._reserved += pages
        return True

    def release(self, request: Request) -> None:
        """Releases the reservation of a request."""
        self._reserved -= self._pages_for(request.max_blocks)

    def store(self, request: Request) -> None:
        """Starts to store a request, behind all work submitted to the current stream so far.

        Its blocks may not be reused before poll() has reported it.
        """
        request.preempted = self._engine.preempt(
            self._keys(request), self._cached_blocks(request), tag=request
        )
        if request.preempted is None:
            raise RuntimeError(f"the host has no room for request {request.id} despite reservation")
        self.traffic["store"].requests += 1
        if request.preempted.jobs:  # the only store of these blocks
            self._track(request.preempted.jobs[0], request)
        else:
            self._stored.append(request)

    def load(self, request: Request) -> None:
        """Starts to load a request into its first blocks.

        Call order_behind_load() before work that uses the blocks.
        """
        job = self._engine.load(self._keys(request), self._cached_blocks(request), tag=request)
        if job is None:
            raise RuntimeError(f"the host has lost blocks of request {request.id}")
        self.traffic["load"].requests += 1
        self._track(job, request)

    def order_behind_load(self, request: Request) -> None:
        """Makes later work on the current stream wait for the load."""
        if request.job is not None:  # None if poll() has reported the load
            request.job.wait()

    def poll(self) -> list[tuple[str, Request]]:
        """Direction and request of each transfer that ended since the last call.

        Raises:
            RuntimeError: a transfer failed; the request's keys and values are undefined.
        """
        ended = [("store", request) for request in self._stored]
        self._stored.clear()
        for result in self._engine.poll():
            request = result.tag
            del self._moving[request.id]
            if not result.ok:
                message = f"the {result.direction} of request {request.id} failed: {result.error}"
                raise RuntimeError(message) from result.error
            traffic = self.traffic[result.direction]
            traffic.blocks += result.nbytes // self._block_bytes
            traffic.nbytes += result.nbytes
            traffic.link_bytes += result.link_bytes
            traffic.seconds += result.copy_seconds
            if result.direction == "load" and request.preempted is not None:
                self._engine.release(request.preempted)
                request.preempted = None
            request.job = None
            ended.append((result.direction, request))
        return ended

    @property
    def is_storing(self) -> bool:
        """Whether a store has not been reported yet."""
        storing = [r for r in self._moving.values() if r.job and r.job.direction == "store"]
        return bool(storing or self._stored)

    @property
    def is_moving(self) -> bool:
        """Whether any transfer has not been reported yet."""
        return bool(self._moving or self._stored)

    def wait(self) -> None:
        """Blocks the host until every transfer has ended.

        Raises:
            TransferError: a transfer failed.
        """
        self._engine.handler.synchronize()

    def _track(self, job: Job, request: Request) -> None:
        request.job = job
        self._moving[request.id] = request

    def _keys(self, request: Request) -> bytes:
        """The keys of what the request has cached; its last page may be partly filled."""
        tokens = [*request.prompt, *request.tokens][: request.cached]
        return self._hasher.keys(tokens) + self._hasher.partial_key(tokens)

    def _cached_blocks(self, request: Request) -> list[int]:
        return request.blocks[: request.blocks_for(request.cached)]

    def _pages_for(self, blocks: int) -> int:
        return -(-blocks // self._host.blocks_per_page)
