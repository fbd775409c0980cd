"""Gates: CUDA graphs that wait on each replay until a load has landed."""

from __future__ import annotations

import torch

from torch_kvswap._native.arguments import INT64_MIN, NotCopyable, read_int
from torch_kvswap._native.loader import native
from torch_kvswap.devices.kind import is_native
from torch_kvswap.offload.native import NativeHandler
from torch_kvswap.offload.streams import resolve_waiting


class Gate(NotCopyable, native.Gate):
    """Makes a captured CUDA graph wait on each replay until a load has landed.

    Made by OffloadHandler.gate(). Capture `gate.wait(layer_group)` in front of the kernels that
    read loaded layers. `load(..., gate=gate)` closes all layer groups in the order of the current
    stream, and opens each group as soon as its layers have landed, failed or been cancelled. Replay
    the graph on that stream after load() has returned. While no load holds the gate closed, the
    graph does not wait. A gate also opens for blocks that the digests of their pool find corrupted:
    the host knows of them when it asks for the load, the graph does not. Any thread may call any
    method.

    Graphs may outlive the gate and its handler: the gate's flags, eight bytes of pinned memory per
    layer group, are never freed. A gate also owns a stream and two events. They are freed after the
    gate was dropped, when the handler makes its next gate or is dropped.

    Attributes:
        layer_groups (int): number of layer groups.
    """

    def __init__(self, handler: NativeHandler, layer_groups: int) -> None:
        self._handler = handler
        layer_groups = handler.groups.read_layer_groups(layer_groups)
        if handler.device.type == "cpu" or not is_native(handler.device.type):
            raise ValueError(
                f"a gate makes CUDA streams wait, but the cache is on {handler.device}, "
                + (
                    "where a load has landed when it returns; leave the gate out"
                    if handler.device.type == "cpu"
                    else "whose streams cannot wait for a word in memory; let them wait for each "
                    "job with Job.wait()"
                )
            )
        native.Gate.__init__(self, handler, layer_groups)

    def wait(  # type: ignore[override]
        self, layer_group: int = 0, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Makes work submitted to the stream after this call wait until a layer group is open.

        In a captured stream, each replay waits at this point.

        Args:
            layer_group (int): 0 to layer_groups - 1.
            stream (torch.cuda.Stream | None): a stream of any GPU; None is the current stream of
                the cache's GPU. A stream other than the one on which a load closes the gate must be
                ordered behind the closing with an event, or it may see the gate still open.

        Raises:
            IndexError: the gate has no such layer group.
            TypeError: stream is not a torch.cuda.Stream.
            RuntimeError: the driver refuses, or this is a forked child.
        """
        layer_group = read_layer_group(layer_group, self.layer_groups, "the gate")
        super().wait(layer_group, *resolve_waiting(stream, self._handler.device))


def read_layer_group(layer_group: object, layer_groups: int, owner: str) -> int:
    group = read_int("layer_group", layer_group, INT64_MIN)
    if not 0 <= group < layer_groups:
        raise IndexError(f"layer_group is {group}; {owner} has groups 0 to {layer_groups - 1}")
    return group
