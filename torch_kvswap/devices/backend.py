"""What a vendor's library adds to a device that torch drives: batched copies and pinned memory."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from torch_kvswap._native.arguments import kind_of


def is_native(device_type: str) -> bool:
    """Whether the library drives devices of this type itself: the CPU, and CUDA's GPUs.

    All others are driven through torch, also "cuda" in a PyTorch for ROCm: those are AMD's GPUs.
    """
    return device_type == "cpu" or (device_type == "cuda" and torch.version.hip is None)


@runtime_checkable
class DeviceBackend(Protocol):
    """A vendor's batched copy of addresses.

    May also have `pin(device, address, nbytes)` and `unpin(device, address)`, which register host
    memory for the device, and undo that; they raise RuntimeError if the driver refuses. Without
    them, pools use memory that torch pins.

    Any thread may call any method, also several at once.
    """

    def copy_batch(
        self, dst: Tensor, src: Tensor, sizes: Tensor, stream: torch.Stream, to_host: bool | None
    ) -> None:
        """Enqueues copies. They may run in any order, and none overlaps another.

        A call may have any number of them, also more than the driver takes at once.

        Must not wait for the device. Host memory is pinned. The tensors with the addresses are only
        valid during the call.

        Args:
            dst (Tensor): int64 [copies], CPU; addresses to write.
            src (Tensor): int64 [copies], CPU; addresses to read.
            sizes (Tensor): int64 [copies], CPU; bytes, at least 1.
            stream (torch.Stream): the stream, which is the current one.
            to_host (bool | None): dst is host memory and src is memory of the stream's device;
                False is the other way round. None: swap_blocks_batch() was called, which does not
                know; each copy may go either way.

        Raises:
            Exception: the device refused. Copies that were enqueued before may run; what else was
                given to the stream must still work.
        """
        ...


_registered: dict[str, DeviceBackend] = {}


def register_device_backend(device_type: str, backend: DeviceBackend) -> None:
    """Lets handlers, pools and swap_blocks_batch() use a vendor's batched copies.

    To be called before the first handler or pool of the device is made.

    Args:
        device_type (str): torch's name of the device type, such as "npu".
        backend (DeviceBackend): an object with copy_batch().

    Raises:
        TypeError: backend has no copy_batch(), or device_type is not a str.
        RuntimeError: torch does not know the device type.
        ValueError: torch_kvswap drives devices of this type itself, the type has a backend already,
            or device_type names one device.
    """
    if not isinstance(backend, DeviceBackend):
        raise TypeError(
            f"backend, of type {type(backend).__name__}, has no copy_batch(); see DeviceBackend"
        )
    if not isinstance(device_type, str):
        raise TypeError(f"device_type is {kind_of(device_type)}; pass a str, such as 'npu'")
    known = torch.device(device_type).type  # raises for a type that torch does not know
    if device_type != known:
        raise ValueError(
            f"device_type is {device_type!r}, but a backend is for all devices of a type; pass "
            f"{known!r}"
        )
    if is_native(device_type):
        raise ValueError(f"{device_type!r} needs no backend: torch_kvswap drives it itself")
    if _registered.setdefault(device_type, backend) is not backend:  # atomic
        raise ValueError(f"{device_type!r} has a backend already; register one, once")


def find_device_backend(device_type: str) -> DeviceBackend | None:
    """The backend that was registered for a device type, or None."""
    return _registered.get(device_type)


def can_pin(backend: DeviceBackend | None) -> bool:
    """Whether the backend registers host memory."""
    return hasattr(backend, "pin") and hasattr(backend, "unpin")
