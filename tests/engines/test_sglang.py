"""KVSwapLinker under SGLang's own factory, wrapper, radix cache and KV pools, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import PATIENCE, in_time
from processes import Process
from sglang_engine import (
    LAYERS,
    PAGE,
    ComponentType,
    Engine,
    PoolName,
    PoolTransfer,
    hashes_of,
    hybrid_pool,
    make_linker,
    make_params,
    mha_pool,
    mla_pool,
    swa_pool,
)

from torch_kvswap.below import threads
from torch_kvswap.below.files import FileStore
from torch_kvswap.integrations import sglang as door

PROMPT = list(range(100, 122))  # five pages can be loaded
POOLS = {"mha": mha_pool, "mla": mla_pool, "swa": swa_pool}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes move when somebody waits or polls: docs/devices.md."""
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")


@pytest.fixture
def make_engine() -> Iterator[Any]:
    made = list[Engine]()

    def make(kvcache: Any, **extra: Any) -> Engine:
        made.append(Engine(kvcache, **extra))
        return made[-1]

    yield make
    for engine in made:
        engine.cache.release_host_resources()


@pytest.fixture
def engine(make_engine: Any) -> Any:
    return make_engine(mha_pool())


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("mha", torch.float32, {}),
        ("mla", torch.float32, {}),
        ("swa", torch.float32, {"verify": "load"}),
        ("mha", torch.bfloat16, {"encoding": "lossless"}),
    ],
    ids=["mha", "mla", "swa-verified", "mha-lossless"],
)
@pytest.mark.usefixtures("late")
def test_prompts_come_back_from_the_host(
    make_engine: Any, kind: str, dtype: torch.dtype, options: Any
) -> None:
    engine = make_engine(POOLS[kind](dtype), **options)
    assert engine.serve(PROMPT) == (0, True)
    engine.forget_gpu()
    assert engine.serve(PROMPT) == (20, True)
    longer = [*PROMPT, 1, 2, 3, 4]
    assert engine.serve(longer) == (0, True)  # the GPU has them
    engine.forget_gpu()
    assert engine.serve(longer) == (24, True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", POOLS)
def test_prompts_come_back_behind_a_busy_forward(make_engine: Any, kind: str) -> None:
    engine = make_engine(POOLS[kind](torch.bfloat16, "cuda"), verify="load")
    for expected in (0, 20):
        with torch.cuda.stream(engine.stream):
            torch.cuda._sleep(100_000_000)  # of the forward before
        assert engine.serve(PROMPT) == (expected, True)
        engine.forget_gpu()


@pytest.mark.usefixtures("late")
def test_layers_land_one_by_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_GROUP_BYTES", 1)
    engine.serve(PROMPT)
    engine.forget_gpu()
    request = engine.start(PROMPT)
    engine.counter.set_consumer(request.index)
    buffers = [engine.kvcache.k_buffer[layer] for layer in range(LAYERS)]
    for landed in range(LAYERS + 1):
        seen = [bool((buffer[request.slots[:20]] != -1).all()) for buffer in buffers]
        assert seen == [layer < landed for layer in range(LAYERS)]
        if landed < LAYERS:
            engine.counter.wait_until(landed)
    assert engine.forward(request)
    assert engine.finish(request) == []


@pytest.mark.usefixtures("late")
def test_a_model_without_waits_reads_old_bytes(engine: Engine) -> None:
    """The control of all tests in which copies are late."""
    engine.serve(PROMPT)
    engine.forget_gpu()
    engine.kvcache.register_layer_transfer_counter(None)
    assert not engine.forward(engine.start(PROMPT))


def test_damaged_pages_abort_their_requests_only(make_engine: Any) -> None:
    engine = make_engine(mha_pool(), verify="load")
    other = [*range(8)]
    for prompt in (PROMPT, other):
        engine.serve(prompt)
    engine.forget_gpu()
    whole = engine.linker.cache.pools[0].pages
    kept = whole.clone()
    whole.view(-1)[:: PAGE * 16] ^= 1
    request = engine.start(PROMPT)
    engine.forward(request)
    assert engine.finish(request) == [request]
    whole.copy_(kept)
    assert engine.serve(other) == (4, True)
    assert engine.serve(PROMPT) == (0, True)  # what was damaged is forgotten, and stored again
    engine.forget_gpu()
    assert engine.serve(PROMPT) == (20, True)


@pytest.mark.parametrize(
    ("call", "error"), [("load", None), ("load", MemoryError()), ("store", MemoryError())]
)
def test_a_refused_copy_ends_no_engine(
    call: str, error: MemoryError | None, engine: Engine
) -> None:
    """None: the pages have left the host before their load."""

    def refuse(*_: object, **__: object) -> None:
        if error:
            raise error

    engine.serve(PROMPT)
    engine.forget_gpu()
    submit = getattr(engine.linker.cache, call)
    setattr(engine.linker.cache, call, refuse)
    request = engine.start(PROMPT if call == "load" else [*range(9)])
    engine.forward(request)
    assert engine.finish(request) == ([request] if call == "load" else [])
    engine.step()
    setattr(engine.linker.cache, call, submit)
    engine.forget_gpu()
    assert engine.serve(PROMPT) == (20, True)
    assert engine.serve([*range(9)]) == (0, True)  # it was not published


def test_a_prompt_beyond_the_host_is_not_published(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(mha_pool(), host_bytes=3 * 1536)
    for _ in range(2):
        engine.serve(PROMPT)
        engine.forget_gpu()
        assert not engine.cache.linker.pending_offloads
    assert engine.serve([*range(9)]) == (0, True)
    engine.forget_gpu()
    assert engine.serve([*range(9)]) == (8, True)
    assert caplog.text.count("5 blocks at once are more than the 3 pages of the host") == 1


def test_blocks_that_do_not_fit_are_not_published(make_engine: Any) -> None:
    engine = make_engine(mha_pool(torch.bfloat16), encoding="lossless")
    request = engine.start(PROMPT)
    engine.forward(request)
    buffer = engine.kvcache.k_buffer[0]
    wide = torch.exp2(torch.arange(buffer[:PAGE].numel()) % 60)
    buffer[request.slots[8:12]] = wide.bfloat16().view(PAGE, *buffer.shape[1:])
    engine.finish(request)
    engine.forget_gpu()
    assert engine.serve(PROMPT) == (8, True)


@pytest.mark.usefixtures("late")
def test_a_reset_with_jobs_in_flight_forgets_all(engine: Engine) -> None:
    engine.serve(PROMPT)
    engine.forget_gpu()
    engine.start(PROMPT)
    request = engine.start([*range(9)])
    engine.forward(request)
    engine.finish(request)  # its store is in flight, and so is the first load
    engine.cache.reset()
    engine.allocator.clear()
    assert engine.linker.num_completed_offloads() == 0
    for prompt in (PROMPT, [*range(9)]):
        assert engine.serve(prompt) == (0, True)
    engine.forget_gpu()
    assert engine.serve(PROMPT) == (20, True)


@pytest.mark.usefixtures("late")
def test_a_cancelled_load_writes_nothing(engine: Engine) -> None:
    engine.serve(PROMPT)
    engine.forget_gpu()
    start, engine.cache.ready_to_load_host_cache = engine.cache.ready_to_load_host_cache, int
    request = engine.start(PROMPT)
    engine.cache.linker.release_request(request.rid)
    assert start() == -1
    engine.linker.cache.synchronize()
    assert bool((engine.kvcache.k_buffer[0][request.slots[:20]] == -1).all())
    assert not engine.linker.cancel_queued_load(request.rid)


def test_engines_find_the_pages_of_a_server(tmp_path: Path) -> None:
    server = f"{tmp_path}/pages"
    command = ["-m", "torch_kvswap", "serve", "--socket", server, "--memory", "4MiB"]
    with Process(command, "serving"):
        engines = [Engine(mla_pool(), server=server) for _ in range(2)]
        assert engines[0].serve(PROMPT) == (0, True)
        request = engines[1].start(PROMPT)  # whose load is the first job
        assert not engines[1].linker.finish_layer_wise_loading(0)  # which stands for a failed load
        assert engines[1].forward(request)
        assert engines[1].finish(request) == []
        engines[1].step()
        assert request.loaded == 20
        engines[0].cache.reset()  # for both
        engines[1].forget_gpu()
        assert engines[1].serve(PROMPT) == (0, True)
        for engine in engines:
            engine.cache.release_host_resources()


@pytest.mark.parametrize("holds", [True, False], ids=["", "control"])
def test_a_step_loads_what_its_lookups_found(
    make_engine: Any, holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile a second tier brings another prompt, for which there are too few free pages."""
    pytest.importorskip("xxhash")
    monkeypatch.setattr(door, "_TIER_SECONDS", PATIENCE)
    engine = make_engine(mha_pool(), below=f"file:{tmp_path}", host_bytes=8 * 1536)
    other = [*range(30)]
    for _ in range(2):  # a second tier gets what is used again
        engine.serve(other)
        engine.forget_gpu()
    assert in_time(lambda: engine.step() or engine.linker.cache.below_stats().written == 7)
    engine.serve(PROMPT)
    engine.forget_gpu()
    cache = engine.linker.cache
    cache._below._absent.clear()  # as if some time had passed: the tier has `other` by now
    lookup = cache.lookup
    cache.lookup = lambda keys, again=False, hold=True: lookup(keys, again=again, hold=holds)
    requests = [engine.admit(PROMPT), engine.admit(other)]
    assert engine.launch(*requests) == ([True] * 2 if holds else [False] * 2)
    assert engine.finish(*requests) == ([] if holds else requests)


def test_the_lookups_of_a_step_wait_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xxhash")
    answers, slept = threading.Event(), list[float]()
    monkeypatch.setattr(FileStore, "exists", lambda _, keys: [not answers.wait()] * len(keys))
    monkeypatch.setattr(threads, "DEADLINE", PATIENCE)
    clock = SimpleNamespace(monotonic=lambda: 1 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(door, "time", clock)
    linker = linker_of(mha_pool(), {FULL}, below=f"file:{tmp_path}")
    for step in (1, 2):
        for request in (1, 2, 3, 3):
            prompt = [PoolTransfer(name=PoolName.KV, keys=hashes_of([step, request, 0, 0]))]
            assert linker.lookup(f"{step} {request}", prompt) == []
            assert sum(slept) == pytest.approx(step * door._TIER_SECONDS, abs=0.002)
        linker.num_completed_offloads()
    linker.lookup("1 1", prompt)  # has waited
    assert sum(slept) == pytest.approx(2 * door._TIER_SECONDS, abs=0.002)
    answers.set()
    linker.close()


def test_engines_find_the_pages_of_a_second_tier(make_engine: Any, tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    engines = [make_engine(mha_pool(), below=f"file:{tmp_path}") for _ in range(2)]
    first, other = (engine.linker for engine in engines)
    engines[0].serve(PROMPT)
    engines[0].forget_gpu()
    engines[0].serve(PROMPT)  # a second tier gets what is used again
    hashes = hashes_of(PROMPT[:20])
    lookup = [PoolTransfer(name=PoolName.KV, keys=hashes)]
    assert in_time(lambda: first._poll() or first.cache.below_stats().written == 5)
    assert in_time(lambda: other.lookup("another request", lookup) == [1, 2, 3, 4, 5])
    assert engines[1].serve(PROMPT) == (20, True)
    engines[1].cache.reset()  # what is below was computed with the old weights, perhaps
    engines[1].allocator.clear()
    assert engines[1].serve(PROMPT) == (0, True)


# Groups of layers.


def linker_of(kvcache: Any, components: set[Any], **more: Any) -> Any:
    params = make_params(kvcache)
    for name, value in more.pop("params", {}).items():
        setattr(params, name, value)
    return make_linker(params, components, **more)


def slots_of(*pages: int) -> torch.Tensor:
    return torch.tensor([page * PAGE + at for page in pages for at in range(PAGE)])


FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA


def transfer(name: Any, keys: list[str], slots: torch.Tensor | None = None) -> Any:
    return PoolTransfer(name=name, keys=keys, device_indices=slots)


@pytest.mark.usefixtures("late")
def test_a_window_loads_its_last_pages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_GROUP_BYTES", 1)
    kvcache = swa_pool()
    for buffer in (*kvcache.full_kv_pool.k_buffer, *kvcache.swa_kv_pool.v_buffer):
        buffer.copy_(torch.rand_like(buffer))
    linker = linker_of(kvcache, {FULL, SWA})
    hashes = hashes_of(PROMPT[:20])
    stored = [
        transfer(PoolName.KV, hashes, slots_of(1, 2, 3, 4, 5)),
        transfer(PoolName.SWA, hashes[1:4], slots_of(2, 3, 4)),
    ]
    assert linker.offload(stored)
    assert linker.num_completed_offloads() == 1
    assert linker.pop_completed_offload()
    ask = [transfer(name, hashes) for name in (PoolName.KV, PoolName.SWA)]
    assert linker.lookup("1", ask) == [4]  # whose window is in pages 2 and 3
    linker._most_lengths = 64  # of several ranks
    assert linker.lookup("1", ask) == [3, 4]
    load = [
        transfer(PoolName.KV, hashes[:4], slots_of(9, 10, 11, 12)),
        transfer(PoolName.SWA, hashes[2:4], slots_of(8, 9)),
    ]
    assert linker.load("1", load)
    linker.layer_done_counter.set_consumer(index := linker.start_layer_wise_loading())
    of_full, of_window = kvcache.full_kv_pool.k_buffer, kvcache.swa_kv_pool.v_buffer
    linker.layer_done_counter.wait_until(0)
    assert torch.equal(of_window[0][slots_of(8, 9)], of_window[0][slots_of(3, 4)])
    assert not torch.equal(of_window[1][slots_of(8, 9)], of_window[1][slots_of(3, 4)])
    # As SGLang does before it replays the graph of a whole forward; the last layer has a window.
    linker.layer_done_counter.wait_until(linker.layer_done_counter.num_layers - 1)
    for buffer in of_full:
        assert torch.equal(buffer[slots_of(9, 10, 11, 12)], buffer[slots_of(1, 2, 3, 4)])
    assert linker.finish_layer_wise_loading(index)
    linker.close()


@pytest.mark.usefixtures("late")
def test_a_state_is_found_at_its_own_length() -> None:
    kvcache, requests = hybrid_pool()
    linker = linker_of(kvcache, {FULL, MAMBA}, params={"req_to_token_pool": requests})
    hashes = hashes_of(PROMPT[:20])
    for last, slot in ((2, 1), (4, 2)):
        part = hashes[last - 2 : last]
        stored = [
            transfer(PoolName.KV, part, slots_of(last - 1, last)),
            transfer(PoolName.MAMBA, part[-1:], torch.tensor([slot], dtype=torch.int32)),
        ]
        assert linker.offload(stored)
    assert linker.num_completed_offloads() == 2
    linker._most_lengths = 64
    ask = [transfer(PoolName.KV, hashes), transfer(PoolName.MAMBA, hashes[-1:])]
    assert linker.lookup("1", ask) == [2, 4]
    load = [
        transfer(PoolName.KV, hashes[:4], slots_of(9, 10, 11, 12)),
        transfer(PoolName.MAMBA, hashes[3:4], torch.tensor([5])),
    ]
    assert linker.load("1", load)
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    states = requests.mamba_pool.mamba_cache
    for part in (states.temporal, *states.conv):
        assert torch.equal(part[:, 5], part[:, 2])
    linker.close()


# What is refused at start.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_byte": 1}, "has host_byte; did you mean host_bytes"),
        (
            {"host_bytes": None, "verify": None},
            "host_bytes is None; it must be an integer, 1536 or more",
        ),
        ({"host_bytes": 1000}, "host_bytes is 1000; it must be an integer, 1536 or more"),
        ({"encoding": "zip"}, "encoding is 'zip'; it must be 'raw' or 'lossless'"),
        ({"verify": "yes"}, "verify is 'yes'; it must be 'off' or 'load'"),
        ({"below": "s3://pages"}, "below is a store of the kind 's3'"),
        ({"below": "file:/a", "server": "/b"}, "has server and below"),
    ],
)
def test_a_wrong_option_is_refused_at_start(options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        linker_of(mha_pool(), {FULL}, **options)


def test_ranks_need_a_server_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    ranks = {"params": {"tp_cache_group": "of two"}}
    with pytest.raises(OSError, match=r"/pages\.1"):
        linker_of(mha_pool(), {FULL}, server="/pages.{rank}", **ranks)
    with pytest.raises(OSError, match=r"/pages\.0"):  # of latent attention all have the same
        linker_of(mla_pool(), {FULL}, server="/pages.{rank}", **ranks)


class PageMajor(type(mha_pool())):  # type: ignore[misc]
    """A pool that SGLang derives."""


@pytest.mark.parametrize(
    ("owner", "change", "message"),
    [
        ("pool", {"k_scale_buffer": [1]}, "KV caches with scales"),
        ("pool", {"kv_cache_layout": "hnd"}, "the KV layout 'hnd'"),
        ("pool", {"page_size": 8}, "pages of 4 tokens in pools with pages of 8"),
        ("pool", {"__class__": PageMajor}, "PageMajor"),
        (
            "pool",
            {"model_layer_ids": ()},
            "models or pipeline stages without layers in the pool kv",
        ),
        ("params", {"sidecar_draft_device_pools": (1,)}, "draft models"),
        ("requests", {"mamba_ckpt_pool": 1}, "int8 checkpoints"),
    ],
)
def test_what_is_not_served_is_named(owner: str, change: Any, message: str) -> None:
    """Of a pool with full attention only, or of a configuration with states."""
    pool, (hybrid, requests) = mha_pool(), hybrid_pool()
    params = make_params(pool if owner == "pool" else hybrid)
    params.req_to_token_pool = requests
    for name, value in change.items():
        setattr({"pool": pool, "params": params, "requests": requests}[owner], name, value)
    with pytest.raises(ValueError, match=f"does not serve {message}"):
        make_linker(params, {FULL} if owner == "pool" else {FULL, MAMBA})
