"""The interface of a store of pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from urllib.parse import SplitResult, urlsplit


class PageStore(ABC):
    """A store of objects (bytes) by name. Derive a store of your own from it.

    The methods may block. Up to eight threads call them at once. Buffers are valid until the call
    returns. An exception means that the call has failed and nothing is known about its keys; then
    no call is made for a while.
    """

    @abstractmethod
    def exists(self, keys: list[str]) -> list[bool]:
        """Returns for each key whether its object exists."""

    @abstractmethod
    def get(self, keys: list[str], buffers: list[memoryview]) -> list[bool]:
        """Reads each object into its buffer.

        Returns:
            list[bool]: for each key, True if the object was read completely, and False if there is
                no object of the buffer's size: its page is then deleted. If the store cannot tell,
                raise an exception instead.
        """

    @abstractmethod
    def put(self, keys: list[str], buffers: list[memoryview]) -> None:
        """Stores the bytes of each buffer under its key, and replaces an object that exists.

        A reader must see the old object, the new one, or none. After an exception all pages of the
        call are written again later.
        """

    @abstractmethod
    def delete(self, keys: list[str]) -> None:
        """Deletes the objects of these keys, as far as they exist."""

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
