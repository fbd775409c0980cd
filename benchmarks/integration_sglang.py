"""Times KVSwapLinker in SGLang's KV pools against SGLang's own host pools (HiCache), on one GPU.

SGLang loads its own with a launch for each layer, and so does this program; stores are as SGLang
makes them. Of a load: host time in the calls, time until the first layer has landed for the
forward's stream, and until the last one has. Times are medians of interleaved rounds, beside one
big pinned copy of the same bytes. "lost": milliseconds that a decode GEMM loses for each GB moved
beside it. All bytes are compared.

Needs SGLang's wheel without its dependencies, msgspec and psutil, and for SGLang's kernels nvcc and
apache-tvm-ffi. Without a GPU only KVSwapLinker runs, and bytes are compared.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import torch
from big_copy import BigCopy
from computes import Compute, computes
from program import count, device_of, finish, new_parser
from report import Column, table_of
from sglang_stubs import install
from timing import synchronize
from traffic import beside

SHAPES = ((80, 1, 64), (80, 2, 64), (80, 1, 128), (32, 8, 16))  # layers, heads, tokens of a page
BLOCKS, SIZE = (1, 8, 64, 256), 128
OURS, THEIRS, BIG = "KVSwapLinker", "HiCache", "big copy"
Times = dict[str, float]  # microseconds by what was timed


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=count, default=9)
    add("--shapes", type=int, nargs="*", default=range(len(SHAPES)), help="which shapes, by number")
    add("--blocks", type=int, nargs="*", default=BLOCKS)
    options = parser.parse_args(arguments)
    device = device_of(options)
    install(on_gpu=device.type == "cuda")
    decode = None
    if device.type == "cuda":
        compile_kernels([SHAPES[number][1] * SIZE * 2 for number in options.shapes])
        decode = computes(device)[0]
    rows, wrong = list[dict[str, Any]](), 0
    for number in options.shapes:
        found, bad = measure(device, *SHAPES[number], decode, options)
        rows, wrong = rows + found, wrong + bad
    names = ("store", "store host", "first layer", "load", "load host", "store lost", "load lost")
    columns = [Column(name, partial(_figure, name)) for name in ("shape", "blocks", "way", *names)]
    print("us; host: in the calls; lost: ms of a decode GEMM for each GB")
    print(table_of(columns, rows), "", sep="\n")
    return finish(options, {"benchmark": "integration_sglang", "cells": rows}, wrong)


def _figure(name: str, row: dict[str, Any]) -> object:
    return row.get(name)


def compile_kernels(sizes: Sequence[int]) -> None:
    """SGLang's kernels for rows of these sizes, all at once: nvcc takes long for each."""
    from sglang.kernels.ops.kvcache import hicache

    jobs = [partial(hicache._jit_hicache_tma_module, block_quota=hicache.TMA_BLOCK_QUOTA)]
    for size in set(sizes):
        how = {"element_size": size, "unroll": hicache._default_unroll(size)}
        for make in (hicache._jit_hicache_module, hicache._jit_hicache_staged_module):
            jobs.append(partial(make, **how, block_quota=hicache.DEFAULT_BLOCK_QUOTA))
    with ThreadPoolExecutor(len(jobs)) as threads:
        for built in [threads.submit(job) for job in jobs]:
            built.result()


def measure(
    device: torch.device,
    layers: int,
    heads: int,
    page: int,
    decode: Compute | None,
    options: Namespace,
) -> tuple[list[dict[str, Any]], int]:
    """The rows of a shape, and the pages with wrong bytes."""
    most = max(options.blocks)
    pool = new_pool(device, layers, heads, page, 2 * most + 1)
    page_bytes = 2 * layers * heads * SIZE * 2 * page
    ways: list[Any] = [Linker(pool, page, 4 * most * page_bytes)]
    big = BigCopy(device, most * page_bytes)
    if device.type == "cuda":
        ways.append(HiCache(pool, page, 2 * most))
    rows, wrong = [], 0
    for blocks in options.blocks:
        timed: dict[str, list[Times]] = {}
        for _ in range(options.rounds + 2):
            pages: Any = torch.randperm(2 * most).add(1)
            source, target = pages[: 2 * blocks].split(blocks)
            fill(pool, source, page)
            for way in ways:
                times = way.store(source) | way.load(target)
                wrong += differing(pool, source, target, page)
                timed.setdefault(way.name, []).append(times)
            copies = [big.move([one], blocks * page_bytes).total_us for one in ("store", "load")]
            timed.setdefault(BIG, []).append(dict(zip(("store", "load"), copies, strict=True)))
        for name, samples in timed.items():
            row: dict[str, Any] = {"shape": f"{layers} layers, {page * heads * SIZE * 2 >> 10} KiB"}
            row |= {"blocks": blocks, "way": name}
            row |= {what: median(one[what] for one in samples[2:]) for what in samples[0]}
            rows.append(row)
    for way in ways:
        if decode is not None:
            last = next(row for row in reversed(rows) if row["way"] == way.name)
            for direction in ("store", "load"):
                last[f"{direction} lost"] = lost(decode, Moving(way, direction, most, page_bytes))
        way.close()
    return rows, wrong


