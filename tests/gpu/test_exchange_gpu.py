"""Ranks that load the same pages, in processes of their own. They need two GPUs that access each
other; each process sees both."""

from __future__ import annotations

import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from exchange_rank import BLOCKS, LAYERS, WORDS, Rank

from torch_kvswap._native.loader import native

pytestmark = pytest.mark.gpu

LARGE = list(range(8, 72))  # 256 MiB: ranks exchange it
NBYTES = len(LARGE) * LAYERS * WORDS * 8


@contextmanager
def started(count: int, **environment: str) -> Iterator[list[Rank]]:
    torch.cuda.init()
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, here are {torch.cuda.device_count()}")
    try:
        native.enable_peer_access(0, 1)
    except RuntimeError as error:
        pytest.skip(str(error))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        ranks = [Rank(rank, count, f"{folder}/pool", **environment) for rank in range(count)]
        yield [stack.enter_context(rank) for rank in ranks]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Rank]]:
    """Two ranks, for all tests that leave them alive."""
    with started(2) as ranks:
        yield ranks


def join(ranks: Sequence[Rank], deadline: float = 20) -> Sequence[Rank]:
    for rank in ranks:
        rank.tell("open", deadline)
    for rank in ranks:
        rank.answer()
    return ranks


def load(ranks: Sequence[Rank], pages: Sequence[int], blocks: Sequence[int]) -> None:
    for rank in ranks:
        rank.load(pages, blocks)


def wrong_blocks(ranks: Sequence[Rank], seed: int) -> int:
    """After loads that all ranks exchange, and loads and stores of one rank that share their blocks."""
    chance = random.Random(seed)
    for _ in range(8):
        pages = chance.sample(range(BLOCKS), chance.choice([2, 16, 64, 96]))
        blocks = chance.sample(range(BLOCKS), len(pages))
        for number, rank in chance.sample(list(enumerate(ranks)), len(ranks)):
            rank.load(pages, blocks)
            while chance.random() < 0.5:
                own = [BLOCKS + 2 * number, BLOCKS + 2 * number + 1][: chance.choice([1, 2])]
                shared = blocks[: len(own)]
                if chance.random() < 0.3:
                    rank.store(own, shared)
                    continue
                of = chance.choice([own, chance.sample(range(BLOCKS), len(own))])
                route: Any = chance.choice([{}, {"expedited": True}])
                rank.load(of, shared, **route)
    ends = [rank.end() for rank in ranks]
    assert {error for end in ends for error in end["errors"]} == {""}
    return sum(end["wrong"] for end in ends)


def expect_own_links(ranks: Sequence[Rank]) -> None:
    """The next loads are right and go by the own links."""
    before = [rank.end()["exchanged"] for rank in ranks]
    load(ranks, LARGE, LARGE[::-1])
    for rank, exchanged in zip(ranks, before, strict=True):
        assert rank.end() == {"errors": [""], "wrong": 0, "exchanged": exchanged}


def expect_right_bytes(ranks: Sequence[Rank]) -> None:
    load(join(ranks), LARGE, LARGE[::-1])
    ends = [rank.end() for rank in ranks]
    assert [(end["errors"], end["wrong"]) for end in ends] == len(ranks) * [([""], 0)]
    assert sum(end["exchanged"] for end in ends) == (len(ranks) - 1) * NBYTES
    assert sum(wrong_blocks(ranks, seed) for seed in range(5)) == 0


def test_exchanged_bytes_arrive_on_two_gpus(pair: list[Rank]) -> None:
    expect_right_bytes(pair)


def test_exchanged_bytes_arrive_on_four_gpus() -> None:
    with started(4) as ranks:
        expect_right_bytes(ranks)


@pytest.mark.parametrize(("connections", "exchanged"), [("32", 16), ("1", 0)])
def test_ranks_submit_collectives_in_another_order(connections: str, exchanged: int) -> None:
    with started(2, CUDA_DEVICE_MAX_CONNECTIONS=connections) as ranks:
        for rank in ranks:
            rank.tell("reduce")  # the first one loads kernels
        join(ranks)
        for shift in range(1, 17):
            blocks = LARGE[shift:] + LARGE[:shift]
            ranks[0].tell("reduce")
            load(ranks, LARGE, blocks)
            ranks[1].tell("reduce")
        ends = [rank.end() for rank in ranks]
    assert [(set(end["errors"]), end["wrong"]) for end in ends] == 2 * [({""}, 0)]
    assert sum(end["exchanged"] for end in ends) == exchanged * NBYTES


def test_memory_is_freed_while_a_load_waits(pair: list[Rank]) -> None:
    """The driver waits for all work of the GPU before it frees memory."""
    ranks = join(pair)
    ranks[0].load(LARGE, LARGE[::-1])
    ranks[0].tell("free")
    ranks[1].load(LARGE, LARGE[::-1])
    assert [(end["errors"], end["wrong"]) for end in map(Rank.end, ranks)] == 2 * [([""], 0)]


def test_a_rank_that_loads_nothing_fails_the_load_on_gpus(pair: list[Rank]) -> None:
    ranks = join(pair, deadline=1)
    ranks[0].load(LARGE, LARGE)
    assert "rank 0 has waited too long" in ranks[0].end()["errors"][0]
    expect_own_links(ranks)


def test_a_stopped_rank_fails_the_load(pair: list[Rank]) -> None:
    ranks = join(pair, deadline=1)
    ranks[1].process.send_signal(signal.SIGSTOP)
    load(ranks, LARGE, LARGE)
    assert "rank 0 has waited too long" in ranks[0].end()["errors"][0]
    ranks[1].process.send_signal(signal.SIGCONT)
    expect_own_links(ranks)


def test_a_rank_may_close_first_on_gpus(pair: list[Rank]) -> None:
    ranks = join(pair)
    load(ranks, LARGE, LARGE)
    assert ranks[0].end()["errors"] == [""]
    ranks[0].tell("close")
    end = ranks[1].end()
    assert (end["errors"], end["wrong"]) == ([""], 0)
    ranks[0].answer()
    expect_own_links(ranks[1:])


def test_a_killed_rank_fails_the_load() -> None:
    with started(2) as ranks:
        join(ranks, deadline=1)
        for number in range(8):
            load(ranks, LARGE[number:], LARGE[: len(LARGE) - number])
        ranks[0].load(LARGE, LARGE)  # which the other rank never loads
        ranks[1].process.kill()
        end = ranks[0].end()
        assert any("has waited too long for the others" in error for error in end["errors"])
        assert end["wrong"] == 0
        expect_own_links(ranks[:1])
        ranks[0].tell("close")
        ranks[0].answer()
