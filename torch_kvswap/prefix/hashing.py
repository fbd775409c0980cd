"""Keys of blocks: SHA-256 hashes of everything that decides the bytes of a block.

A key has KEY_BYTES bytes. The key of a prompt's block is chained: it covers all
tokens up to the end of the block, and the settings under which blocks may be shared. Every field is
written with its kind and length in front, so that different lists of fields never give the same
bytes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from torch_kvswap._native.arguments import (
    CONVERSION_ERRORS,
    UINT32_MAX,
    count_of,
    kind_of,
    read_int,
)
from torch_kvswap._native.loader import native

KEY_BYTES: int = native.KEY_BYTES
# First byte of the hashed bytes, so that hashes of different kinds never collide.
_ROOT, _BLOCK, _KEY = b"\x01", b"\x02", b"\x03"

_TokenArray: TypeAlias = npt.NDArray[np.integer]
Tokens: TypeAlias = Sequence[int] | _TokenArray


def encode(value: Hashable) -> bytes:
    """Encodes a value with its kind and length in front, so that different values differ.

    Raises:
        TypeError: the value is not None, a bool, int, float, str, bytes, or a tuple of those.
    """
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
            f"{kind_of(value)} cannot be part of a key; use None, bool, int, float, str, bytes and "
            "tuples of them"
        )
    return kind + len(content).to_bytes(8, "little") + content


def hash_key(key: Hashable) -> bytes:
    """The KEY_BYTES that stand for any key of a caller. Bytes of this length stand for themselves.

    Raises:
        TypeError: the key is not None, a bool, int, float, str, bytes or a tuple of these.
    """
    if type(key) is bytes and len(key) == KEY_BYTES:
        return key
    return sha256(_KEY + encode(key)).digest()


@dataclass(frozen=True, slots=True)
class PrefixKeys(Sequence[bytes]):
    """Keys of a prompt's blocks from a PrefixHasher: a sequence of bytes.

    Immutable. A slice of adjacent keys is PrefixKeys too.

    Attributes:
        joined (bytes): all keys in a row, KEY_BYTES each.
        block_tokens (int): tokens per key.
    """

    joined: bytes
    block_tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.joined, bytes):
            raise TypeError(f"joined is {kind_of(self.joined)}; pass bytes, keys in a row")
        _check_length("joined", self.joined)

    def __len__(self) -> int:
        return len(self.joined) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> PrefixKeys: ...

    def __getitem__(self, index: int | slice) -> bytes | PrefixKeys:
        try:
            places = range(len(self))[index]
        except IndexError:
            raise IndexError(f"keys[{index}]; there are {count_of(len(self), 'key')}") from None
        if isinstance(places, int):
            return self.joined[places * KEY_BYTES : (places + 1) * KEY_BYTES]
        if places.step != 1:
            raise ValueError(f"a slice of keys has the step {places.step}; take adjacent keys")
        part = self.joined[places.start * KEY_BYTES : places.stop * KEY_BYTES]
        return PrefixKeys(part, self.block_tokens)


class PrefixHasher:
    """Computes the keys of prompts' blocks.

    Two blocks have equal keys if and only if their prompts have equal tokens up to the end of the
    block, under equal settings. Placeholder tokens do not tell one image from another: pass words
    of the image's hash in their places. Immutable, so any thread may call any method.

    Args:
        model (str): the model; add its revision if it can change.
        dtype (str): dtype of the cached values, e.g. "bfloat16".
        block_tokens (int): tokens per key; for a PrefixCache, the tokens of all blocks of a page.
        adapter (Hashable): the LoRA adapter; None for none.
        salt (str | bytes | None): separates tenants: prompts with different salts never share a
            block.
        group (int): the group of layers, for models with several.
        extra (Hashable): anything else that decides the bytes of a block.

    Raises:
        TypeError: an argument has a wrong type, or a Hashable one is not None, a bool, int, float,
            str, bytes or a tuple of these.
        ValueError: a number is out of range, or a name is empty.
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
        self.block_tokens = int(read_int("block_tokens", block_tokens, 1, UINT32_MAX))
        group = int(read_int("group", group))
        if not isinstance(model, str):
            raise TypeError(f"model is {kind_of(model)}; it must be a str")
        if not isinstance(dtype, str):
            raise TypeError(f"dtype is {dtype!r}; pass its name, such as 'bfloat16'")
        if not model or not dtype:
            raise ValueError(
                f"model is {model!r}, dtype {dtype!r}; name both: blocks of different models or "
                "types must not have equal keys"
            )
        if not isinstance(salt, str | bytes | None):
            raise TypeError(f"salt is {kind_of(salt)}; it must be a str, bytes or None")
        for name, part in (("adapter", adapter), ("extra", extra)):
            try:
                encode(part)
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from error
        fields = ("torch_kvswap", 1, model, dtype, self.block_tokens, adapter, salt, group, extra)
        self._root = sha256(_ROOT + encode(fields)).digest()

    def __repr__(self) -> str:
        # The hash is equal for equal settings only, and does not give away the salt.
        return f"PrefixHasher(block_tokens={self.block_tokens}, settings={self._root[:4].hex()})"

    def keys(self, tokens: Tokens) -> PrefixKeys:
        """The keys of all full blocks of a prompt: what can be stored.

        Args:
            tokens: 1-D sequence, numpy array or CPU tensor of token ids.

        Raises:
            TypeError: tokens is not a sequence of integers.
            ValueError: a token is not in 0 to 2**32 - 1, or tokens is not 1-D.
        """
        return self._first_keys(tokens, 0)

    def lookup_keys(self, tokens: Tokens) -> PrefixKeys:
        """The keys of the blocks that a prompt can reuse: what to look up.

        As keys(), but without the block of the last token, which must be computed to predict the
        next one.
        """
        return self._first_keys(tokens, -1)

    def request_keys(self, tokens: Tokens) -> PrefixKeys:
        """The keys of all blocks of a request, including a partly filled last one.

        For a request that is preempted. As keys(), with one more for a partly filled block. It
        covers the number of tokens, so it differs from the key of any full block.
        """
        return self._first_keys(tokens, self.block_tokens - 1)

    def _first_keys(self, tokens: Tokens, more: int) -> PrefixKeys:
        """The keys of as many blocks as are full with this many more tokens; see keys()."""
        content = _token_bytes(_token_sequence(tokens))
        size = 4 * self.block_tokens
        blocks = max(len(content) + 4 * more, 0) // size
        keys, parent = [], self._root
        for begin in range(0, blocks * size, size):
            block = content[begin : begin + size]
            head = _BLOCK + (len(block) // 4).to_bytes(8, "little")
            parent = sha256(head + parent + block).digest()
            keys.append(parent)
        return PrefixKeys(b"".join(keys), self.block_tokens)


def _token_sequence(tokens: Tokens) -> Sequence[int] | _TokenArray:
    """The tokens as something that can be sliced."""
    if not isinstance(tokens, Sequence | np.ndarray) and hasattr(tokens, "__array__"):
        try:
            tokens = np.asarray(tokens)  # a tensor
        except CONVERSION_ERRORS as error:  # on a GPU, or of a type that numpy lacks
            raise TypeError(f"tokens cannot be read as an array of integers: {error}") from error
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1:
            raise ValueError(f"tokens has shape {tokens.shape}; it must have one dimension")
        if tokens.size and tokens.dtype.kind not in "iu":
            raise TypeError(f"tokens is an array of {tokens.dtype}; tokens must be integers")
        return tokens
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray | memoryview):
        raise TypeError(f"tokens is {kind_of(tokens)}; pass a list or an array of integers")
    return tokens


