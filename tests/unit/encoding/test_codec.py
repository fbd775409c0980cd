"""The CPU encodes and decodes slots as the format says, whatever the values are."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from bf16_blocks import (
    KINDS,
    ONE,
    SMOLLM2_SIZES,
    Values,
    bases_of,
    make_block,
    real_page,
    with_escapes,
)
from error_text import error_text, one_line
from expecttest import assert_expected_inline
from slot_model import MAGIC, OVERFLOW, Bytes, SlotModel, best_window

from torch_kvswap._native.loader import native

GOOD, TOO_MANY, REFUSED = range(3)
SHAPES = [
    [2048] * 7,
    [6144] * 5,
    [32 << 10] * 3,
    [(32 << 10) + 64] * 2,
    [2 << 20],
    [4096, 64, 40960, 2048, 128],
]


def encode(block: Sequence[Values]) -> tuple[int, Bytes]:
    """Returns the state and the slot, whose surroundings the encoder must leave alone."""
    sizes = [part.nbytes for part in block]
    model = SlotModel(sizes)
    memory = np.full(model.slot_bytes + 32, 0xA5, np.uint8)
    slot = memory[16:-16]
    state = native.encode_block(bases_of(block), sizes, slot.ctypes.data)
    assert [*memory[:16], *memory[-16:]] == [0xA5] * 32
    return state, slot


def decode(
    slot: Bytes, sizes: Sequence[int], slabs: range | None = None
) -> tuple[int, list[Values]]:
    """Returns the state and the block; what was not written is 0xA5."""
    slabs = range(len(sizes)) if slabs is None else slabs
    rooms = [np.full(size // 2 + 16, 0xA5A5, np.uint16) for size in sizes]
    block = [room[8:-8] for room in rooms]
    state = native.decode_block(bases_of(block), sizes, slot.ctypes.data, slabs.start, slabs.stop)
    for room in rooms:
        assert [*room[:8], *room[-8:]] == [0xA5A5] * 16
    return state, block


def outside_windows(model: SlotModel, slot: Bytes, block: Sequence[Values]) -> int:
    """The values of a block that no code of its slot stands for."""
    count = 0
    for number, tile in enumerate(model.tiles):
        lowest = model.entry(slot, number)[0]
        exponents = block[tile.slab][tile.first :][: tile.count] >> 7 & 0xFF
        count += int(((exponents < lowest) | (exponents >= lowest + 15))[exponents != 0].sum())
    return count


def assert_equal(block: Sequence[Values], expected: Sequence[Values]) -> None:
    for slab, (part, wanted) in enumerate(zip(block, expected, strict=True)):
        np.testing.assert_array_equal(part, wanted, f"slab {slab}")


@pytest.mark.parametrize("sizes", [*SHAPES, [1 << 31, 1 << 31]], ids=str)
def test_library_and_model_agree_on_the_size(sizes: list[int]) -> None:
    assert native.lossless_encoding(sizes).slot_bytes == SlotModel(sizes).slot_bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_every_kind_of_values_comes_back(sizes: list[int], kind: str) -> None:
    block, model = make_block(kind, sizes), SlotModel(sizes)
    state, slot = encode(block)
    assert state == GOOD
    assert_equal(model.decode(slot), block)
    for written in (slot, model.encode(block)):
        state, read = decode(written, sizes)
        assert state == GOOD
        assert_equal(read, block)
    assert model.state(slot) == outside_windows(model, slot, block)


def test_every_value_comes_back_in_every_window() -> None:
    # The window is chosen by a quarter of the values. These have its lowest and its highest
    # exponent; the other places take all values of the window and of exponent 0 in turn, and for
    # each other exponent a value, which is an escape.
    tiles, random = 4, np.random.default_rng(4)
    vectors = np.arange(tiles * 2048)
    in_tile = vectors % 2048
    sampled = (8 * vectors + 2 * (((in_tile >> 3) + (in_tile >> 5)) % 4))[:, None] + [0, 1]
    others = random.permutation(np.setdiff1d(np.arange(tiles * 16384), sampled))
    all_values = np.arange(65536)
    exponents = all_values >> 7 & 0xFF
    values = np.zeros(tiles * 16384, np.uint16)
    model = SlotModel([values.nbytes])
    for lowest in range(1, 242):
        is_inside = (exponents == 0) | (exponents >= lowest) & (exponents < lowest + 15)
        escapes = np.setdiff1d(np.arange(256), exponents[is_inside])
        escapes = escapes << 7 | random.integers(65536, size=len(escapes)) & 0x807F
        values[others] = np.resize(all_values[is_inside], len(others))
        values[others[: len(escapes)]] = escapes
        values[sampled] = [lowest << 7, (lowest + 14) << 7]
        state, slot = encode([values])
        assert state == GOOD
        assert [model.entry(slot, number)[0] for number in range(tiles)] == [lowest] * tiles
        state, read = decode(slot, model.sizes)
        assert state == GOOD
        assert_equal(read, [values])
        if lowest in (1, 120, 241):
            assert_equal(model.decode(slot), [values])
            assert_equal(decode(model.encode([values], lowest), model.sizes)[1], [values])


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_a_slot_takes_escapes_up_to_its_room(sizes: list[int]) -> None:
    model = SlotModel(sizes)
    full = with_escapes(sizes, model.max_escapes)
    state, slot = encode(full)
    assert (state, model.state(slot)) == (GOOD, model.max_escapes)
    assert_equal(model.decode(slot), full)
    assert_equal(decode(slot, sizes)[1], full)

    state, slot = encode(with_escapes(sizes, model.max_escapes + 1))
    assert (state, model.state(slot)) == (TOO_MANY, model.max_escapes + 1 | OVERFLOW)
    state, read = decode(slot, sizes)
    assert state == REFUSED
    assert_equal(read, [np.full_like(part, 0xA5A5) for part in read])


def test_a_slot_without_escapes_holds_plain_blocks() -> None:
    sizes = [4096, 64]
    assert SlotModel(sizes).max_escapes == 0
    state, slot = encode(with_escapes(sizes, 0))
    assert state == GOOD
    assert_equal(decode(slot, sizes)[1], with_escapes(sizes, 0))
    state, slot = encode(with_escapes(sizes, 1))
    assert (state, decode(slot, sizes)[0]) == (TOO_MANY, REFUSED)


def test_real_keys_and_values_fit() -> None:
    block, model = real_page(), SlotModel(SMOLLM2_SIZES)
    state, slot = encode(block)
    assert state == GOOD
    assert 0 < model.state(slot) < model.max_escapes / 5
    assert_equal(model.decode(slot), block)
    assert_equal(decode(slot, SMOLLM2_SIZES)[1], block)


@pytest.mark.parametrize("slabs", [range(1), range(1, 3), range(2, 5), range(3, 3)], ids=str)
def test_a_range_of_slabs_is_decoded_alone(slabs: range) -> None:
    sizes = [4096, 64, 40960, 2048, 128]
    block = make_block("NaN, Inf, -0 and others among normal", sizes)
    state, read = decode(encode(block)[1], sizes, slabs)
    assert state == GOOD
    untouched = [np.full_like(part, 0xA5A5) for part in block]
    assert_equal(read, [block[s] if s in slabs else untouched[s] for s in range(5)])


def damaged_slots() -> dict[str, tuple[str, int, int]]:
    """What to write where in a slot with one tile and some escapes."""
    model = SlotModel([8192])
    return {
        "zeros": ("<I", 0, 0),
        "magic": ("<I", 0, MAGIC ^ 1 << 24),
        "version": ("<I", 0, MAGIC + 1),
        "overflow": ("<I", 4, OVERFLOW | 3),
        "a lowest exponent of 0": ("B", 16, 0),
        "a lowest exponent of 242": ("B", 16, 242),
        "more escapes than fit": ("<H", 18, model.max_escapes + 1),
        "escapes that begin behind the last one": ("<I", 20, model.max_escapes + 1),
        "escapes that end behind the last one": ("<I", 20, model.max_escapes - 2),
        "an escape behind the tile": ("<H", model.places, 4096),
    }


@pytest.mark.parametrize("damage", damaged_slots())
def test_a_slot_without_a_block_is_refused(damage: str) -> None:
    slot, model = encode(with_escapes([8192], 3))[1], SlotModel([8192])
    # Behind the escapes there would be valid ones, up to the first tile.
    slot[model.places : model.metadata_bytes] = 0
    assert decode(slot, [8192])[0] == GOOD
    struct.pack_into(damaged_slots()[damage][0], slot, *damaged_slots()[damage][1:])
    state, read = decode(slot, [8192])
    assert state == REFUSED
    assert_equal(read, [np.full(4096, 0xA5A5, np.uint16)])


@pytest.mark.parametrize("slabs", [range(3), range(1), range(1, 2), range(2, 3)], ids=str)
def test_damage_to_one_slab_is_refused_by_all(slabs: range) -> None:
    sizes = [4096] * 3
    slot = encode(make_block("normal", sizes))[1]
    struct.pack_into("<H", slot, 16 + 8 + 2, 0xFFFF)  # escapes of the second tile
    state, read = decode(slot, sizes, slabs)
    assert state == REFUSED
    assert_equal(read, [np.full(2048, 0xA5A5, np.uint16)] * 3)


@pytest.mark.parametrize("change", ["lowest", "first escape", "place"])
def test_a_changing_slot_writes_only_its_block(change: str) -> None:
    # The values of the first slab, which have no escapes, take the place of the slot's metadata
    # while the second slab still needs it.
    sizes, model = [4096, 4096], SlotModel([4096, 4096])
    metadata = np.zeros(model.metadata_bytes, np.uint8)
    first_escape = model.max_escapes if change == "first escape" else 0
    struct.pack_into("<BBHI", metadata, 24, 0 if change == "lowest" else 120, 0, 1, first_escape)
    if change == "place":
        struct.pack_into("<H", metadata, model.places, ONE)
    block = make_block("one value", sizes)
    block[0][-metadata.size // 2 :] = metadata.view(np.uint16)
    slot = encode(block)[1]
    assert model.state(slot) == 0
    memory = np.concatenate([np.zeros(4096 - metadata.size, np.uint8), slot])
    second = np.full(2 * ONE + 2, 0xA5, np.uint8)
    bases, at = bases_of([memory, second]), memory.ctypes.data + 4096 - metadata.size
    state = native.decode_block(bases, sizes, at, 0, 2)
    assert (memory[:4096].view(np.uint16) == block[0]).all()
    assert (state, set(second[4096:])) == (REFUSED, {0xA5})


def test_a_block_may_begin_at_an_odd_address() -> None:
    block = make_block("normal", [4096])
    odd = np.zeros(4097, np.uint8)
    odd[1:] = block[0].view(np.uint8)
    slot, back = np.zeros(SlotModel([4096]).slot_bytes, np.uint8), np.zeros_like(odd)
    assert native.encode_block([odd.ctypes.data + 1], [4096], slot.ctypes.data) == GOOD
    assert native.decode_block([back.ctypes.data + 1], [4096], slot.ctypes.data, 0, 1) == GOOD
    np.testing.assert_array_equal(back, odd)


def chosen_lowest(values: Values) -> int:
    """The lowest exponent of a tile, as csrc/kernels/slot.h and codec.cpp say."""
    vectors = values.reshape(-1, 4, 2)  # of 16 bytes
    number = np.arange(len(vectors))
    exponents = vectors[number, ((number >> 3) + (number >> 5)) % 4].ravel() >> 7 & 0xFF
    lowest = best_window(exponents.astype(np.int64))
    return lowest + 1 if lowest not in exponents and lowest < 241 else lowest


def blocks_of_random_exponents(sizes: Sequence[int]) -> Iterator[list[Values]]:
    """Blocks whose exponents are among some neighbours, at both ends of the range and between."""
    random = np.random.default_rng(3)
    for lowest, count in itertools.product([0, 1, 2, 3, 100, 238, 240, 241, 242, 255], [1, 4, 17]):
        high = min(lowest + count, 256)
        yield [random.integers(lowest << 7, high << 7, size // 2, np.uint16) for size in sizes]


def test_the_window_has_most_of_the_sampled_values() -> None:
    sizes = [64, 128, 4096, 6144, 40960]
    model = SlotModel(sizes)
    for block in blocks_of_random_exponents(sizes):
        state, slot = encode(block)
        assert [model.entry(slot, number)[0] for number in range(len(model.tiles))] == [
            chosen_lowest(block[tile.slab][tile.first :][: tile.count]) for tile in model.tiles
        ]
        escapes = outside_windows(model, slot, block)
        assert model.state(slot) & ~OVERFLOW == escapes
        assert state == (GOOD if escapes <= model.max_escapes else TOO_MANY)


def test_blocks_that_cannot_be_encoded_are_refused() -> None:
    calls = [[2048, 96], [2048, 0], [64], [1024] * 160, [1 << 31, 1 << 31, 64]]
    errors = [one_line(native.lossless_encoding, call) for call in calls]
    for call in (
        lambda: native.encode_block([0], [96], 0),
        lambda: native.decode_block([0], [96], 0, 0, 1),
    ):
        assert error_text(call).startswith("ValueError: slab 0 has 96 bytes of a block;")
    assert_expected_inline(
        "\n".join(errors),
        """\
ValueError: slab 1 has 96 bytes of a block; lossless encoding needs a multiple of 64 bytes in every slab
ValueError: slab 1 has 0 bytes of a block; lossless encoding needs a multiple of 64 bytes in every slab
ValueError: a block of 64 bytes in 1 slab needs 72 bytes encoded, and a slot has 48
ValueError: a block of 163840 bytes in 160 slabs needs 124176 bytes encoded, and a slot has 124160
ValueError: a block has more than 4294967296 bytes, which lossless encoding cannot address""",
    )
