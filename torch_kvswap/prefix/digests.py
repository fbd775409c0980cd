"""Keys of blocks as the native side has them: digests, one after another."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from io import BytesIO
from itertools import islice

from torch_kvswap.prefix.hashing import DIGEST_BYTES, key_digest

Keys = bytes | bytearray | memoryview | Sequence[Hashable]

# Keys that are read or copied in one call of Python's C code. Other threads may run in between.
SLICE = 1024
_SLICE_BYTES = SLICE * DIGEST_BYTES


def read_digests(name: str, keys: Keys) -> bytes:
    """The digests of the keys, one after another.

    Args:
        name (str): the argument, as the caller wrote it.
        keys: bytes of digests, or a sequence of keys.

    Raises:
        TypeError: it is neither, or a key has no digest.
        ValueError: the bytes are no whole number of digests.
    """
    if isinstance(keys, bytearray | memoryview):
        view = memoryview(keys)
        if view.itemsize != 1 or not view.c_contiguous:
            raise TypeError(
                f"{name} is a memoryview of items of {view.itemsize} bytes, shape {view.shape}; "
                "pass contiguous bytes of digests"
            )
        keys = join_digests([view.cast("B")] if view.nbytes else [])
    if isinstance(keys, bytes):
        if len(keys) % DIGEST_BYTES:
            raise ValueError(
                f"{name} has {len(keys)} bytes, but a digest has {DIGEST_BYTES}; "
                "pass digests one after another, or a list of keys"
            )
        return keys
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise TypeError(f"{name} is a {type(keys).__name__}; pass bytes of digests or a list")
    try:
        if len(keys) <= SLICE:
            return _digests_of(keys)
        every = iter(keys)
        return _write(map(_digests_of, iter(lambda: list(islice(every, SLICE)), [])))
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error


def join_digests(parts: Sequence[bytes | memoryview]) -> bytes:
    """`b"".join(parts)`, in slices if that is long. A view must have items of one byte."""
    if sum(map(len, parts)) <= _SLICE_BYTES:
        return b"".join(parts)
    return _write(
        view[start : start + _SLICE_BYTES]
        for view in [memoryview(part) for part in parts]
        for start in range(0, len(view), _SLICE_BYTES)
    )


def cut_digests(
    digests: bytes, counts: array[int], needed: Sequence[range]
) -> tuple[bytes, array[int]]:
    """Those of the digests that are needed, and how many they are in each group."""
    parts, start, view = [], 0, memoryview(digests)
    for group, (count, blocks) in enumerate(zip(counts, needed, strict=True)):
        if not 0 <= blocks.stop <= count:
            raise ValueError(
                f"the prefix takes {blocks.stop} blocks of group {group}, which has {count} keys"
            )
        first, end = start + blocks.start, start + blocks.stop
        parts.append(view[first * DIGEST_BYTES : end * DIGEST_BYTES])
        start += count
    return join_digests(parts), array("q", map(len, needed))


def _digests_of(keys: Sequence[Hashable]) -> bytes:
    try:
        if set(map(len, keys)) == {DIGEST_BYTES}:  # type: ignore[arg-type]
            joined = b"".join(keys)  # type: ignore[arg-type]
            if len(joined) == len(keys) * DIGEST_BYTES:  # not so for 32 items of several bytes
                return joined
    except (TypeError, BufferError):
        pass  # not all are bytes
    return b"".join(map(key_digest, keys))


def _write(parts: Iterable[bytes | memoryview]) -> bytes:
    whole = BytesIO()
    for part in parts:
        whole.write(part)
    return whole.getvalue()
