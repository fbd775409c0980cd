"""KVSWAP_LATE_CPU=1: bytes of a cache on the CPU move when somebody waits or polls."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import torch_kvswap as kvs

NUM_BLOCKS = 8


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")


def make_handler(num_layers: int = 1, dtype: torch.dtype = torch.float32) -> kvs.OffloadHandler:
    """A handler of layers whose block n holds n + 1."""
    rows = torch.arange(1, NUM_BLOCKS + 1, dtype=dtype)[:, None].repeat(1, 4096)
    gpu = kvs.PagedLayout([rows.clone() for _ in range(num_layers)])
    encoding = "lossless" if dtype == torch.bfloat16 else "raw"
    return kvs.OffloadHandler(gpu, kvs.HostPool(gpu, num_pages=NUM_BLOCKS, encoding=encoding))


def values(handler: kvs.OffloadHandler, layer: int = 0) -> list[float]:
    firsts: list[float] = handler.layouts[0].tensors[layer][:, 0].tolist()
    return firsts


def set_late(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    monkeypatch.setenv("KVSWAP_LATE_CPU", str(int(is_late)))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["raw", "lossless"])
def test_a_forgotten_wait_shows_in_late_mode(
    is_late: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_late(monkeypatch, is_late)
    with make_handler(dtype=dtype) as handler:
        handler.store(gpu_block_ids=[2], page_ids=[0]).synchronize()
        load = handler.load(page_ids=[0], gpu_block_ids=[7])
        assert values(handler)[7] == (8 if is_late else 3)
        load.wait()
        assert values(handler)[7] == 3


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["raw", "lossless"])
def test_early_reuse_shows_in_late_mode(
    is_late: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_late(monkeypatch, is_late)
    with make_handler(dtype=dtype) as handler:
        handler.store(gpu_block_ids=[2], page_ids=[0])
        handler.layouts[0].tensors[0][2] = 50  # another request's
        handler.load(page_ids=[0], gpu_block_ids=[7]).synchronize()
        assert values(handler)[7] == (50 if is_late else 3)


@pytest.mark.parametrize(
    "ask",
    [
        lambda handler, job: handler.poll(),
        lambda handler, job: handler.poll(timeout=None),
        lambda handler, job: handler.synchronize(),
        lambda handler, job: job.query(),
        lambda handler, job: job.synchronize(),
        lambda handler, job: job.wait(),
        lambda handler, job: handler.rebind(handler.layouts[0]),
        lambda handler, job: handler.close(),
    ],
    ids=["poll", "poll_timeout", "synchronize", "query", "job", "wait", "rebind", "close"],
)
def test_bytes_move_when_somebody_waits_or_polls(
    ask: Callable[[kvs.OffloadHandler, kvs.Job], object], late: None
) -> None:
    with make_handler() as handler:
        handler.store(gpu_block_ids=[2], page_ids=[0])
        load = handler.load(page_ids=[0], gpu_block_ids=[7])
        assert load.result is None
        assert values(handler)[7] == 8
        ask(handler, load)
        assert values(handler)[7] == 3
        assert load.query()


@pytest.mark.parametrize(
    "ask",
    [
        lambda handler, job: job.wait(),
        lambda handler, job: job.query(),
        lambda handler, job: job.synchronize(),
        lambda handler, job: handler.synchronize([job]),
    ],
    ids=["wait", "query", "synchronize", "handler"],
)
def test_asking_for_a_job_moves_no_unrelated_one(
    ask: Callable[[kvs.OffloadHandler, kvs.Job], object], late: None
) -> None:
    with make_handler() as handler:
        *_, unrelated = (
            handler.store(gpu_block_ids=[block], page_ids=[block]) for block in range(3)
        )
        handler.load(page_ids=[1], gpu_block_ids=[6])
        load = handler.load(page_ids=[0], gpu_block_ids=[7])
        ask(handler, load)
        assert values(handler)[6:] == [2, 1]
        assert handler.jobs_using(range(3)) == [unrelated]
        handler.layouts[0].tensors[0][2] = 50  # too early
        handler.load(page_ids=[2], gpu_block_ids=[5]).synchronize()
        assert values(handler)[5] == 50


def test_nothing_else_moves_them(late: None) -> None:
    with make_handler() as handler:
        store = handler.store(gpu_block_ids=[2], page_ids=[0])
        load = handler.load(page_ids=[0], gpu_block_ids=[7], expedited=True)
        assert handler.jobs_using([2, 7]) == [store, load]
        assert handler.metrics().stores.running == 1
        assert handler.cancel(load)
        assert handler.metrics().expedited.running == 1
        assert values(handler)[7] == 8
        assert [result.state for result in handler.poll()] == ["done", "cancelled"]


def test_a_layer_wait_moves_no_later_layers(late: None) -> None:
    with make_handler(num_layers=4) as handler:
        handler.store(gpu_block_ids=[2], page_ids=[0]).synchronize()
        load = handler.load(page_ids=[0], gpu_block_ids=[7], layer_groups=4)
        load.wait(layer_group=1)
        assert [values(handler, layer)[7] for layer in range(4)] == [3, 3, 8, 8]
        load.wait()
        assert [values(handler, layer)[7] for layer in range(4)] == [3] * 4


def test_late_jobs_keep_their_order(late: None) -> None:
    with make_handler() as handler:
        for page in range(1000):  # block 0 goes through all pages and all blocks
            handler.store(gpu_block_ids=[page % NUM_BLOCKS], page_ids=[page % NUM_BLOCKS])
            handler.load(page_ids=[page % NUM_BLOCKS], gpu_block_ids=[(page + 1) % NUM_BLOCKS])
        assert handler.metrics().stores.running == 1000
        assert len(handler.poll()) == 2000
        assert values(handler) == [1.0] * NUM_BLOCKS


def test_a_handler_is_late_as_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    set_late(monkeypatch, True)
    one = make_handler()
    set_late(monkeypatch, False)
    with one, make_handler() as other:
        assert one.store(gpu_block_ids=[2], page_ids=[0]).result is None
        assert other.store(gpu_block_ids=[2], page_ids=[0]).result is not None
    monkeypatch.setenv("KVSWAP_LATE_CPU", "yes")
    with pytest.raises(ValueError, match="KVSWAP_LATE_CPU is 'yes'; it must be 0 or 1"):
        make_handler()


def test_threads_that_submit_and_poll_lose_no_job(late: None) -> None:
    count, results = 300, []

    def submit(blocks: tuple[int, int]) -> None:
        for _ in range(count):
            handler.store(gpu_block_ids=[blocks[0]], page_ids=[blocks[0]])
            handler.load(page_ids=[blocks[0]], gpu_block_ids=[blocks[1]]).wait()

    with make_handler() as handler:
        threads = [threading.Thread(target=submit, args=[(n, n + 4)]) for n in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            results += handler.poll()
        results += handler.poll()
        assert sorted(result.job_id for result in results) == list(range(6 * count))
        assert values(handler) == [1, 2, 3, 4, 1, 2, 3, 8]