def _token_bytes(tokens: Sequence[int] | _TokenArray) -> bytes:
    """The tokens as 32-bit words."""
    if isinstance(tokens, np.ndarray):
        if not tokens.size or (int(tokens.min()) >= 0 and int(tokens.max()) <= UINT32_MAX):
            return tokens.astype("<u4").tobytes()
        tokens = tokens.tolist()
    try:
        return array("I", tokens).tobytes()
    except CONVERSION_ERRORS:
        every = enumerate(tokens)
        read = [read_int(f"tokens[{place}]", token, 0, UINT32_MAX) for place, token in every]
        return array("I", read).tobytes()


Keys = PrefixKeys | bytes | Sequence[Hashable]


def split_keys(keys: bytes) -> list[bytes]:
    """Keys that lie in a row, one by one."""
    places = range(0, len(keys), KEY_BYTES)
    return [keys[place : place + KEY_BYTES] for place in places]


def _check_length(name: str, keys: bytes) -> None:
    if len(keys) % KEY_BYTES:
        raise ValueError(
            f"{name} has {len(keys)} bytes, but a key has {KEY_BYTES}; "
            "pass keys in a row, or a list of keys"
        )


def _hash_keys(name: str, keys: Keys) -> bytes:
    """What native.join_keys() does with keys that are not all KEY_BYTES long.

    Raises TypeError or ValueError that calls the argument `name`.
    """
    if isinstance(keys, bytes):
        _check_length(name, keys)
        return keys
    if isinstance(keys, str | bytearray | memoryview) or not isinstance(keys, Sequence):
        raise TypeError(
            f"{name} is {kind_of(keys)}; pass keys of a PrefixHasher, or a list of keys"
        )
    hashed = bytearray()
    for at, key in enumerate(keys):
        try:
            hashed += hash_key(key)
        except TypeError as error:
            raise TypeError(f"{name}[{at}]: {error}") from error
    return bytes(hashed)


native.set_python(hash_keys=_hash_keys, PrefixKeys=PrefixKeys)
