"""A request of the demo's server."""

from dataclasses import dataclass, field

from torch_kvswap.handler import Job
from torch_kvswap.prefix.engine import Preempted


@dataclass(eq=False)
class Request:
    """A prompt to be continued.

    A request has blocks on the device, or is preempted and has pages on the host. It has both only
    while `job` moves it.

    Attributes:
        id (int): number of the request.
        prompt (bytes): its tokens.
        new_tokens (int): number of tokens to generate.
        block_size (int): tokens per block.
        tokens (list[int]): the tokens generated so far.
        cached (int): tokens whose keys and values are in its blocks.
        blocks (list[int]): its blocks on the device.
        preempted (Preempted | None): its pages on the host.
        job (Job | None): the transfer in flight.
    """

    id: int
    prompt: bytes
    new_tokens: int
    block_size: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    preempted: Preempted | None = None
    job: Job | None = None

    @property
    def max_cached(self) -> int:
        """Tokens cached at its end: all but the last one generated."""
        return len(self.prompt) + self.new_tokens - 1

    @property
    def max_blocks(self) -> int:
        """Blocks at its end."""
        return self.blocks_for(self.max_cached)

    @property
    def is_done(self) -> bool:
        """Whether all tokens are generated."""
        return self.cached == self.max_cached

    @property
    def has_room(self) -> bool:
        """Whether its blocks have room for one more token."""
        return self.cached < len(self.blocks) * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)
