"""A wait for loads that a CUDA graph can hold."""

from __future__ import annotations

import torch

from torch_kvswap._native import abi
from torch_kvswap._native.arguments import INT64_MIN, NotCopyable, read_int
from torch_kvswap._native.handler import NativeHandler
from torch_kvswap.after import resolve_waiting


class Gate(NotCopyable):
    """What a captured graph waits for on each replay: open, or closed until a load has landed.

    Capture `wait(part)` in front of the kernels that read loaded layers. `load(..., gate=gate)`
    closes all parts in the order of the current stream, on which the graph must be replayed
    afterwards, and opens part g as soon as its g-th group of layers has landed, failed or been
    cancelled. Without a load the graph does not wait. Any thread may call. parts: their number.

    Graphs may outlive the gate and its handler: eight bytes of pinned memory for each part are
    never freed. The gate has a stream and two events. When it has been dropped they are let go as
    soon as the handler makes another gate, or is dropped, too.
    """

    native: int | None = None

    def __init__(self, handler: NativeHandler, parts: int) -> None:
        self.handler = handler
        self.parts = read_int("parts", parts, 1, handler.groups.num_layers)
        if handler.device.type != "cuda":
            raise ValueError(
                f"a gate makes CUDA streams wait, but the cache is on {handler.device}, where a "
                "load has landed when it returns; leave the gate out"
            )
        self.native = handler.make_gate(self.parts)

    def __del__(self) -> None:
        if self.native is not None:
            self.handler.release_gate(self.native)

    def wait(self, part: int = 0, stream: torch.cuda.Stream | None = None) -> None:
        """Makes work given to the stream from now on wait until the part is open.

        In a captured stream, each replay waits there.

        Args:
            part (int): the group of layers.
            stream (torch.cuda.Stream | None): a stream of any GPU; None is the current stream of
                the cache's GPU. A stream other than the one on which a load closes the gate passes
                as long as the gate is open: order it behind the closing, with an event.

        Raises:
            IndexError: the gate has no such part.
        """
        part = read_int("part", part, INT64_MIN)
        if not 0 <= part < self.parts:
            raise IndexError(f"part {part} of a gate with parts 0 to {self.parts - 1}")
        self.handler.check_process()
        abi.call("kvswap_gate_wait", self.native, part, *resolve_waiting(stream))
