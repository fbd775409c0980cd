"""Other libraries' copies of scattered blocks, each with the face of a handler.

All take lists of ids, as OffloadHandler does, and move the same blocks to and from the same pinned
pages. They use the libraries' own workers and kernels, with their defaults, and need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from blocks import NumberedBlocks
from torch import Tensor
from transfers import DIRECTIONS

TOKENS = 16  # of a block, each of them with as many bytes of each fragment


@dataclass
class Job:
    """wait: until it has ended, on the host."""

    wait: Callable[[], object]
    result = SimpleNamespace(copy_method="")


class Peer:
    """What moves blocks. _submit() gives a job to the device."""

    library: str  # as it is installed

    def __init__(self, blocks: NumberedBlocks) -> None:
        self._blocks = blocks
        self._fragment_bytes = blocks.tensors[0][0].nbytes

    @classmethod
    def version(cls) -> str:
        return f"{cls.library} {version(cls.library)}"

    def store(self, *, gpu_block_ids: list[int], page_ids: list[int]) -> Job:
        return self._submit("store", gpu_block_ids, page_ids)

    def load(self, *, page_ids: list[int], gpu_block_ids: list[int]) -> Job:
        return self._submit("load", gpu_block_ids, page_ids)

    def synchronize(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.wait()

    def poll(self) -> None:
        """Gives back what the jobs that have ended used."""

    def _submit(self, direction: str, blocks: list[int], pages: list[int]) -> Job:
        raise NotImplementedError


class Vllm(Peer):
    """The two handlers of the worker of vLLM's CPU offloading, with its layout of host memory."""

    library = "vllm"

    def __init__(self, blocks: NumberedBlocks) -> None:
        super().__init__(blocks)
        self._base = import_module("vllm.v1.kv_offload.base")
        self._cpu = import_module("vllm.v1.kv_offload.cpu.common")
        worker = import_module("vllm.v1.kv_offload.cpu.gpu_worker")
        on_gpu = [tensor.view(torch.int8) for tensor in blocks.tensors]
        on_host = [*blocks.pages.view(torch.int8).split(self._fragment_bytes, dim=1)]
        refs = [
            self._base.CanonicalKVCacheRef(layer, self._fragment_bytes)
            for layer in range(len(on_gpu))
        ]
        self._ways = {
            direction: worker.SingleDirectionOffloadingHandler(
                gpu_tensors=on_gpu,
                cpu_tensors=on_host,
                blocks_per_chunk=1,
                layer_refs_per_group=[refs],
                gpu_to_cpu=direction == "store",
            )
            for direction in DIRECTIONS
        }
        self._numbers = count()

    def poll(self) -> None:
        for way in self._ways.values():
            way.get_finished()

    def _submit(self, direction: str, blocks: list[int], pages: list[int]) -> Job:
        number, way = next(self._numbers), self._ways[direction]
        on_gpu = self._base.GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        on_host = self._cpu.CPULoadStoreSpec(pages)
        ends = (on_gpu, on_host) if direction == "store" else (on_host, on_gpu)
        way.transfer_async(number, *ends)
        return Job(lambda: way.wait({number}))


class OnStream(Peer):
    """Copies on a stream for each direction, which waits for the current one. _copy() enqueues."""

    def __init__(self, blocks: NumberedBlocks) -> None:
        super().__init__(blocks)
        self._streams = {way: torch.cuda.Stream(blocks.device) for way in DIRECTIONS}
        self._layers = self._on_gpu([tensor.data_ptr() for tensor in blocks.tensors])

    def _on_gpu(self, numbers: Any) -> Tensor:
        """int64, in the order of the current stream."""
        return torch.from_numpy(np.array(numbers)).to(self._blocks.device, non_blocking=True)

    def _submit(self, direction: str, blocks: list[int], pages: list[int]) -> Job:
        stream, end = self._streams[direction], torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._copy(direction, blocks, pages)
            end.record()
        return Job(end.synchronize)

    def _copy(self, direction: str, blocks: list[int], pages: list[int]) -> None:
        raise NotImplementedError


