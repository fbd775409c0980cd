"""A scheduler step around SGLang's radix cache, with its pools, its factory and its wrapper."""

from __future__ import annotations

import hashlib
import os
import warnings
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_stubs
import torch
from patience import in_time

if not os.environ.get("KVSWAP_TEST_SGLANG"):
    pytest.skip("KVSWAP_TEST_SGLANG=1 runs these, where SGLang is", allow_module_level=True)

sglang_stubs.install()
with warnings.catch_warnings():  # SGLang's own are not ours to mend
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import (
        EvictParams,
        InitLoadBackParams,
        InsertParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.memory_pool import (
        HybridLinearKVPool,
        MambaPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
    )
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.srt.server_args import ServerArgs

__all__ = ["PoolName", "PoolTransfer", "ServerArgs", "UnifiedCacheLinker"]

PAGE, LAYERS, TOKENS, WINDOW = 4, 3, 64, 6


SERVER_ARGS = ServerArgs(model_path="model")


def mha_pool(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    size = 8 if dtype == torch.float32 else 128  # encoded slots of small blocks have no room
    return MHATokenToKVPool(TOKENS, PAGE, dtype, 2, size, LAYERS, device, False)


def mla_pool(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    rank = 12 if dtype == torch.float32 else 252
    return MLATokenToKVPool(TOKENS, PAGE, dtype, rank, 4, LAYERS, device, False)


def swa_pool(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Layers 0 and 2 have a window of six tokens."""
    size = 8 if dtype == torch.float32 else 128
    return SWAKVPool(TOKENS, TOKENS, PAGE, dtype, 2, size, [0, 2], [1], device)


def hybrid_pool() -> tuple[Any, Any]:
    """Layers 1 and 3 have full attention, 0 and 2 a state in the pool of requests, which follows."""
    shape = SimpleNamespace(conv=[(5,)], temporal=(3,))
    dtype = SimpleNamespace(conv=torch.float32, temporal=torch.float32)
    made_of = SimpleNamespace(shape=shape, dtype=dtype, is_kda=False)
    requests = SimpleNamespace(
        mamba_pool=MambaPool(
            size=5, spec_state_size=0, cache_params=made_of, mamba_layer_ids=[0, 2], device="cpu"
        ),
        mamba_ckpt_pool=None,
        register_layer_transfer_counter=lambda counter: None,
    )
    states = requests.mamba_pool.mamba_cache
    for part in (states.temporal, *states.conv):
        part.copy_(torch.rand_like(part))
    of_layers = TOKENS, torch.float32, PAGE, 2, 8, [1, 3], "cpu"
    return HybridLinearKVPool(*of_layers, requests.mamba_pool), requests


def make_linker(params: Any, components: Any, stream: Any = None, **extra: Any) -> Any:
    """Through SGLang's factory, as its command line does."""
    return create_unified_cache_linker(
        SERVER_ARGS,
        params,
        backend="dynamic",
        config={
            "linker": "KVSwapLinker",
            "linker_module_path": "torch_kvswap.integrations.sglang",
            "linker_extra_config": {"host_bytes": 1 << 20, **extra},
        },
        components=components,
        forward_stream=stream,
    )


def make_params(kvcache: Any, **more: Any) -> Any:
    components: tuple[Any, ...] = (ComponentType.FULL,)
    of_pool = PAGE, kvcache.dtype, kvcache.device, kvcache, False
    if isinstance(kvcache, SWAKVPool):
        components = ComponentType.FULL, ComponentType.SWA
        allocator = SWATokenToKVPoolAllocator(kvcache.size, kvcache.size_swa, *of_pool)
        more = {"sliding_window_size": WINDOW, **more}
    else:
        allocator = PagedTokenToKVPoolAllocator(kvcache.size, *of_pool)
    given = {"disable": False, "req_to_token_pool": None, "page_size": PAGE}
    given |= {"tree_components": components, "tree_core_backend": "python"}
    return CacheInitParams(token_to_kv_pool_allocator=allocator, **given, **more)


def value_of(tokens: Sequence[int], layer: int, part: int) -> int:
    """What the model computes for the last of these tokens. bfloat16 holds it, too."""
    return hashlib.sha256(f"{list(tokens)} {layer} {part}".encode()).digest()[0]


def hashes_of(tokens: Sequence[int]) -> list[str]:
    """SGLang's hashes of the pages of a prompt."""
    hashes: list[str] = get_storage_hash_str(RadixKey(array("q", tokens)), page_size=PAGE)
    return hashes


class Engine:
    """Serves prompts, mostly one in a step: match, load, forward, insert, as SGLang's scheduler does."""

    def __init__(self, kvcache: Any, linker: Any = None, **extra: Any) -> None:
        self.kvcache, params = kvcache, make_params(kvcache, **extra.pop("params", {}))
        self.cache = UnifiedRadixCache(params)
        self.allocator = params.token_to_kv_pool_allocator
        self.stream = torch.get_device_module(kvcache.device).Stream()  # of the forward
        components = set(self.cache.components)
        self.linker = linker or make_linker(params, components, self.stream, **extra)
        self.cache.init_cache_linker(self.linker)
        self.counter = self.cache.linker.layer_done_counter
        kvcache.register_layer_transfer_counter(self.counter)
        self.served = 0

    def buffers(self, layer: int) -> list[torch.Tensor]:
        """Asks the pool for a layer, as attention does: that waits for its load."""
        if not isinstance(self.kvcache, MLATokenToKVPool):
            return list(self.kvcache.get_kv_buffer(layer))
        return [self.kvcache.get_key_buffer(layer)]

    def start(self, tokens: Sequence[int]) -> Any:
        """Begins a request, and starts its load."""
        request = self.admit(tokens)
        request.index = self.cache.ready_to_load_host_cache()
        return request

    def launch(self, *requests: Any) -> list[bool]:
        """Starts the loads of admitted requests and runs the model; see forward()."""
        index = self.cache.ready_to_load_host_cache()
        for request in requests:
            request.index = index
        return [self.forward(request) for request in requests]

    def admit(self, tokens: Sequence[int]) -> Any:
        """Begins a request: matches its prompt, takes slots, and queues its load."""
        self.served += 1
        request = SimpleNamespace(rid=f"{self.served}", session=None, evicted=dict[Any, int]())
        request.kv = SimpleNamespace(
            get_evicted_seqlen=lambda component: request.evicted.get(component, 0),
            set_evicted_seqlen=request.evicted.__setitem__,
        )
        request.swa_branching_seqlen = None
        request.tokens = list(tokens)
        key = RadixKey(array("q", tokens[:-1]))
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        request.last_node = found.last_device_node
        request.lock = self.cache.inc_lock_ref(request.last_node).to_dec_params()
        request.matched = found.device_prefix_len
        request.slots = self.cache.path_device_indices(request.last_node)[: request.matched]
        request.loaded = 0
        if found.host_hit_length:
            loading = InitLoadBackParams(found.best_match_node, found.host_hit_length, req=request)
            request.loaded, _ = self.cache.init_load_back(loading)
            tail = self.cache.linker.private_load_indices.get(request.rid)
            if tail is not None:
                request.slots = torch.cat([request.slots, tail])
        new = -(-(len(tokens) - len(request.slots)) // PAGE) * PAGE
        request.cached = len(request.slots)
        request.slots = torch.cat([request.slots, self._take(new)])
        return request

    def _take(self, count: int) -> torch.Tensor:
        """Slots of new tokens, in whole pages."""
        allocator = self.allocator
        if not isinstance(self.kvcache, SWAKVPool):
            slots: torch.Tensor = allocator.alloc(count)
            return slots
        slots = allocator.full_attn_allocator.alloc(count)
        allocator.set_full_to_swa_mapping(slots, allocator.swa_attn_allocator.alloc(count))
        return slots

    def forward(self, request: Any) -> bool:
        """Runs the model. Returns whether each layer found what the tokens before had."""
        module = torch.get_device_module(self.kvcache.device)
        self.stream.wait_stream(module.current_stream())
        with module.stream(self.stream):
            return self._compute(request)

    def _compute(self, request: Any) -> bool:
        self.counter.set_consumer(request.index)
        is_right = True
        for layer in range(LAYERS):
            slots, first = request.slots, 0
            if isinstance(self.kvcache, SWAKVPool) and self.kvcache.layers_mapping[layer][1]:
                slots = self.allocator.translate_loc_from_full_to_swa(slots)
                first = max(request.cached - WINDOW, 0)  # of what the new tokens see
            for part, buffer in enumerate(self.buffers(layer)):
                for at in range(first, len(request.tokens)):
                    value = value_of(request.tokens[: at + 1], layer, part)
                    if at < request.cached:
                        is_right &= bool((buffer[slots[at]] == value).all())
                    else:
                        buffer[slots[at]] = value
        return is_right

    def finish(self, *requests: Any) -> list[Any]:
        """Ends the step. Returns the requests whose load failed."""
        failed: list[Any] = self.cache.finish_external_linker_loads(requests)
        for request in requests:
            kept = request.matched
            if request not in failed:
                kept = len(request.tokens) // PAGE * PAGE
                new = InsertParams(
                    key=RadixKey(array("q", request.tokens[:kept])),
                    value=request.slots[:kept].clone(),
                    prev_prefix_len=request.matched,
                    component_evicted_seqlens=request.evicted,
                )
                self.cache.insert(new)  # frees what the tree has already
            self.allocator.free(request.slots[kept:])
            self.cache.dec_lock_ref(request.last_node, request.lock)
        return failed

    def serve(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Returns how many tokens were loaded, and whether the model found the right bytes."""
        request = self.start(tokens)
        is_right = self.forward(request)
        assert self.finish(request) == []
        self.step()
        return request.loaded, is_right

    def step(self) -> None:
        """What the scheduler does in each step."""
        self.cache.check_hicache_events()

    def forget_gpu(self) -> None:
        """Evicts everything on the GPU, which then holds other bytes."""
        assert in_time(lambda: self.step() or not self.cache.linker.pending_offloads)
        self.cache.evict(EvictParams(num_tokens=TOKENS))
        for layer in range(LAYERS):
            for buffer in self.buffers(layer):
                buffer.fill_(-1)