def new_pool(device: torch.device, layers: int, heads: int, page: int, pages: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    size = (page, torch.bfloat16, heads, SIZE, layers, str(device), False)
    return MHATokenToKVPool(pages * page, *size)


def slots_of(pages: torch.Tensor, page: int) -> torch.Tensor:
    return (pages[:, None] * page + torch.arange(page)).flatten()


def fill(pool: Any, pages: torch.Tensor, page: int) -> None:
    slots = slots_of(pages, page).to(pool.k_buffer[0].device)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slots] = torch.randn_like(buffer[slots])


def differing(pool: Any, source: torch.Tensor, target: torch.Tensor, page: int) -> int:
    """Pages that are not what was stored. Then the target holds something else."""
    device = pool.k_buffer[0].device
    stored, loaded = (slots_of(pages, page).to(device) for pages in (source, target))
    wrong = torch.zeros(len(source), dtype=torch.bool, device=device)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        same = (buffer[stored] == buffer[loaded]).view(len(source), -1).all(1)
        wrong |= ~same
        buffer[loaded] = -1
    synchronize(device)
    return int(wrong.sum())


class Linker:
    """KVSwapLinker, called as SGLang's wrapper does. Each store has new keys."""

    name = OURS

    def __init__(self, pool: Any, page: int, host_bytes: int) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.server_args import ServerArgs

        from torch_kvswap.integrations.sglang import KVSwapLinker

        self.device, self.page = pool.k_buffer[0].device, page
        self._on_gpu = self.device.type == "cuda"
        new_stream: Any = torch.cuda.Stream
        allocator = SimpleNamespace(get_kvcache=lambda: pool)
        self.linker: Any = KVSwapLinker(
            ServerArgs(model_path="model"),
            CacheInitParams(False, None, allocator, page),
            components={ComponentType.FULL},
            extra_config={"host_bytes": host_bytes},
            forward_stream=new_stream() if self._on_gpu else None,
        )
        self._transfer = lambda keys, slots: [
            PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots)
        ]
        self._numbers = itertools.count()
        self.keys = list[str]()

    def begin(self, direction: str, pages: torch.Tensor) -> Callable[[], bool]:
        """Starts a transfer; what it returns says whether it has ended."""
        slots = slots_of(pages, self.page).to(self.device)
        if direction == "store":
            self.keys = [f"{next(self._numbers):064x}" for _ in pages]
            self.linker.offload(self._transfer(self.keys, slots))
            return lambda: self.linker.num_completed_offloads() > 0 and self._pop()
        self.linker.load("", self._transfer(self.keys[: len(pages)], slots))
        index = self.linker.start_layer_wise_loading()
        job: Any = self.linker._loads[index]
        return lambda: job.query() and self.linker.finish_layer_wise_loading(index)

    def _pop(self) -> bool:
        if not self.linker.pop_completed_offload():
            raise RuntimeError("a store failed")
        return True

    def store(self, pages: torch.Tensor) -> Times:
        synchronize(self.device)
        start = time.perf_counter()
        has_ended = self.begin("store", pages)
        host = time.perf_counter() - start
        synchronize(self.device)  # the numbers of the pages are on the host
        again = time.perf_counter()
        ended = has_ended()  # submits
        host += time.perf_counter() - again
        while not ended:
            ended = has_ended()
        return {"store": (time.perf_counter() - start) * 1e6, "store host": host * 1e6}

    def load(self, pages: torch.Tensor) -> Times:
        slots = slots_of(pages, self.page).to(self.device)
        synchronize(self.device)
        start = time.perf_counter()
        self.linker.load("", self._transfer(self.keys, slots))
        index = self.linker.start_layer_wise_loading()
        host = time.perf_counter() - start
        counter = self.linker.layer_done_counter
        counter.set_consumer(index)
        times = []
        for layer in (0, counter.num_layers - 1):
            counter.wait_until(layer)
            if self._on_gpu:
                torch.cuda.current_stream().synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        if not self.linker.finish_layer_wise_loading(index):
            raise RuntimeError("a load failed")
        return {"first layer": times[0], "load": times[1], "load host": host * 1e6}

    def close(self) -> None:
        self.linker.close()


