"""The messages between the prefix cache of an engine and a server (docs/serve.md).

A message is HEAD, with the bytes that follow and a number, and then these bytes. The number of a
request is its Op, that of an answer its Status. Keys are the count of each group, int64, and then
all digests in a row. All numbers are in the byte order of the machine.

A PrefixCache says HELLO, and is one session. An engine whose scheduler and worker are two processes
is two sessions: the worker says HELLO, and READY when it has pinned the memory; the scheduler says
MEET and has all reservations. After a server was lost the worker says MEET too, before it frees the
old memory: the scheduler comes when no job uses it any more.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from torch_kvswap.prefix.hashing import DIGEST_BYTES

VERSION = 2
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
PUBLISH = struct.Struct("=qq")  # reservation, pages; then their positions and keys
MET = struct.Struct("=qq")  # session, pages


class Op(IntEnum):
    """Requests. Those that are marked so get no answer."""

    HELLO = 1
    LOOKUP = 2
    LOOKUP_AGAIN = 3
    PREPARE_LOAD = 4  # the prefix, or -1 for all keys; then the keys
    PREPARE_STORE = 5
    PREEMPT = 6
    IS_PENDING = 7
    RELEASE = 8
    STATS = 9
    RESET = 10  # the answer: how many there have been
    MEET = 11  # answered when the other process of the engine is there
    HOLD = 12  # how many lists of keys; then the keys of each. The answer: RESET's, HELD of each
    LEASE = 13  # how many pages at most, for keys that PUBLISH will name
    END = 14  # no answer
    TOUCH = 15  # no answer
    ORDER = 16  # no answer
    ORDER_RENEWED = 17  # no answer
    DELETE = 18  # no answer: pages that loads have found damaged, by PAGE
    PUBLISH = 19  # no answer: pages of a LEASE have been filled
    READY = 20  # no answer: the memory is pinned
    LEAVE = 21  # no answer: no job is in flight


class Status(IntEnum):
    """Answers."""

    DONE = 0
    REFUSED = 1  # the text of a ValueError


class ProtocolError(Exception):
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
