"""What a store of pages must have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from urllib.parse import SplitResult, urlsplit


class PageStore(ABC):
    """Keeps objects, each a number of bytes, by name. Derive a store of your own from it.

    The methods block. Several threads call them at once. An exception means that the call has
    failed, and that nothing is known of its keys: the store is then left alone for a while.
    """

    @abstractmethod
    def exists(self, keys: list[str]) -> list[bool]:
        """Which of these objects are there."""

    @abstractmethod
    def get(self, keys: list[str], buffers: list[memoryview]) -> list[bool]:
        """Reads each object into its buffer.

        Returns:
            list[bool]: for each key, True if the object was read whole, and False if there is none
                of the size of the buffer.
        """

    @abstractmethod
    def put(self, keys: list[str], buffers: list[memoryview]) -> None:
        """Stores what is in each buffer under its key, in place of what is there."""

    @abstractmethod
    def delete(self, keys: list[str]) -> None:
        """Deletes those of these objects that are there."""

    def close(self) -> None:
        """Called once, when all other calls have returned."""
        return

    def __str__(self) -> str:
        """For messages; without a password."""
        return type(self).__name__


def split_url(
    url: str, scheme: str, default_port: int, is_no_url: str
) -> tuple[SplitResult, tuple[str, int]]:
    """The parts of a server's URL, and its host and port.

    Raises:
        ValueError: with the text `is_no_url`, because other messages can have the password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or default_port
    except ValueError:
        raise ValueError(is_no_url) from None
    behind = parts.path or parts.query or parts.fragment
    if parts.scheme != scheme or not parts.hostname or behind:
        raise ValueError(is_no_url)
    return parts, (parts.hostname, port)
