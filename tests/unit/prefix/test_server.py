"""Engines that share the pages and the index of one server."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import threading
import weakref
from pathlib import Path
from textwrap import fill
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from below_engine import BLOCK_BYTES, Engine, bytes_of, key_of
from error_text import error_text
from expecttest import assert_expected_inline
from held_requests import resume
from patience import in_time
from processes import in_child
from served_engine import PAGE_BYTES, ServedEngine, engine_process, server_process, serving

from torch_kvswap import OffloadHandler, PagedLayout, PrefixCache
from torch_kvswap.below.files import FileStore
from torch_kvswap.below.threads import StoreThreads
from torch_kvswap.host_pool import system
from torch_kvswap.prefix import BlockGroup, cache, session
from torch_kvswap.prefix.manager import Lookup
from torch_kvswap.prefix.protocol import Op, Outcome, pack
from torch_kvswap.prefix.server import PageServer
from torch_kvswap.prefix.session import Session

PROMPT = list("abcdefgh")


def test_an_engine_loads_what_another_process_has_computed(path: str) -> None:
    with (
        serving(path),
        engine_process(path, "engine.compute('abcdefgh')"),
        ServedEngine(path) as engine,
    ):
        assert engine.load(PROMPT) == 8
        assert (engine.pages.stored, engine.pages.loaded) == (8, 8)


def test_what_is_being_stored_is_pending(path: str) -> None:
    with serving(path), ServedEngine(path) as engine, ServedEngine(path) as other:
        keys = list(map(key_of, PROMPT))
        engine.compute("abxy")
        assert engine.hold(PROMPT) is not None
        assert engine.prefixes.lookup(keys) == Lookup(8, 2, 6)
        assert engine.prefixes.lookup([*keys[:5], key_of("z"), *keys[5:]]) == Lookup(5, 2, 3)
        assert engine.prefixes.store(keys, range(8)).state == "present"
        assert engine.prefixes.load(keys, list(range(32, 40))) is None
        assert other.prefixes.lookup(keys) == Lookup(8, 2, 6)
        assert other.prefixes.store(keys, range(8)).state == "present"
        engine.prefixes.poll()
        assert engine.prefixes.lookup(keys) == other.prefixes.lookup(keys) == Lookup(8, 8, 0)


def test_an_idle_engine_ends_its_stores(path: str) -> None:
    with serving(path), ServedEngine(path) as idle, ServedEngine(path) as other:
        keys = list(map(key_of, PROMPT))
        assert idle.hold(PROMPT) is not None
        held = other.prefixes.store(keys, range(8), hold=True)
        assert held.state == "present"
        assert resume(other.prefixes, held, keys, range(32, 40)) == "pending"
        idle.prefixes.synchronize()  # its last call
        other.until(lambda: other.prefixes.lookup(keys).ready == 8)
        assert resume(other.prefixes, held, keys, range(32, 40)) == "loaded"
        assert other.load(PROMPT) == 8


@pytest.mark.parametrize("is_served", [True, False])
def test_a_poll_without_jobs_pauses(
    is_served: bool, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine's store may end meanwhile, or the second tier may answer."""
    with serving(path), ServedEngine(path) if is_served else Engine(tmp_path) as engine:
        slept: list[float] = []
        monkeypatch.setattr(cache, "time", Mock(sleep=slept.append))
        for timeout in (None, 1.0, 1e-6, 0.0):
            assert engine.prefixes.poll(timeout) == []
        assert slept == [cache._PAUSE, cache._PAUSE, 1e-6]


def test_of_two_engines_only_one_stores_a_block(path: str) -> None:
    with serving(path), ServedEngine(path) as first, ServedEngine(path) as second:
        assert first.hold("abcd") is not None
        assert second.hold("cdef") is not None
        assert first.pages.filling_pages == 6

        def are_stored() -> bool:
            first.prefixes.poll()
            second.prefixes.poll()
            return first.pages.stored == 6

        first.until(are_stored)
        assert (first.pages.idle_pages, first.pages.free_pages) == (6, 26)
        assert second.load("abcdef") == first.load("abcdef") == 6


