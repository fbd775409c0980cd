"""How a block is stored in its slot of a host page: as it is, or encoded in fewer bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from torch_kvswap._native.arguments import Int64Array, read_name
from torch_kvswap._native.loader import native
from torch_kvswap.devices.kind import is_native
from torch_kvswap.layout import PagedLayout, address_of

EncodingName = Literal["raw", "lossless"]
ENCODINGS: tuple[EncodingName, ...] = get_args(EncodingName)
VerifyName = Literal["off", "load"]
VERIFY: tuple[VerifyName, ...] = get_args(VerifyName)
_USE_RAW = "use encoding='raw'"
_IF_BYTES = ", or pass dtype=torch.bfloat16 to PagedLayout if the tensors are views of such values"
_BYTES = {torch.uint8, torch.int8}
_CAN_HOLD_BF16 = {torch.bfloat16, *_BYTES}
SLOT_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Encoding:
    """An encoding: RAW or LOSSLESS.

    Attributes:
        name (EncodingName): what the caller passes as `encoding`.
    """

    name: EncodingName

    def for_native(self, sizes: Int64Array) -> native.Encoding:
        """What the native side asks about the slots. Raises ValueError if none can hold a block."""
        if self is RAW:
            return native.raw_encoding(sizes)
        return native.lossless_encoding(sizes)

    def slot_bytes(
        self, layout: PagedLayout, advice: str = _USE_RAW, *, name: str = "the layout"
    ) -> int:
        """Bytes of a slot for a block of the layout, which errors call `name`.

        Raises:
            ValueError: its blocks cannot be encoded. Says `advice`.
        """
        if self is RAW:
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
        return self._encoded_bytes(layout.sizes, advice)

    def _encoded_bytes(self, sizes: Int64Array, advice: str) -> int:
        """Bytes of an encoded slot; see slot_bytes()."""
        try:
            return self.for_native(sizes).slot_bytes
        except ValueError as error:
            raise ValueError(f"{error}; {advice}") from None

    def block_in(self, slot: Tensor, sizes: Int64Array) -> Tensor | None:
        """Copies the block out of a slot in CPU memory, and decodes it on the CPU if it is encoded.

        Returns uint8, the slabs in a row; None if the slot holds no block.
        """
        nbytes = int(sizes.sum())
        if self is RAW:
            return slot[:nbytes].clone()
        block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        bases = address_of(block) + np.cumsum(sizes) - sizes
        is_refused = native.decode_block(bases, sizes, address_of(slot), 0, len(sizes))
        return None if is_refused else block

    def bytes_for(self, nbytes: int) -> int:
        """Bytes of a slot for blocks of this size, however they are divided into slabs.

        Raises:
            ValueError: no block of this size can be encoded.
        """
        if self is RAW:
            return nbytes
        return self._encoded_bytes(np.array([nbytes]), _USE_RAW)


RAW, LOSSLESS = map(Encoding, ENCODINGS)


def read_encoding(encoding: object) -> Encoding:
    """Checks the argument `encoding` of a pool.

    Raises:
        ValueError: there is no such encoding.
    """
    return (RAW, LOSSLESS)[ENCODINGS.index(read_name("encoding", encoding, ENCODINGS))]


def read_verify(verify: object, device: torch.device | None = None) -> VerifyName:
    """Checks the argument `verify` of a pool, for a cache on this device if it is known.

    Raises:
        ValueError: there is no such choice, or the device has no kernels for it.
    """
    choice = read_name("verify", verify, VERIFY)
    if choice != "off" and device is not None and not is_native(device.type):
        raise ValueError(
            f"verify={choice!r} needs kernels of this library, which {device} does not have; use "
            "verify='off'"
        )
    return choice
