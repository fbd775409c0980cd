"""The messages between the prefix cache of an engine and a server (docs/serve.md).

A message is HEAD, then numbers, int64, and then bytes, which are digests, JSON or text. What a
request is its Op says, and what an answer is its Status. All numbers are in the byte order of the
machine. Keys are the counts of the groups, the last numbers of a message, and all digests in a row.

A PrefixCache says HELLO, and is one session. An engine whose scheduler and workers are processes of
their own has a session for each: a worker says HELLO, and READY when it has pinned the memory; the
scheduler says MEET, which is answered when all workers are ready, and has all reservations. After a
server was lost the workers say MEET too, before they free the old memory: the scheduler comes when
no job uses it any more.

A scheduler borrows pages for the blocks that it will store, publishes those that have their blocks,
and gives back the others.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum

from torch_kvswap.prefix.hashing import DIGEST_BYTES

VERSION = 7
HEAD = struct.Struct("=IBI")  # bytes that follow; Op or Status; how many numbers
MAX_BYTES = 64 << 20  # of a message: two million keys
READ_BYTES = 1 << 16  # at once
MAGIC = b"KVSWSERV"  # a server begins with it, its version and its generation


class Op(IntEnum):
    """Requests, with their numbers. Those that are marked so get no answer."""

    # JSON, and open_lock(). The answer: session, `resets` of the index; then come the PoolHandles
    HELLO = 1
    LOOKUP = 2  # whether it is asked again, keys. The answer: a Lookup, `resets` of the index
    # The answers of these three: reservation, lease, of each group the number of pages, then of
    # each the indices of the keys, then of each the pages; nothing if nothing is reserved.
    PREPARE_LOAD = 3  # prefix, or -1 for all keys; keys
    PREPARE_STORE = 4  # `resets` when the blocks were computed, or -1 for now; keys
    PREEMPT = 5  # keys
    IS_PENDING = 6  # keys. The answer: 0 or 1
    RELEASE = 7  # lease. The answer: 0 or 1
    STATS = 8  # group. The answer: BlockStats
    RESET = 9  # the answer: `resets` of the index
    MEET = 10  # JSON. The answer, when the others have come: session, pages, resets so far
    # Several lists of keys. The answer for each: reservation or 0; pages; how many keys in front
    # are there, arrive, or are being asked for below, or -1: all are held; then the pages, and if
    # not all are held the indices of their keys.
    HOLD = 11
    BORROW = 12  # how many pages at most. The answer: pages
    END = 13  # no answer: reservation, whether it has succeeded, rejected positions
    TOUCH = 14  # no answer: keys
    ORDER = 15  # no answer: whether it is renewed, keys
    DELETE = 16  # no answer: groups of pages that loads have found damaged, their keys one by one
    PUBLISH = 17  # no answer: resets before the store began, borrowed pages; digests of each
    GIVE_BACK = 18  # no answer: borrowed pages
    READY = 19  # no answer: the memory is pinned
    # No answer: no job is in flight. On a new connection: a session of this process, and the
    # generation of its server.
    LEAVE = 20


class Status(IntEnum):
    """Answers."""

    DONE = 0
    REFUSED = 1  # the text of a ValueError
    RESET = 2  # no answer: to schedulers, another engine has reset the server


class ProtocolError(ConnectionError):
    """What came is no message of this protocol."""


def pack(kind: int, numbers: Iterable[int] = (), data: bytes = b"") -> bytes:
    """A message."""
    packed = array("q", numbers)
    head = HEAD.pack(8 * len(packed) + len(data), kind, len(packed))
    return b"".join((head, packed, data))


def pack_keys(kind: int, numbers: Sequence[int], of_groups: Sequence[bytes]) -> bytes:
    """A message that ends with the digests of each group."""
    counts = [len(digests) // DIGEST_BYTES for digests in of_groups]
    return pack(kind, [*numbers, *counts], b"".join(of_groups))


def split_keys(counts: Sequence[int], digests: bytes) -> list[bytes]:
    """The digests of each group. Raises ProtocolError if there are not as many."""
    if min(counts, default=0) < 0 or sum(counts) * DIGEST_BYTES != len(digests):
        raise ProtocolError(f"{len(digests)} bytes are no {counts} digests")
    of_groups, at = [], 0
    for count in counts:
        of_groups.append(digests[at : at + count * DIGEST_BYTES])
        at += count * DIGEST_BYTES
    return of_groups


def next_message(received: bytearray) -> tuple[int, array[int], bytes] | None:
    """Takes the first message of what was received: its kind, numbers and other bytes.

    None if it is not complete.
    """
    if len(received) < HEAD.size:
        return None
    length, kind, count = HEAD.unpack_from(received)
    if length > MAX_BYTES or 8 * count > length:
        raise ProtocolError(f"a message of {length} bytes with {count} numbers")
    end = HEAD.size + length
    if len(received) < end:
        return None
    at = HEAD.size + 8 * count
    numbers = array("q", bytes(received[HEAD.size : at]))
    data = bytes(memoryview(received)[at:end])
    del received[:end]
    return kind, numbers, data
