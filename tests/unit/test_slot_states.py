"""The ring of slot states, compiled by itself, against a model."""

from __future__ import annotations

import ctypes
import os
import random
import shlex
import subprocess
from collections import deque
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT = 1 << 20
PROGRAM = """
#include "offload/slot_states.h"

namespace {
kvswap::SlotStates ring;
uint8_t states[kvswap::SlotStates::kCount];
}  // namespace

extern "C" {
uint8_t* start() {
  ring = {};
  ring.use(states);
  return states;
}
bool has_room(size_t count) { return ring.has_room(count); }
void take(size_t count, kvswap::SlotStates::Range* range) { *range = ring.take(count); }
size_t place(const kvswap::SlotStates::Range* range) { return ring.at(*range) - states; }
void give(const kvswap::SlotStates::Range* range) { ring.give(*range); }
}
"""


class Range(ctypes.Structure):
    _fields_ = (("before", ctypes.c_uint64), ("begin", ctypes.c_uint64), ("end", ctypes.c_uint64))


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("slot_states")
    (folder / "program.cpp").write_text(PROGRAM)
    command = [*shlex.split(os.environ.get("CXX") or "g++"), "-std=c++17", "-shared", "-fPIC"]
    command += ["-O1", "-I", str(ROOT / "csrc"), "-o", str(folder / "ring.so")]
    sources = [str(folder / "program.cpp"), str(ROOT / "csrc/offload/slot_states.cpp")]
    subprocess.run([*command, *sources], check=True)
    library = ctypes.CDLL(str(folder / "ring.so"))
    library.start.restype = ctypes.POINTER(ctypes.c_uint8)
    library.place.restype = ctypes.c_size_t
    library.has_room.restype = ctypes.c_bool
    library.has_room.argtypes = [ctypes.c_size_t]
    return library


@pytest.mark.parametrize("seed", range(4))
def test_ranges_in_use_never_overlap(ring: ctypes.CDLL, seed: int) -> None:
    rng = random.Random(seed)
    states = ctypes.cast(ring.start(), ctypes.POINTER(ctypes.c_uint8 * COUNT)).contents
    view = memoryview(states).cast("B")
    taken: deque[tuple[Range, int, int, int]] = deque()
    most = rng.choice([COUNT, COUNT // 3, 1000])
    for number in range(300):
        count = rng.randint(1, most)
        if rng.random() < 0.55 and ring.has_room(count):
            made = Range()
            ring.take(ctypes.c_size_t(count), ctypes.byref(made))
            begin = ring.place(ctypes.byref(made))
            assert begin + count <= COUNT
            assert bytes(view[begin : begin + count]) == bytes(count)
            for _, other, of_other, _ in taken:
                assert begin + count <= other or other + of_other <= begin
            mark = number % 255 + 1
            view[begin : begin + count] = bytes([mark]) * count
            taken.append((made, begin, count, mark))
        elif taken:
            # The oldest one has ended, or the newest one has failed.
            old = taken.pop() if rng.random() < 0.3 else taken.popleft()
            made, begin, count, mark = old
            assert bytes(view[begin : begin + count]) == bytes([mark]) * count
            ring.give(ctypes.byref(made))
    while taken:
        ring.give(ctypes.byref(taken.popleft()[0]))
    assert ring.has_room(COUNT)
    assert bytes(view) == bytes(COUNT)


def test_an_empty_ring_has_all_its_room(ring: ctypes.CDLL) -> None:
    ring.start()
    for count in (7, COUNT, COUNT - 1, COUNT):
        assert ring.has_room(count)
        made = Range()
        ring.take(ctypes.c_size_t(count), ctypes.byref(made))
        assert not ring.has_room(COUNT + 1 - count)
        ring.give(ctypes.byref(made))
    assert not ring.has_room(COUNT + 1)
