"""torch_kvswap in SGLang, by configuration only: see docs/sglang.md."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import torch_kvswap as kvs
from torch_kvswap.integrations import did_you_mean, not_installed, real_path
from torch_kvswap.prefix import BlockGroup, PrefixKeys

try:
    from sglang.srt.arg_groups.arg_utils import namespace_of, record_fields
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.memory_pool import (
        HybridLinearKVPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
    )
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
    from sglang.srt.runtime_context import get_serving
except ModuleNotFoundError as error:
    raise not_installed("sglang", error) from error

_log = logging.getLogger(__name__)
_OPTIONS = ("host_bytes", "encoding", "verify", "below", "server")
# Engines share pages if they were started with equal options. Left out are options that engines of
# one machine cannot have equal, secrets, what is described elsewhere, schedules and logs.
_LEFT_OUT_GROUPS = ("device", "disagg", "observability", "parallel", "schedule")  # of SGLang's
_LEFT_OUT = (
    # Addresses, devices, and which engine has the weights that others map.
    "host port grpc_port fastapi_root_path sidecar_args engine_info_bootstrap_port "
    "mooncake_ib_device weight_cache_mode weight_cache_socket "
    "remote_instance_weight_loader_seed_instance_ip "
    "remote_instance_weight_loader_seed_instance_service_port "
    "remote_instance_weight_loader_send_weights_group_ports "
    # Secrets, and a dictionary that may have some.
    "api_key admin_api_key ssl_keyfile_password watermark_config watermark_key watermark_key_b "
    "hicache_storage_backend_extra_config "
    # Described by SGLang's hashes, by our keys and with the cache.
    "lora_paths weight_version unified_cache_external_linker_config"
)
_SERVED = (  # SGLang's KV cache, and the pool in it that has the keys and values
    (MHATokenToKVPool, MHATokenToKVPool),
    (MLATokenToKVPool, MLATokenToKVPool),
    (SWAKVPool, MHATokenToKVPool),
    (HybridLinearKVPool, MHATokenToKVPool),
    (HybridLinearKVPool, MLATokenToKVPool),
)
_GROUP_BYTES, _GROUPS = 2 << 20, 16  # least bytes of a layer group, and most groups of a load
_LENGTHS = 64  # of a prefix with windows or states that the ranks compare
_TIER_SECONDS = 0.05  # that the requests of a step wait for a second tier, together


@dataclass(eq=False)
class _Offload:
    """Pages to store: submitted when `after[0]` is done, and with it the slots are on the host."""

    keys: list[PrefixKeys]
    slots: list[list[torch.Tensor]]
    after: tuple[Any, ...] | None  # None: submitted
    is_stored: bool | None = None  # None: has not ended


class KVSwapLinker(UnifiedCacheLinker):
    """Keeps SGLang's KV cache in a PrefixCache. SGLang makes a linker in each rank.

    docs/sglang.md has the options, and says when SGLang's scheduler waits.

    Raises:
        TypeError, ValueError: an option is wrong, or the model or configuration is not served.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, Any],
        forward_stream: Any,
    ) -> None:
        options = {name: value for name, value in extra_config.items() if value is not None}
        for name in options.keys() - _OPTIONS:
            raise ValueError(f"linker_extra_config has {name}; {did_you_mean(name, _OPTIONS)}")
        self.forward_stream, self._page_tokens = forward_stream, params.page_size
        self.pools, layers = dict[Any, kvs.PagedLayout](), list[int]()
        for name, blocks, of_blocks in _read_pools(params, components):
            _refuse(not blocks, f"models or pipeline stages without layers in the pool {name}")
            self.pools[name] = kvs.PagedLayout(blocks, 0)
            layers += of_blocks
        self._is_on_gpu = self.pools[PoolName.KV].device.type != "cpu"
        # With which tensor a layer, and every layer before it, has landed: before the graph of a
        # whole forward SGLang waits for the last layer only.
        self._last_tensors = {
            layer: max(at for at, other in enumerate(layers) if other <= layer) for layer in layers
        }
        # SGLang's pools wait with it before they hand out a layer.
        self.layer_done_counter, self.num_layers, self.consumer_index = self, max(layers) + 1, -1
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self)
        self._queued = dict[str, list[Any]]()  # transfers of the next load, by request
        self._leases = dict[str, list[Any]]()  # of what this step's lookups have found, by request
        self._loads = dict[int, kvs.Job]()  # by what SGLang calls a counter's index
        self._offloads = deque[_Offload]()
        self._waited = deque[str](maxlen=1024)  # requests that have waited for a second tier
        self._deadline = 0.0  # of this step's waits; 0: it has not waited
        part = _describe_part(server_args, params)
        self._most_lengths = _LENGTHS if part[2] > 1 else 1
        self.cache = self._open(options, params, part)
        _log.info("KVSwapLinker: %s, rank %d of %d, %s, %r", *part, options, self.cache)
        if params.page_size < 16:
            _log.warning("pages of %d tokens are slow; set --page-size 64", params.page_size)

    def _open(self, options: Any, params: Any, part: tuple[str, int, int]) -> kvs.PrefixCache:
        how: Any = {name: options[name] for name in ("encoding", "verify") if name in options}
        layouts, size = list(self.pools.values()), options.get("host_bytes")
        blocks = [layout.num_blocks for layout in layouts]
        whole = sum(kvs.HostPool.page_bytes_of(one, **how) * one.num_blocks for one in layouts)
        least = -(-whole // min(blocks))
        if not isinstance(size, int) or size < least:
            raise ValueError(
                f"linker_extra_config: host_bytes is {size!r}; it must be an integer, "
                f"{least} or more"
            )
        pages = [count * size // whole for count in blocks]  # in the proportions on the GPU
        groups = list[BlockGroup]()
        for name, count in zip(self.pools, pages, strict=True):
            # SGLang's window is without the token that is computed.
            window = params.swa_retain_window + 1 if name == PoolName.SWA else None
            groups.append(BlockGroup(count, params.page_size, window, name == PoolName.MAMBA))
        below, server = options.get("below"), options.get("server")
        if server is None:
            pools = [kvs.HostPool(*sized, **how) for sized in zip(layouts, pages, strict=True)]
            model = None if below is None else part
            return kvs.PrefixCache(layouts, pools, groups, below=below, below_model=model)
        if below is not None:
            raise ValueError("linker_extra_config has server and below; start the server --below")
        path = str(server).replace("{rank}", str(part[1]))
        return kvs.PrefixCache.connect(path, layouts, groups, model=part, **how)

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """The lengths of the prefix, in pages, that this rank can load.

        No rank may refuse to load the one that all have, so the pages of each are held. SGLang
        loads it in this step or looks it up again.
        """
        hashes = next(one.keys for one in transfers if one.name == PoolName.KV)
        keys = [self._keys(hashes)] * len(self.pools)
        found = self.cache.lookup(keys, hold=True)
        if (found.asking or found.pending) and rid not in self._waited:
            self._waited.append(rid)
            self._deadline = self._deadline or time.monotonic() + _TIER_SECONDS
            while (found.asking or found.pending) and time.monotonic() < self._deadline:
                time.sleep(0.001)
                self._poll()
                found = self.cache.lookup(keys, again=True, hold=True)
        self._leases[rid] = leases = [found.lease]
        if len(keys) == 1:
            return list(range(1, found.ready + 1))
        lengths = list[int]()
        while found.ready and len(lengths) < self._most_lengths:
            lengths.insert(0, found.ready)
            keys = [of_group[: found.ready - 1] for of_group in keys]
            found = self.cache.lookup(keys, again=True, hold=True)
            leases.append(found.lease)
        return lengths

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        self._queued.setdefault(rid, []).extend(transfers)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Starts the queued loads as one job, layer after layer."""
        transfers, self._queued = [*itertools.chain(*self._queued.values())], {}
        try:
            return self._load(transfers) if transfers else -1
        finally:
            self._leases.clear()

    def _load(self, transfers: Sequence[Any]) -> int:
        try:
            keys, slots = self._read(transfers)
            after: Any = ()
            if self._is_on_gpu:
                # For the slots, and with them for all that the scheduler's stream does before.
                torch.cuda.current_stream().synchronize()
                # A forward in flight may still use what was freed for this load.
                after = self.forward_stream or ()
            blocks = self._blocks(slots)
            sizes = zip(blocks, self.cache.pools, strict=True)
            nbytes = sum(len(one) * pool.page_bytes for one, pool in sizes)
            groups = min(_GROUPS, len(self._last_tensors), 1 + nbytes // _GROUP_BYTES)
            job = self.cache.load(keys, blocks, after=after, layer_groups=groups)
        except Exception:
            _log.exception("a load could not be submitted")
            return 0  # no job has it, so finish_layer_wise_loading() returns False
        if job is None:
            _log.warning("pages have left the host before their load")
            return 0
        index = 1 + job.id  # the first job of a handler is number 0
        self._loads[index] = job
        return index

    def set_consumer(self, index: int) -> None:
        """Chooses the loads of the next forward; -1 is none."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Makes the forward's stream, not the host, wait for a layer and those before it; for all
        if SGLang has no cache for it."""
        job, at = self._loads.get(self.consumer_index), self._last_tensors.get(threshold)
        if job is not None:
            job.wait(layer_group=None if at is None else job.layer_group_of(at))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Blocks the host until the loads have ended. False: their requests must end."""
        job = self._loads.pop(counter_index, None)
        if job is None:
            return False
        try:
            self.cache.synchronize(job)
        except kvs.TransferError:
            return False
        finally:
            self._poll()  # forgets pages that could not be loaded
        return True

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
        """SGLang asks once in each step, before all lookups."""
        self._leases.clear()
        self._deadline = 0.0
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
        self.cache.reset()

    def close(self) -> None:
        self._quiesce()
        self.cache.close()
        for pool in self.cache.pools:
            pool.close()

    def _quiesce(self) -> None:
        self._queued.clear()
        self._leases.clear()
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
        """SGLang's hashes of pages (SHA-256) as keys. Each version of the weights has its own:
        other engines may have another version."""
        keys = np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8)
        version = hashlib.sha256(str(get_serving().weight_version).encode()).digest()
        mixed = keys.reshape(-1, len(version)) ^ np.frombuffer(version, np.uint8)
        return PrefixKeys(mixed.tobytes(), self._page_tokens)

    def _read(self, transfers: Sequence[Any]) -> tuple[list[PrefixKeys], list[list[torch.Tensor]]]:
        """The keys of each group of layers, and the slots of its pages, which the current stream
        copies to the host."""
        slots, keys = list[list[torch.Tensor]](), list[PrefixKeys]()
        for name in self.pools:
            own = [one for one in transfers if one.name == name]
            slots.append([one.device_indices.to("cpu", non_blocking=True) for one in own])
            keys.append(self._keys("".join(one.keys) for one in own))
        return keys, slots

    def _blocks(self, slots: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
        """The GPU blocks of each group of layers, when their slots are on the host."""
        blocks = list[list[int]]()
        for of_group, name in zip(slots, self.pools, strict=True):
            step = 1 if name == PoolName.MAMBA else self._page_tokens  # slots of a block
            firsts = [one.numpy()[::step].tolist() for one in of_group]
            blocks.append([slot // step for first in firsts for slot in first])
        return blocks


def _describe_part(server_args: Any, params: Any) -> tuple[str, int, int]:
    """Names the bytes of a page: the model, and this rank's part of how many."""
    ranks, rank, world = params.attn_tp_cache_group or params.tp_cache_group, 0, 1
    is_latent = type(params.token_to_kv_pool_allocator.get_kvcache()) is MLATokenToKVPool
    if ranks is not None and not is_latent:  # of latent attention all ranks have all bytes
        rank, world = torch.distributed.get_rank(ranks), torch.distributed.get_world_size(ranks)
    rank += world * (params.pp_rank * params.attn_cp_size + params.attn_cp_rank)
    world *= params.pp_size * params.attn_cp_size
    return _describe_model(server_args), rank, world


def _describe_model(server_args: Any) -> str:
    """The model, with the options that count and are not SGLang's defaults, as they were given."""
    kind = type(server_args)
    groups, default, left_out = namespace_of(kind), kind(model_path=""), _LEFT_OUT.split()
    text = f"sglang {importlib.metadata.version('sglang')}"
    for name in (field.name for field in record_fields(kind)):
        value = getattr(server_args, name)
        is_out = name in left_out or groups.get(name) in _LEFT_OUT_GROUPS
        # SGLang has forward_hooks, which change what layers compute, in observability.
        if value == getattr(default, name) or (is_out and name != "forward_hooks"):
            continue
        if isinstance(value, str):
            value = real_path(value)
        if isinstance(value, set):  # in another order in each process
            value = sorted(value)
        if name == "model_loader_extra_config":  # may hold secrets, and what is described is shown
            value = hashlib.sha256(repr(value).encode()).hexdigest()
        text += f", {name} {value!r}"
    return text


def _read_pools(
    params: Any, components: Any
) -> Iterator[tuple[Any, list[torch.Tensor], list[int]]]:
    """For each group of layers its name, the blocks of each of its tensors, and their layers.

    Full attention, by far the most bytes, is last: it is loaded last.
    """
    kvcache, requests = params.token_to_kv_pool_allocator.get_kvcache(), params.req_to_token_pool
    drafts = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)
    _refuse(drafts, "draft models with a KV cache of their own")
    first, page = getattr(kvcache, "start_layer", 0), params.page_size

    def blocks_of(parts: Sequence[Any], layers: Sequence[int], step: int) -> Any:
        """parts: such as keys and values, a tensor for each layer. step: slots of a block."""
        rows = [part[at] for at in range(len(layers)) for part in parts]
        # The last rows may be no whole block, and no request gets them.
        blocks = [one[: len(one) // step * step].unflatten(0, (-1, step)) for one in rows]
        return blocks, [layer - first for layer in layers for _ in parts]

    if any(component.name == "MAMBA" for component in components):
        [info] = requests.mamba_pool.get_device_pool_infos()
        states = info.buffer_info
        _refuse(requests.mamba_ckpt_pool is not None, "int8 checkpoints of states")
        _refuse(states.extra_checkpoint_buffers, "states in addition to those of Mamba layers")
        parts = [part for part in (states.temporal, *states.conv) if part.numel()]
        yield PoolName.MAMBA, *blocks_of(parts, info.layer_ids, 1)
    pools = {PoolName.KV: getattr(kvcache, "full_kv_pool", kvcache)}
    if type(kvcache) is SWAKVPool:
        pools = {PoolName.SWA: kvcache.swa_kv_pool, **pools}
    for name, pool in pools.items():
        kinds = type(kvcache), type(pool)
        _refuse(kinds not in _SERVED, f"{kinds[1].__name__} in {kinds[0].__name__}")
        scales = getattr(pool, "k_scale_buffer", None), getattr(pool, "native_k_scale_buffer", None)
        _refuse(scales != (None, None), "KV caches with scales")
        order, size = getattr(pool, "kv_cache_layout", "nhd"), pool.page_size
        _refuse(order != "nhd", f"the KV layout {order!r}")
        _refuse(size != page, f"pages of {page} tokens in pools with pages of {size} (DCP)")
        is_latent = kinds[1] is MLATokenToKVPool
        parts = [pool.kv_buffer] if is_latent else [pool.k_buffer, pool.v_buffer]
        layers = getattr(kvcache, "full_attention_layer_id_mapping", None) or pool.model_layer_ids
        yield name, *blocks_of(parts, list(layers), page)


def _refuse(is_so: object, what: str) -> None:
    if is_so:
        without = "leave out --enable-unified-cache-external-linker"
        raise ValueError(f"KVSwapLinker does not serve {what}; {without}")
