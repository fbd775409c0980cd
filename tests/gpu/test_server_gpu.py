"""Engines on GPUs that share the pages of one server."""

from __future__ import annotations

import signal
import tempfile

import pytest
import torch
from below_engine import key_of
from patience import in_time
from served_engine import PAGE_BYTES, Process, ServedEngine, engine_process, serving

from torch_kvswap import HostPool, PagedLayout, PrefixCache
from torch_kvswap.prefix import peers

pytestmark = pytest.mark.gpu

PAGES, BLOCK = 32, 32 << 20
KEYS = [bytes([number]) * 32 for number in range(PAGES)]
# Stores 1 GiB, copies 20 GiB more into its pages, which takes a third of a second, and is killed in
# between. A child that was forked after CUDA started keeps the copies running.
VICTIM = """
import os, sys, time, torch
from torch_kvswap import PagedLayout, PrefixCache
tensor = torch.full((32, 32 << 20), 255, dtype=torch.uint8, device="cuda")
prefixes = PrefixCache.connect(sys.argv[1], PagedLayout([tensor]), model="m")
torch.cuda.synchronize()
if sys.argv[2] != "alone" and os.fork() == 0:
    os.close(1)
    time.sleep(1)
    os._exit(0)
prefixes._manager._session.end_jobs = lambda: None  # the next copies are this store's
prefixes.store([bytes([number + 100]) * 32 for number in range(32)], range(32))
for number in range(640):
    prefixes.pools[0].pages[number % 32, 0].copy_(tensor[0], non_blocking=True)
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


def test_an_idle_engine_ends_its_stores() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, prompt = f"{folder}/pages", list("abcdefgh")
        with (
            serving(path),
            ServedEngine(path, "cuda") as idle,
            ServedEngine(path, "cuda") as engine,
        ):
            idle.hold(prompt)  # its last call
            assert in_time(lambda: engine.prefixes.lookup(list(map(key_of, prompt))).ready == 8)
            assert engine.load(prompt) == 8


@pytest.mark.parametrize("how", ["alone", "forked", "control"])
def test_a_killed_engines_copies_end_before_its_pages(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the quarantine. As a control the server trusts the pidfd of a process that has forked."""
    if how == "control":
        monkeypatch.setattr(peers.Peer, "_await_forks", lambda peer: peer.ended())
    tensor = torch.zeros(PAGES, BLOCK, dtype=torch.uint8, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/pages"
        layout = PagedLayout([tensor])
        memory = PAGES * HostPool.page_bytes_of(layout)
        with serving(path, -(-memory // PAGE_BYTES)):  # 1 GiB
            prefixes = PrefixCache.connect(path, layout, model="m")
            for _ in range(1 if how == "control" else 5):
                with Process(["-c", VICTIM, path, how], "done") as victim:
                    victim.send(signal.SIGKILL)
                    victim.wait()
                    assert in_time(lambda: prefixes.stats().free_pages == PAGES)
                store = prefixes.store(KEYS, range(PAGES)).job  # zeros, in all pages
                assert store is not None
                store.synchronize()
                prefixes.poll()
                is_damaged = any(prefixes.pools[0].pages.any() for _ in range(5))
                assert is_damaged == (how == "control")
                prefixes.reset()
            prefixes.close()
