import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torch_kvswap as kvs

README = Path(__file__).parents[2] / "README.md"


def examples_of(page):
    text = (README.parent / "docs" / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def on_the_cpu(code, *changes):
    for large, small in (('"cuda"', '"cpu"'), *changes):
        assert code.count(large) == 1
        code = code.replace(large, small)
    return code


@pytest.mark.parametrize("becomes", ["loaded", "pending", "lost"])
def test_the_preemption_example_runs_without_a_gpu(becomes, monkeypatch):
    preempt, resume = (
        next(code for code in examples_of("prefixes.md") if f"prefixes.{call}(" in code)
        for call in ("preempt", "resume")
    )
    rows = torch.arange(18)[:, None].repeat(1, 5)
    gpu = kvs.PagedLayout([rows])
    hasher = kvs.PrefixHasher("my-model", "bfloat16", block_tokens=16)
    with kvs.PrefixCache(gpu, kvs.HostPool(gpu, num_pages=7)) as prefixes:
        names = {"prefixes": prefixes, "hasher": hasher, "tokens": list(range(100))}
        exec(preempt, names)
        assert prefixes.preempt(["other"], [0]) is None
        if becomes == "pending":
            monkeypatch.setattr(prefixes, "poll", lambda: [])
        if becomes == "lost":
            prefixes.manager.reset()
        exec(resume, names)
        assert names["resumed"].state == becomes
        assert (names["resumed"].job is not None) == (becomes == "loaded")
        first = 4 if becomes == "loaded" else 11
        assert rows[11:, 0].tolist() == list(range(first, first + 7))
        assert prefixes.release(names["held"]) == (becomes == "pending")


@pytest.fixture
def scheduler(monkeypatch):
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")
    code = on_the_cpu(examples_of("scheduler.md")[0])
    names = {}
    exec(code, names)
    assert names["scheduler"].running == [names["request"]]
    assert names["request"].num_valid == 5
    gpu = kvs.PagedLayout([torch.arange(12, dtype=torch.float32)[:, None].repeat(1, 4)])
    with kvs.OffloadHandler(gpu, kvs.HostPool(gpu, num_pages=8)) as handler:
        made = names["Scheduler"](handler)
        made.running.append(names["Request"]([made.free_blocks.pop() for _ in range(5)], [], 5))
        yield made


def make_results(scheduler, monkeypatch, **changes):
    """Lets poll() report all jobs with these changes."""
    poll = scheduler.handler.poll
    monkeypatch.setattr(
        scheduler.handler, "poll", lambda *of: [replace(each, **changes) for each in poll(*of)]
    )


def test_the_documented_scheduler_moves_a_request(scheduler):
    (request,) = scheduler.running
    assert scheduler.preempt(request)
    assert (scheduler.running, len(scheduler.free_pages), len(scheduler.free_blocks)) == ([], 3, 7)
    scheduler.poll()
    assert (scheduler.swapped, len(scheduler.free_blocks)) == ([request], 12)
    assert scheduler.resume(request)
    scheduler.poll()
    assert (scheduler.running, scheduler.swapped) == ([request], [])
    assert request.num_valid == 5
    assert sorted(scheduler.free_pages) == list(range(8))
    assert sorted(scheduler.free_blocks + request.blocks) == list(range(12))
    (rows,) = scheduler.handler.layouts[0].tensors
    assert rows[request.blocks, 0].tolist() == [11, 10, 9, 8, 7]


@pytest.mark.parametrize(
    ("state", "rejected", "valid"),
    [("cancelled", (), 0), ("failed", (2, 3), 2)],
)
def test_the_documented_scheduler_recomputes_after_failures(
    scheduler, monkeypatch, state, rejected, valid
):
    (request,) = scheduler.running
    scheduler.preempt(request)
    scheduler.poll()
    make_results(scheduler, monkeypatch, state=state, rejected=rejected)
    scheduler.resume(request)
    scheduler.poll()
    assert (scheduler.running, request.num_valid) == ([request], valid)
    assert (len(request.blocks), len(scheduler.free_pages)) == (5, 8)