class HiCache:
    """SGLang's own host pool and transfer engine, with its defaults."""

    name = THEIRS

    def __init__(self, pool: Any, page: int, pages: int) -> None:
        from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        os.environ.setdefault("SGLANG_HICACHE_TMA_TRANSFER", "1")  # its default
        self.pool, self.page, self.pages, self.layers = pool, page, pages, len(pool.k_buffer)
        tokens = pages * page
        self.host = MHATokenToKVPoolHost(
            *(pool._mha_buffer_info(), 0.0, 0, page, "page_first"),
            device_capacity_tokens=pool.size,
            start_layer=0,
            end_layer=self.layers,
            host_token_capacity=tokens,
        )
        self.engine, self._transfer = L2TransferEngine("kernel"), L2Transfer
        # SGLang keeps the host's indices of staged stores on the host.
        self._is_staged = self.host.can_use_write_back_jit
        self._slots = torch.empty(0)

    def _begin(self, direction: str, pages: torch.Tensor) -> tuple[Any, list[Any]]:
        slots, events = slots_of(pages, self.page).cuda(), list[Any]()
        if direction == "store":
            host = slots_of(torch.randperm(self.pages)[: len(pages)], self.page)
            self._slots = host.cuda()
            own = host if self._is_staged else self._slots
            moved = [self._transfer(self.host, None, own, slots)]
            return self.engine.submit_device_to_host(moved), []

        def record(layer: int) -> None:
            new_event: Any = torch.cuda.Event
            events.append(new_event())
            events[-1].record()

        own = self._slots[: len(slots)]
        moved = [self._transfer(self.host, None, own, slots)]
        end = self.engine.submit_host_to_device(
            moved, transfer_layer_id_max=self.layers, on_layer_done=record
        )
        return end, events

    def begin(self, direction: str, pages: torch.Tensor) -> Callable[[], bool]:
        end, _ = self._begin(direction, pages)
        return lambda: bool(end.finish_event.query())

    def _timed(self, direction: str, pages: torch.Tensor) -> tuple[float, float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        end, layers = self._begin(direction, pages)
        host = time.perf_counter()
        if layers:
            layers[0].synchronize()
        first = time.perf_counter()
        end.finish_event.synchronize()
        seen = time.perf_counter()
        return (host - start) * 1e6, (first - start) * 1e6, (seen - start) * 1e6

    def store(self, pages: torch.Tensor) -> Times:
        host, _, end = self._timed("store", pages)
        return {"store": end, "store host": host}

    def load(self, pages: torch.Tensor) -> Times:
        host, first, end = self._timed("load", pages)
        return {"first layer": first, "load": end, "load host": host}

    def close(self) -> None:
        self.host.destroy()


def lost(decode: Compute, moving: Moving) -> float:
    """Milliseconds that the compute loses for each GB."""
    floor = beside(decode, None)[0]
    beside(decode, moving)
    took, gigabytes, _ = beside(decode, moving)
    return (took - floor) / gigabytes


class Moving:
    """One transfer after another, for traffic.beside()."""

    def __init__(self, way: Any, direction: str, most: int, page_bytes: int) -> None:
        count = max(1, most // 2)
        self.nbytes, self._way, self._direction = count * page_bytes, way, direction
        pages: Any = torch.randperm(2 * most).add(1)
        self._parts = itertools.cycle(pages.split(count))
        way.store(next(self._parts))  # what is loaded

    def start(self) -> Callable[[], bool]:
        has_ended: Callable[[], bool] = self._way.begin(self._direction, next(self._parts))
        return has_ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
