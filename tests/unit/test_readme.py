import re
from pathlib import Path

import pytest
import torch

import torch_kvswap as kvs

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_example_runs_without_a_gpu(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for large, small in (
        ("(2, 1000, 16, 8, 128)", "(2, 30, 2, 1, 4)"),
        ('"cuda"', '"cpu"'),
        ("4000", "4"),
        ("num_layers=32", "num_layers=3"),
    ):
        assert code.count(large) == 1
        code = code.replace(large, small)
    names = {}
    exec(code, names)
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    bytes_moved = str(3 * 3 * 2 * 2 * 4 * 2)
    assert lines == [["store", "True", bytes_moved], ["load", "True", bytes_moved]]
    assert all(isinstance(tensor, torch.Tensor) for tensor in names["kv_tensors"])


def test_the_examples_of_the_prefixes_run_without_a_gpu():
    page = README.parent / "docs" / "prefixes.md"
    code, _, _, lazy = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    gpu = kvs.PagedLayout([torch.zeros(12, 5) for _ in range(2)])
    names = {"kvs": kvs, "gpu": gpu, "host": kvs.HostPool(gpu, num_pages=8)}
    exec(code, names)
    assert names["engine"].lookup(names["keys"]).ready == 6
    with kvs.OffloadHandler(gpu, names["host"]) as handler:
        engine = kvs.OffloadEngine(handler, store_policy="lazy")
        exec(lazy, {"engine": engine, "keys": names["keys"], "gpu_block_ids": range(4, 10)})
        engine.poll()
        assert engine.lookup(names["keys"]).ready == 6


def test_the_example_of_the_encoding_runs_without_a_gpu(capsys):
    page = README.parent / "docs" / "encoding.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    large = "torch.randn(2, 1000, 16, 8, 128"
    assert code.count(large) == 1
    names = {}
    exec(code.replace(large, "torch.randn(2, 100, 16, 2, 64"), names)
    advice, sizes = capsys.readouterr().out.splitlines()
    assert advice.startswith("lossless with 12.125 bits per value")
    block, page_bytes = names["gpu"].block_bytes, names["host"].page_bytes
    assert sizes == f"{3 * block} {3 * page_bytes}"


@pytest.mark.parametrize("becomes", ["loaded", "pending", "lost"])
def test_the_example_of_a_preempted_request_runs_without_a_gpu(becomes, monkeypatch):
    page = README.parent / "docs" / "prefixes.md"
    _, preempt, resume, _ = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    rows = torch.arange(12)[:, None].repeat(1, 5)
    gpu = kvs.PagedLayout([rows])
    hasher = kvs.PrefixHasher("my-model", "bfloat16", block_tokens=16)
    with kvs.OffloadHandler(gpu, kvs.HostPool(gpu, num_pages=7)) as handler:
        engine = kvs.OffloadEngine(handler)
        names = {"engine": engine, "hasher": hasher, "tokens": list(range(100))}
        names |= {"num_computed": 99, "gpu_block_ids": range(7)}
        exec(preempt, names)
        assert engine.preempt(["other"], [0]) is None
        if becomes == "pending":
            monkeypatch.setattr(engine, "poll", lambda: [])
        if becomes == "lost":
            engine.manager.reset()
        exec(resume, names)
        assert (names["job"] is not None) == (becomes == "loaded")
        first = 0 if becomes == "loaded" else 5
        assert rows[5:, 0].tolist() == list(range(first, first + 7))
        assert engine.release(names["held"]) == (becomes == "pending")


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150
