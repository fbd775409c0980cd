"""A store in the memory of several machines, by Mooncake."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_kvswap.below.store import PageStore, split_url

TIMEOUT = 5.0  # seconds, for the first connection
_PORT = 50051
_MOST_CALLS = 2  # at once: Mooncake has threads of its own, and more calls are slower
_NOT_THERE = -704


class MooncakeStore(PageStore):
    """A PageStore in a Mooncake store, which engines of several machines may share.

    Pages lie in the memory of `mooncake_client` processes. TCP carries them from and to the given
    memory without a copy between. Connects at the first call; Mooncake reconnects by itself.

    Args:
        url (str): "mooncake://HOST" or "mooncake://HOST:PORT", of the master.

    Raises:
        ImportError: the package mooncake is not installed, or a library that it needs is missing.
        ValueError: url is not such a URL.
    """

    def __init__(self, url: str) -> None:
        is_no_url = (
            "below is not the URL of a Mooncake master: {why}; pass 'mooncake://HOST' or "
            "'mooncake://HOST:PORT'"
        )
        parts, self._address = split_url(url, "mooncake", _PORT, is_no_url)
        if parts.username is not None:
            raise ValueError(is_no_url.format(why="it names a user, but Mooncake has none"))
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ImportError(
                f"Mooncake cannot be used: {error}; install it with "
                "pip install 'torch_kvswap[mooncake]', and libibverbs1 from your system's packages"
            ) from error
        self._new_client = MooncakeDistributedStore
        self._client: Any = None
        self._registered: dict[int, weakref.ref[Any]] = {}  # memory, by its address
        self._changing = threading.Lock()  # of both
        self._calls = threading.Semaphore(_MOST_CALLS)

    def __str__(self) -> str:
        host, port = self._address
        return f"mooncake://{host}:{port}"

    def exists(self, keys: list[str]) -> list[bool]:
        with self._calls:
            codes = self._connected().batch_is_exist(keys)
        return [code == 1 for code in _checked(keys, codes)]

    def get(
        self, keys: list[str], pages: list[memoryview], trailers: list[memoryview]
    ) -> list[bool]:
        with self._calls:
            client, places = self._connected(), self._places(pages, trailers)
            codes = client.batch_get_into_multi_buffers(keys, *places)
        # An object of another size is an error of Mooncake.
        return [code != _NOT_THERE for code in _checked(keys, codes, _NOT_THERE)]

    def put(self, keys: list[str], pages: list[memoryview], trailers: list[memoryview]) -> None:
        with self._calls:
            client, places = self._connected(), self._places(pages, trailers)
            # What exists, or is being written by others, stays.
            _checked(keys, client.batch_put_from_multi_buffers(keys, *places))

    def delete(self, keys: list[str]) -> None:
        with self._calls:
            codes = self._connected().batch_remove(keys, force=True)  # also those that are read
        _checked(keys, codes, _NOT_THERE)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connected(self) -> Any:
        """The client."""
        with self._changing:
            if self._client is None:
                host, port = self._address
                try:
                    # setup() would try for 90 s to reach a master that is not there.
                    with socket.create_connection(self._address, TIMEOUT) as probe:
                        own, *_ = probe.getsockname()
                except OSError as error:
                    raise ConnectionError(f"cannot connect to {host}:{port}: {error}") from error
                client = self._new_client()
                # Its own part of the store's memory and its buffer for copies have no bytes.
                code = client.setup(own, "P2PHANDSHAKE", 0, 0, "tcp", "", f"{host}:{port}")
                if code:
                    raise ConnectionError(f"no Mooncake master at {host}:{port}: error {code}")
                self._client = client
            return self._client

    def _places(
        self, pages: Sequence[memoryview], trailers: Sequence[memoryview]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """For each page, the addresses of it and its trailer, and their sizes.

        Mooncake must know all memory, which it is told once. What a view is a part of is told as a
        whole: a pool, or the trailers of a batch.
        """
        with self._changing:
            for address, still in list(self._registered.items()):
                if still() is None:  # other memory may be there now
                    self._client.unregister_buffer(address)
                    del self._registered[address]
            for whole in {id(view.obj): view.obj for view in [*pages, *trailers]}.values():
                address, nbytes = _place_of(whole)
                if address not in self._registered:
                    code = self._client.register_buffer(address, nbytes)
                    if code:
                        raise OSError(f"{nbytes} bytes cannot be registered: error {code}")
                    self._registered[address] = weakref.ref(whole)
        objects = list(zip(pages, trailers, strict=True))
        addresses = [[_place_of(page)[0], _place_of(trailer)[0]] for page, trailer in objects]
        return addresses, [[len(page), len(trailer)] for page, trailer in objects]


def _place_of(memory: Any) -> tuple[int, int]:
    """The address and the bytes of a buffer."""
    as_bytes = np.frombuffer(memory, np.uint8)
    return as_bytes.ctypes.data, as_bytes.nbytes


def _checked(keys: list[str], codes: list[int], *expected: int) -> list[int]:
    """The codes. Raises OSError for the first that is an error, and none of those expected."""
    for key, code in zip(keys, codes, strict=True):
        if code < 0 and code not in expected:
            raise OSError(f"{key}: Mooncake's error {code}")
    return codes
