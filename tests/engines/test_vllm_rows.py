"""A scheduler gets the pages of its engine's workers. vLLM need not be installed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from patience import in_time
from processes import run_script

from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm import rows as vllm_rows
from torch_kvswap.integrations.vllm.canonical import Share
from torch_kvswap.integrations.vllm.rows import ROW_ALIGNMENT, Rows, RowsOffer, RowsServer
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler
from torch_kvswap.results import CorruptedPageError


@pytest.fixture
def engine() -> str:
    return str(uuid.uuid4())


def pool_of(*sizes: int, blocks_per_page: int = 2, **how: Any) -> HostPool:
    tensors = [torch.zeros(4, size, dtype=torch.uint8) for size in sizes or (1000,)]
    layout = PagedLayout(tensors, dtype=torch.bfloat16 if "encoding" in how else None)
    aligned = {"shared": True, "part": (0, 1)}
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
    code = """
    from torch_kvswap.integrations.vllm.rows import Rows
    Rows(sys.argv[1]).memory[2, 3] = 5
    """
    with pool_of() as pool:
        server = RowsServer(engine, pool.share(), "")
        run_script(code, engine)
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
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pool_of() as pool:
        server = RowsServer(engine, pool.share(), "")
        with pytest.raises(
            PermissionError, match=f"socket belongs to user {own}, and this process"
        ):
            Rows(engine)
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(vllm_rows._address(engine))
            assert caller.recv(1) == b""
        assert server._thread.is_alive()
        server.close()


class Ranks:
    """Two ranks with a cache each, whose rows a scheduler has. Page 3 is stored."""

    def __init__(self, engine: str, **how: Any) -> None:
        self.cache = (1 + torch.rand(4, 12 << 10)).bfloat16()
        layout = PagedLayout([self.cache])
        self.right = self.cache.clone()
        shared = {"shared": True, "part": (0, 2)}
        self.pools = [HostPool(layout, 5, 2, **shared | how)]
        handle = self.pools[0].share()
        self.pools.append(HostPool.attach(layout, handle, rank=1))
        server = RowsServer(engine, handle, "")
        self.rows = Rows(engine)
        self.memory = np.asarray(self.rows.memory)
        server.close()
        self.handlers = [OffloadHandler(layout, pool) for pool in self.pools]
        for handler in self.handlers:
            handler.store(gpu_block_ids=[0, 1], page_ids=[3]).synchronize()
            handler.poll()
        assert self.rows.without_blocks([3]) == []

    def load(self, page: int) -> list[tuple[int, ...]]:
        """The blocks that were not what was stored, of each rank. The others are."""
        rejected = []
        for handler in self.handlers:
            self.cache.zero_()
            handler.mark_written([page])
            handler.load(page_ids=[page], gpu_block_ids=[2, 3])
            with contextlib.suppress(CorruptedPageError):
                handler.synchronize()
            (result,) = handler.poll()
            rejected.append(result.rejected)
            for block in {0, 1} - {*result.rejected}:
                assert torch.equal(self.cache[2 + block], self.right[block])
        return rejected


ENCODINGS = pytest.mark.parametrize("encoding", ["raw", "lossless"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "how",
    [{"encoding": "lossless"}, {"verify": "load"}, {"encoding": "lossless", "verify": "load"}],
)
def test_a_slot_without_a_block_is_noticed_in_the_part_of_each_rank(engine, rank, how):
    ranks = Ranks(engine, **how)
    assert ranks.rows.without_blocks([2]) == [2]
    ranks.pools[rank]._forget_block(3, 1)
    assert ranks.rows.without_blocks([3]) == [3]


@ENCODINGS
def test_a_row_that_a_tier_has_read_from_elsewhere_is_verified(engine, encoding):
    old = Ranks(engine, encoding=encoding, verify="load")
    ranks = Ranks(engine, encoding=encoding, verify="load")
    ranks.right = old.right
    for page in (3, 1, 1):  # also where something was stored, and the same once more
        ranks.memory[page] = old.memory[3]
        ranks.rows.adopt([page])
        assert ranks.rows.without_blocks([page]) == []
        assert ranks.load(page) == [(), ()]
        assert ranks.load(page) == [(), ()]


@ENCODINGS
def test_a_row_that_was_damaged_in_a_tier_is_noticed_by_the_rank_with_the_damage(engine, encoding):
    old = Ranks(engine, encoding=encoding, verify="load")
    pool = old.pools[0]
    nbytes = pool._encoding.for_native(pool.layout.sizes).slot_bytes
    random = np.random.default_rng(3)
    noticed = []
    for number in range(200):
        rank, slot, kind = number % 2, number // 2 % 2, ("block", "digests")[number // 4 % 2]
        first = slot * pool.slot_bytes + rank * pool._shape.part_bytes
        damaged = old.memory[3].copy()
        if kind == "block":
            damaged[first + random.integers(nbytes)] ^= 1 << random.integers(8)
        else:  # the tag, or the digests of three tiles; the rest of the head only explains
            at = random.choice([*range(8), *range(32, 56)])
            begin = first + pool._shape.block_room
            damaged[begin + at] ^= 1 << random.integers(8)
        old.memory[4] = damaged
        old.rows.adopt([4])
        found = old.load(4)
        assert found[1 - rank] == ()
        noticed.append(found[rank] == (slot,))
    assert sum(noticed) > 190  # a bit may be of no value, as in an encoded block


@ENCODINGS
def test_without_digests_damage_of_a_row_is_loaded(engine, encoding):
    """The control of the test above."""
    ranks = Ranks(engine, encoding=encoding)
    ranks.memory[3, 1000] ^= 8
    ranks.cache.zero_()
    ranks.handlers[0].load(page_ids=[3], gpu_block_ids=[2, 3]).synchronize()
    assert not torch.equal(ranks.cache[2], ranks.right[0])


def test_what_is_no_row_is_no_block(engine):
    ranks = Ranks(engine, verify="load")
    for page, byte in ((3, 0), (2, 0), (1, 255)):
        ranks.memory[page] = byte
        ranks.rows.adopt([page])
        assert ranks.load(page) == [(0, 1), (0, 1)]


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
        "digests": [pool_of(4096, part=(0, 1), verify="load")],
        "groups": [pool_of(4096), pool_of(64)],
    }
    names = {name: offer.namespace(one) for name, one in pools.items()}
    names["layout"] = RowsOffer("engine", "NHD").namespace(pools["raw"])
    assert len(set(names.values())) == len(names)
    assert names["raw"] == RowsOffer("other", "HND").namespace([pool_of(4096)])
    assert '"bits_per_value": 12.5' in names["wide"]


def test_the_namespace_of_canonical_rows_has_the_heads_and_not_the_ranks():
    """Of four heads with two layers of 1,024 bytes."""

    def named(ranks: int, heads: int, *sizes: int) -> str:
        share = Share(heads, (0, ranks), (0, 1))
        return RowsOffer("engine", "HND", share).namespace([pool_of(*sizes, part=(0, ranks))])

    names = {named(ranks, 4, *[1024] * (8 // ranks)) for ranks in (1, 2, 4)}
    assert len(names) == 1
    assert '"heads": 4' in names.pop()
    others = [named(1, 2, 2048, 2048, 2048, 2048), named(1, 4, *[512, 1536] * 4)]
    others.append(RowsOffer("engine", "HND").namespace([pool_of(*[1024] * 8, part=(0, 1))]))
    assert len({named(1, 4, *[1024] * 8), *others}) == 4
