"""Engines on GPUs that share the pages of one server."""

from __future__ import annotations

import signal
import tempfile
import time

import pytest
import torch
from patience import in_time
from served_engine import PAGE_BYTES, Process, ServedEngine, engine_process, serving

from torch_kvswap import PagedLayout, PrefixCache

pytestmark = pytest.mark.gpu

PAGES, BLOCK = 32, 32 << 20
KEYS = [bytes([number]) * 32 for number in range(PAGES)]
# Stores 1 GiB, which takes 20 ms and more, and is killed in between.
VICTIM = """
import sys, torch
from torch_kvswap import PagedLayout, PrefixCache
tensor = torch.full((32, 32 << 20), 255, dtype=torch.uint8, device="cuda")
prefixes = PrefixCache.connect(sys.argv[1], PagedLayout([tensor]), model="m")
torch.cuda.synchronize()
prefixes.store([bytes([number + 100]) * 32 for number in range(32)], range(32))
print("done", flush=True)
sys.stdin.read()
"""


def test_two_processes_share_pages() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/pages"
        prompt = list("abcdefgh")
        does = f"engine.compute({prompt})"
        with (
            serving(path),
            engine_process(path, does, "cuda"),
            ServedEngine(path, "cuda") as engine,
        ):
            assert engine.prefixes.pools[0].is_pinned
            assert engine.load(prompt) == 8


def test_copies_of_a_killed_engine_have_ended_when_its_pages_are_free() -> None:
    tensor = torch.zeros(PAGES, BLOCK, dtype=torch.uint8, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/pages"
        with serving(path, PAGES * BLOCK // PAGE_BYTES):  # 1 GiB
            prefixes = PrefixCache.connect(path, PagedLayout([tensor]), model="m")
            for _ in range(5):
                with Process(["-c", VICTIM, path], "done") as victim:
                    victim.send(signal.SIGKILL)
                    victim.wait()
                    gone = time.monotonic()
                    assert in_time(lambda: prefixes.manager.stats().free_pages == PAGES)
                    print(f"pages are free after {1e3 * (time.monotonic() - gone):.1f} ms")
                store = prefixes.store(KEYS, range(PAGES)).job  # zeros, in all pages
                assert store is not None
                store.synchronize()
                prefixes.poll()
                for _ in range(5):
                    assert not prefixes.pools[0].pages.any()
                prefixes.manager.reset()
            prefixes.close()
