"""What a vendor could bring for the fake accelerator: batched copies, and pinned memory."""

from __future__ import annotations

import torch
from fake_accelerator import Accelerator
from torch import Tensor


class Backend:
    """Copies addresses on the fake accelerator, and notes what was asked for."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.calls: list[tuple[list[int], bool | None]] = []

    def copy_batch(
        self, dst: Tensor, src: Tensor, sizes: Tensor, stream: torch.Stream, to_host: bool | None
    ) -> None:
        assert torch.accelerator.current_stream() == stream
        self.calls.append((sizes.tolist(), to_host))
        self.accelerator.copy_batch(dst, src, sizes, stream)


class PinningBackend(Backend):
    """Also registers memory."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.pinned: dict[int, int] = {}
        self.refuses = False

    def pin(self, device: torch.device, address: int, nbytes: int) -> None:
        if self.refuses:
            raise RuntimeError("no more memory can be locked")
        self.accelerator.pin(device.index, address, nbytes)
        self.pinned[address] = nbytes

    def unpin(self, device: torch.device, address: int) -> None:
        self.accelerator.unpin(address)
        del self.pinned[address]
