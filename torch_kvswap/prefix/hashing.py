"""Keys of blocks: what decides the bytes of a block, hashed with SHA-256.

A key is a digest of DIGEST_BYTES. That of a block of a prompt is chained: it covers all tokens up
to the end of the block, and who may share them. Every field is written with its kind and length in
front, so that no two different lists of fields give the same bytes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from itertools import islice
from typing import SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_kvswap._native import abi
from torch_kvswap._native.arguments import UINT64_MAX, read_int

DIGEST_BYTES = abi.DIGEST_BYTES
# The first byte of what is hashed, so that no digest of one kind is ever one of another.
_ROOT, _BLOCK, _KEY = b"\x01", b"\x02", b"\x03"
_BLOCK_HEAD = struct.Struct("<II")  # tokens; multi_modal_items that begin in the block
_ITEM_HEAD = struct.Struct("<IQ")  # first token in the block; tokens
_UINT32_MAX = 2**32 - 1
_TOKEN_SLICE = (
    1 << 14
)  # tokens that are read in one call of Python's C code: others may run in between

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


def encode(value: Hashable) -> bytes:
    """The value with its kind and length in front: different values, or kinds, differ. Raises
    TypeError for what is no None, bool, int, float, str, bytes, or tuple of those."""
    if isinstance(value, tuple):
        kind, content = b"t", b"".join(map(encode, value))
    elif isinstance(value, bytes):
        kind, content = b"b", value
    elif isinstance(value, str):
        kind, content = b"s", value.encode("utf-8", "surrogatepass")
    elif value is None or isinstance(value, bool):
        kind, content = b"c", str(value).encode()
    elif isinstance(value, int):
        kind, content = b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    elif isinstance(value, float):
        kind, content = b"f", struct.pack("<d", value)
    else:
        raise TypeError(
            f"a key, or a part of one, is of type {type(value).__name__}; "
            "make it of None, bool, int, float, str, bytes and tuples of them"
        )
    return kind + len(content).to_bytes(8, "little") + content


def key_digest(key: Hashable) -> bytes:
    """The digest of any key; DIGEST_BYTES of bytes are one already."""
    if type(key) is bytes and len(key) == DIGEST_BYTES:
        return key
    return sha256(_KEY + encode(key)).digest()


def reusable_blocks(num_tokens: int, block_tokens: int) -> int:
    """How many blocks of a prompt may come from a cache: not the one with its last token, which has
    to be computed, for the token that follows it."""
    return max(num_tokens - 1, 0) // block_tokens


@dataclass(frozen=True)
class MultiModalItem:
    """What placeholder tokens stand for, such as an image.

    Args:
        first_token (int), num_tokens (int): where they are in the prompt.
        key (bytes): the hash of its content.

    Raises:
        TypeError, ValueError: an argument has a wrong type, or is negative or too large.
    """

    first_token: int
    num_tokens: int
    key: bytes

    def __post_init__(self) -> None:
        read_int("first_token", self.first_token)
        read_int("num_tokens", self.num_tokens, 0, UINT64_MAX)
        if not isinstance(self.key, bytes):
            raise TypeError(f"key is a {type(self.key).__name__}; it must be bytes")


class PrefixHasher:
    """Makes the keys of prompts that may share blocks: equal keys are equal tokens, from the first
    one on, under equal settings, and nothing else.

    Any thread may call.

    Args:
        model (str): with its revision, if it can change.
        dtype (str): of the cached values.
        block_tokens (int): tokens per block.
        adapter: LoRA or such; None for none.
        salt (str or bytes): of a tenant. Prompts with different salts never share a block; None is
            for what all may share.
        group (int): of layers, where a model has several.
        extra: what else decides the bytes of a block.

    Raises:
        TypeError: an argument has a wrong type, see encode().
        ValueError: block_tokens is below 1, or a number is too large.
    """

    def __init__(
        self,
        model: str,
        dtype: str,
        block_tokens: int,
        *,
        adapter: Hashable = None,
        salt: str | bytes | None = None,
        group: int = 0,
        extra: Hashable = None,
    ) -> None:
        self.block_tokens = int(read_int("block_tokens", block_tokens, 1, _UINT32_MAX))
        group = int(read_int("group", group))
        for name, value in (("model", model), ("dtype", dtype)):
            if not isinstance(value, str):
                raise TypeError(f"{name} is a {type(value).__name__}; it must be a str")
        if not isinstance(salt, str | bytes | None):
            raise TypeError(f"salt is a {type(salt).__name__}; it must be a str, bytes or None")
        for name, part in (("adapter", adapter), ("extra", extra)):
            try:
                encode(part)
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from error
        fields = ("torch_kvswap", 1, model, dtype, self.block_tokens, adapter, salt, group, extra)
        self._root = sha256(_ROOT + encode(fields)).digest()

    def keys(self, tokens: Tokens, multi_modal_items: Sequence[MultiModalItem] = ()) -> bytes:
        """The digests of all full blocks, one after another: what can be stored.

        Raises:
            TypeError: tokens are no integers, or no sequence; an item is no
                MultiModalItem.
            IndexError: a token is not in 0 to 2**32 - 1.
            ValueError: an item begins outside of the tokens, or the tokens have several
                dimensions.
        """
        content = _token_bytes(tokens)
        return self._digests(content, multi_modal_items, len(content) // 4 // self.block_tokens)

    def lookup_keys(
        self, tokens: Tokens, multi_modal_items: Sequence[MultiModalItem] = ()
    ) -> bytes:
        """keys() without the block that has the last token: what a prompt can reuse, and so what it
        looks up. A prompt of n tokens gets n - 1 of them from a cache at most."""
        content = _token_bytes(tokens)
        return self._digests(
            content, multi_modal_items, reusable_blocks(len(content) // 4, self.block_tokens)
        )

    def partial_key(
        self, tokens: Tokens, multi_modal_items: Sequence[MultiModalItem] = ()
    ) -> bytes:
        """The digest of the last block, which is part full: of a request that is preempted. Its
        number of tokens is in it, so it is no prefix of a full one. Empty when it is full."""
        content = _token_bytes(tokens)
        num_tokens = len(content) // 4
        full, blocks = num_tokens // self.block_tokens, -(-num_tokens // self.block_tokens)
        return self._digests(content, multi_modal_items, blocks)[full * DIGEST_BYTES :]

    def _digests(
        self, content: bytes, multi_modal_items: Sequence[MultiModalItem], blocks: int
    ) -> bytes:
        """Of the first blocks. content: the tokens, as 32-bit words."""
        of_block = (
            self._items_of_blocks(multi_modal_items, len(content) // 4)
            if multi_modal_items != ()
            else {}
        )
        size = self.block_tokens * 4
        parent, digests = self._root, []
        head = _BLOCK + _BLOCK_HEAD.pack(self.block_tokens, 0)
        for block in range(blocks):
            part = content[block * size : (block + 1) * size]
            if block in of_block or len(part) < size:
                its = of_block.get(block, [])
                start = _BLOCK + _BLOCK_HEAD.pack(len(part) // 4, len(its))
                parent = sha256(b"".join((start, parent, part, *its))).digest()
            else:
                parent = sha256(head + parent + part).digest()
            digests.append(parent)
        return b"".join(digests)

    def _items_of_blocks(
        self, multi_modal_items: Sequence[MultiModalItem], num_tokens: int
    ) -> dict[int, list[bytes]]:
        """For each block what begins in it. Later blocks have it from their parent."""
        of_block: dict[int, list[bytes]] = {}
        if not isinstance(multi_modal_items, Sequence):
            raise TypeError(
                f"multi_modal_items is a {type(multi_modal_items).__name__}; "
                "pass a list of MultiModalItem"
            )
        for place, item in enumerate(multi_modal_items):
            if not isinstance(item, MultiModalItem):
                raise TypeError(
                    f"multi_modal_items[{place}] is a {type(item).__name__}; pass a MultiModalItem"
                )
        for item in sorted(
            multi_modal_items, key=lambda its: (its.first_token, its.num_tokens, its.key)
        ):
            if not 0 <= item.first_token < num_tokens:
                raise ValueError(
                    f"an item begins at token {item.first_token} of a prompt of {num_tokens}"
                )
            block, first = divmod(item.first_token, self.block_tokens)
            head = _ITEM_HEAD.pack(first, item.num_tokens)
            of_block.setdefault(block, []).append(head + encode(item.key))
        return of_block


def _token_bytes(tokens: Tokens) -> bytes:
    """The tokens as 32-bit words."""
    if not isinstance(tokens, Sequence | np.ndarray) and hasattr(tokens, "__array__"):
        tokens = np.asarray(tokens)  # a tensor
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1:
            raise ValueError(f"tokens has shape {tokens.shape}; it must have one dimension")
        if tokens.size and tokens.dtype.kind not in "iu":
            raise TypeError(f"tokens is an array of {tokens.dtype}; tokens must be integers")
        if not tokens.size or (int(tokens.min()) >= 0 and int(tokens.max()) <= _UINT32_MAX):
            return tokens.astype("<u4").tobytes()
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray | memoryview):
        raise TypeError(f"tokens is a {type(tokens).__name__}; pass a list or an array of integers")
    try:
        if len(tokens) <= _TOKEN_SLICE:
            return array("I", tokens).tobytes()
        words, every = array("I"), iter(tokens)
        while some := list(islice(every, _TOKEN_SLICE)):
            words.extend(array("I", some))
        return words.tobytes()
    except (TypeError, OverflowError):
        for place, token in enumerate(tokens):
            if not isinstance(token, SupportsIndex):
                kind = type(token).__name__
                raise TypeError(f"tokens[{place}] is a {kind}; a token is an integer") from None
            if not 0 <= token < 2**32:
                raise IndexError(
                    f"tokens[{place}] is {token}; a token is 0 to 4294967295"
                ) from None
        raise


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
