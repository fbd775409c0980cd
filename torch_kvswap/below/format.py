"""The format of a page below: its bytes, and a trailer that says what they are.

A page is two objects, NAMESPACE@RANK@0@KEY with its bytes and NAMESPACE@RANK@1@KEY with a trailer
of TRAILER_BYTES: magic, version, namespace, key, length, digest, then zeros. The trailer is written
second. Whoever reads a page makes the trailer of the bytes that came, and compares: that checks all
fields and the digest.

Another version of the format has other namespaces, so that its pages are not found, and another
number in its trailers, so that they are refused where they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from hashlib import sha256

from torch_kvswap._native.log import log
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout

FORMAT_VERSION = 1
TRAILER_BYTES = 4096
_MAGIC = b"KVSWPAGE"
_FIELDS = struct.Struct("<8sI4x32s32sQ16s")  # 104 bytes
_NAMES = ("magic", "version", "namespace", "key", "length", "digest")


def load_digest() -> Callable[[memoryview], bytes]:
    """XXH3-128, 16 bytes; releases the GIL.

    Raises:
        ImportError: the package xxhash is not installed.
    """
    try:
        from xxhash import xxh3_128_digest
    except ImportError as error:
        raise ImportError(
            "a PrefixCache with `below` needs the package xxhash for the digests of pages: "
            "pip install 'torch_kvswap[below]'"
        ) from error
    digest: Callable[[memoryview], bytes] = xxh3_128_digest
    return digest


class PageFormat:
    """Names and trailers of the pages of one pool.

    Args:
        layout (PagedLayout), pool (HostPool): what the pages hold.
        model (str): the model, with its revision.
        group (int): the position of the pool among those of the cache.
        rank (int), world (int): which part of the model this process has, of how many.

    Attributes:
        namespace (bytes): SHA-256 of everything that must be equal for a page to be of use.

    Raises:
        ImportError: see load_digest().
    """

    def __init__(
        self, layout: PagedLayout, pool: HostPool, model: str, group: int, rank: int, world: int
    ) -> None:
        dtypes = [layout.dtype] if layout.dtype else [tensor.dtype for tensor in layout.tensors]
        fields = {
            "format": FORMAT_VERSION,
            "model": model,
            "slab_sizes": pool.layout.sizes.tolist(),
            "dtypes": list(map(str, dtypes)),
            "blocks_per_page": pool.blocks_per_page,
            "slot_bytes": pool.slot_bytes,
            "encoding": [pool.encoding, pool.bits_per_value],
            "group": group,
            "rank": [rank, world],
        }
        self.namespace = sha256(json.dumps(fields, sort_keys=True).encode()).digest()
        self._prefix = f"{self.namespace.hex()}@{rank:x}"
        self._digest = load_digest()
        log.info("pages of group %d have the namespace %s below: %s", group, self._prefix, fields)

    def page_name(self, key: bytes) -> str:
        """The name of the object with the bytes of a page."""
        return f"{self._prefix}@0@{key.hex()}"

    def trailer_name(self, key: bytes) -> str:
        """The name of the object with the trailer of a page."""
        return f"{self._prefix}@1@{key.hex()}"

    def write_trailer(self, trailer: memoryview, key: bytes, page: memoryview) -> None:
        """Writes the trailer of a page into TRAILER_BYTES of zeros."""
        digest = self._digest(page)
        _FIELDS.pack_into(
            trailer, 0, _MAGIC, FORMAT_VERSION, self.namespace, key, len(page), digest
        )

    def problem(self, trailer: memoryview, key: bytes, page: memoryview) -> str | None:
        """Why these bytes are not the page of the key, or None."""
        expected = bytearray(TRAILER_BYTES)
        self.write_trailer(memoryview(expected), key, page)
        if trailer == expected:
            return None
        several = zip(
            _NAMES, _FIELDS.unpack_from(trailer), _FIELDS.unpack_from(expected), strict=True
        )
        for name, found, wanted in several:
            if found != wanted:
                return f"its {name} is {_text(found)}, not {_text(wanted)}"
        return "its trailer is damaged"


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
