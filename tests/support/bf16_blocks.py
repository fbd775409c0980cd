"""Blocks of bf16 values of many kinds, for tests of the encoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torch_kvswap._native.loader import native

Values = npt.NDArray[np.uint16]
Make = Callable[[int, np.random.Generator], Values]

SMOLLM2_PAGE = Path(__file__).parents[1] / "data" / "smollm2_page.bin"
SMOLLM2_SIZES = [6144] * 60
ONE = 0x3F80
SPECIAL = (0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x8000, 0x0000, 0x7F7F, 0x0001, 0x807F, 0x0080)


def bf16(numbers: npt.NDArray[np.floating]) -> Values:
    """Rounded to the nearest bf16."""
    words = numbers.astype(np.float32).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def _normal(count: int, random: np.random.Generator) -> Values:
    return bf16(random.standard_normal(count))


def _special(count: int, random: np.random.Generator) -> Values:
    values = _normal(count, random)
    at = random.random(count) < 1 / 2048
    values[at] = random.choice(np.array(SPECIAL, np.uint16), int(at.sum()))
    return values


def _subnormal(count: int, random: np.random.Generator) -> Values:
    return (random.integers(0, 2, count) * random.integers(0, 65536, count) & 0x807F).astype(
        np.uint16
    )


def _outlier_channels(count: int, random: np.random.Generator) -> Values:
    scale = np.where(random.random(64) < 0.03, 4.0, 1.0)
    return bf16(random.standard_normal(count) * np.resize(scale, count))


def _half_padding(count: int, random: np.random.Generator) -> Values:
    values = _normal(count, random)
    values[: count // 2] = 0
    return values


def _fifteen_exponents(count: int, random: np.random.Generator) -> Values:
    signs = random.integers(0, 65536, count) & 0x807F
    return (signs | random.integers(100, 115, count) << 7).astype(np.uint16)


def _all_nan(count: int, random: np.random.Generator) -> Values:
    return (random.integers(0, 65536, count) & 0x803F | 0x7FC0).astype(np.uint16)


# Kinds of values that fit into encoded slots.
KINDS: dict[str, Make] = {
    "normal": _normal,
    "NaN, Inf, -0 and others among normal": _special,
    "subnormals and zeros": _subnormal,
    "outlier channels": _outlier_channels,
    "half padding": _half_padding,
    "fifteen exponents": _fifteen_exponents,
    "NaN only": _all_nan,
    "zeros": lambda count, _: np.zeros(count, np.uint16),
    "minus zeros": lambda count, _: np.full(count, 0x8000, np.uint16),
    "one value": lambda count, _: np.full(count, ONE, np.uint16),
}


def make_block(kind: str, sizes: Sequence[int], seed: int = 0) -> list[Values]:
    random = np.random.default_rng(seed)
    return [KINDS[kind](size // 2, random) for size in sizes]


def random_bits(sizes: Sequence[int], seed: int = 0) -> list[Values]:
    """Too many escapes for any slot."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 65536, size // 2).astype(np.uint16) for size in sizes]


def with_escapes(sizes: Sequence[int], count: int, seed: int = 0) -> list[Values]:
    """A block with exactly so many escapes: 1 everywhere, and 2**73 at some places."""
    values = np.full(sum(sizes) // 2, ONE, np.uint16)
    places = np.random.default_rng(seed).permutation(len(values))[:count]
    values[places] = 200 << 7
    return list(np.split(values, np.cumsum([size // 2 for size in sizes])[:-1]))


def real_page() -> list[Values]:
    page = np.fromfile(SMOLLM2_PAGE, np.uint16)
    return list(np.split(page, len(SMOLLM2_SIZES)))


def bases_of(block: Sequence[Values]) -> list[int]:
    return [part.ctypes.data for part in block]


def escapes_of(block: Sequence[Values]) -> int:
    """As many as the encoder of the CPU has."""
    sizes = [part.nbytes for part in block]
    slot = np.zeros(native.lossless_encoding(sizes).slot_bytes, np.uint8)
    native.encode_block(bases_of(block), sizes, slot.ctypes.data)
    return int(slot.view("<u4")[1]) & 0x7FFFFFFF
