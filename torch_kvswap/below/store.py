"""The interface of a store of pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from urllib.parse import SplitResult, urlsplit


class PageStore(ABC):
    """A store of pages by name. Derive a store of your own from it.

    A page comes with a trailer, some KiB that describe it. The store keeps both as one object: a
    reader gets the page and the trailer of one put(), or neither.

    The methods may block. Up to eight threads call them at once. Buffers are valid until the call
    returns. An exception means that the call has failed and nothing is known about its keys; then
    no call is made for a while.
    """

    @abstractmethod
    def exists(self, keys: list[str]) -> list[bool]:
        """Returns for each key whether its page exists."""

    @abstractmethod
    def get(
        self, keys: list[str], pages: list[memoryview], trailers: list[memoryview]
    ) -> list[bool]:
        """Reads each page and its trailer into these buffers.

        For a truncated object it may return True, too: the caller checks the bytes.

        Returns:
            list[bool]: for each key, True if the page was read, and False if there is none of these
                sizes: it is then deleted. If the store cannot tell, raise an exception instead.
        """

    @abstractmethod
    def put(self, keys: list[str], pages: list[memoryview], trailers: list[memoryview]) -> None:
        """Stores each page with its trailer under its key.

        Several engines may write a page at once; then the store may keep any of their objects.
        After an exception all pages of the call are written again later.
        """

    @abstractmethod
    def delete(self, keys: list[str]) -> None:
        """Deletes the pages of these keys, as far as they exist."""

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
        ValueError: with the text `is_no_url`, which gets the reason for {why}. The URL is not
            shown, because it can have a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(is_no_url.format(why="it cannot be parsed")) from None
    try:
        port = parts.port or default_port
    except ValueError:
        raise ValueError(is_no_url.format(why="its port is not a number up to 65535")) from None
    if parts.scheme != scheme or not parts.hostname:
        raise ValueError(is_no_url.format(why="it names no host"))
    if parts.path or parts.query or parts.fragment:
        raise ValueError(is_no_url.format(why="something stands behind the port"))
    return parts, (parts.hostname, port)
