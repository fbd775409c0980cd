"""Processes share a pool: each pins it, and nothing is left when they end."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from host_pools import in_chunks, through_a_socket
from interrupts import Interrupter
from patience import PATIENCE
from simulated_driver import HOST, Driver, place, simulated

from torch_kvswap._native import rendezvous
from torch_kvswap._native.loader import native
from torch_kvswap.host_pool import PoolHandle, memory, shared
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import OffloadHandler

BLOCK = 4096


def layout(block_bytes: int = BLOCK, blocks: int = 8) -> PagedLayout:
    return PagedLayout([torch.zeros(blocks, block_bytes, dtype=torch.uint8)])


def test_a_handle_goes_through_a_socket() -> None:
    pool = HostPool(layout(), 6, blocks_per_page=2, shared=True)
    handle = through_a_socket(pool.share())
    assert (handle.num_pages, handle.blocks_per_page, handle.page_bytes) == (6, 2, 2 * BLOCK)
    assert not os.get_inheritable(handle.fd)
    other = HostPool.attach(layout(), handle)
    assert (other.num_pages, other.num_ready_pages) == (6, 6)
    pool.pages[5, 1].fill_(9)
    assert other.pages[5, 1].eq(9).all()
    assert other.pages.data_ptr() != pool.pages.data_ptr()


def test_another_users_memory_is_neither_sent_nor_received(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, own = HostPool(layout(), 4, shared=True), os.geteuid()
    handle = pool.share()
    here, there = socket.socketpair()
    with here, there:
        handle.send(here)
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        for pass_on in (lambda: handle.send(here), lambda: PoolHandle.receive(there)):
            with pytest.raises(PermissionError, match=f"socket belongs to user {own}, and this"):
                pass_on()
        before = open_files()
        monkeypatch.setattr(rendezvous, "credentials_of", lambda _: (0, own + 1))
        with pytest.raises(PermissionError, match=f"memory of the host pool belongs to user {own}"):
            PoolHandle.receive(there)
        assert open_files() == before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_files() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:torch_kvswap ")


@pytest.mark.parametrize("call", ["HostPool", "share", "attach", "receive"])
def test_an_interruption_leaves_no_file_or_mapping(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "check_room", lambda *_, **__: None)  # most of the points
    cache, interrupter = layout(), Interrupter()
    pool = HostPool(cache, 4, shared=True)
    handle = pool.share()

    def receive() -> PoolHandle:
        handle.send(here)
        return PoolHandle.receive(there)

    makes: dict[str, Callable[[], Any]] = {
        "HostPool": lambda: HostPool(cache, 4, shared=True),
        "share": pool.share,
        "attach": lambda: HostPool.attach(cache, handle),
        "receive": receive,
    }
    gc.collect()
    for at in count(1):
        here, there = socket.socketpair()
        with here, there:
            before = open_files(), mapped_files()
            made: list[Any] = []
            is_stopped = interrupter.stops(at, lambda made=made: made.append(makes[call]()))
            for one in made:
                one.close()
            assert (open_files(), mapped_files()) == before, at
        if not is_stopped:
            break
    assert at > 20


def test_a_closed_handle_sends_no_other_file() -> None:
    pool = HostPool(layout(), 4, shared=True)
    handle = pool.share()
    number = handle.fd
    handle.close()
    os.dup2(other := os.memfd_create("of somebody else"), number)
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        for use in (
            lambda: handle.send(there),
            lambda: HostPool.attach(layout(), handle),
            lambda: handle.fd,
        ):
            assert error_text(use).startswith(
                "RuntimeError: the handle of the host pool is closed;"
            )
        with pytest.raises(BlockingIOError):
            here.recv(1)
    for file in {other, number}:
        os.close(file)


@pytest.mark.parametrize(
    ("sent", "ends", "error"),
    [
        (8, False, TimeoutError),
        (8, True, ConnectionError),
        (80, False, ConnectionError),  # all bytes are 0
    ],
)
def test_a_missing_handle_leaves_no_file(sent: int, ends: bool, error: type[Exception]) -> None:
    handle = HostPool(layout(), 4, shared=True).share()
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(0.05)
        before = open_files()
        socket.send_fds(there, [bytes(sent)], [handle.fd])
        if ends:
            there.shutdown(socket.SHUT_WR)
        with pytest.raises(error):
            PoolHandle.receive(here)
        assert open_files() == before


def test_a_closed_pool_has_no_file() -> None:
    before = open_files()
    pool = HostPool(layout(), 4, shared=True)
    pool.share().close()
    assert open_files() == before + 1
    pool.close()
    assert open_files() == before


def test_the_memory_stays_while_one_process_has_it() -> None:
    pool = HostPool(layout(), 4, shared=True)
    pool.pages.fill_(5)
    handle = pool.share()
    pool.close()
    other = HostPool.attach(layout(), handle)
    handle.close()
    del pool, handle
    gc.collect()
    assert other.pages.eq(5).all()


@simulated
def test_each_process_pins_all_pages(driver: Driver) -> None:
    caches = [place(driver, layout()) for _ in range(2)]
    pool = HostPool(caches[0], 3, shared=True)
    pool.pages.fill_(7)
    other = HostPool.attach(caches[1], pool.share(), pin_in_background=True)
    assert other.wait_ready(PATIENCE)
    assert other.is_pinned
    assert other.pages.eq(7).all()  # touching and pinning change nothing


@simulated
def test_chunks_of_odd_pages_begin_aligned(driver: Driver) -> None:
    register, begins = native.register_host, []

    def note(device: int, address: int, nbytes: int) -> None:
        begins.append(address)
        register(device, address, nbytes)

    cache = place(driver, layout(656))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "register_host", note)
        pool = in_chunks(1 << 18, cache, 4000, shared=True)
    assert len(begins) > 2
    assert all(begin % os.sysconf("SC_PAGE_SIZE") == 0 for begin in begins)
    assert all(driver.cuda.memory_type(page) == HOST for page in pool.pages)


def test_a_handle_of_something_else_is_refused() -> None:
    pool = HostPool(layout(), 6, shared=True)
    handle = pool.share()
    assert_expected_inline(
        error_text(HostPool.attach, layout(8), handle),
        """\
