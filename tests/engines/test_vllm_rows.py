"""A scheduler gets the pages of its engine's workers. vLLM need not be installed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE, in_time

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm import rows as vllm_rows
from torch_kvswap.integrations.vllm.rows import ROW_ALIGNMENT, Rows, RowsOffer, RowsServer
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler


@pytest.fixture
def engine() -> str:
    return str(uuid.uuid4())


def pool_of(*sizes: int, blocks_per_page: int = 2, **how: Any) -> HostPool:
    tensors = [torch.zeros(4, size, dtype=torch.uint8) for size in sizes or (1000,)]
    layout = PagedLayout(tensors, dtype=torch.bfloat16 if "encoding" in how else None)
    aligned = {"shared": True, "page_alignment": ROW_ALIGNMENT}
    return HostPool(layout, 5, blocks_per_page, **aligned | how)


def test_the_scheduler_reads_and_writes_the_pages(engine):
    with pool_of() as pool:
        server = RowsServer(engine, pool.share(), "named")
        rows = Rows(engine)
        server.close()
        assert (rows.num_pages, rows.namespace) == (5, "named")
        assert rows.memory.shape == (5, pool.page_bytes)
        assert pool.page_bytes % ROW_ALIGNMENT == 0
        pool.pages[3, 1, 7] = 9
        assert rows.memory[3, pool.slot_bytes + 7] == 9
        rows.memory[4, 5] = 8
        assert pool.pages[4, 0, 5] == 8
    rows.memory[4, 5] = 7  # it lasts longer than the worker


def test_the_scheduler_may_be_another_process(engine):
    code = (
        "import sys\n"
        "from torch_kvswap.integrations.vllm.rows import Rows\n"
        "Rows(sys.argv[1]).memory[2, 3] = 5\n"
    )
    root = str(Path(__file__).parents[2])
    with pool_of() as pool:
        server = RowsServer(engine, pool.share(), "")
        command = [sys.executable, "-c", code, engine]
        assert subprocess.run(command, env=os.environ | {"PYTHONPATH": root}).returncode == 0
        server.close()
        assert pool.pages[2, 0, 3] == 5


def test_a_server_ends_when_it_is_closed_and_serves_one_scheduler(engine):
    with pool_of() as pool:
        threads = threading.active_count()
        RowsServer(engine, pool.share(), "").close()
        assert threading.active_count() == threads
        server = RowsServer(engine, pool.share(), "")
        with pytest.raises(RuntimeError, match=r"another engine with engine_id .* is starting on"):
            RowsServer(engine, pool.share(), "")
        Rows(engine)
        assert in_time(lambda: threading.active_count() == threads)
        with pytest.raises(RuntimeError, match="found no host memory of a worker"):
            Rows(engine)
        server.close()


def test_a_caller_that_hangs_up_is_not_the_scheduler(engine):
    with pool_of() as pool:
        server = RowsServer(engine, pool.share(), "x" * (1 << 20))  # more than a socket takes
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(vllm_rows._address(engine))
        assert len(Rows(engine).namespace) == 1 << 20
        server.close()


def test_another_user_is_given_nothing(engine, monkeypatch):
    asked = threading.Event()

    def other(connection: socket.socket) -> int:
        asked.set()
        return os.getuid() + 1

    monkeypatch.setattr(vllm_rows, "user_of", other)
    with pool_of() as pool:
        server = RowsServer(engine, pool.share(), "")
        with pytest.raises(RuntimeError, match="it belongs to another user"):
            Rows(engine)
        assert asked.wait(PATIENCE)
        assert server._thread.is_alive()
        server.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slot_without_a_block_is_noticed_in_the_part_of_each_rank(engine, rank):
    cache = (1 + torch.rand(4, 2048)).bfloat16()
    pools = [HostPool(PagedLayout([cache]), 5, 2, shared=True, encoding="lossless", part=(0, 2))]
    handle = pools[0].share()
    pools.append(HostPool.attach(PagedLayout([cache]), handle, rank=1))
    server = RowsServer(engine, handle, "")
    rows = Rows(engine)
    server.close()
    assert not rows.holds_blocks(3)
    for pool in pools:
        with OffloadHandler(PagedLayout([cache]), pool) as handler:
            handler.store(gpu_block_ids=[0, 1], page_ids=[3]).synchronize()
    assert rows.holds_blocks(3)
    pools[rank].pages[3, 1, :16] = 0
    assert not rows.holds_blocks(3)
    for pool in pools:
        pool.close()


def test_the_namespace_names_all_that_rows_depend_on():
    offer = RowsOffer("engine", "HND")
    pools = {
        "raw": [pool_of(4096)],
        "lossless": [pool_of(4096, encoding="lossless")],
        "wide": [pool_of(4096, encoding="lossless", bits_per_value=12.5)],
        "slots": [pool_of(4096, blocks_per_page=1)],
        "slabs": [pool_of(2048, 2048)],
        "order": [pool_of(1024, 3072)],
        "ranks": [pool_of(4096, part=(0, 2))],
        "groups": [pool_of(4096), pool_of(64)],
    }
    names = {name: offer.namespace(one) for name, one in pools.items()}
    names["layout"] = RowsOffer("engine", "NHD").namespace(pools["raw"])
    assert len(set(names.values())) == len(names)
    assert names["raw"] == RowsOffer("other", "HND").namespace([pool_of(4096)])
    assert names["wide"].startswith("torch_kvswap 1: lossless 12.5, little endian, 2 slots of ")