def test_a_preemption_keeps_what_earlier_stores_bring(path: str) -> None:
    with serving(path, pages=4), ServedEngine(path) as engine, ServedEngine(path) as other:
        keys = list(map(key_of, "abcd"))
        engine.hold("ab")
        for block, key in enumerate(keys):
            engine.tensor[block] = bytes_of(key)
        held = engine.prefixes.store(keys, range(4), hold=True)
        assert resume(engine.prefixes, held, keys, range(32, 36)) == "pending"
        engine.prefixes.poll()
        assert other.hold("e") is None
        assert resume(engine.prefixes, held, keys, range(32, 36)) == "loaded"
        engine.prefixes.poll()
        assert torch.equal(engine.tensor[32:36], torch.stack(list(map(bytes_of, keys))))
        assert other.hold("e") is not None


def test_a_preempted_request_holds_pages_after_a_reset(path: str) -> None:
    with serving(path, pages=4), ServedEngine(path) as engine, ServedEngine(path) as other:
        keys = list(map(key_of, "abcd"))
        held = engine.prefixes.store(keys, range(4), hold=True)
        engine.prefixes.poll()
        other.prefixes.reset()
        assert engine.find("abcd") == Lookup(0, 0, 0)
        assert other.pages.free_pages == 0
        assert resume(engine.prefixes, held, keys, range(4)) == "lost"
        engine.prefixes.poll()
        assert other.pages.free_pages == 4


def test_calls_of_the_index_reach_the_server(path: str) -> None:
    with serving(path, pages=4), ServedEngine(path) as engine, ServedEngine(path) as other:
        engine.compute("abcd")
        engine.prefixes.touch([key_of("a")])
        engine.compute("e")  # evicts the oldest, d: a prompt is evicted from its end
        assert [other.find([name]).ready for name in "abcde"] == [1, 1, 1, 0, 1]
        engine.prefixes.order([key_of("c")], renew=True)
        engine.compute("f")
        assert [other.find([name]).ready for name in "abcef"] == [1, 0, 1, 1, 1]
        with pytest.raises(ValueError, match=r"keys\[1\] is the same key as keys\[0\]"):
            engine.prefixes.store([key_of("g")] * 2, [1, 2], hold=True)
        assert engine.prefixes.store([key_of(name) for name in "uvwxyz"], range(6)).state == "full"
        assert engine.pages.refused == 1
        engine.prefixes.reset()
        assert other.find(["a"]).found == 0
        assert engine.pages.free_pages == 4


@pytest.mark.parametrize("is_control", [False, True])
def test_a_page_being_loaded_is_not_given_away(is_control: bool, path: str) -> None:
    """As a control the server is told too early that the load has ended."""
    keys = list(map(key_of, "abcd"))
    stores = f"""
assert (engine.hold("wxyz") is not None) == {is_control}
engine.prefixes.poll()
"""
    with serving(path, pages=4), ServedEngine(path) as engine:
        engine.compute("abcd")
        job = engine.prefixes.load(keys, [32, 33, 34, 35])
        assert job is not None
        if is_control:
            (number,) = engine.session._jobs
            engine.session.send(pack(Op.END, [number, Outcome.DONE]))
        with engine_process(path, stores):
            job.synchronize()
        right = [torch.equal(engine.tensor[32 + at], bytes_of(keys[at])) for at in range(4)]
        assert right == [not is_control] * 4


def test_a_preemption_keeps_its_pages_until_resumed(path: str) -> None:
    with serving(path, pages=4), ServedEngine(path) as engine, ServedEngine(path) as other:
        keys = list(map(key_of, "abcd"))
        for _ in range(2):  # the second one is in memory already
            engine.tensor[:4] = torch.arange(4, dtype=torch.uint8)[:, None]
            held = engine.prefixes.store(keys, [0, 1, 2, 3], hold=True)
            assert held.lease is not None
            engine.prefixes.poll()
            assert other.hold("e") is None
            assert resume(engine.prefixes, held, keys, [32, 33, 34, 35]) == "loaded"
            engine.prefixes.poll()
            assert engine.tensor[32:36, 0].tolist() == [0, 1, 2, 3]
            assert not held.lease.is_held
        assert other.hold("e") is not None