ValueError: the handle is for other pages: tensors[0]: uint8 [blocks, 8] here, uint8
[blocks, 4096] in the pool; attach with a layout of the cache that the pool was made for""",
    )
    assert_expected_inline(
        error_text(HostPool.attach, layout(), pool),
        """\
TypeError: handle is a HostPool; it must be the PoolHandle that share() or receive()
returned""",
    )
    assert_expected_inline(
        error_text(HostPool(layout(), 1).share),
        """ValueError: this pool belongs to one process; make it with HostPool(shared=True)""",
    )


def of_slabs(*sizes: int) -> PagedLayout:
    return PagedLayout([torch.zeros(8, size, dtype=torch.uint8) for size in sizes])


def test_a_handle_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = HostPool(layout(), 6, shared=True).share()
    here, there = socket.socketpair()
    with here, there:
        monkeypatch.setattr(shared, "FORMAT_VERSION", 1000)
        handle.send(here)
        monkeypatch.undo()
        before = open_files()
        with pytest.raises(ConnectionError, match="its format is 1000"):
            PoolHandle.receive(there)
        assert open_files() == before


@pytest.mark.parametrize("encoding", ["raw", "lossless"])
@pytest.mark.parametrize("verify", ["off", "load"])
@pytest.mark.parametrize("blocks_per_page", [1, 3])
def test_each_rank_has_a_part_of_every_slot(
    encoding: Any, verify: Any, blocks_per_page: int
) -> None:
    """Two groups of layers with blocks of different sizes."""
    caches = [[torch.rand(12, size).bfloat16() + 1 for size in (4096, 2080)] for _ in range(3)]
    layouts = [[PagedLayout([one]) for one in cache] for cache in caches]
    how: dict[str, Any] = {"encoding": encoding, "verify": verify, "part": (0, 3)}
    pools = [HostPool(layouts[0][0], 4, blocks_per_page, shared=True, **how)]
    size = HostPool.page_bytes_of(layouts[0][0], blocks_per_page, **how)
    assert size == pools[0].page_bytes
    handle = through_a_socket(pools[0].share())
    pools += [HostPool.attach(layouts[rank][0], handle, rank=rank) for rank in (1, 2)]
    blocks = list(range(2 * blocks_per_page))
    jobs = []
    for groups, pool in zip(layouts, pools, strict=True):
        assert (pool.num_parts, pool.page_bytes) == (3, pools[0].page_bytes)
        views = [pool, pool.view_for(groups[1])]
        handler = OffloadHandler(groups, views)
        handler.store(gpu_block_ids=[blocks, blocks], page_ids=[[0, 1], [2, 3]]).synchronize()
        jobs.append((handler, views))
    for cache, (handler, views) in zip(caches, jobs, strict=True):
        for one, view, first in zip(cache, views, (0, 2), strict=True):
            for block in blocks:
                page, slot = divmod(block, blocks_per_page)
                block_bytes = view.read_block(first + page, slot)
                assert torch.equal(block_bytes, one[block].view(torch.uint8))
        right = [one.clone() for one in cache]
        for one in cache:
            one.zero_()
        handler.load(page_ids=[[0, 1], [2, 3]], gpu_block_ids=[blocks, blocks]).synchronize()
        for one, before in zip(cache, right, strict=True):
            assert torch.equal(one[blocks], before[blocks])


def test_a_wrong_part_is_refused() -> None:
    handle = HostPool(layout(), 4, shared=True, part=(0, 2)).share()
    assert_expected_inline(
        "\n".join(
            (
                error_text(lambda: HostPool(layout(), 4, part=(0, 2))),
                error_text(lambda: HostPool(layout(), 4, shared=True, part=(2, 2))),
                error_text(lambda: HostPool(layout(), 4, shared=True, part=2)),  # type: ignore[arg-type]
                error_text(lambda: HostPool.attach(layout(), handle, rank=2)),
                error_text(
                    lambda: HostPool(layout(), 4, shared=True, part=(0, 2)).view_for(layout(8192))
                ),
            )
        ),
        """\
