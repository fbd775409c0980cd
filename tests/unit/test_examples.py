"""The examples run; each compares bytes and fails if they are wrong.

On the CPU jobs end late, so that a forgotten wait shows.
"""

import runpy
from pathlib import Path

import pytest
import torch
from processes import run_script

ROOT = Path(__file__).parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "example",
    # That one is for another engine: tests/engines/test_nano_vllm.py.
    sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples" / "nano_vllm.py"}),
    ids=lambda path: path.stem,
)
def test_an_example_runs(
    example: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")
    script = f"import runpy; runpy.run_path({str(example)!r}, run_name='__main__')"
    assert run_script(script, "--device", device, folder=tmp_path)


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
