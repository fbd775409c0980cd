"""The messages between the prefix cache of an engine and a server (docs/serve.md).

A message is HEAD, with the bytes that follow and a number, and then these bytes. The number of a
request is its Op, that of an answer its Status. Keys are the count of each group, int64, and then
all digests in a row. All numbers are in the byte order of the machine.

A PrefixCache says HELLO, and is one session. An engine whose scheduler and worker are two processes
is two sessions: the worker says HELLO, and READY when it has pinned the memory; the scheduler says
MEET, and has all reservations. After a server was lost the worker says MEET too, before it frees
the old memory: the scheduler comes when no job uses it any more.

A scheduler borrows pages for the blocks that it will store, publishes those that have their blocks,
and gives back the others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from torch_kvswap.prefix.hashing import DIGEST_BYTES

VERSION = 3
HEAD = struct.Struct("=IB")
MAX_BYTES = 64 << 20  # of a message: two million keys
NUMBER = struct.Struct("=q")
END = struct.Struct("=q?")  # reservation, whether it has succeeded; then rejected positions
WELCOME = struct.Struct("=8sIq")  # magic, version, generation of the server
MAGIC = b"KVSWSERV"
LOOKUP = struct.Struct("=4q")  # the fields of a Lookup
PAGE = struct.Struct(f"=q{DIGEST_BYTES}s")  # group, digest
RESERVED = struct.Struct("=qq")  # id, lease; then for each group the count, indices, pages
# Of each list of HOLD: reservation or 0, pages, and how many keys in front are there, arrive, or
# are being asked for below, or -1: all keys are held; then the pages, and if not all are held the
# indices.
HELD = struct.Struct("=3q")
MET = struct.Struct("=3q")  # session, pages, how many resets there have been


class Op(IntEnum):
    """Requests. Those that are marked so get no answer."""

    HELLO = 1
    LOOKUP = 2  # whether it is asked again; then the keys
    PREPARE_LOAD = 3  # the prefix, or -1 for all keys; then the keys
    PREPARE_STORE = 4
    PREEMPT = 5
    IS_PENDING = 6
    RELEASE = 7
    STATS = 8
    RESET = 9
    MEET = 10  # answered when the other process of the engine is there
    HOLD = 11  # how many lists of keys; then the keys of each. The answer: HELD of each
    BORROW = 12  # how many pages at most. The answer: pages
    END = 13  # no answer
    TOUCH = 14  # no answer
    ORDER = 15  # no answer: whether it is renewed; then the keys
    DELETE = 16  # no answer: pages that loads have found damaged, by PAGE
    PUBLISH = 17  # no answer: resets before the store began; borrowed pages; their digests
    GIVE_BACK = 18  # no answer: borrowed pages
    READY = 19  # no answer: the memory is pinned
    LEAVE = 20  # no answer: no job is in flight


class Status(IntEnum):
    """Answers."""

    DONE = 0
    REFUSED = 1  # the text of a ValueError
    RESET = 2  # no answer: to schedulers, another engine has reset the server


class ProtocolError(ConnectionError):
    """What came is no message of this protocol."""


def pack(number: int, *parts: bytes) -> bytes:
    """A message."""
    return b"".join((HEAD.pack(sum(map(len, parts)), number), *parts))


def pack_keys(of_groups: Sequence[bytes]) -> tuple[bytes, ...]:
    """Digests of each group, as parts of a message."""
    counts = [len(digests) // DIGEST_BYTES for digests in of_groups]
    return (struct.pack(f"={len(counts)}q", *counts), *of_groups)


def unpack_keys(body: bytes, num_groups: int) -> list[bytes]:
    """The digests of each group. Raises ProtocolError if these are no such keys."""
    at = num_groups * NUMBER.size
    if len(body) < at:
        raise ProtocolError(f"{len(body)} bytes are no keys of {num_groups} groups")
    counts = struct.unpack_from(f"={num_groups}q", body)
    if min(counts) < 0 or sum(counts) * DIGEST_BYTES != len(body) - at:
        raise ProtocolError(f"{len(body) - at} bytes are no {counts} digests")
    of_groups = []
    for count in counts:
        of_groups.append(body[at : at + count * DIGEST_BYTES])
        at += count * DIGEST_BYTES
    return of_groups


def next_message(received: bytearray) -> tuple[int, bytes] | None:
    """Takes the first message of what was received; None if it is not complete."""
    if len(received) < HEAD.size:
        return None
    length, number = HEAD.unpack_from(received)
    if length > MAX_BYTES:
        raise ProtocolError(f"a message of {length} bytes; {MAX_BYTES} is the most")
    end = HEAD.size + length
    if len(received) < end:
        return None
    body = bytes(memoryview(received)[HEAD.size : end])
    del received[:end]
    return number, body
