"""Ranks that load the same pages, in processes of their own. They need two GPUs that access each
other, of which each process sees both."""

from __future__ import annotations

import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch
from exchange_rank import BLOCKS, LAYERS, WORDS, Rank

from torch_kvswap._native.loader import native

pytestmark = pytest.mark.gpu

LARGE = list(range(8, 72))  # 256 MiB: ranks exchange it
NBYTES = len(LARGE) * LAYERS * WORDS * 8


@contextmanager
def started(ranks: int, deadline: float = 20) -> Iterator[list[Rank]]:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, here are {torch.cuda.device_count()}")
    try:
        native.enable_peer_access(0, 1)
    except RuntimeError as error:
        pytest.skip(str(error))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/pool"
        made = [stack.enter_context(Rank(rank, ranks, path, deadline)) for rank in range(ranks)]
        for rank in made:
            rank.answer()
        yield made


def load(ranks: Sequence[Rank], pages: Sequence[int], blocks: Sequence[int]) -> None:
    for rank in ranks:
        rank.load(pages, blocks)


def expect_own_links(ranks: Sequence[Rank]) -> None:
    """The next loads are right and go by the own links."""
    before = [rank.end()["exchanged"] for rank in ranks]
    load(ranks, LARGE, LARGE[::-1])
    for rank, exchanged in zip(ranks, before, strict=True):
        assert rank.end() == {"errors": [""], "wrong": 0, "exchanged": exchanged}


@pytest.mark.parametrize("count", [2, 4])
def test_exchanged_bytes_arrive_on_gpus(count: int) -> None:
    with started(count) as ranks:
        load(ranks, LARGE, LARGE[::-1])
        ends = [rank.end() for rank in ranks]
        assert [(end["errors"], end["wrong"]) for end in ends] == count * [([""], 0)]
        assert sum(end["exchanged"] for end in ends) == (count - 1) * NBYTES
        chance = random.Random(count)
        for _ in range(5):
            for _ in range(8):
                pages = chance.sample(range(BLOCKS), chance.choice([2, 16, 64, 96]))
                blocks = chance.sample(range(BLOCKS), len(pages))
                load(chance.sample(ranks, count), pages, blocks)
            for rank in ranks:
                end = rank.end()
                assert (end["errors"], end["wrong"]) == ([""] * 8, 0)


def test_a_rank_that_loads_nothing_fails_the_load_on_gpus() -> None:
    with started(2, deadline=1) as ranks:
        ranks[0].load(LARGE, LARGE)
        assert "rank 0 has waited too long" in ranks[0].end()["errors"][0]
        expect_own_links(ranks)


def test_a_stopped_rank_fails_the_load() -> None:
    with started(2, deadline=1) as ranks:
        ranks[1].process.send_signal(signal.SIGSTOP)
        load(ranks, LARGE, LARGE)
        assert "rank 0 has waited too long" in ranks[0].end()["errors"][0]
        ranks[1].process.send_signal(signal.SIGCONT)
        expect_own_links(ranks)


def test_a_killed_rank_fails_the_load() -> None:
    with started(2, deadline=1) as ranks:
        for number in range(8):
            load(ranks, LARGE[number:], LARGE[: len(LARGE) - number])
        ranks[1].process.kill()
        ranks[1].process.wait()
        load(ranks[:1], LARGE, LARGE)
        end = ranks[0].end()
        assert "rank 0 has waited too long" in end["errors"][-1]
        assert end["wrong"] == 0
        expect_own_links(ranks[:1])
        ranks[0].tell("close")
        ranks[0].answer()


def test_a_rank_may_close_first_on_gpus() -> None:
    with started(2) as ranks:
        load(ranks, LARGE, LARGE)
        assert ranks[0].end()["errors"] == [""]
        ranks[0].tell("close")
        end = ranks[1].end()
        assert (end["errors"], end["wrong"]) == ([""], 0)
        ranks[0].answer()
        expect_own_links(ranks[1:])