def test_other_engines_evict_nothing_that_a_lookup_holds(path: str) -> None:
    with serving(path, pages=4), ServedEngine(path) as engine, ServedEngine(path) as other:
        keys = list(map(key_of, "abcd"))
        assert engine.prefixes.lookup(keys, hold=True) == Lookup(0, 0, 0)
        engine.compute("abcd")
        lookups = [engine.prefixes.lookup(keys[:count], hold=True) for count in (2, 4)]
        for found in lookups:
            assert other.hold("wxyz") is None
            assert engine.load("abcd") == 4
            assert found.lease is not None
            assert found.lease.let_go()
            assert not found.lease.let_go()
        engine.prefixes.poll()
        assert engine.pages.loaded == 8
        assert other.hold("wxyz") is not None


@pytest.mark.parametrize("options", [{"verify": "load"}, {"encoding": "lossless"}, {}])
def test_pages_are_as_the_engines_want_them(options: Any, path: str) -> None:
    def make() -> tuple[torch.Tensor, PrefixCache]:
        cache = torch.zeros(20, 16, 256, dtype=torch.bfloat16)
        layout = PagedLayout([cache])
        return cache, PrefixCache.connect(path, layout, model="m", blocks_per_page=2, **options)

    with serving(path, pages=32):
        (mine, first), (other, second) = make(), make()
        keys = [key_of(number) for number in range(3)]
        mine[:6] = 1 + torch.rand(6, 16, 256)  # of few exponents, so they fit
        first.store(keys, range(6)).job.synchronize()
        first.poll()
        second.load(keys, range(10, 16), prefix=second.lookup(keys).ready).synchronize()
        assert torch.equal(mine[:6], other[10:16])
        assert [result.ok for result in second.poll()] == [True]
        first.close()
        second.close()


def test_groups_of_layers_have_pages_of_their_own(path: str) -> None:
    groups = [BlockGroup(6, block_tokens=2), BlockGroup(4, block_tokens=4, window_tokens=9)]

    def make() -> tuple[list[torch.Tensor], PrefixCache]:
        tensors = [torch.zeros(16, size, dtype=torch.uint8) for size in (100, 300)]
        layouts = [PagedLayout([tensor]) for tensor in tensors]
        return tensors, PrefixCache.connect(path, layouts, groups, model="m")

    with serving(path):
        (mine, first), (others, second) = make(), make()
        keys = [
            [key_of((group, place)) for place in range(count)] for group, count in ((0, 6), (1, 3))
        ]
        blocks = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
        for tensor, of_group in zip(mine, blocks, strict=True):
            tensor[of_group] = torch.randint(
                255, (len(of_group), tensor.shape[1]), dtype=torch.uint8
            )
        first.store(keys, blocks)
        first.poll()
        found = second.lookup(keys)
        assert found.ready == 3
        assert second.needed_blocks(3) == [range(6), range(1, 3)]
        second.touch(keys)
        second.load(keys, [[10, 11, 12, 13, 14, 15], [-1, 2, 3]], prefix=3).synchronize()
        assert torch.equal(mine[0][1:7], others[0][10:16])
        assert torch.equal(mine[1][8:10], others[1][2:4])
        assert not others[1][[0, 1, *range(4, 16)]].any()
        second.poll()
        assert second.stats(1).loaded == 2
        with pytest.raises(ValueError, match=r"needs 8 blocks, but keys\[0\] has 6 keys"):
            second.load(keys, [[1] * 6, [1, 2, 3]], prefix=4)
        first.close()
        second.close()


def test_pages_that_leave_memory_are_found_below(path: str, tmp_path: Any) -> None:
    below = {"below": f"file:{tmp_path}", "below_policy": "all"}
    with serving(path, pages=8, **below), ServedEngine(path) as engine:
        engine.compute(PROMPT)
        engine.until(lambda: len(list(tmp_path.glob("*@*"))) == 8)
    with serving(path, pages=8, **below), ServedEngine(path) as engine:
        assert engine.find(PROMPT).ready == 8
        assert engine.pages.promoted == 8
        assert engine.load(PROMPT) == 8
        assert engine.pages.loaded == 8
        engine.compute("ijklmnop")  # no lease holds the pages any more
        assert engine.pages.evicted == 8


