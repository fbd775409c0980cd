"""One prompt on its way through the server."""

from dataclasses import dataclass, field

from torch_kvswap.handler import Job
from torch_kvswap.prefix.engine import Preempted


@dataclass(eq=False)
class Request:
    """Holds blocks on the device, or is `preempted` and has pages on the host; both only while
    `job` moves it."""

    id: int
    prompt: bytes
    new_tokens: int
    block_size: int
    tokens: list[int] = field(default_factory=list)  # generated, as far as the host has seen them
    cached: int = 0  # tokens whose keys and values lie in its blocks, in order
    blocks: list[int] = field(default_factory=list)
    preempted: Preempted | None = None
    job: Job | None = None

    @property
    def max_cached(self) -> int:
        """Tokens cached at its end: the last one that it generates never is."""
        return len(self.prompt) + self.new_tokens - 1

    @property
    def max_blocks(self) -> int:
        return self.blocks_for(self.max_cached)

    @property
    def is_done(self) -> bool:
        return self.cached == self.max_cached

    @property
    def has_room(self) -> bool:
        """Whether its blocks hold one more token."""
        return self.cached < len(self.blocks) * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
