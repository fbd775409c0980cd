"""Host memory that the CUDA driver has registered, so that the GPU reaches it."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from torch_kvswap._native import loader
from torch_kvswap._native.fork_guard import Process


class Registration:
    """Pieces of a memory, which must not be unmapped while they are registered: this holds it until
    remove().

    Not by torch's runtime: a failure would be handed to the thread's next kernel launch, and a CUDA
    graph that another thread captures would be spoilt.
    """

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._address = memory.data_ptr()
        self._held: Tensor | None = memory
        self._device = device
        self._process = Process()
        self._bytes: dict[int, int] = {}  # by address

    def add(self, first: int, last: int) -> str | None:
        """Registers the bytes from `first` to `last` in one piece; why the driver refuses, or
        None."""
        native = loader.library()
        address = self._address + first
        if not native.kvswap_host_register(self._device.index, address, last - first):
            reason: str = native.kvswap_last_error().decode()
            return reason
        self._bytes[address] = last - first
        return None

    def is_known(self) -> bool:
        """Whether there is something, and the driver says that all of it is pinned."""
        addresses = list(self._bytes)
        return bool(addresses) and all(is_pinned(address, self._device) for address in addresses)

    def remove(self) -> None:
        """Unregisters all pieces. A fork has the memory, but not the registrations."""
        native, kept, reason = loader.library(), 0, ""
        while self._process.is_current and self._bytes:
            address, nbytes = self._bytes.popitem()
            if not native.kvswap_host_unregister(self._device.index, address):
                kept, reason = kept + nbytes, native.kvswap_last_error().decode()
        self._held = None
        if kept:  # at the end: the caller may have turned warnings into errors
            warnings.warn(
                f"the driver did not unpin {kept} bytes of host memory: {reason}; they stay locked "
                "until the process ends",
                RuntimeWarning,
                stacklevel=2,
            )


def is_pinned(address: int, device: torch.device | None = None) -> bool:
    """Whether the driver says so, asked in the context of a GPU or, which does not initialise CUDA,
    in that of the thread."""
    index = -1 if device is None else device.index
    return bool(loader.library().kvswap_host_is_pinned(index, address) == 1)
