"""Keys of blocks as the native side has them: digests, one after another."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from torch_kvswap.prefix_hash import DIGEST_BYTES, key_digest

Keys = bytes | bytearray | memoryview | Sequence[Hashable]


def read_digests(name: str, keys: Keys) -> bytes:
    """The digests of the keys, one after another. Raises ValueError for bytes that are none,
    TypeError for a key that has no digest."""
    if isinstance(keys, bytes | bytearray | memoryview):
        keys = bytes(keys)
        if len(keys) % DIGEST_BYTES:
            raise ValueError(
                f"{name} has {len(keys)} bytes, but a digest has {DIGEST_BYTES}; "
                "pass digests one after another, or a list of keys"
            )
        return keys
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise TypeError(f"{name} is a {type(keys).__name__}; pass bytes of digests or a list")
    try:
        if set(map(len, keys)) == {DIGEST_BYTES}:  # type: ignore[arg-type]
            return b"".join(keys)  # type: ignore[arg-type]
    except TypeError:
        pass  # not all are bytes
    return b"".join(map(key_digest, keys))


def cut_digests(
    digests: bytes, counts: array[int], needed: Sequence[range]
) -> tuple[bytes, array[int]]:
    """Those of the digests that are needed, and how many they are in each group."""
    parts, start = [], 0
    for group, (count, blocks) in enumerate(zip(counts, needed, strict=True)):
        if not 0 <= blocks.stop <= count:
            raise ValueError(
                f"the prefix takes {blocks.stop} blocks of group {group}, which has {count} keys"
            )
        first, end = start + blocks.start, start + blocks.stop
        parts.append(digests[first * DIGEST_BYTES : end * DIGEST_BYTES])
        start += count
    return b"".join(parts), array("q", map(len, needed))
