"""torch_kvswap in SGLang, by configuration only:

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "KVSwapLinker",
      "linker_module_path": "torch_kvswap.integrations.sglang",
      "linker_extra_config": {"host_bytes": 10737418240}}'

docs/sglang.md describes the options and what happens when a copy fails.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from torch_kvswap._native.arguments import read_int
from torch_kvswap._native.loader import native
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import Job
from torch_kvswap.prefix.block_groups import BlockGroup
from torch_kvswap.prefix.cache import PrefixCache
from torch_kvswap.prefix.hashing import KEY_BYTES
from torch_kvswap.results import TransferError

_log = logging.getLogger(__name__)
_OPTIONS = ("host_bytes", "encoding", "verify", "below", "server")
_OF_BYTES = "model_path revision dtype quantization kv_cache_dtype json_model_override_args"
_LENGTHS = 64  # of a prefix with windows or states that the ranks compare
_TIER_SECONDS = 0.05  # that a request waits for a second tier


class _Group(NamedTuple):
    """Layers that share their blocks: pages of `step` tokens, or states (step 1)."""

    name: Any
    step: int
    layout: PagedLayout
    layers: list[int]  # of each tensor, as SGLang numbers them


@dataclass(eq=False)
class _Offload:
    """Pages to store. When `after[0]` is done, the slots are on the host, and it is submitted."""

    keys: list[bytes]
    slots: list[torch.Tensor]
    after: tuple[Any, ...] | None  # None: submitted
    is_stored: bool | None = None  # None: has not ended


class KVSwapLinker(UnifiedCacheLinker):
    """SGLang's prefixes in host memory, in a PrefixCache. SGLang makes one in each rank.

    Its scheduler thread makes all calls. They return without waiting for copies, except
    finish_layer_wise_loading(), reset() and close(), which are for waiting.

    Raises:
        TypeError, ValueError: an option is wrong, or the model or configuration is not served.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        options = dict(extra_config or {})
        for name in options.keys() - _OPTIONS:
            known = difflib.get_close_matches(name, _OPTIONS, 1) or _OPTIONS
            raise ValueError(f"linker_extra_config has {name}; did you mean {' or '.join(known)}?")
        if "server" in options and "below" in options:
            raise ValueError(
                "linker_extra_config has server and below; give the server its --below"
            )
        self.forward_stream, self._has_below = forward_stream, "below" in options
        self._groups = _read_groups(params, {component.name for component in components})
        self.pools = {group.name: group.layout for group in self._groups}
        self._queued = dict[str, list[Any]]()  # transfers of the next loads, by request
        self._loads = dict[int, Job | None]()  # None: it could not be submitted
        self._offloads, self._numbers = deque[_Offload](), itertools.count()
        self._waited = deque[str](maxlen=1024)  # requests that have waited for a second tier
        self._salt: Any = np.zeros(KEY_BYTES, np.uint8)
        self._open(options, server_args, params)
        # SGLang's pools wait with this before they hand out a layer.
        self.layer_done_counter = self
        layers = [layer for group in self._groups for layer in group.layers]
        self.num_layers, self.consumer_index = max(layers) + 1, -1
        self._parts = len(set(layers))  # of a load, one for each layer, which ends with a tensor:
        parts = [native.layer_group_of(at, self._parts, len(layers)) for at in range(len(layers))]
        self._part_of_layer = dict(zip(layers, parts, strict=True))
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self)

    def _open(self, options: dict[str, Any], server_args: Any, params: Any) -> None:
        ranks, rank, world = params.attn_tp_cache_group or params.tp_cache_group, 0, 1
        is_latent = type(params.token_to_kv_pool_allocator.get_kvcache()) is MLATokenToKVPool
        if ranks is not None and not is_latent:  # of latent attention all ranks have all bytes
            rank, world = torch.distributed.get_rank(ranks), torch.distributed.get_world_size(ranks)
        rank += world * (params.pp_rank * params.attn_cp_size + params.attn_cp_rank)
        world *= params.pp_size * params.attn_cp_size
        self._most_lengths = _LENGTHS if world > 1 else 1
        model = f"sglang {importlib.metadata.version('sglang')}"
        model += "".join(f", {name} {getattr(server_args, name)}" for name in _OF_BYTES.split())
        how: dict[str, Any] = {
            name: options[name] for name in ("encoding", "verify") if name in options
        }
        layouts = [group.layout for group in self._groups]
        pages, groups = _divide(options.get("host_bytes"), layouts, how), list[BlockGroup]()
        for name, count in zip(self.pools, pages, strict=True):
            # SGLang's window is without the token that is computed.
            window = params.sliding_window_size + 1 if name == PoolName.SWA else None
            groups.append(BlockGroup(count, params.page_size, window, name == PoolName.MAMBA))
        part: dict[str, Any] = {"model": model, "rank": rank, "world": world}
        if "server" in options:
            path = str(options["server"]).replace("{rank}", str(rank))
            self.cache = PrefixCache.connect(path, layouts, groups, **part, **how)
        else:
            part = {f"below_{name}": value for name, value in part.items()}
            part = {"below": options["below"], **part} if self._has_below else {}
            pools = [HostPool(*sized, **how) for sized in zip(layouts, pages, strict=True)]
            self.cache = PrefixCache(layouts, pools, groups, **part)
        counts = [
            f"{group.num_pages} pages of {name.value}"
            for group, name in zip(groups, self.pools, strict=True)
        ]
        _log.info("KVSwapLinker: rank %d of %d, %s, %s", rank, world, ", ".join(counts), options)
        if params.page_size < 16:
            _log.warning("pages of %d tokens are slow; set --page-size 64", params.page_size)

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """The lengths of the prefix, in pages, that this rank can load."""
        hashes = next(one.keys for one in transfers if one.name == PoolName.KV)
        keys = [self._keys(hashes)] * len(self._groups)
        found = self.cache.lookup(keys)
        if (found.asking or found.pending) and rid not in self._waited:
            self._waited.append(rid)
            deadline = time.monotonic() + _TIER_SECONDS
            while (found.asking or found.pending) and time.monotonic() < deadline:
                time.sleep(0.001)
                self._poll()
                found = self.cache.lookup(keys, again=True)
        if len(keys) == 1:
            return list(range(1, found.ready + 1))
        lengths = list[int]()
        while found.ready and len(lengths) < self._most_lengths:
            lengths.append(found.ready)
            keys = [of_group[: (found.ready - 1) * KEY_BYTES] for of_group in keys]
            found = self.cache.lookup(keys, again=True)
        return lengths[::-1]

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        self._queued.setdefault(rid, []).extend(transfers)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Starts the queued loads as one job, layer after layer."""
        if not self._queued:
            return -1
        transfers, self._queued = [*itertools.chain(*self._queued.values())], {}
        index, job = next(self._numbers), None
        try:
            keys, slots = self._read(transfers)
            blocks, after = self._blocks(slots), self._ready()
            job = self.cache.load(keys, blocks, after=after, layer_groups=self._parts)
            if job is None:
                _log.warning("pages have left the host before their load")
        except Exception:
            _log.exception("a load could not be submitted")
        self._loads[index] = job
        return index

    def set_consumer(self, index: int) -> None:
        """Chooses the loads of the next forward; -1 is none."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Makes the forward's stream, not the host, wait for a layer; for all if nothing is its."""
        if (job := self._loads.get(self.consumer_index)) is not None:
            job.wait(layer_group=self._part_of_layer.get(threshold))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Blocks the host until the loads have ended. False: their requests must end."""
        if counter_index not in self._loads:
            return True
        if (job := self._loads.pop(counter_index)) is None:
            return False
        with contextlib.suppress(TransferError):
            job.synchronize()
        self._poll()  # forgets pages that could not be loaded
        return job.result is not None and job.result.ok

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Begins to store pages. pop_completed_offload() says what becomes of them: ranks consume
        equally many, so none may refuse what another accepts.

        The slots are on the GPU, and the scheduler's stream may wait for the forward in flight. So
        they are copied beside it, and a later step submits the store.
        """
        keys, slots = self._read(transfers)
        slots = [one.to("cpu", non_blocking=True) for one in slots]  # pinned
        self._offloads.append(_Offload(keys, slots, self._ready()))
        return True

    def num_completed_offloads(self) -> int:
        """SGLang asks in each step."""
        for offload in self._offloads:
            if offload.after is not None and all(event.query() for event in offload.after[:1]):
                self._store(offload)
        self._poll()
        ended = itertools.takewhile(lambda one: one.is_stored is not None, self._offloads)
        return sum(1 for _ in ended)

    def _store(self, offload: _Offload) -> None:
        after, offload.after = offload.after, None
        try:
            blocks = self._blocks(offload.slots)
            stored = self.cache.store(offload.keys, blocks, after=after, tag=offload)
            if stored.job is None:
                offload.is_stored = stored.state == "present"
        except Exception:
            _log.exception("pages could not be stored")
            offload.is_stored = False

    def pop_completed_offload(self) -> bool:
        return bool(self._offloads.popleft().is_stored)

    def reset(self) -> None:
        """Forgets all pages, for example because the weights have changed."""
        self._quiesce()
        self.cache.manager.reset()
        if self._has_below:  # pages of the old weights are not found there any more
            self._salt = np.frombuffer(os.urandom(KEY_BYTES), np.uint8)

    def close(self) -> None:
        self._quiesce()
        self.cache.close()
        for pool in self.cache.pools:
            pool.close()

    def _quiesce(self) -> None:
        self._queued.clear()
        with contextlib.suppress(TransferError):
            self.cache.synchronize()
        self._poll()
        self._offloads.clear()
        self._loads.clear()
        self.consumer_index = -1

    def _poll(self) -> None:
        for result in self.cache.poll():
            if result.tag is not None:
                result.tag.is_stored = result.ok
            if not result.ok:
                _log.warning("a %s ended as %s: %s", result.direction, result.state, result.error)

    def _keys(self, hashes: Sequence[str]) -> bytes:
        """SGLang's hashes of pages (SHA-256) as keys in a row."""
        keys = np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8)
        return bytes((keys.reshape(-1, KEY_BYTES) ^ self._salt).tobytes())

    def _read(self, transfers: Sequence[Any]) -> tuple[list[bytes], list[torch.Tensor]]:
        """The keys of each group, and the first slot of each of its pages."""
        keys, slots = list[bytes](), list[torch.Tensor]()
        for group in self._groups:
            own = [one for one in transfers if one.name == group.name and one.keys]
            keys.append(self._keys([key for one in own for key in one.keys]))
            none = transfers[0].device_indices[:0]  # to concatenate
            slots.append(torch.cat([none, *(one.device_indices[:: group.step] for one in own)]))
        return keys, slots

    def _blocks(self, slots: Sequence[torch.Tensor]) -> list[Any]:
        """The GPU blocks of each group. Waits for slots that are on the GPU."""
        return [one.cpu().numpy() // of.step for of, one in zip(self._groups, slots, strict=True)]

    def _ready(self) -> tuple[Any, ...]:
        """What a copy waits for: the scheduler's stream, and the forward that may be running, which
        writes what is stored, and may still use what was freed for a load."""
        is_cpu = self._groups[0].layout.device.type == "cpu"
        return () if is_cpu else tuple(self.record_offload_ready())


def _divide(size: object, layouts: Sequence[PagedLayout], how: Mapping[str, Any]) -> list[int]:
    """Host pages of each group, in the proportions of SGLang's GPU memory."""
    nbytes = read_int("linker_extra_config: host_bytes", size, 1)
    counts = [layout.num_blocks for layout in layouts]
    whole = sum(layout.num_blocks * HostPool.page_bytes_of(layout, **how) for layout in layouts)
    if nbytes * min(counts) < whole:
        least = -(-whole // min(counts))
        raise ValueError(f"linker_extra_config: host_bytes is {nbytes}; set {least} or more")
    return [nbytes * count // whole for count in counts]


def _read_groups(params: Any, components: set[str]) -> list[_Group]:
    """The model's groups. Full attention, by far the most bytes, is last: it is loaded last."""
    kvcache, requests = params.token_to_kv_pool_allocator.get_kvcache(), params.req_to_token_pool
    drafts = params.mtp_draft_device_pools, params.sidecar_draft_device_pools
    groups, start = list[_Group](), getattr(kvcache, "start_layer", 0)
    if any((*drafts, params.mtp_draft_mamba_pools)):
        raise _refused("draft models that have a KV cache of their own")
    if "MAMBA" in components:
        [info] = requests.mamba_pool.get_device_pool_infos()
        states = info.buffer_info
        if requests.mamba_ckpt_pool is not None or states.extra_checkpoint_buffers:
            raise _refused("int8 checkpoints of states, or states beside those of Mamba layers")
        parts = [part for part in (states.temporal, *states.conv) if part.numel()]
        groups.append(_group(PoolName.MAMBA, 1, parts, [one - start for one in info.layer_ids]))
    pools = {PoolName.KV: kvcache}
    if type(kvcache) is SWAKVPool:
        pools = {PoolName.SWA: kvcache.swa_kv_pool, PoolName.KV: kvcache.full_kv_pool}
    elif type(kvcache) is HybridLinearKVPool:
        pools = {PoolName.KV: kvcache.full_kv_pool}
    for name, pool in pools.items():
        if type(pool) is MHATokenToKVPool:
            parts, scales = (
                [pool.k_buffer, pool.v_buffer],
                (pool.k_scale_buffer, pool.native_k_scale_buffer),
            )
            if pool.kv_cache_layout != "nhd":
                raise _refused(f"the KV layout {pool.kv_cache_layout!r}")
            if any(scale is not None for scale in scales):
                raise _refused("KV caches with scales")
        elif type(pool) is MLATokenToKVPool and type(kvcache) is not SWAKVPool:
            parts = [pool.kv_buffer]
        else:
            raise _refused(f"a {type(pool).__name__} in a {type(kvcache).__name__}")
        if pool.page_size != params.page_size:
            pages = f"pages of {params.page_size} tokens in pools with pages of {pool.page_size}"
            raise _refused(f"{pages} (--dcp-size)")
        layers = getattr(kvcache, "full_attention_layer_id_mapping", None) or pool.model_layer_ids
        groups.append(_group(name, params.page_size, parts, [one - start for one in layers]))
    return groups


def _group(name: Any, step: int, parts: Sequence[Any], layers: Sequence[int]) -> _Group:
    """parts: for example keys and values, each with a tensor of rows for each layer."""
    tensors = [part[at] for at in range(len(layers)) for part in parts]
    # The last rows may be no whole block, and no request gets them.
    blocks = [one[: len(one) // step * step].unflatten(0, (-1, step)) for one in tensors]
    return _Group(name, step, PagedLayout(blocks, 0), [one for one in layers for _ in parts])


def _refused(what: str) -> ValueError:
    return ValueError(
        f"KVSwapLinker does not serve {what}; leave out --enable-unified-cache-external-linker"
    )
