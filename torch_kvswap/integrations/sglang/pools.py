"""The tensors of SGLang's KV pools, as groups of layers that share their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from torch_kvswap.layout import PagedLayout

_NAMES = {"FULL": PoolName.KV, "SWA": PoolName.SWA, "MAMBA": PoolName.MAMBA}


class LayerGroup(NamedTuple):
    """Layers that share their blocks.

    Attributes:
        name (PoolName): what SGLang's transfers call it.
        layout (PagedLayout): its tensors. A block is a page of tokens, or a state.
        index_step (int): indices of a transfer per block: the tokens of a page, 1 for a state.
        last_tensors (dict[int, int]): the last tensor in the layout of each layer, by the number
            that SGLang waits with.
        is_mla (bool): whether all ranks of tensor parallelism have the same bytes.
    """

    name: Any
    layout: PagedLayout
    index_step: int
    last_tensors: dict[int, int]
    is_mla: bool = False


def read_groups(server_args: Any, params: Any, components: Any) -> list[LayerGroup]:
    """The groups of the model, the one with full attention last: a load moves them in this order,
    and its layers are by far the most bytes.

    Raises:
        ValueError: KVSwapLinker does not serve this model or configuration; the error names why.
    """
    _check_configuration(server_args, params)
    names = {_NAMES.get(component.name, component.name) for component in components}
    kvcache, step = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    groups = []
    if PoolName.MAMBA in names:
        groups.append(_states(server_args, params.req_to_token_pool, _first_layer(kvcache)))
    if type(kvcache) is SWAKVPool:
        for name, pool, is_swa in (
            (PoolName.SWA, kvcache.swa_kv_pool, True),
            (PoolName.KV, kvcache.full_kv_pool, False),
        ):
            of_layer = {
                layer - kvcache.start_layer: index
                for layer, (index, in_window) in kvcache.layers_mapping.items()
                if in_window == is_swa
            }
            groups.append(_paged(name, pool, step, of_layer))
    elif type(kvcache) is HybridLinearKVPool:
        mapping = kvcache.full_attention_layer_id_mapping
        of_layer = {layer - kvcache.start_layer: index for layer, index in mapping.items()}
        groups.append(_paged(PoolName.KV, kvcache.full_kv_pool, step, of_layer))
    else:
        of_layer = {layer: layer for layer in range(getattr(kvcache, "layer_num", 0))}
        groups.append(_paged(PoolName.KV, kvcache, step, of_layer))
    if names != {group.name for group in groups}:
        raise _refused(
            f"{type(kvcache).__name__} with the tree components "
            f"{', '.join(sorted(component.name for component in components))}"
        )
    return groups


def _check_configuration(server_args: Any, params: Any) -> None:
    drafts = ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools")
    if getattr(server_args, "enable_hisparse", False):
        raise _refused("HiSparse (--enable-hisparse)")
    if getattr(server_args, "dcp_size", 1) > 1:
        raise _refused(f"decode context parallelism (--dcp-size {server_args.dcp_size})")
    if any(getattr(params, name, ()) for name in drafts):
        raise _refused("speculative decoding with a draft model that has a KV cache of its own")


def _first_layer(kvcache: Any) -> int:
    return int(getattr(kvcache, "start_layer", 0))


def _paged(name: Any, pool: Any, step: int, of_layer: dict[int, int]) -> LayerGroup:
    """The group of a pool with rows of tokens. of_layer: the position in the pool of each layer."""
    if type(pool) is MLATokenToKVPool:
        buffers = [{"kv": buffer} for buffer in pool.kv_buffer]
        scales = [pool.kv_scale_buffer]
    elif type(pool) is MHATokenToKVPool:
        pairs = zip(pool.k_buffer, pool.v_buffer, strict=True)
        buffers = [{"k": k, "v": v} for k, v in pairs]
        scales = [pool.k_scale_buffer, getattr(pool, "native_k_scale_buffer", None)]
        if pool.kv_cache_layout != "nhd":
            raise _refused(f"the KV layout {pool.kv_cache_layout!r}")
    else:
        raise _refused(f"KV pools of the kind {type(pool).__name__}")
    if any(scale is not None for scale in scales):
        raise _refused("KV caches with scales")
    if pool.layer_shard_enabled:
        raise _refused("KV caches whose layers are divided among ranks")
    if pool.page_size != step:
        raise _refused(f"a {name.value} pool with pages of {pool.page_size} tokens beside {step}")
    tensors = [{part: _pages(buffer[part], step) for part in buffer} for buffer in buffers]
    return _group(name, tensors, step, of_layer, is_mla=type(pool) is MLATokenToKVPool)


def _pages(buffer: Tensor, page_tokens: int) -> Tensor:
    """Rows of tokens as pages. The last rows may be no whole page, and no request gets them."""
    pages = buffer.shape[0] // page_tokens
    return buffer[: pages * page_tokens].view(pages, page_tokens, *buffer.shape[1:])


def _states(server_args: Any, pool: Any, first_layer: int) -> LayerGroup:
    """The group of Mamba states and the like, which SGLang keeps in the pool of requests."""
    if getattr(server_args, "enable_unified_memory", False):
        raise _refused("states in unified memory (--enable-unified-memory)")
    if pool.mamba_ckpt_pool is not None:
        raise _refused("int8 checkpoints of states")
    if pool.mamba_pool._slot_siblings or pool.short_conv_pool.enabled or pool.ngram_pool.enabled:
        raise _refused("states beside those of Mamba layers")
    states = pool.mamba_pool.mamba_cache
    if states.replayssm_g is not None:
        raise _refused("--enable-linear-replayssm")
    parts = {"temporal": states.temporal}
    parts |= {f"conv.{place}": conv for place, conv in enumerate(states.conv)}
    parts = {name: part for name, part in parts.items() if part.numel()}
    tensors = [dict(zip(parts, layer, strict=True)) for layer in zip(*parts.values(), strict=True)]
    of_layer = {layer - first_layer: index for layer, index in pool.mamba_map.items()}
    return _group(PoolName.MAMBA, tensors, 1, of_layer)


def _group(
    name: Any,
    tensors: Sequence[Mapping[str, Tensor]],
    index_step: int,
    of_layer: dict[int, int],
    is_mla: bool = False,
) -> LayerGroup:
    """A group whose layers lie in the layout in the order in which the model computes them."""
    ordered, last_tensors = dict[str, Tensor](), {}
    for layer in sorted(of_layer):
        parts = tensors[of_layer[layer]]
        ordered |= {f"layers.{layer}.{part}": parts[part] for part in parts}
        last_tensors[layer] = len(ordered) - 1
    return LayerGroup(name, PagedLayout(ordered, 0), index_step, last_tensors, is_mla)


def _refused(what: str) -> ValueError:
    return ValueError(
        f"KVSwapLinker does not serve {what}; leave out --enable-unified-cache-external-linker"
    )
