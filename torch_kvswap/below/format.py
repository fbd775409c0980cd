"""The format of a page in a second tier: its bytes, and a trailer that describes them.

A page is one object, NAMESPACE@RANK@KEY: its bytes, then a trailer. The trailer has magic, version,
namespace, key, length, checksum, the checksums of the blocks if the pool has them
(`HostPool.verify`), then zeros up to a multiple of 4,096. The checksum is of the bytes and of the
checksums of the blocks. A reader makes the trailer of the bytes that came, and compares the two:
that checks all fields.

NAMESPACE is the SHA-256 of the page_text() of what describes the pages. Another version of the
format has other namespaces, so that its pages are not found, and another number in its trailers, so
that they are refused where they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

from torch_kvswap._native.log import log
from torch_kvswap.host_pool.description import FORMAT_VERSION, page_text
from torch_kvswap.host_pool.pool import HostPool

ALIGNMENT = 4096  # bytes: of trailers, and of memory for O_DIRECT
_MAGIC = b"KVSWPAGE"
_FIELDS = struct.Struct("<8sI4x32s32sQ16s")  # 104 bytes
_NAMES = ("magic", "version", "namespace", "key", "length", "checksum")


def load_checksum() -> Callable[[memoryview, bytes], bytes]:
    """XXH3-128 of both, 16 bytes; releases the GIL.

    Raises:
        ImportError: the package xxhash is not installed.
    """
    try:
        from xxhash import xxh3_128
    except ImportError as error:
        raise ImportError(
            "a PrefixCache with `below` needs the package xxhash for the checksums of pages: "
            "pip install xxhash"
        ) from error

    def checksum(page: memoryview, checksums: bytes) -> bytes:
        sum_of_both = xxh3_128(page)
        sum_of_both.update(checksums)
        return bytes(sum_of_both.digest())

    return checksum


class PageFormat:
    """Names and trailers of the pages of one pool.

    Args:
        pool (HostPool): has the pages.
        contents (dict[str, Any]): what the pages hold, from describe_contents().

    Attributes:
        pool (HostPool): has the pages.
        name (str): of these pages in a store: NAMESPACE@RANK.
        namespace (bytes): the SHA-256.
        trailer_bytes (int): bytes of a trailer.

    Raises:
        ImportError: see load_checksum().
    """

    def __init__(self, pool: HostPool, contents: dict[str, Any]) -> None:
        description = page_text(pool._describe(contents))
        self.namespace = sha256(description.encode()).digest()
        self.name = f"{self.namespace.hex()}@{contents['rank']:x}"
        self.pool, self._group, self._checksum = pool, contents["group"], load_checksum()
        self._end = _FIELDS.size + len(pool._read_checksums(0, self._group))
        self.trailer_bytes = -(-self._end // ALIGNMENT) * ALIGNMENT
        log.info("pages in the second tier are named %s@...; they are\n%s", self.name, description)

    def names(self, keys: Iterable[bytes], suffix: str) -> list[str]:
        """The names of pages in a store."""
        return [f"{self.name}@{key.hex()}{suffix}" for key in keys]

    def write_trailer(
        self, trailer: memoryview, key: bytes, page: int, of_page: memoryview
    ) -> None:
        """Writes the trailer of a page of the pool, with these bytes, over zeros."""
        self._write(trailer, key, of_page, self.pool._read_checksums(page, self._group))

    def problem(self, trailer: memoryview, key: bytes, of_page: memoryview) -> str | None:
        """Why these bytes are not the page of the key, or None."""
        expected = bytearray(self.trailer_bytes)
        self._write(memoryview(expected), key, of_page, self._checksums_in(trailer))
        if trailer == expected:
            return None
        several = zip(
            _NAMES, _FIELDS.unpack_from(trailer), _FIELDS.unpack_from(expected), strict=True
        )
        for name, found, wanted in several:
            if found != wanted:
                return f"its trailer has the {name} {_text(found)} instead of {_text(wanted)}"
        return "its trailer is damaged"

    def enter_checksums(self, trailer: memoryview, page: int) -> None:
        """The bytes are in this page: so are the checksums of its blocks from now on."""
        self.pool._write_checksums(page, self._group, self._checksums_in(trailer))

    def _write(
        self, trailer: memoryview, key: bytes, of_page: memoryview, checksums: bytes
    ) -> None:
        checksum = self._checksum(of_page, checksums)
        _FIELDS.pack_into(
            trailer, 0, _MAGIC, FORMAT_VERSION, self.namespace, key, len(of_page), checksum
        )
        trailer[_FIELDS.size : self._end] = checksums

    def _checksums_in(self, trailer: memoryview) -> bytes:
        return bytes(trailer[_FIELDS.size : self._end])


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