@pytest.mark.parametrize(
    "survivor", ["that did it", "that heard of it", "that was told", "that came later"]
)
def test_engines_tell_the_next_server_of_a_reset(path: str, tmp_path: Any, survivor: str) -> None:
    """They have other weights now; it finds pages from before the reset below."""
    below = {"below": f"file:{tmp_path}", "below_policy": "all"}
    with contextlib.ExitStack() as stack:
        with serving(path, **below), ServedEngine(path) as engine:
            engine.compute(PROMPT)
            engine.until(lambda: len(list(tmp_path.glob("*@*"))) == 8)
            if survivor == "that did it":
                left = stack.enter_context(ServedEngine(path))
                left.prefixes.reset()
            elif survivor == "that heard of it":
                left = stack.enter_context(ServedEngine(path))
                engine.prefixes.reset()
                assert left.find(PROMPT).found == 0
            elif survivor == "that was told":
                left = stack.enter_context(ServedEngine(path))
                engine.prefixes.reset()
            else:
                engine.prefixes.reset()
                left = stack.enter_context(ServedEngine(path))
        assert left.find(PROMPT).found == 0  # the request fails before an answer is read
        with serving(path, **below):
            left.until(lambda: left.is_served)
            assert left.find(PROMPT).found == 0


def test_a_reset_without_a_server_is_not_lost(path: str) -> None:
    """Although another engine has told the next server of an earlier one."""
    joins = threading.Event()
    with contextlib.ExitStack() as stack:
        with serving(path):
            engine, other = (stack.enter_context(ServedEngine(path)) for _ in range(2))
            engine.prefixes.reset()
            assert other.find(PROMPT).found == 0
            joining = engine.session
            join = joining.join
            joining.join = lambda: (joins.wait(), join())  # type: ignore[method-assign]
        with serving(path):
            other.until(lambda: other.is_served)
            other.compute(PROMPT)
            assert other.find(PROMPT).ready == 8
            engine.prefixes.reset()
            joins.set()
            engine.until(lambda: engine.is_served)
            assert engine.find(PROMPT).found == other.find(PROMPT).found == 0


def test_a_page_damaged_twice_is_deleted_below(path: str, tmp_path: Any) -> None:
    """After the first time it was read from there."""
    below = {"below": f"file:{tmp_path}", "below_policy": "all"}
    with serving(path, **below), ServedEngine(path, verify="load") as engine:
        engine.compute(PROMPT)
        engine.until(lambda: len(list(tmp_path.glob("*@*"))) == 8)
        pages, block = engine.prefixes.pools[0].pages, bytes_of(key_of("c"))
        for promoted in (0, 1):
            assert engine.find(PROMPT).ready == 8
            assert engine.pages.promoted == promoted
            assert len(list(tmp_path.glob("*@*"))) == 8
            (at,) = (at for at in range(32) if torch.equal(pages[at, 0, :BLOCK_BYTES], block))
            pages[at, 0, 7] += 1
            job = engine.prefixes.load(list(map(key_of, PROMPT)), list(range(32, 40)))
            assert job is not None
            assert [result.rejected for result in engine.prefixes.poll()] == [(2,)]
        engine.until(lambda: len(list(tmp_path.glob("*@*"))) == 7)
        engine.compute(PROMPT)
        engine.until(lambda: len(list(tmp_path.glob("*@*"))) == 8)
        assert engine.load(PROMPT) == 8


def test_another_engines_store_repairs_a_failed_page(path: str) -> None:
    with serving(path, pages=1), ServedEngine(path) as engine, ServedEngine(path) as other:
        assert engine.prefixes.cancel(engine.hold("a"))
        assert [result.state for result in engine.prefixes.poll()] == ["cancelled"]
        other.compute("b")
        assert engine.load("b") == 1


