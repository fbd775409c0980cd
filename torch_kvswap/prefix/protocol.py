"""The messages between the engines and a server of host pages (docs/serve.md).

A message is HEAD, then numbers, int64, and then bytes, which are keys, JSON or text. What a
request is its Op says, and what an answer is its Status. All numbers are in the byte order of the
machine. Keys are the counts of the groups, the last numbers of a message, and all keys in a row.

Answers come in the order of the requests, and an engine may send more before it has read them. A
PrefixCache waits for each. It says HELLO, and is one session. An engine whose scheduler and workers
are processes of their own has a session for each: a worker says HELLO, and READY when it has pinned
the memory; the scheduler says MEET, which is answered when all workers are ready, and has all
pages. After a server was lost the workers say MEET too, before they free the old memory: the
scheduler comes when no job uses it any more.

An engine holds pages that it reads, under a number that it chooses, until END. It reserves pages
for the keys that it stores, which are found after END; or it borrows pages before it knows the
keys, and gives them back, with the keys of the blocks that were copied.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum

from torch_kvswap.prefix.hashing import KEY_BYTES

VERSION = 20
HEAD = struct.Struct("=IBI")  # number of bytes that follow; Op or Status; number of numbers
MAX_BYTES = 64 << 20  # of a message, which has two million keys at most
READ_BYTES = 1 << 16  # in one call
# A server first sends it, with VERSION, its generation, the number of the session, and its deadline
# in microseconds.
MAGIC = b"KVSWSERV"
# Seconds within which each end must have said who it is; tests set it, where it is used.
JOINING = 10.0


class Op(IntEnum):
    """Requests, with their numbers."""

    # The answer of both: `resets` of the index, pages of the first group.
    HELLO = 1  # JSON, and open_lock(). Behind the answer come the PoolHandles
    MEET = 2  # JSON. The answer comes when the others have come
    # Whether it was counted before, number, keys. Holds what is `ready`, unless the number is 0.
    # The answer: a Lookup without its lease.
    LOOKUP = 3
    # Number, keys. Holds all keys, or none; this is a use. The answer: their pages, or nothing.
    LOAD = 4
    # Number, keys. Holds the keys that are ready, under this number. The answer: for each key its
    # page, or its KeyState. Only for a server with one group.
    HOLD = 5
    # Number, lease, keys. Lends a page for each key that has none. These are pending until END says
    # with this number how their store has ended. A lease that is not 0 is the number under which
    # the pages of all keys are held, too. The answer: how many pages are lent, and for each key its
    # page, or KeyState.ABSENT if none is lent; nothing if there is not enough room; or it is
    # refused.
    RESERVE = 6
    BORROW = 7  # how many pages of the first group at most. The answer: the pages
    STATS = 8  # group. The answer: BlockStats
    RESET = 9  # the answer: no number
    # These get no answer.
    # number, Outcome, group and page of each rejected page: what has this number has ended
    END = 10
    # `resets` when the store began, borrowed pages; the key of each if they have their blocks.
    GIVE_BACK = 11
    TOUCH = 12  # keys
    ORDER = 13  # whether it is renewed, keys
    READY = 14  # the memory is pinned
    LEAVE = 15  # no job is in flight. On a new connection: another session of this process


class KeyState(IntEnum):
    """Of a key without a page to load from; an engine may ask again. A page number instead: the
    page is held for the engine.
    """

    ARRIVES = -2  # it is being stored, or read from the second tier, which may still be asked
    ABSENT = -3  # neither


class Outcome(IntEnum):
    """How a load or a store has ended."""

    FAILED = 0  # nobody finds its blocks any more
    DONE = 1  # the same holds for rejected ones only
    DAMAGED = 2  # the same, and the rejected ones are deleted below: they have other bytes
    LOST = 3  # as FAILED, but the copy may still run: nobody gets its pages before LEAVE


class Status(IntEnum):
    """Answers."""

    DONE = 0
    REFUSED = 1  # the text of a ValueError
    RESET = 2  # no answer: another engine has reset the server


class ProtocolError(ConnectionError):
    """The bytes received are not a message of this protocol."""


def pack(kind: int, numbers: Iterable[int] = (), data: bytes = b"") -> bytes:
    """A message."""
    packed = array("q", numbers)
    head = HEAD.pack(8 * len(packed) + len(data), kind, len(packed))
    return b"".join((head, packed, data))


def pack_keys(kind: int, numbers: Sequence[int], of_groups: Sequence[bytes]) -> bytes:
    """A message that ends with the keys of each group."""
    counts = [len(keys) // KEY_BYTES for keys in of_groups]
    return pack(kind, [*numbers, *counts], b"".join(of_groups))


def unpack_keys(counts: Sequence[int], keys: bytes) -> list[bytes]:
    """The keys of each group. Raises ProtocolError if there are not as many."""
    if min(counts, default=0) < 0 or sum(counts) * KEY_BYTES != len(keys):
        raise ProtocolError(f"{len(keys)} bytes are no {counts} keys")
    of_groups, at = [], 0
    for count in counts:
        of_groups.append(keys[at : at + count * KEY_BYTES])
        at += count * KEY_BYTES
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