ValueError: part is (0, 2), but shared is False, so that nobody has the others; pass
shared=True, or leave part out
ValueError: part[0] is 2; it must be 0 to 1
TypeError: part is an int; pass a tuple, (rank, number of ranks)
ValueError: rank is 2; it must be 0 to 1
ValueError: blocks of 8192 bytes do not fit into slots of 4096 bytes; make the pool from
the layout with the largest slots""",
    )


def test_the_handle_of_a_view_describes_its_pool() -> None:
    pool = HostPool(of_slabs(1024, 3072), 4, shared=True)
    handle = through_a_socket(pool.view_for(of_slabs(2048, 2048)).share())
    assert handle.tensors == ["uint8 [blocks, 1024]", "uint8 [blocks, 3072]"]
    assert HostPool.attach(of_slabs(1024, 3072), handle).num_pages == 4


def test_a_handle_with_many_tensors_comes_in_parts() -> None:
    tensors = [f"uint8 [blocks, {number}]" for number in range(1, 20_000)]
    fd = os.memfd_create("pages")
    here, there = socket.socketpair()
    with here, there:
        for end in (here, there):
            end.settimeout(PATIENCE)
        handle = PoolHandle(fd, 1, 1, 1, tensors)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sender = threading.Thread(target=handle.send, args=(here,))
        sender.start()
        assert PoolHandle.receive(there).tensors == tensors
        sender.join()
    os.close(fd)


def test_a_small_or_unsealed_file_is_refused(tmp_path: Path) -> None:
    pool = HostPool(layout(), 6, shared=True)
    small = pool.share()
    small.num_pages = 7
    assert_expected_inline(
        error_text(HostPool.attach, layout(), small),
        """\