def test_a_leaving_engine_ends_what_it_holds(path: str) -> None:
    with serving(path) as server, ServedEngine(path) as engine:
        with ServedEngine(path) as other:
            other.compute("ab")
            assert other.prefixes.store([key_of("a")], [0], hold=True).lease is not None
            other.hold("cd")
        engine.until(lambda: engine.pages.filling_pages == 0)
        assert engine.load("cd") == engine.load("ab") == 2
        assert (engine.pages.idle_pages, engine.pages.free_pages) == (4, 28)
        dropped = ServedEngine(path)
        dropped.hold("e")
        del dropped
        engine.until(lambda: len(server._sessions) == 1)
        assert engine.pages.filling_pages == 0


def test_a_closed_engine_keeps_no_server_memory(path: str) -> None:
    with serving(path), ServedEngine(path) as engine:
        (pool,) = engine.prefixes.pools
        engine.prefixes.close()
        closed = "RuntimeError: the host pool is closed; make a new one"
        assert error_text(lambda: pool.pages) == closed


def test_a_cache_moves_while_pages_stay(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(path), ServedEngine(path) as engine:
        engine.compute("ab")
        changing, rebind, held = engine.prefixes._manager._pools.changing, OffloadHandler.rebind, []

        def look(*of: Any) -> None:
            held.append(changing.locked())
            rebind(*of)

        monkeypatch.setattr(OffloadHandler, "rebind", look)
        engine.tensor = torch.zeros_like(engine.tensor)
        engine.prefixes.rebind(PagedLayout([engine.tensor]))
        assert held == [True]
        assert engine.load("ab") == 2


def test_a_rebound_cache_lets_the_old_one_go(path: str) -> None:
    with server_process(path) as server, ServedEngine(path) as engine:
        old = weakref.ref(engine.tensor)
        engine.tensor = torch.zeros_like(engine.tensor)
        engine.prefixes.rebind(PagedLayout([engine.tensor]))
        gc.collect()
        assert old() is None
        server.kill()
        engine.find("a")
        with serving(path):
            engine.until(lambda: engine.is_served)
            engine.compute("ab")
            assert engine.load("ab") == 2


def test_a_cache_with_other_pages_is_refused(path: str) -> None:
    tensor = torch.zeros(4, BLOCK_BYTES, dtype=torch.uint8)
    wider = torch.zeros(4, BLOCK_BYTES + 1, dtype=torch.uint8)
    layout = PagedLayout([tensor])

    def refusal(gpu: Any = layout, groups: Any = None, **options: Any) -> str:
        connect = PrefixCache.connect
        error = error_text(connect, path, gpu, groups, **{"model": "m", **options})
        return fill(" ".join(error.replace(path, "PATH").split()), 88)

    with serving(path), ServedEngine(path) as engine:
        engine.compute("a")
        errors = [
            refusal(model="another"),
            refusal(model=("m", 1, 2)),
            refusal(blocks_per_page=2),
            refusal(verify="load"),
            refusal(PagedLayout([wider])),
            refusal(PagedLayout([tensor], dtype=torch.bfloat16)),
            refusal([layout], [BlockGroup(4)]),
            refusal([layout, layout], [BlockGroup(4)] * 2),
        ]
        assert engine.load("a") == 1
    with serving(path, pages=4):
        errors.append(refusal([layout], [BlockGroup(5)]))
        errors.append(refusal(blocks_per_page=5))
        with ServedEngine(path) as engine:  # what was refused decided nothing
            assert engine.pages.pages == 4
    errors.append(refusal())
    errors.append(refusal(model=None))
    errors.append(refusal([layout], [BlockGroup(4)] * 2))
    errors.append(refusal([layout]))
    errors.append(refusal(groups=[BlockGroup(4)]))
    assert_expected_inline(
        "\n".join(errors),
        """\
ValueError: the server has other pages: pages[0].model: another here, m at PATH; start a
server of its own for this cache
ValueError: the server has other pages: pages[0].rank: 1 here, 0 at PATH; start a server
of its own for this cache
ValueError: the server has other pages: pages[0].blocks_per_page: 2 here, 1 at PATH;
start a server of its own for this cache
ValueError: the server has other pages: pages[0].verify: load here, off at PATH; start a
server of its own for this cache
ValueError: the server has other pages: pages[0].tensors[0]: uint8 [blocks, 5001] here,
uint8 [blocks, 5000] at PATH; start a server of its own for this cache
ValueError: the server has other pages: pages[0].tensors[0]: bfloat16 [blocks, 2500]
here, uint8 [blocks, 5000] at PATH; start a server of its own for this cache
ValueError: the server has other pages: num_pages[0]: 4 here, 0 at PATH; start a server
of its own for this cache
ValueError: the server has other pages: pages[0].groups: 2 here, 1 at PATH; start a
server of its own for this cache
ValueError: 5 pages of 5000 bytes do not fit into the 20000 bytes that this server has
left for them; start it with more --memory
ValueError: 1 pages of 25000 bytes do not fit into the 20000 bytes that this server has
left for them; start it with more --memory
ConnectionError: no server answers at PATH: [Errno 2] No such file or directory; start
one with `python -m torch_kvswap serve --socket PATH --memory ...`
TypeError: model is None; name the model and its revision, because others may use the
same pages, or pass (name, rank, number of ranks)
ValueError: 2 groups and 1 layout; pass a BlockGroup for each layout
ValueError: groups is None, but gpu is a list of 1 layout; pass a BlockGroup for each
ValueError: groups is for a list of layouts; leave it out, or pass gpu as a list""",
    )


def test_the_socket_is_for_this_user_only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    with serving(path), socket.socket(socket.AF_UNIX) as connection:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        # Whoever can connect is refused all the same.
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        connection.connect(path)
        with pytest.raises(
            ValueError, match=f"belongs to user {own}, and this .* to user {own + 1}"
        ):
            session.receive(connection, bytearray())


def test_an_engine_tells_another_users_server_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    monkeypatch.setattr(session, "JOINING", 0.1)
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(path)
        squatter.listen()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        error = error_text(ServedEngine, path).replace(path, "PATH").replace("\n", " ")
        assert error == (
            f"PermissionError: the server at PATH belongs to user {own}, and this process to user "
            f"{own + 1}; run both as one user, and share nothing in a folder that other users may "
            "write"
        )
        connection, _ = squatter.accept()
        with connection:
            assert connection.recv(1) == b""


def test_a_server_takes_no_place_of_another_user(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    Path(f"{path}.lock").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(PermissionError, match=f"pages.lock belongs to user {own}, and this"):
            PageServer(path, PAGE_BYTES)
    Path(f"{path}.lock").unlink()
    Path(f"{path}.lock").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        PageServer(path, PAGE_BYTES)
    assert not os.path.exists(path)


def test_a_forked_child_is_refused(path: str) -> None:
    """Also if it was forked while another thread asked the server."""
    is_locked, has_forked = threading.Event(), threading.Event()

    def asks() -> None:
        with engine.session.lock:
            is_locked.set()
            has_forked.wait()

    with serving(path), ServedEngine(path) as engine:
        engine.compute("a")
        prefixes = engine.prefixes

        def child() -> bool:
            keys = [key_of("a")]
            errors = [error_text(call, keys) for call in (prefixes.lookup, prefixes.touch)]
            errors += [error_text(prefixes.reset), error_text(prefixes.load, keys, [0])]
            return all("forked from it" in error for error in errors)

        thread = threading.Thread(target=asks)
        thread.start()
        is_locked.wait()
        try:
            assert in_child(child) == 1
        finally:
            has_forked.set()
            thread.join()
        assert engine.load("a") == 1


def test_the_command_serves_and_ends_with_sigterm(path: str) -> None:
    with server_process(path, 4) as server:
        with ServedEngine(path) as engine:
            engine.compute("abcd")
            assert engine.load("abcd") == 4
            assert engine.prefixes.pools[0].nbytes == 4 * PAGE_BYTES
        server.send(15)
        assert server.wait() == 0
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (Path("/x"), "TypeError: path is a PosixPath; pass the path of the server's socket, a str"),
        ("unix:/x", "ValueError: path is 'unix:/x'; pass it without unix:"),
        *(
            (
                path,
                f"ValueError: path is {path!r}, {size} bytes; the path of a socket has 1 to 107 "
                "bytes, none of them zero",
            )
            for path, size in (("", 0), ("/" + 53 * "é" + "x", 108), ("/\0", 2))
        ),
    ],
)
def test_a_path_of_no_socket_is_refused(path: Any, text: str) -> None:
    layout = PagedLayout([torch.zeros(8, 16)])
    for call in (
        lambda: PrefixCache.connect(path, layout, model="m"),
        lambda: PageServer(path, 1),
    ):
        assert error_text(call).replace("\n", " ") == text


