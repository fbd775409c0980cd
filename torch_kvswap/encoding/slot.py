"""How a block is stored in its slot of a host page: as it is, or encoded in fewer bytes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from torch_kvswap._native.arguments import Int64Array
from torch_kvswap._native.loader import native
from torch_kvswap.devices.kind import is_native
from torch_kvswap.layout import PagedLayout, address_of

EncodingName = Literal["raw", "lossless"]
ENCODINGS: tuple[EncodingName, ...] = get_args(EncodingName)
VerifyName = Literal["off", "load"]
VERIFY: tuple[VerifyName, ...] = get_args(VerifyName)
# Bits of a slot per value of its block. The first one is the default.
WIDTHS = (12.125, 12.5)
_USE_RAW = "use encoding='raw'"
_IF_BYTES = ", or pass dtype=torch.bfloat16 to PagedLayout if the tensors are views of such values"
_BYTES = {torch.uint8, torch.int8}
_CAN_HOLD_BF16 = {torch.bfloat16, *_BYTES}
SLOT_ALIGNMENT = 16  # bytes


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

    def for_native(self, sizes: Int64Array) -> native.Encoding:
        """What the native side asks about the slots. Raises ValueError if none can hold a block."""
        if self.bits_per_value is None:
            return native.raw_encoding(sizes)
        return native.lossless_encoding(sizes, self.width_eighths)

    def slot_bytes(
        self,
        layout: PagedLayout,
        advice: str = _USE_RAW,
        *,
        is_width_open: bool = True,
        name: str = "the layout",
    ) -> int:
        """Bytes of a slot for a block of the layout, which errors call `name`.

        Raises:
            ValueError: its blocks cannot be encoded. Says `advice`, and another bits_per_value if
                the caller can choose one (`is_width_open`).
        """
        if self.bits_per_value is None:
            return layout.block_bytes
        if not is_native(layout.device.type):
            raise ValueError(
                f"encoding='lossless' needs kernels of this library, which {layout.device} does "
                f"not have; {advice}"
            )
        if layout.dtype != torch.bfloat16:
            remedy = ""
            if layout.dtype is None and {one.dtype for one in layout.tensors} - _CAN_HOLD_BF16:
                remedy = ", or make a layout for each type"
            elif layout.dtype is None or layout.dtype in _BYTES:
                remedy = _IF_BYTES
            raise ValueError(
                f"encoding='lossless' is for torch.bfloat16, but {name} is of "
                f"{layout.dtype or 'several types'}; {advice}{remedy}"
            )
        return self._encoded_bytes(layout.sizes, advice, is_width_open)

    def _encoded_bytes(self, sizes: Int64Array, advice: str, is_width_open: bool) -> int:
        """Bytes of an encoded slot; see slot_bytes()."""
        try:
            return self.for_native(sizes).slot_bytes
        except ValueError as error:
            wider = _width_for(sizes) if is_width_open else None
            wide = "" if wider is None else f"pass bits_per_value={wider:g}, or "
            raise ValueError(f"{error}; {wide}{advice}") from None

    def block_in(self, slot: Tensor, sizes: Int64Array) -> Tensor | None:
        """Copies the block out of a slot in CPU memory, and decodes it on the CPU if it is encoded.

        Returns uint8, the slabs in a row; None if the slot holds no block.
        """
        nbytes = int(sizes.sum())
        if self.bits_per_value is None:
            return slot[:nbytes].clone()
        block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        bases = address_of(block) + np.cumsum(sizes) - sizes
        width, address = self.width_eighths, address_of(slot)
        is_refused = native.decode_block(bases, sizes, width, address, 0, len(sizes))
        return None if is_refused else block

    def bytes_for(self, nbytes: int) -> int:
        """Bytes of a slot for blocks of this size, however they are divided into slabs.

        Raises:
            ValueError: no block of this size can be encoded.
        """
        if self.bits_per_value is None:
            return nbytes
        return self._encoded_bytes(np.array([nbytes]), _USE_RAW, is_width_open=True)


RAW = Encoding()


def _width_for(sizes: Int64Array) -> float | None:
    """The first of WIDTHS whose slots have room for such blocks."""
    for width in WIDTHS:
        with contextlib.suppress(ValueError):
            Encoding(width).for_native(sizes)
            return width
    return None


def read_encoding(encoding: object, bits_per_value: object) -> Encoding:
    """Checks the arguments `encoding` and `bits_per_value` of a pool.

    Raises:
        ValueError: there is no such encoding or width, or a width for raw blocks.
    """
    if not isinstance(encoding, str) or encoding not in ENCODINGS:
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
    if not isinstance(bits_per_value, float | np.floating) or bits_per_value not in WIDTHS:
        widths = " or ".join(map(str, WIDTHS))
        raise ValueError(f"bits_per_value is {bits_per_value!r}; it can be {widths}")
    return Encoding(float(bits_per_value))


def read_verify(verify: object, device: torch.device | None = None) -> VerifyName:
    """Checks the argument `verify` of a pool, for a cache on this device if it is known.

    Raises:
        ValueError: there is no such choice, or the device has no kernels for it.
    """
    if not isinstance(verify, str) or verify not in VERIFY:
        raise ValueError(f"verify is {verify!r}; it can be {' or '.join(VERIFY)}")
    if verify != "off" and device is not None and not is_native(device.type):
        raise ValueError(
            f"verify={verify!r} needs kernels of this library, which {device} does not have; use "
            "verify='off'"
        )
    return verify


def encoding_of(width_eighths: int) -> Encoding:
    """The encoding with this width in eighths of a bit; 0 is raw.

    Raises:
        ValueError: no encoding has this width.
    """
    for known in (RAW, *map(Encoding, WIDTHS)):
        if known.width_eighths == width_eighths:
            return known
    raise ValueError(f"no encoding has slots of {width_eighths} eighths of a bit per value")
