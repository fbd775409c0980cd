"""What a store of pages must have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# The number of the call, whether all went well, an error text, and whether each key went well or,
# for exists, is there. None stands for as many as `all went well` says.
Completion = tuple[int, bool, str, Sequence[bool] | None]


class PageStore(Protocol):
    """Keeps objects, each a number of bytes, by name.

    This is the contract of LMCache's native connectors. Each submit_batch_*() returns a number at
    once. When the call has ended, the file descriptor of event_fd() is readable, and
    drain_completions() returns that number with the outcome. The memory of a set or get stays
    valid, and in use, until then.

    A get of an object that is not there, or has another number of bytes than the memory, is not
    right for that key. The outcome has an error text if the store has failed: then nothing is known
    of the keys that are not right. One thread calls all methods.
    """

    def submit_batch_set(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        """Begins to keep these bytes under these keys, in place of what is there."""
        ...

    def submit_batch_get(self, keys: list[str], memoryviews: list[memoryview]) -> int:
        """Begins to read the bytes of these keys into this memory."""
        ...

    def submit_batch_exists(self, keys: list[str]) -> int:
        """Begins to find out which keys are there."""
        ...

    def submit_batch_delete(self, keys: list[str]) -> int:
        """Begins to delete these keys."""
        ...

    def event_fd(self) -> int:
        """A file descriptor that is readable while drain_completions() has something to return."""
        ...

    def drain_completions(self) -> list[Completion]:
        """Returns the calls that have ended since it was called last."""
        ...

    def close(self) -> None:
        """Ends all calls. Afterwards no memory is in use."""
        ...
