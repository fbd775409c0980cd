"""How a block is kept in its slot of a host page: as it is, or encoded in fewer bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from torch_kvswap.layout import PagedLayout

EncodingName = Literal["raw", "lossless"]
ENCODINGS: tuple[EncodingName, ...] = get_args(EncodingName)
# Bits of a slot per value of its block. The first one is the default.
WIDTHS = (12.125, 12.5)
SLOT_ALIGNMENT = 16  # of encoded slots, in bytes


@dataclass(frozen=True)
class Encoding:
    """An encoding, with the size of its slots.

    Attributes:
        bits_per_value (float | None): one of WIDTHS; None for raw blocks.
    """

    bits_per_value: float | None = None

    @property
    def name(self) -> EncodingName:
        """What the caller passes as `encoding`."""
        return "raw" if self.bits_per_value is None else "lossless"

    @property
    def width_eighths(self) -> int:
        """bits_per_value in eighths of a bit, for the native side; 0 for raw blocks."""
        return 0 if self.bits_per_value is None else int(self.bits_per_value * 8)

    def slot_bytes(self, layout: PagedLayout, advice: str = "leave encoding out") -> int:
        """Bytes of a slot for a block of the layout.

        Args:
            layout (PagedLayout): the cache.
            advice (str): what to do if its blocks cannot be encoded.

        Raises:
            ValueError: its blocks cannot be encoded.
        """
        if self.bits_per_value is None:
            return layout.block_bytes
        if layout.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"encoding='lossless' needs kernels of this library, which {layout.device} does "
                f"not have; {advice}"
            )
        if layout.dtype != torch.bfloat16:
            is_bytes = layout.dtype in (None, torch.uint8, torch.int8)
            raise ValueError(
                f"encoding='lossless' is for torch.bfloat16, but the layout is of "
                f"{layout.dtype or 'several types'}, so its slots stay at {layout.block_bytes} "
                f"bytes; {advice}"
                + (", or pass PagedLayout dtype=torch.bfloat16 if that is true" if is_bytes else "")
            )
        return slot_format(layout.sizes, self.width_eighths).slot_bytes


RAW = Encoding()


@dataclass(frozen=True)
class SlotFormat:
    """TEMPORARY until the native function is there."""

    slot_bytes: int


def slot_format(sizes, width_eighths):
    for slab, size in enumerate(sizes.tolist()):
        if size % 64:
            raise ValueError(f"slab {slab} has {size} bytes in a block")
    return SlotFormat(int(sizes.sum()) // 2 * width_eighths // 64 // 16 * 16)


def read_encoding(encoding: object, bits_per_value: object) -> Encoding:
    """Checks the arguments `encoding` and `bits_per_value` of a pool.

    Raises:
        ValueError: there is no such encoding or width, or a width for raw blocks.
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding is {encoding!r}; it can be {' or '.join(ENCODINGS)}")
    if encoding == "raw":
        if bits_per_value is not None:
            raise ValueError(
                f"bits_per_value is {bits_per_value!r}, but encoding is 'raw'; leave it out, or "
                "pass encoding='lossless'"
            )
        return RAW
    if bits_per_value is None:
        return Encoding(WIDTHS[0])
    if bits_per_value not in WIDTHS:
        widths = " or ".join(map(str, WIDTHS))
        raise ValueError(f"bits_per_value is {bits_per_value!r}; it can be {widths}")
    return Encoding(WIDTHS[WIDTHS.index(bits_per_value)])


def encoding_of(width_eighths: int) -> Encoding:
    """The encoding with this width in eighths of a bit; 0 is raw.

    Raises:
        ValueError: there is none.
    """
    for known in (RAW, *map(Encoding, WIDTHS)):
        if known.width_eighths == width_eighths:
            return known
    raise ValueError(f"no encoding has slots of {width_eighths} eighths of a bit per value")