def test_the_longest_path_of_a_socket_is_served(path: str) -> None:
    folder = os.path.dirname(path)
    with serving(os.path.join(folder, "s" * (106 - len(folder)))) as server:
        assert len(os.fsencode(server._path)) == 107


def test_a_server_without_its_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot be opened.*; pass the path of a socket"):
        PageServer(str(tmp_path / "missing" / "socket"), 1)


def test_more_memory_than_the_machine_has_is_refused(path: str) -> None:
    text = error_text(PageServer, path, PAGE_BYTES * 2**36)
    assert text.startswith("ValueError: this server has ")
    assert "; start it with less" in text.replace("\n", " ")


def test_a_server_starts_while_engines_map_the_memory(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of an earlier server, which they free when they join this one."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 4000 kB\n")
    layout = PagedLayout([torch.zeros(8, PAGE_BYTES, dtype=torch.uint8)])
    monkeypatch.setattr(system, "ROOT", tmp_path)
    with serving(path, 2**10):
        text = error_text(PrefixCache.connect, path, layout, model="m")
        monkeypatch.undo()
        assert text.startswith("ValueError: this server has ")
        assert "; start it with --memory " in text.replace("\n", " ")
        with ServedEngine(path) as engine:
            engine.compute("a")


def test_the_pages_of_all_groups_must_have_room(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine has touched any when the last group's are made."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 100 kB\n")
    layouts = [PagedLayout([torch.zeros(8, 1024, dtype=torch.uint8)]) for _ in range(2)]
    groups = [BlockGroup(60), BlockGroup(60)]
    monkeypatch.setattr(system, "ROOT", tmp_path)
    with serving(path, 2**10):
        text = error_text(PrefixCache.connect, path, layouts, groups, model="m").replace("\n", " ")
        assert "the pages need 122880 bytes of host memory" in text
        assert "ask for fewer pages, or end what uses the memory" in text
        groups = [BlockGroup(50), BlockGroup(50)]
        PrefixCache.connect(path, layouts, groups, model="m").close()


def test_a_tier_without_threads_leaves_none(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = StoreThreads.start, list[StoreThreads]()

    def fail(threads: StoreThreads) -> None:
        begun.append(threads)
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        start(threads)

    closed = list[FileStore]()
    monkeypatch.setattr(FileStore, "close", lambda store: closed.append(store))
    with serving(path, below=f"file:{tmp_path}"):
        with monkeypatch.context() as patch:
            patch.setattr(StoreThreads, "start", fail)
            with pytest.raises((ValueError, OSError)):
                ServedEngine(path)
        assert in_time(lambda: not any(thread.is_alive() for thread in begun[0].threads))
        assert not closed  # the next engine's tier uses it
        with ServedEngine(path) as engine:
            engine.compute("a")
    assert in_time(lambda: len(closed) == 1)


def test_a_connection_without_a_thread_leaves_no_session(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    layout = PagedLayout([torch.zeros(8, PAGE_BYTES, dtype=torch.uint8)])
    with serving(path) as server:
        # The mock keeps the error, whose traceback has a reference to all that was made.
        with pytest.raises(RuntimeError, match="can't start new thread"):
            PrefixCache.connect(path, layout, model="m")
        assert in_time(lambda: not server._sessions)


def test_below_policy_of_a_server_needs_below(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^below_policy without below: name a store, such"):
        PageServer(str(tmp_path / "socket"), 1, below_policy="all")
