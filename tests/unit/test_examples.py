"""The examples run; each compares bytes and fails if they are wrong.

On the CPU jobs end late, so that a forgotten wait shows.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run_late(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KVSWAP_LATE_CPU": "1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "example",
    # That one is for another engine: tests/engines/test_nano_vllm.py.
    sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples" / "nano_vllm.py"}),
    ids=lambda path: path.stem,
)
def test_an_example_runs(example: Path, device: str, tmp_path: Path) -> None:
    done = run_late(tmp_path, str(example), "--device", device)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["raw", "lossless"])
def test_control_a_long_prompt_differs_without_waits(encoding: str, tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "long_prompt.py")
    options = "--device", "cpu", "--encoding", encoding, "--control"
    assert run_late(tmp_path, example, *options).stderr == "the outputs differ\n"


@pytest.mark.slow
def test_long_prompts_keep_blocks_that_overflow() -> None:
    names = runpy.run_path(str(ROOT / "examples" / "long_prompt.py"))
    torch.manual_seed(0)
    model = names["Model"](layers=4, heads=4, kv_heads=2, size=32, device="cpu")
    prompt = torch.randn(256, 4 * 32).bfloat16()
    want = names["prefill"](model, prompt, 64, names["Resident"](model, 256, buffers=4))
    for raw_pages in (1, 64):
        cache = names["Offloaded"](model, 256, 64, buffers=2, block=16, raw_pages=raw_pages)
        if raw_pages == 1:
            with pytest.raises(MemoryError, match="more than 1 blocks do not fit"):
                names["prefill"](model, prompt, 64, cache)
        else:
            assert torch.equal(names["prefill"](model, prompt, 64, cache), want)
            assert cache.raw_page_of
        cache.close()