class Sglang(OnStream):
    """The kernel that copies tokens of all layers between GPU and pinned memory, in one launch.

    SGLang itself stores like that, and launches once for each layer to load, which takes longer.
    """

    library = "sglang-kernel"

    def __init__(self, blocks: NumberedBlocks) -> None:
        import_module("sgl_kernel")
        super().__init__(blocks)
        self._transfer = torch.ops.sgl_kernel.transfer_kv_all_layer_mla.default
        # In both tables a layer begins with its first token. From a block's token to the same one
        # of the next block it is TOKENS tokens on the GPU, and those of all layers on the host.
        first = blocks.pages.data_ptr()
        layers = range(len(blocks.tensors))
        of_pages = self._on_gpu([first + layer * self._fragment_bytes for layer in layers])
        self._tables = tuple(table.view(torch.uint64) for table in (self._layers, of_pages))

    def _copy(self, direction: str, blocks: list[int], pages: list[int]) -> None:
        layers = len(self._blocks.tensors)
        firsts = np.array([blocks, pages])[..., None] * np.array([[[TOKENS]], [[TOKENS * layers]]])
        tokens = self._on_gpu((firsts + np.arange(TOKENS)).reshape(2, -1))
        ends = [*zip(self._tables, tokens, strict=True)]  # of the GPU and of the host
        (source, from_), (target, to) = ends if direction == "store" else reversed(ends)
        ctas, warps = 2, 32
        token_bytes = self._fragment_bytes // TOKENS
        self._transfer(source, target, from_, to, token_bytes, layers, ctas, warps)


class Lmcache(OnStream):
    """The staged copies of LMCache's server: four objects at a time, here of one block each."""

    library = "lmcache"
    objects = 4

    def __init__(self, blocks: NumberedBlocks) -> None:
        ops = self._ops = import_module("lmcache.c_ops")
        super().__init__(blocks)
        shape = self._shape = ops.PageBufferShapeDesc()
        shape.kv_size, shape.nl, shape.nb = 1, len(blocks.tensors), blocks.count
        shape.bs, shape.nh, shape.element_size = TOKENS, 1, 2
        shape.hs = self._fragment_bytes // TOKENS // shape.element_size
        size = self.objects, blocks.layout.block_bytes
        self._staging = {
            way: torch.empty(size, dtype=torch.uint8, device=blocks.device) for way in DIRECTIONS
        }

    def _copy(self, direction: str, blocks: list[int], pages: list[int]) -> None:
        ops, ids = self._ops, self._on_gpu(blocks)
        staging = [buffer.data_ptr() for buffer in self._staging[direction]]
        nbytes, first = self._blocks.layout.block_bytes, self._blocks.pages.data_ptr()
        format_ = ops.EngineKVFormat.NL_X_NB_BS_HS  # layers of blocks, as with MLA
        group = ops.KernelGroupSpec(
            self._layers.data_ptr(), staging, self._shape, TOKENS, format_, ids.data_ptr(), len(ids)
        )
        back = 1 if direction == "store" else -1
        steps = []
        for start in range(0, len(pages), self.objects):
            chunk = pages[start : start + self.objects]
            ends = [
                (first + page * nbytes, buffer)
                for page, buffer in zip(chunk, staging, strict=False)
            ]
            copies = [ops.StagingCopy(*pair[::back], nbytes, 0) for pair in ends]
            launch = ops.LaunchVar(0, start, len(chunk), len(chunk), 0)
            steps.append(ops.BatchStep(copies, [launch]))
        way = ops.TransferDirection.D2H if direction == "store" else ops.TransferDirection.H2D
        one_registration = 1 << 40
        ops.execute_object_group_transfer(
            way, self._blocks.device, one_registration, [group], steps
        )


PEERS: dict[str, type[Peer]] = {"vLLM": Vllm, "SGLang": Sglang, "LMCache": Lmcache}
