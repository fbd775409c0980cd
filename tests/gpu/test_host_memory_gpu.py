"""On a GPU: pools in memory that the driver allocates, and pools of a process that is checkpointed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from patience import PATIENCE

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.host_pool.memory import Registration

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_hang")]

NOT_SUPPORTED = 801
# Stores, waits until it is told to go on, and loads.
PROGRAM = """
import sys, torch
from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.host_pool.memory import Registration

def refuse(*_):
    raise NotImplementedError

if sys.argv[1] == "allocated":
    Registration.add = refuse
tensor = torch.randint(256, (64, 256 << 10), dtype=torch.uint8, device="cuda")
expected, ids = tensor.cpu(), list(range(64))
layout = PagedLayout([tensor])
pool = HostPool(layout, 64, verify="load")
handler = OffloadHandler(layout, pool)
handler.store(gpu_block_ids=ids, page_ids=ids).synchronize()
tensor.zero_()
torch.cuda.synchronize()
print("stored", flush=True)
sys.stdin.readline()
handler.load(page_ids=ids, gpu_block_ids=ids).synchronize()
handler.store(gpu_block_ids=ids[::-1], page_ids=ids).synchronize()
same = torch.equal(tensor.cpu(), expected) and all(
    torch.equal(pool.pages[page, 0], expected[63 - page]) for page in ids
)
print("same" if same and pool.is_pinned else "different", flush=True)
"""


@pytest.mark.parametrize("copy_method", ["strided", "staged", "kernel", "batch"])
def test_pages_that_the_driver_allocates_are_pinned(
    copy_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(Registration, "add", refuse)
    tensor = torch.randint(256, (64, 64 << 10), dtype=torch.uint8, device="cuda")
    expected, ids = tensor.cpu(), list(range(64))
    layout = PagedLayout([tensor])
    verify = "off" if copy_method == "batch" else "load"
    with HostPool(layout, 64, verify=verify) as pool:
        assert pool.is_pinned
        with OffloadHandler(layout, pool, copy_method=copy_method) as handler:
            handler.store(gpu_block_ids=ids, page_ids=ids).synchronize()
            assert torch.equal(pool.pages[:, 0], expected)
            tensor.zero_()
            handler.load(page_ids=ids, gpu_block_ids=ids).synchronize()
        assert torch.equal(tensor.cpu(), expected)


@pytest.mark.parametrize("memory", ["registered", "allocated"])
def test_pages_survive_checkpoint_and_restore(memory: str) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    steps = [f"cuCheckpointProcess{step}" for step in ("Lock", "Checkpoint", "Restore", "Unlock")]
    missing = [step for step in steps if not hasattr(library, step)]
    if missing:
        pytest.skip(f"the driver has no {missing[0]}: it is older than CUDA 12.8")
    assert library.cuInit(0) == 0
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, memory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "stored\n"
            for step in steps:
                result = getattr(library, step)(child.pid, None)
                if result == NOT_SUPPORTED:
                    pytest.skip(f"{step} is not supported here")
                assert result == 0, f"{step} returned {result}"
            assert child.communicate("\n", PATIENCE)[0] == "same\n"
        finally:
            child.kill()
