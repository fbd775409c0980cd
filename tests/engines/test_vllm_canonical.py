"""Canonical rows: engines of any tensor parallelism read each other's. vLLM's own code says where the
bytes of each worker are in a canonical page."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_contract import bytes_of
from vllm_engine import base, keys
from vllm_serving import PROMPTS, RUNNERS, again, check, serving
from vllm_tiers import TieredRanks, files, on_one_host, tier

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm import tiering as tiering_module
from torch_kvswap.integrations.vllm import worker as worker_module
from torch_kvswap.integrations.vllm.canonical import Share, kv_heads
from torch_kvswap.integrations.vllm.pool import Replicas
from torch_kvswap.integrations.vllm.tiering import KVSwapTieringOffloadingSpec
from torch_kvswap.layout import PagedLayout

BLOCKS, LAYERS, TOKENS = 12, ("first", "second", "third"), 16


class Model(NamedTuple):
    """A model's KV cache: `size` values of each head and token, keys and values together."""

    heads: int = 8
    size: int = 64
    dtype: torch.dtype = torch.bfloat16
    is_latent: bool = False

    def spec(self, world: int) -> Any:
        if self.is_latent:
            kind, heads, size = MLAAttentionSpec, 1, self.size
        else:
            kind, heads, size = FullAttentionSpec, max(1, self.heads // world), self.size // 2
        return kind(block_size=TOKENS, num_kv_heads=heads, head_size=size, dtype=self.dtype)

    def heads_of(self, world: int, rank: int) -> slice:
        if self.is_latent:
            return slice(0, 1)
        count = max(1, self.heads // world)
        return slice(rank * self.heads // world, rank * self.heads // world + count)

    def content(self) -> np.ndarray:
        """uint8 [layers, blocks, heads, bytes]."""
        shape = len(LAYERS), BLOCKS, self.heads, TOKENS * self.size * self.dtype.itemsize
        return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


MODELS = {
    "grouped": Model(),
    "fp8": Model(dtype=torch.float8_e4m3fn),
    "replicated": Model(heads=2),
    "latent": Model(heads=1, size=576, is_latent=True),
}
OF_MODELS = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def registered(
    model: Model, world: int, rank: int, layout: str = "LBHNC", **parallel: int
) -> tuple[Any, list[torch.Tensor]]:
    """What vLLM's connector gives to a spec for a cache of zeros, and the layers, uint8."""
    spec = model.spec(world)
    page = spec.page_size_bytes
    tensors = KVCacheTensor(
        size=len(LAYERS) * BLOCKS * page,
        layers=list(LAYERS),
        layer_stride=BLOCKS * page,
        block_stride=page,
    )
    settings = KVCacheConfig(BLOCKS, [tensors], [KVCacheGroupSpec(list(LAYERS), spec)])
    views = allocate_kv_cache(settings, torch.device("cpu"), KVCacheLayout[layout])
    of_engine = {
        "tensor_parallel_size": world,
        "world_size": world,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
        "rank": rank,
    }
    given: list[Any] = []
    OffloadingConnectorWorker(
        Record(
            replicated_layout=False,
            config=Record(canonical_layout=True),
            get_worker=given.append,
        ),
        Record(
            parallel_config=Record(**of_engine | parallel),
            model_config=Record(get_total_num_kv_heads=lambda: model.heads),
        ),
        settings,
    ).register_kv_caches(views)
    return given[0], [views[name] for name in LAYERS]


def caches_of(model: Model, world: int, is_filled: bool = True) -> list[Any]:
    """The caches of all ranks, with their part of the content."""
    made = []
    for rank in range(world):
        cache, layers = registered(model, world, rank)
        for layer, values in zip(layers, model.content(), strict=True):
            mine = torch.from_numpy(values[:, model.heads_of(world, rank)].copy())
            if is_filled:
                layer.view(torch.uint8).copy_(mine.view(layer.view(torch.uint8).shape))
        made.append(cache)
    return made


def canonical_pages(ranks: list[Any], block: int) -> list[np.ndarray]:
    """A block of each layer as vLLM would keep it, uint8 [bytes]."""
    pages = []
    for refs in zip(*(rank.group_data_refs[0] for rank in ranks), strict=True):
        page = np.zeros(refs[0].mapping.canonical_page_size_bytes, np.uint8)
        for rank, ref in zip(ranks, refs, strict=True):
            local = rank.tensors[ref.tensor_idx].tensor[block].numpy().view(np.uint8)
            for run in ref.mapping.runs:
                for at in range(run.num_fragments):
                    here = run.local_offset + at * run.local_stride
                    there = run.canonical_offset + at * run.canonical_stride
                    size = run.fragment_size
                    page[there : there + size] = local[here : here + size]
        pages.append(page)
    return pages


def row_of(model: Model, ranks: list[Any], blocks: Sequence[int]) -> bytes:
    """Head after head, of the canonical pages of each block."""
    slots = []
    for block in blocks:
        heads = [page.reshape(model.heads, -1) for page in canonical_pages(ranks, block)]
        slot = np.concatenate(heads, 1).tobytes()
        slots.append(slot + bytes(-len(slot) % (4096 // len(blocks))))
    return b"".join(slots)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TieredRanks]:
    def made(model: Model, ranks: list[Any], chunk: int = 1, **how: Any) -> TieredRanks:
        monkeypatch.setattr(tiering_module, "kv_heads", lambda: model.heads)
        page = model.spec(len(ranks)).page_size_bytes
        how |= {"chunk": chunk, "block_bytes": len(LAYERS) * page, "replicated": model.is_latent}
        return TieredRanks(tmp_path, ranks, canonical_layout=True, cpu_bytes_to_use=4 << 20, **how)

    return made


def store(engine: TieredRanks, chunk: int) -> list[bytes]:
    """Stores blocks 0 to 7."""
    named = keys(*range(8 // chunk))
    request = engine.request("old")
    engine.store(request, named, list(range(8)))
    engine.end(request)
    engine.shutdown()
    return named


@OF_MODELS
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_row_is_made_of_canonical_pages_by_any_number_of_workers(
    tmp_path, engine, model, chunk, world
):
    ranks, of_one = caches_of(model, world), caches_of(model, 1)
    chunks = [range(at, at + chunk) for at in range(0, 8, chunk)]
    expected = {row_of(model, ranks, blocks) for blocks in chunks}
    assert expected == {row_of(model, of_one, blocks) for blocks in chunks}
    store(engine(model, ranks, chunk), chunk)
    assert {one.read_bytes() for one in files(tmp_path)} == expected


@OF_MODELS
@pytest.mark.parametrize("chunk", [1, 2])
def test_rows_of_four_workers_are_loaded_by_one_two_and_eight(tmp_path, engine, model, chunk):
    named = store(engine(model, caches_of(model, 4), chunk), chunk)
    stored = files(tmp_path)
    assert len(stored) == len(named)
    for world in (1, 2, 8):
        ranks = caches_of(model, world, is_filled=False)
        loading = engine(model, ranks, chunk)
        request = loading.request("new")
        assert loading.found(request, named) == ["HIT"] * len(named)
        loading.load(request, named, [11, 10, 9, 8, 7, 6, 5, 4])
        for one, right in zip(ranks, caches_of(model, world), strict=True):
            for block in range(8):
                assert bytes_of(one, 11 - block) == bytes_of(right, block)
        loading.end(request)
        loading.shutdown()
    assert files(tmp_path) == stored


def test_with_another_order_of_the_workers_rows_are_loaded_wrong(engine, monkeypatch):
    """The control of the test above."""
    model = MODELS["grouped"]
    named = store(engine(model, caches_of(model, 4)), 1)
    real = Share.of

    def backwards(*arguments: Any) -> Share:
        share = real(*arguments)
        number, parts = share.part
        return share._replace(part=(parts - 1 - number, parts))

    monkeypatch.setattr(Share, "of", backwards)
    ranks = caches_of(model, 2, is_filled=False)
    loading = engine(model, ranks)
    request = loading.request("new")
    assert loading.found(request, named) == ["HIT"] * len(named)
    loading.load(request, named, list(range(8)))
    right = caches_of(model, 2)
    for one, other in zip(ranks, reversed(right), strict=True):
        assert bytes_of(one, 3) == bytes_of(other, 3)
    assert bytes_of(right[0], 3) != bytes_of(right[1], 3)
    loading.shutdown()


@pytest.mark.parametrize(("name", "world", "turns"), [("replicated", 8, 4), ("latent", 4, 4)])
def test_workers_with_the_same_heads_store_by_turns(engine, name, world, turns):
    model = MODELS[name]
    storing = engine(model, caches_of(model, world))
    request = storing.request("r")
    storing.store(request, keys(*range(8)), list(range(8)))
    stored = [one._handler.metrics().stores.blocks for one in storing.workers]
    assert stored == [8 // turns] * world
    primary = storing.manager.primary_tier
    row_bytes = primary.get_kv_memoryview().shape[1]
    assert primary._blocks.stats().pages == (4 << 20) // row_bytes
    (info,) = [one for one in storing.manager.config_info() if one["tier"] == "0:primary"]
    assert int(info["cpu_kv_cache_size_bytes"]) == (4 << 20) // row_bytes * row_bytes
    storing.shutdown()


@pytest.mark.parametrize(("is_latent", "heads"), [(False, 8), (True, 1)])
def test_latent_attention_has_one_head(monkeypatch, is_latent, heads):
    model = Record(use_mla=is_latent, get_total_num_kv_heads=lambda: 8)
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: Record(model_config=model))
    assert kv_heads() == heads


class Together:
    """Workers that share a pool and are made one after another, in one thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        on_one_host(patch)
        patch.setattr(worker_module, "replicated_pool", self)

    def __call__(
        self, layout: PagedLayout, pages: int, blocks: int, replicas: Replicas, **how: Any
    ) -> HostPool:
        if replicas.rank:
            return HostPool.attach(layout, self.handle, rank=replicas.part[0])
        pool = HostPool(layout, pages, blocks, **how | {"part": replicas.part})
        self.handle = pool.share()
        return pool


@RUNNERS
@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 2)])
def test_an_engine_finds_what_one_with_another_number_of_workers_has_left(
    tmp_path, monkeypatch, runner, old, new
):
    """With our connector it loads in the step."""
    Together(monkeypatch)
    longer = again("again", PROMPTS, PROMPTS["0"][:20])
    how = {"extra": tier(tmp_path, canonical_layout=True), "heads": 2}
    with serving(tmp_path, **how, runner=runner, workers=old) as engine:
        engine.serve(PROMPTS)
        check(engine, PROMPTS)
    stored = files(tmp_path)
    with serving(tmp_path, **how, runner=runner, workers=new) as engine:
        engine.serve(longer)
        check(engine, longer)
        assert engine.agree
        for worker in engine.workers:
            metrics = worker._handler.metrics()
            loads = metrics.expedited
            assert loads.blocks == len(stored)
    assert stored.items() <= files(tmp_path).items()


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        (
            {},
            lambda config: replace(config, kv_cache_layout="LBNHC"),
            "the KV cache has the layout LBNHC, in which the heads of a worker are in many pieces; "
            "set the environment variable VLLM_KV_CACHE_LAYOUT=HND",
        ),
        (
            {},
            lambda config: replace(
                config, parallel=replace(config.parallel, is_parallelism_agnostic=False)
            ),
            "blocks of this model depend on how it is divided among the GPUs, as with context "
            "parallelism, Mamba states, or a scale for each token and head; leave it out",
        ),
        (
            {"encoding": "lossless"},
            lambda config: config,
            "encoding is 'lossless' and verify 'off', which depend on the number of workers; leave "
            "these out",
        ),
        (
            {"verify": "load"},
            lambda config: config,
            "encoding is 'raw' and verify 'load', which depend on the number of workers; leave "
            "these out",
        ),
    ],
    ids=["NHD", "divided", "lossless", "verify"],
)
def test_what_rows_for_any_number_of_workers_cannot_have_is_refused(
    tmp_path, options, change, said
):
    """By every process."""
    settings = TieredRanks.config(
        tmp_path, 4, 0, canonical_layout=True, block_bytes=4096, **options
    )
    said = f"kv_connector_extra_config: canonical_layout is set, but {said}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        KVSwapTieringOffloadingSpec(change(settings))


def joined(*caches: Any) -> Any:
    """The layers of all caches, as groups of one."""
    tensors = [one for cache in caches for one in cache.tensors]
    groups, first = [], 0
    for cache in caches:
        (refs,) = cache.group_data_refs
        groups.append([replace(ref, tensor_idx=first + ref.tensor_idx) for ref in refs])
        first += len(cache.tensors)
    return base.CanonicalKVCaches(tensors, groups)


def uncertified(cache: Any) -> Any:
    (refs,) = cache.group_data_refs
    return replace(cache, group_data_refs=[[*refs[:-1], replace(refs[-1], mapping=None)]])


GROUPED, LATENT = MODELS["grouped"], MODELS["latent"]


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (
            lambda: registered(GROUPED, 4, 1, "LBNHC")[0],
            "a canonical page has a block of a layer in fragments of 256 of its 4096 bytes; leave "
            "it out",
        ),
        (
            lambda: registered(MODELS["replicated"], 4, 1, decode_context_parallel_size=2)[0],
            "vLLM does not certify the KV cache of each layer for it; leave it out",
        ),
        (
            lambda: uncertified(registered(GROUPED, 4, 1)[0]),
            "vLLM does not certify the KV cache of each layer for it; leave it out",
        ),
        (
            lambda: joined(registered(GROUPED, 4, 1)[0], registered(LATENT, 4, 1)[0]),
            "the layers are divided among the workers in different ways; leave it out",
        ),
        (
            lambda: joined(
                registered(GROUPED, 4, 1)[0], registered(GROUPED._replace(size=32), 4, 1)[0]
            ),
            "blocks of some groups of layers have 6144 bytes, others 12288; leave it out",
        ),
    ],
    ids=["NHD", "context parallel", "uncertified", "latent and not", "sizes"],
)
def test_a_cache_that_does_not_fit_into_rows_is_refused(tmp_path, monkeypatch, cache, said):
    """By the workers, when vLLM registers it."""
    monkeypatch.setattr(tiering_module, "kv_heads", lambda: 8)
    said = f"kv_connector_extra_config: canonical_layout is set, but {said}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        TieredRanks(tmp_path, [cache()], canonical_layout=True)
