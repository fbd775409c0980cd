"""vLLM's secondary tiers: its spec, manager and memory, with our worker on that memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm.kv_layouts import group_layouts
from torch_kvswap.integrations.vllm.options import read_options
from torch_kvswap.integrations.vllm.worker import KVSwapWorker
from torch_kvswap.layout import PagedLayout

_log = logging.getLogger(__name__)


class KVSwapTieringSpec(TieringOffloadingSpec):
    """vLLM's TieringOffloadingSpec with our worker, where both put every byte in the same place.

    Tiers keep the bytes of a chunk under its name, and engines with vLLM's own worker read them,
    too. Where our worker would order them differently, vLLM's own is used, and the log says why.

    Args:
        config (OffloadingConfig): vLLM's configuration; `extra_config` has the SpecOptions.

    Raises:
        ValueError: an option is unknown, missing or invalid, or is not possible with tiers.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self.options = read_options(config.extra_config)
        super().__init__(config)

    def create_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Our worker, or vLLM's own, which is always made: it maps and pins the memory."""
        theirs: Any = super().create_worker(kv_caches)
        chunks = theirs._store_handler.dst_tensors
        layers = [group.layer_names for group in self.config.groups]
        try:
            why = self._why_theirs(kv_caches, group_layouts(kv_caches, layers), chunks)
            if why:
                _log.info(
                    "vLLM's own worker moves the KV-cache blocks, because torch_kvswap would lay "
                    "out the chunks of its tiers differently: %s. A failed copy ends the engine, "
                    "and the host waits for loads in a step",
                    why,
                )
                return theirs
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
                chunks[0].untyped_storage()
            )
            place = {"page_bytes": chunks[0].stride(0), "offset": chunks[0].storage_offset()}

            def make_pool(layout: PagedLayout, pages: int, blocks: int, **how: Any) -> HostPool:
                return HostPool.over(memory, layout, blocks, **place, **how)

            return KVSwapWorker(
                *(kv_caches, self.num_chunks, 1, self.options, layers, make_pool),
                has_writers=True,
                at_end=theirs.shutdown,
            )
        except BaseException:
            theirs.shutdown()
            raise

    def _why_theirs(
        self, kv_caches: Any, layouts: Sequence[PagedLayout | None], chunks: Sequence[Tensor]
    ) -> str:
        """Where our worker would put a block in another place than vLLM's; empty if nowhere.

        Args:
            kv_caches: vLLM's CanonicalKVCaches.
            layouts (Sequence[PagedLayout | None]): of each group of layers.
            chunks (Sequence[Tensor]): vLLM's chunks of each of its tensors, [chunks, bytes].
        """
        if self.blocks_per_chunk > 1:
            return f"{self.blocks_per_chunk} blocks of a layer lie one after another"
        if self.config.canonical_layout and not all(
            ref.mapping.num_writers == 1
            and [run.fragment_size for run in ref.mapping.runs] == [ref.page_size_bytes]
            and ref.mapping.canonical_page_size_bytes == ref.page_size_bytes
            for refs in kv_caches.group_data_refs
            for ref in refs
        ):
            return "layers have the heads of all workers"
        first = chunks[0].data_ptr()
        for refs, layout in zip(kv_caches.group_data_refs, layouts, strict=True):
            begin = 0
            for tensor, size in zip(
                dict.fromkeys(ref.tensor_idx for ref in refs),
                [] if layout is None else layout.sizes.tolist(),
                strict=True,
            ):
                at = chunks[tensor].data_ptr() - first
                if at != begin:
                    return f"tensor {tensor} lies at byte {at}, not {begin}"
                begin += size
        return ""