ValueError: the handle's file has 49152 bytes; it must have 50240 for 7 pages, and be
sealed against shrinking; pass what HostPool.share() returns""",
    )
    plain = tmp_path / "file"
    plain.write_bytes(bytes(6 * BLOCK))
    half_sealed = os.memfd_create("pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(half_sealed, 6 * BLOCK)
    fcntl.fcntl(half_sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    for file in (os.open(plain, os.O_RDWR), half_sealed):
        loose = PoolHandle(file, 6, 1, BLOCK, [f"uint8 [blocks, {BLOCK}]"])
        with pytest.raises(ValueError, match="sealed against shrinking"):
            HostPool.attach(layout(), loose)
        os.close(file)


def test_the_socket_refuses_what_is_no_handle() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.send(b"hello")
        there.settimeout(0.05)  # without a file it does not wait for more
        assert_expected_inline(
            error_text(PoolHandle.receive, there),
            """\
ConnectionError: received 5 bytes and 0 files instead of the handle of a host pool; send
it with PoolHandle.send""",
        )
        here.close()
        assert "received 0 bytes" in error_text(PoolHandle.receive, there)


def test_a_handle_needs_a_connected_unix_socket() -> None:
    handle = HostPool(layout(), 6, shared=True).share()
    here, there = socket.socketpair()
    closed = socket.socket(socket.AF_UNIX)
    closed.close()
    with here, there, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as alone:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
            for call in (handle.send, PoolHandle.receive):
                assert_expected_inline(
                    "\n".join(error_text(call, it) for it in (3, tcp, datagrams, alone, closed)),
                    """\
TypeError: connection is an int; pass a connected Unix stream socket
ValueError: connection is a socket of AF_INET, SOCK_STREAM; pass a connected Unix stream
socket
ValueError: connection is a socket of AF_UNIX, SOCK_DGRAM; pass a connected Unix stream
socket
ConnectionError: connection is not connected; connect it to the other process first
ConnectionError: connection is closed; pass a connected Unix stream socket""",
                )
        there.close()
        with pytest.raises(ConnectionError):
            handle.send(here)


@pytest.mark.gpu
def test_several_processes_store_into_the_same_pages() -> None:
    script = """
        import socket, sys, torch
        from torch_kvswap import HostPool, OffloadHandler, PagedLayout
        from torch_kvswap.host_pool import PoolHandle
        connection = socket.socket(fileno=int(sys.argv[1]))
        cache = PagedLayout([torch.full((2, 1 << 20), 2, dtype=torch.uint8, device="cuda")])
        handle = PoolHandle.receive(connection)
        pool = HostPool.attach(cache, handle)
        assert pool.is_pinned
        with pool, OffloadHandler(cache, pool) as handler:
            handler.synchronize(handler.store(gpu_block_ids=[0, 1], page_ids=[3, 5]))
        connection.send(b"!")
    """
    here, there = socket.socketpair()
    cache = PagedLayout([torch.ones(2, 1 << 20, dtype=torch.uint8, device="cuda")])
    with here, there, HostPool(cache, 6, shared=True) as pool:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(there.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[there.fileno()],
        )
        there.close()
        pool.share().send(here)
        with OffloadHandler(cache, pool) as handler:
            handler.synchronize(handler.store(gpu_block_ids=[0], page_ids=[2]))
        assert here.recv(1) == b"!"
        assert process.wait() == 0
        values: list[Any] = pool.pages.view(6, -1)[:, 77].tolist()
    assert values == [0, 0, 1, 2, 0, 2]
