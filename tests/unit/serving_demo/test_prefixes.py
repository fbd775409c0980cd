"""Prompts with a common prefix: its blocks are loaded from the host, and the answers are the
same.
"""

from __future__ import annotations

import re
from random import Random
from unittest.mock import Mock

import pytest
import torch

from serving_demo import demo
from serving_demo.model import Model, same_bits_every_time
from serving_demo.prefixes import PrefixServer, alike_prompts
from torch_kvswap import HostPool, Job, OffloadEngine, OffloadHandler, PagedLayout

pytestmark = pytest.mark.slow

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZE = 8
PROMPTS = alike_prompts(Random(0).randbytes(500), count=6, longest=64, seed=1)


class Spoiling(OffloadEngine):
    """Stores the last block of each prompt with values that fit into no encoded slot."""

    def store(self, keys, gpu_block_ids):
        for tensor in self.handler.layouts[0].tensors:
            block = tensor[:, gpu_block_ids[-1]]
            exponents = torch.arange(-100, 100).float()[torch.arange(block.numel()) % 200]
            block.copy_(exponents.exp2().view(block.shape))
        return super().store(keys, gpu_block_ids)


class Forgetful(OffloadEngine):
    """Loses the first block of each load."""

    def load(self, keys, gpu_block_ids, prefix=None):
        job = super().load(keys, gpu_block_ids, prefix)
        for tensor in self.handler.layouts[0].tensors:
            tensor[:, gpu_block_ids[0]] = 0
        return job


@pytest.fixture
def exact():
    with same_bits_every_time():
        yield


def serve(device, engine_kind=OffloadEngine, pages=100, per_page=1, rounds=2, bits=None):
    """The answers of each round, how many tokens it reused, and those of requests alone.

    bits: of a value in encoded pages; None: of float32 values as they are.
    """
    dtype = torch.float32 if bits is None else torch.bfloat16
    encoding = {} if bits is None else {"encoding": "lossless", "bits_per_value": bits}
    model = Model(SIZE, 9, seed=0, device=torch.device(device), cache_dtype=dtype)
    layout = PagedLayout(model.new_cache(18), block_dim=1)
    got, reused = [], []
    with (
        HostPool(layout, pages, per_page, **encoding) as host,
        OffloadHandler(layout, host) as handler,
    ):
        server = PrefixServer(model, engine_kind(handler))
        for _ in range(rounds):
            before = server.reused
            got.append([server.generate(prompt, 4) for prompt in PROMPTS])
            reused.append(server.reused - before)
    return got, reused, [model.generate(prompt, 4) for prompt in PROMPTS]


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_gets_all_that_was_served_before_but_its_last_token(device, exact):
    got, reused, expected = serve(device)
    assert got == [expected, expected]
    assert reused[1] == sum((len(prompt) - 1) // SIZE * SIZE for prompt in PROMPTS)
    assert reused[0] >= 4 * 32  # of six prompts two are the first with their beginning


@pytest.mark.parametrize(("pages", "per_page"), [(100, 3), (7, 1), (2, 2)])
def test_answers_are_the_same_from_large_pages_and_from_too_few(pages, per_page, exact):
    got, reused, expected = serve("cpu", pages=pages, per_page=per_page)
    assert got == [expected, expected]
    assert reused[1] < sum((len(prompt) - 1) // SIZE * SIZE for prompt in PROMPTS)


def test_a_block_that_does_not_come_back_changes_the_answers(exact):
    got, _, expected = serve("cpu", Forgetful)
    assert got[1] != expected


def test_blocks_that_do_not_fit_into_encoded_pages_are_computed_again(exact):
    whole, spoiled = (serve("cpu", kind, bits=12.5) for kind in (OffloadEngine, Spoiling))
    for got, _, expected in (whole, spoiled):
        assert got == [expected, expected]
    assert 0 < spoiled[1][1] < whole[1][1]


def test_a_load_of_what_is_not_on_the_host_is_not_passed_over(exact):
    class Erased(OffloadEngine):
        def load(self, keys, gpu_block_ids, prefix=None):
            (pool,) = self.handler.pools
            pool.pages.zero_()
            super().load(keys, gpu_block_ids, prefix)
            return Mock(spec=Job)  # its wait() knows nothing, as on a GPU before the load has ended

    with pytest.raises(RuntimeError, match=r"load \d+ failed: \d+ of \d+ blocks are not in their"):
        serve("cpu", Erased, bits=12.5)


def test_a_transfer_that_failed_is_not_passed_over(exact):
    class Failing(OffloadEngine):
        def poll(self):
            for result in super().poll():
                object.__setattr__(result, "state", "failed")
                yield result

    with pytest.raises(RuntimeError, match=r"store \d+ failed: None"):
        serve("cpu", Failing)


def test_half_of_each_prompt_is_one_of_two_beginnings():
    assert {prompt[:32] for prompt in PROMPTS} == {PROMPTS[0][:32], PROMPTS[1][:32]}
    assert len(set(PROMPTS)) == len(PROMPTS)
    assert all(33 <= len(prompt) <= 64 for prompt in PROMPTS)


@pytest.mark.parametrize("device", DEVICES)
def test_the_demo_prints_how_much_of_each_round_came_from_the_host(device, tmp_path, capsys):
    file = tmp_path / "text"
    file.write_bytes(Random(0).randbytes(2000))
    arguments = "--requests 4 --new-tokens 4 --block-size 8 --gpu-blocks 40 --rounds 2"
    assert demo.main([*arguments.split(), "--device", device, "--file", str(file)]) == 0
    out = capsys.readouterr().out
    shares = re.findall(r"round (\d) of 4 prompts .*: (\d+) of (\d+) tokens from the host", out)
    assert [number for number, *_ in shares] == ["1", "2"]
    assert 0 < int(shares[0][1]) < int(shares[1][1]) < int(shares[1][2])
    assert "8 answers compared, 0 differ" in out


def test_the_demo_fails_when_an_answer_differs(tmp_path, monkeypatch, capsys):
    file = tmp_path / "text"
    file.write_bytes(Random(0).randbytes(2000))
    monkeypatch.setattr(demo, "OffloadEngine", Forgetful)
    arguments = "--requests 4 --new-tokens 4 --block-size 8 --gpu-blocks 40"
    assert demo.main([*arguments.split(), "--file", str(file)]) == 1
    assert re.search(r"12 answers compared, [1-9]\d* differ", capsys.readouterr().out)
