"""Moves whole requests between the device and the host through an OffloadEngine."""

from dataclasses import dataclass

from serving_demo.request import Request
from torch_kvswap.handler import Job
from torch_kvswap.prefix.engine import OffloadEngine
from torch_kvswap.prefix.hashing import PrefixHasher


@dataclass
class Traffic:
    """What went one way: blocks that the host had already are not stored again. `seconds` are the
    transfers' times on the device, added up."""

    requests: int = 0
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Swapper:
    """Knows which request each transfer belongs to. Nobody else uses the engine. Not thread
    safe."""

    def __init__(self, engine: OffloadEngine, block_size: int) -> None:
        ((self._host,), (layout,)) = engine.handler.pools, engine.handler.layouts
        self.traffic = {"store": Traffic(), "load": Traffic()}
        self._engine = engine
        self._block_bytes = layout.block_bytes
        self._hasher = PrefixHasher("demo", "float32", block_size * self._host.blocks_per_page)
        self._reserved = 0
        self._moving: dict[int, Request] = {}
        self._stored: list[Request] = []  # without a transfer: the host had all of it

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
        on before `poll` has reported it."""
        request.preempted = self._engine.preempt(
            self._keys(request), self._cached_blocks(request), tag=request
        )
        if request.preempted is None:
            raise RuntimeError(f"the host has no room for request {request.id}, which had reserved")
        self.traffic["store"].requests += 1
        if request.preempted.job is None:
            self._stored.append(request)
        else:
            self._track(request.preempted.job, request)

    def load(self, request: Request) -> None:
        """Into the first of its blocks, which are not to be used before `order_behind_load`."""
        job = self._engine.load(self._keys(request), self._cached_blocks(request), tag=request)
        if job is None:
            raise RuntimeError(f"the host has lost blocks of request {request.id}")
        self.traffic["load"].requests += 1
        self._track(job, request)

    def order_behind_load(self, request: Request) -> None:
        """What the current stream is given from now on sees the loaded blocks."""
        if request.job is not None:  # else the host has seen it end
            request.job.wait()

    def poll(self) -> list[tuple[str, Request]]:
        """Direction and request of each transfer that ended since the last call. Raises when one
        failed: its request could only go on with keys and values that are not its own."""
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
            traffic.seconds += result.copy_seconds
            if result.direction == "load" and request.preempted is not None:
                self._engine.release(request.preempted)
                request.preempted = None
            request.job = None
            ended.append((result.direction, request))
        return ended

    @property
    def is_storing(self) -> bool:
        storing = [r for r in self._moving.values() if r.job and r.job.direction == "store"]
        return bool(storing or self._stored)

    @property
    def is_moving(self) -> bool:
        return bool(self._moving or self._stored)

    def wait(self) -> None:
        """Blocks the host until every transfer has ended; raises when one failed."""
        self._engine.handler.synchronize()

    def _track(self, job: Job, request: Request) -> None:
        request.job = job
        self._moving[request.id] = request

    def _keys(self, request: Request) -> bytes:
        """Of what it has cached; its last page may be part full."""
        tokens = [*request.prompt, *request.tokens][: request.cached]
        return self._hasher.keys(tokens) + self._hasher.partial_key(tokens)

    def _cached_blocks(self, request: Request) -> list[int]:
        return request.blocks[: request.blocks_for(request.cached)]

    def _pages_for(self, blocks: int) -> int:
        return -(-blocks // self._host.blocks_per_page)
