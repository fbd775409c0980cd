"""torch_kvswap in SGLang, by configuration only:

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "KVSwapLinker",
      "linker_module_path": "torch_kvswap.integrations.sglang",
      "linker_extra_config": {"host_bytes": 10737418240}}'

docs/sglang.md describes the options and what happens when a copy fails.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

import torch_kvswap as kvs
from torch_kvswap.integrations import did_you_mean
from torch_kvswap.prefix import BlockGroup, PrefixKeys

_log = logging.getLogger(__name__)
_OPTIONS = ("host_bytes", "encoding", "verify", "below", "server")
_OF_BYTES = "model_path revision dtype quantization kv_cache_dtype json_model_override_args"
_SERVED = {  # what has the keys and values, by what SGLang's allocator has
    MHATokenToKVPool: (MHATokenToKVPool,),
    MLATokenToKVPool: (MLATokenToKVPool,),
    SWAKVPool: (MHATokenToKVPool,),
    HybridLinearKVPool: (MHATokenToKVPool, MLATokenToKVPool),
}
_GROUP_BYTES, _GROUPS = 2 << 20, 16  # least bytes of a layer group, and most groups of a load
_LENGTHS = 64  # of a prefix with windows or states that the ranks compare
_TIER_SECONDS = 0.05  # that a request waits for a second tier


@dataclass(eq=False)
class _Offload:
    """Pages to store: submitted when `after[0]` is done, and with it the slots are on the host."""

    keys: list[PrefixKeys]
    slots: list[list[torch.Tensor]]
    after: tuple[Any, ...] | None  # None: submitted
    is_stored: bool | None = None  # None: has not ended


class KVSwapLinker(UnifiedCacheLinker):
    """Keeps SGLang's KV cache in a PrefixCache. SGLang makes a linker in each rank.

    All calls come from SGLang's scheduler thread, and none waits for copies except
    finish_layer_wise_loading(), reset() and close(). docs/sglang.md has the options.

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
        given = (extra_config or {}).items()
        options = {name: value for name, value in given if value is not None}
        self.forward_stream = forward_stream
        for name in options.keys() - _OPTIONS:
            raise ValueError(f"linker_extra_config has {name}; {did_you_mean(name, _OPTIONS)}")
        self.pools, self._steps, layers = dict[Any, kvs.PagedLayout](), dict[Any, int](), []
        for name, step, parts, of_layers in _read_pools(params, components):
            rows = [part[at] for at in range(len(of_layers)) for part in parts]
            # The last rows may be no whole block, and no request gets them.
            blocks = [one[: len(one) // step * step].unflatten(0, (-1, step)) for one in rows]
            self.pools[name], self._steps[name] = kvs.PagedLayout(blocks, 0), step
            layers += [layer for layer in of_layers for _ in parts]
        self._last_tensors = {layer: at for at, layer in enumerate(layers)}
        # SGLang's pools wait with it before they hand out a layer.
        self.layer_done_counter, self.num_layers, self.consumer_index = self, max(layers) + 1, -1
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self)
        self._queued = dict[str, list[Any]]()  # transfers of the next loads, by request
        self._loads, self._number = dict[int, kvs.Job | None](), 0  # None: was not submitted
        self._offloads = deque[_Offload]()
        self._waited = deque[str](maxlen=1024)  # requests that have waited for a second tier
        self._page_tokens: int = params.page_size
        self._is_on_gpu = self.pools[PoolName.KV].device.type != "cpu"
        self._open(options, server_args, params)

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
        how: Any = {name: options[name] for name in ("encoding", "verify") if name in options}
        layouts, size = list(self.pools.values()), options.get("host_bytes")
        blocks = [layout.num_blocks for layout in layouts]
        whole = sum(kvs.HostPool.page_bytes_of(one, **how) * one.num_blocks for one in layouts)
        if not isinstance(size, int) or size * min(blocks) < whole:
            least = -(-whole // min(blocks))
            raise ValueError(
                f"linker_extra_config: host_bytes is {size!r}; set an integer from {least} on"
            )
        pages = [count * size // whole for count in blocks]  # in the proportions on the GPU
        groups = list[BlockGroup]()
        for name, count in zip(self.pools, pages, strict=True):
            # SGLang's window is without the token that is computed.
            window = params.sliding_window_size + 1 if name == PoolName.SWA else None
            groups.append(BlockGroup(count, params.page_size, window, name == PoolName.MAMBA))
        part = model, rank, world
        if "below" in options and "server" in options:
            raise ValueError("linker_extra_config has server and below; start the server --below")
        if "server" in options:
            path = options["server"]
            if not isinstance(path, str):
                raise ValueError(f"linker_extra_config: server is {path!r}; set a socket's path")
            path = path.replace("{rank}", str(rank))
            self.cache = kvs.PrefixCache.connect(path, layouts, groups, model=part, **how)
        else:
            pools = [kvs.HostPool(*sized, **how) for sized in zip(layouts, pages, strict=True)]
            below = options.get("below")
            self.cache = kvs.PrefixCache(
                layouts, pools, groups, below=below, below_model=None if below is None else part
            )
        _log.info("KVSwapLinker: rank %d of %d, %s, %r", rank, world, options, self.cache)
        if params.page_size < 16:
            _log.warning("pages of %d tokens are slow; set --page-size 64", params.page_size)

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """The lengths of the prefix, in pages, that this rank can load."""
        hashes = next(one.keys for one in transfers if one.name == PoolName.KV)
        keys = [self._keys(hashes)] * len(self.pools)
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
            lengths.insert(0, found.ready)
            keys = [of_group[: found.ready - 1] for of_group in keys]
            found = self.cache.lookup(keys, again=True)
        return lengths

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
        self._number, job = self._number + 1, None
        try:
            keys, slots = self._read(transfers)
            if self._is_on_gpu:  # waits for the slots, and for all that this stream does before
                torch.cuda.current_stream().synchronize()
            blocks = self._blocks(slots)
            sizes = zip(blocks, self.cache.pools, strict=True)
            nbytes = sum(len(one) * pool.page_bytes for one, pool in sizes)
            groups = min(_GROUPS, len(self._last_tensors), 1 + nbytes // _GROUP_BYTES)
            # A forward in flight may still use what was freed for this load.
            after: Any = () if self.forward_stream is None else self.forward_stream
            job = self.cache.load(keys, blocks, after=after, layer_groups=groups)
            if job is None:
                _log.warning("pages have left the host before their load")
        except Exception:
            _log.exception("a load could not be submitted")
        self._loads[self._number] = job
        return self._number

    def set_consumer(self, index: int) -> None:
        """Chooses the loads of the next forward; -1 is none."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Makes the forward's stream, not the host, wait for a layer; for all if nothing is its."""
        job, at = self._loads.get(self.consumer_index), self._last_tensors.get(threshold)
        if job is not None:
            job.wait(layer_group=None if at is None else job.layer_group_of(at))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Blocks the host until the loads have ended. False: their requests must end."""
        job = self._loads.pop(counter_index, None)
        with contextlib.suppress(kvs.TransferError):
            self.cache.synchronize(job or [])
        self._poll()  # forgets pages that could not be loaded
        return job is not None and job.result is not None and job.result.ok

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Begins to store pages. pop_completed_offload() says what becomes of them: ranks consume
        equally many, so none may refuse what another accepts.

        The slots are on the GPU, and the scheduler's stream may wait for the forward in flight. So
        they are copied beside it, and a later step submits the store.
        """
        keys, slots = self._read(transfers)
        ready = self.record_offload_ready() if self._is_on_gpu else ()
        self._offloads.append(_Offload(keys, slots, tuple(ready)))
        return True

    def num_completed_offloads(self) -> int:
        """SGLang asks in each step."""
        for one in self._offloads:
            if one.after is not None and all(event.query() for event in one.after[:1]):
                after, one.after = one.after, None
                try:
                    blocks = self._blocks(one.slots)
                    stored = self.cache.store(one.keys, blocks, after=after, tag=one)
                    if stored.job is None:
                        one.is_stored = stored.state == "present"
                except Exception:
                    _log.exception("pages could not be stored")
                    one.is_stored = False
        self._poll()
        ended = itertools.takewhile(lambda one: one.is_stored is not None, self._offloads)
        return sum(1 for _ in ended)

    def pop_completed_offload(self) -> bool:
        return bool(self._offloads.popleft().is_stored)

    def reset(self) -> None:
        """Forgets all pages, for example because the weights have changed."""
        self._quiesce()
        self.cache.manager.reset()

    def close(self) -> None:
        self._quiesce()
        self.cache.close()
        for pool in self.cache.pools:
            pool.close()

    def _quiesce(self) -> None:
        self._queued.clear()
        with contextlib.suppress(kvs.TransferError):
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

    def _keys(self, hashes: Iterable[str]) -> PrefixKeys:
        """SGLang's hashes of pages (SHA-256) as keys."""
        return PrefixKeys(bytes.fromhex("".join(hashes)), self._page_tokens)

    def _read(self, transfers: Sequence[Any]) -> tuple[list[PrefixKeys], list[list[torch.Tensor]]]:
        """The keys of each group of layers, and the slots of its pages, which the current stream
        copies to the host."""
        slots, keys = list[list[torch.Tensor]](), list[PrefixKeys]()
        for name in self._steps:
            own = [one for one in transfers if one.name == name and one.keys]
            slots.append([one.device_indices.to("cpu", non_blocking=True) for one in own])
            keys.append(self._keys("".join(one.keys) for one in own))
        return keys, slots

    def _blocks(self, slots: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
        """The GPU blocks of each group of layers, when their slots are on the host."""
        return [
            [block for one in of_group for block in (one.numpy()[::step] // step).tolist()]
            for of_group, step in zip(slots, self._steps.values(), strict=True)
        ]


def _read_pools(params: Any, components: Any) -> Iterator[tuple[Any, int, list[Any], list[int]]]:
    """For each group of layers its name, the slots of a block, its parts (such as keys and values),
    which have a tensor for each layer, and the numbers of these layers.

    Full attention, by far the most bytes, is last: it is loaded last.
    """
    kvcache, requests = params.token_to_kv_pool_allocator.get_kvcache(), params.req_to_token_pool
    drafts = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)
    _refuse(drafts or params.mtp_draft_mamba_pools, "draft models with a KV cache of their own")
    first = getattr(kvcache, "start_layer", 0)
    if any(component.name == "MAMBA" for component in components):
        [info] = requests.mamba_pool.get_device_pool_infos()
        states = info.buffer_info
        _refuse(requests.mamba_ckpt_pool is not None, "int8 checkpoints of states")
        _refuse(states.extra_checkpoint_buffers, "states in addition to those of Mamba layers")
        parts = [part for part in (states.temporal, *states.conv) if part.numel()]
        yield PoolName.MAMBA, 1, parts, [layer - first for layer in info.layer_ids]
    pools = {PoolName.KV: getattr(kvcache, "full_kv_pool", kvcache)}
    if type(kvcache) is SWAKVPool:
        pools = {PoolName.SWA: kvcache.swa_kv_pool, **pools}
    for name, pool in pools.items():
        served = _SERVED.get(type(kvcache), ())
        _refuse(type(pool) not in served, f"{type(pool).__name__} in {type(kvcache).__name__}")
        parts = (
            [pool.kv_buffer] if type(pool) is MLATokenToKVPool else [pool.k_buffer, pool.v_buffer]
        )
        scales = [getattr(pool, name, None) for name in ("k_scale_buffer", "native_k_scale_buffer")]
        _refuse(scales != [None, None], "KV caches with scales")
        order = getattr(pool, "kv_cache_layout", "nhd")
        _refuse(order != "nhd", f"the KV layout {order!r}")
        size, wanted = pool.page_size, params.page_size
        _refuse(size != wanted, f"pages of {wanted} tokens in pools with pages of {size} (DCP)")
        layers = getattr(kvcache, "full_attention_layer_id_mapping", None) or pool.model_layer_ids
        yield name, wanted, parts, [layer - first for layer in layers]


def _refuse(is_so: object, what: str) -> None:
    if is_so:
        without = "leave out --enable-unified-cache-external-linker"
        raise ValueError(f"KVSwapLinker does not serve {what}; {without}")
