"""Keys of blocks: what decides the bytes of a block, hashed with SHA-256.

A key is a digest of DIGEST_BYTES. That of a block of a prompt is chained: it covers all tokens up
to the end of the block, and who may share them. Every field is written with its kind and length in
front, so that no two different lists of fields give the same bytes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32
# The first byte of what is hashed, so that no digest of one kind is ever one of another.
_ROOT, _BLOCK, _KEY = b"\x01", b"\x02", b"\x03"
_BLOCK_HEAD = struct.Struct("<II")  # tokens; media that begin in the block
_MEDIUM_HEAD = struct.Struct("<IQ")  # first token in the block; tokens


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
class Medium:
    """What placeholder tokens stand for, such as an image. key: the hash of its content."""

    first_token: int
    num_tokens: int
    key: bytes


class PrefixHasher:
    """Makes the keys of prompts that may share blocks: equal keys are equal tokens, from the first
    one on, under equal settings, and nothing else.

    model: with its revision, if it can change. dtype: of the cache. block_tokens: in a block.
    adapter: LoRA or such; None for none. salt: of a tenant, None for what all may share; those
    with different salts never share a block. group: of layers, where a model has several. extra:
    what else decides the bytes of a block. Raises TypeError for what `encode` does not take,
    ValueError for block_tokens below 1. Any thread may call.
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
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; a block has at least 1 token")
        self.block_tokens = block_tokens
        fields = ("torch_kvswap", 1, model, dtype, block_tokens, adapter, salt, group, extra)
        self._root = sha256(_ROOT + encode(fields)).digest()

    def keys(
        self, tokens: Sequence[int] | npt.NDArray[np.integer], media: Sequence[Medium] = ()
    ) -> bytes:
        """The digests of all full blocks, one after another: what can be stored.

        Raises IndexError for a token that is not in 0 to 2**32 - 1, ValueError for a medium that
        begins outside of the tokens.
        """
        return self._digests(tokens, media, len(tokens) // self.block_tokens)

    def lookup_keys(
        self, tokens: Sequence[int] | npt.NDArray[np.integer], media: Sequence[Medium] = ()
    ) -> bytes:
        """keys() without the block that has the last token: what a prompt can reuse, and so what it
        looks up. A prompt of n tokens gets n - 1 of them from a cache at most."""
        return self._digests(tokens, media, reusable_blocks(len(tokens), self.block_tokens))

    def partial_key(
        self, tokens: Sequence[int] | npt.NDArray[np.integer], media: Sequence[Medium] = ()
    ) -> bytes:
        """The digest of the last block, which is part full: of a request that is preempted. Its
        number of tokens is in it, so it is no prefix of a full one. Empty when it is full."""
        full, blocks = len(tokens) // self.block_tokens, -(-len(tokens) // self.block_tokens)
        return self._digests(tokens, media, blocks)[full * DIGEST_BYTES :]

    def _digests(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        media: Sequence[Medium],
        blocks: int,
    ) -> bytes:
        of_block = self._media_of_blocks(media, len(tokens)) if media else {}
        content, size = _token_bytes(tokens), self.block_tokens * 4
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

    def _media_of_blocks(self, media: Sequence[Medium], num_tokens: int) -> dict[int, list[bytes]]:
        """For each block what begins in it. Later blocks have it from their parent."""
        of_block: dict[int, list[bytes]] = {}
        for medium in sorted(media, key=lambda its: (its.first_token, its.num_tokens, its.key)):
            if not 0 <= medium.first_token < num_tokens:
                raise ValueError(
                    f"a medium begins at token {medium.first_token} of a prompt of {num_tokens}"
                )
            block, first = divmod(medium.first_token, self.block_tokens)
            head = _MEDIUM_HEAD.pack(first, medium.num_tokens)
            of_block.setdefault(block, []).append(head + encode(medium.key))
        return of_block


def _token_bytes(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    try:
        if isinstance(tokens, np.ndarray):
            if tokens.ndim == 1 and tokens.dtype.kind in "iu" and _fit(tokens):
                return tokens.astype("<u4").tobytes()
            tokens = tokens.tolist()
        return array("I", tokens).tobytes()
    except OverflowError:
        place, token = next(
            (place, token) for place, token in enumerate(tokens) if not 0 <= token < 2**32
        )
        raise IndexError(f"tokens[{place}] is {token}; a token is 0 to 4294967295") from None


def _fit(tokens: npt.NDArray[np.integer]) -> bool:
    return not tokens.size or (int(tokens.min()) >= 0 and int(tokens.max()) < 2**32)
