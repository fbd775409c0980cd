"""The workers of one engine share one host pool. vLLM need not be installed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from patience import PATIENCE
from processes import run_script

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm import worker_pools
from torch_kvswap.integrations.vllm.worker_pools import (
    Host,
    Replicas,
    check_one_host,
    replicated_pool,
    this_host,
)
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.results import CorruptedPageError


@pytest.fixture
def engine() -> str:
    return str(uuid.uuid4()) + "x" * 200  # longer than the name of a socket may be


def layout(nbytes: int = 64) -> PagedLayout:
    return PagedLayout([torch.zeros(8, nbytes, dtype=torch.uint8)])


def make(rank: int, world: int, engine: str, timeout: float = PATIENCE) -> HostPool:
    return replicated_pool(layout(), 6, 2, Replicas(rank, world, engine), timeout)


def test_workers_share_checksums_and_notice_damage(engine):
    gpu = [torch.randint(256, (8, 64), dtype=torch.uint8) for _ in range(2)]
    layouts = [PagedLayout([one]) for one in gpu]

    def attach(rank: int) -> HostPool:
        of_engine = Replicas(rank, 2, engine)
        return replicated_pool(layouts[rank], 6, 2, of_engine, PATIENCE, verify="load")

    with ThreadPoolExecutor(2) as threads:
        pools = list(threads.map(attach, range(2)))
    first, second = map(OffloadHandler, layouts, pools)
    first.store(gpu_block_ids=[0, 1, 2, 3], page_ids=[4, 5]).synchronize()
    second.load(page_ids=[4, 5], gpu_block_ids=[7, 6, 5, 4]).synchronize()
    assert torch.equal(gpu[1][[7, 6, 5, 4]], gpu[0][:4])
    pools[0].pages[4, 1, 9] ^= 1
    with pytest.raises(CorruptedPageError, match="GPU block 3, page 4, slot 1"):
        second.load(page_ids=[4, 5], gpu_block_ids=[2, 3, 1, 0]).synchronize()
    for pool in pools:
        pool.close()


def test_workers_are_processes_and_come_in_any_order(engine):
    code = """
    import torch
    from torch_kvswap.integrations.vllm.worker_pools import Replicas, replicated_pool
    from torch_kvswap.layout import PagedLayout

    layout = PagedLayout([torch.zeros(8, 64, dtype=torch.uint8)])
    pool = replicated_pool(layout, 6, 2, Replicas(1, 2, sys.argv[1]))
    pool.pages[4].fill_(9)
    """
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(run_script, code, engine)
        with make(0, 2, engine) as pool:
            other.result()
            assert bool((pool.pages[4] == 9).all())
            assert not pool.pages[5].any()


def test_two_engines_do_not_share(engine):
    with ThreadPoolExecutor(4) as threads:
        names = [(rank, 2, engine + name) for name in "ab" for rank in range(2)]
        pools = list(threads.map(lambda worker: make(*worker), names))
    pools[0].pages.fill_(1)
    assert pools[1].pages.all()
    assert pools[1].num_ready_pages == 6
    assert not pools[2].pages.any()
    for pool in pools:
        pool.close()


def test_a_worker_that_does_not_come_is_missed(engine):
    with pytest.raises(TimeoutError, match=r"1 of the 2 workers of engine .* have attached"):
        make(0, 2, engine, timeout=0.05)
    with pytest.raises(TimeoutError, match="worker 1 has found no worker 0 of engine"):
        make(1, 2, engine, timeout=0.05)
    with ThreadPoolExecutor(2) as threads:  # and nothing is left of it
        for pool in threads.map(lambda rank: make(rank, 2, engine), range(2)):
            pool.close()


@pytest.mark.parametrize(
    "other", [Host("b", "1", 2), Host("a", "2", 2), Host("a", "1", 3), Host("a", "", 0)]
)
def test_workers_share_memory_on_one_host_only(other):
    one = Host("a", "1", 2)
    check_one_host([one, one, one])
    with pytest.raises(RuntimeError, match=r"but worker 0 runs on a .* and worker 2 on [ab] "):
        check_one_host([one, one, other])


def test_processes_of_one_machine_have_one_host():
    code = "from torch_kvswap.integrations.vllm.worker_pools import this_host; print(this_host())"
    assert run_script(code).strip() == str(this_host())


def test_when_worker_0_fails_the_others_are_told(engine, monkeypatch):
    has_come, receive = threading.Event(), worker_pools.PoolHandle.receive

    def comes(connection: socket.socket) -> object:
        has_come.set()
        return receive(connection)

    def fails(*_: object, **__: object) -> None:
        assert has_come.wait(PATIENCE)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker_pools.PoolHandle, "receive", comes)
    monkeypatch.setattr(worker_pools.HostPool, "__init__", fails)
    with ThreadPoolExecutor(2) as threads:
        others = threads.submit(make, 1, 2, engine)
        first = threads.submit(make, 0, 2, engine)
        with pytest.raises(RuntimeError, match="out of memory"):
            first.result()
        with pytest.raises(RuntimeError, match="worker 1 got no host pool: worker 0 of engine"):
            others.result()


def test_two_engines_of_one_name_are_told_apart(engine):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(worker_pools.address_of(engine))
        with pytest.raises(RuntimeError, match="is making its host pool on this machine"):
            make(0, 2, engine)


def test_a_worker_that_hangs_up_is_not_counted(engine, monkeypatch):
    has_hung_up, make_pool = threading.Event(), HostPool.__init__

    def make_late(*arguments: Any, **options: Any) -> None:
        assert has_hung_up.wait(PATIENCE)  # else it may be given the pool before it hangs up
        make_pool(*arguments, **options)

    monkeypatch.setattr(worker_pools.HostPool, "__init__", make_late)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(make, 0, 2, engine)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            worker_pools._connect(
                caller,
                worker_pools.address_of(engine),
                Replicas(1, 2, engine),
                time.monotonic() + PATIENCE,
            )
        has_hung_up.set()
        make(1, 2, engine).close()
        first.result().close()


@pytest.fixture
def listener(engine: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(worker_pools.address_of(engine))
        made.listen()
        yield made


@pytest.fixture
def caller(engine: str, listener: socket.socket) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.connect(worker_pools.address_of(engine))
        yield made


def test_a_caller_of_another_user_is_sent_nothing(listener, caller, monkeypatch):
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with (
        HostPool(layout(), 6, 2, shared=True) as pool,
        contextlib.closing(pool.share()) as handle,
        pytest.raises(TimeoutError),
    ):
        worker_pools.send_to_next(listener, handle, deadline=time.monotonic())
    assert caller.recv(1) == b""


def test_a_worker_that_closes_early_is_counted(listener, caller):
    handle = mock.Mock()
    handle.send.side_effect = lambda connection: caller.close()
    worker_pools.send_to_next(listener, handle, deadline=time.monotonic())
    handle.send.assert_called_once()


def test_another_user_is_given_nothing(engine, monkeypatch):
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(make, 0, 2, engine, 2)
        with pytest.raises(
            PermissionError, match=f"socket belongs to user {own}, and this process"
        ):
            make(1, 2, engine)
        with pytest.raises(TimeoutError):
            first.result()
