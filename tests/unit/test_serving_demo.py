"""The demo of `make demo`: it runs, its tokens are right, and it finds wrong ones."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from patience import PATIENCE, in_time
from served_engine import serving

import torch_kvswap as kvs
from serving_demo import demo
from serving_demo.engine import Engine, Request
from serving_demo.model import Model, same_bits_every_time
from torch_kvswap.below import threads

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The last rows of the table: without the host cache, and with it.
TABLE = r"^(of \d+ prompt tokens.*|preempted.*|tokens computed.*?) +(\d+) +(\d+)$"
SMALL = ["--requests", "6", "--new-tokens", "24", "--gpu-blocks", "15"]


@pytest.fixture(autouse=True)
def late_cpu(monkeypatch):
    """A forgotten wait, and a block that is used again too early, show on the CPU."""
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("encoding", ["raw", "lossless"])
def test_every_token_is_right(device, encoding, capsys):
    assert demo.main([*SMALL, "--device", device, "--encoding", encoding]) == 0
    printed = capsys.readouterr().out
    rows = {name: list(map(int, pair)) for name, *pair in re.findall(TABLE, printed, re.MULTILINE)}
    (nothing, reused), both, (again, never) = rows.values()
    assert (nothing, never) == (0, 0)
    assert min(reused, *both, again) > 0
    assert "144 tokens compared, 0 requests differ" in printed


@pytest.mark.slow
def test_demos_on_one_server_reuse_more(tmp_path, capsys):
    def reused(*options):
        assert demo.main([*SMALL, *options]) == 0
        printed = capsys.readouterr().out
        assert "144 tokens compared, 0 requests differ" in printed
        (_, count), *_ = [row[1:] for row in re.findall(TABLE, printed, re.MULTILINE)]
        return int(count)

    path = str(tmp_path / "pages")
    with serving(path, pages=768):  # as much memory as two have of their own
        first, second = reused("--server", path), reused("--server", path)
        with pytest.raises(SystemExit, match=r"^--server: .*: demo, seed 1 here, demo, seed 0 at"):
            demo.main([*SMALL, "--server", path, "--seed", "1"])
    alone = reused()
    assert first == alone
    assert second > 2 * alone


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--device", "meta", "the demo runs on cpu and cuda, not on meta"),
        ("--device", "gpu", "the demo runs on cpu and cuda, not on gpu"),
        ("--requests", "0", "'0' is not a positive integer"),
    ],
)
def test_a_wrong_argument_is_named(option, value, why, capsys):
    with pytest.raises(SystemExit):
        demo.main([option, value])
    assert f"argument {option}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("device", DEVICES)
def test_control_a_lost_block_changes_tokens(device, capsys):
    assert demo.main([*SMALL, "--device", device, "--control"]) == 0
    assert "144 tokens compared, 1 requests differ" in capsys.readouterr().out


# Its engine, which others copy, with a second tier and damaged pages.

PROMPTS, NEW_TOKENS = demo.make_prompts(6, seed=0), 24


class Served:
    """Engines that serve the same prompts one after another with one host cache."""

    def __init__(self, prompts, **tier):
        self.model, self.prompts = Model(demo.BLOCK_SIZE, 8, 0, torch.device("cpu")), prompts
        self.expected = [self.model.generate(prompt, NEW_TOKENS) for prompt in prompts]
        self.cache = self.model.new_cache(15)
        gpu = kvs.PagedLayout(self.cache, block_dim=1)
        self.pool = kvs.HostPool(gpu, 100, verify="load")
        self.prefixes = kvs.PrefixCache(gpu, self.pool, **tier)

    def start(self, kind=Engine):
        self.requests = [Request(prompt, NEW_TOKENS) for prompt in self.prompts]
        return kind(self.model, self.cache, self.prefixes, self.requests)

    def is_right(self):
        return [request.generated for request in self.requests] == self.expected

    def damage(self):
        self.prefixes.synchronize()
        self.pool.pages.fill_(0x7F)


@contextmanager
def served(prompts, **tier) -> Iterator[Served]:
    with same_bits_every_time():
        made = Served(prompts, **tier)
        with made.prefixes:
            yield made


class BlindEngine(Engine):
    """Accepts tokens whose load has failed."""

    def poll(self, timeout=0.0):
        self.prefixes.poll(timeout)
        return set()


@pytest.mark.parametrize("kind", [Engine, BlindEngine])
def test_damaged_preempted_requests_are_computed_again(kind):
    with served(PROMPTS) as one:
        engine = one.start(kind)
        while not any(request.held for request in engine.waiting):
            engine.step()
        one.damage()
        engine.run()
        assert one.is_right() == (kind is Engine)
        assert (engine.computed_again > 0) == (kind is Engine)


def test_a_second_tier_replaces_damaged_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "DEADLINE", PATIENCE)  # however slow this machine is
    tier = {"below": f"file:{tmp_path}", "below_model": "demo", "below_policy": "all"}
    with served(PROMPTS, **tier) as one:
        one.start().run()
        assert one.is_right()
        one.prefixes.synchronize()
        one.prefixes.poll()
        stored = one.prefixes.stats().stored
        assert in_time(
            lambda: not one.prefixes.poll() and one.prefixes.below_stats().written == stored
        )
        one.prefixes._below._absent.clear()  # as if a second had passed since they were missed
        one.damage()
        engine = one.start()
        engine.run()
        assert one.is_right()
        assert engine.computed_again > 0
        assert one.prefixes.below_stats().promoted > 0
    with served(PROMPTS, **tier) as other:
        engine = other.start()
        engine.run()
        assert other.is_right()
        assert engine.reused >= sum(len(each) - 1 - demo.BLOCK_SIZE for each in PROMPTS)


def test_only_requests_that_fit_are_looked_up(tmp_path):
    with served(PROMPTS, below=tmp_path, below_model="demo") as one:
        engine = one.start()
        engine.step()  # the second tier is asked, so none starts
        assert not engine.running
        looked_up = [request for request in engine.waiting if request.was_asked]
        assert 0 < sum(map(engine.blocks_of, looked_up)) <= len(engine.free)


@pytest.mark.parametrize(
    ("of", "name"), [(kvs.Job, "wait"), (kvs.PrefixCache, "jobs_using")], ids=["wait", "jobs_using"]
)
def test_control_without_waits_tokens_differ(of, name, monkeypatch):
    monkeypatch.setattr(of, name, lambda *_: [])
    prompts = [bytes([n]) + prompt for n, prompt in enumerate(PROMPTS)]  # nobody waits for another
    with served(prompts) as one:
        for _ in range(2):  # what was stored wrongly is loaded in the second turn
            one.start().run()
        assert not one.is_right()
