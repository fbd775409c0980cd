"""Engines in several processes share pages through one folder, also after one of them was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from below_engine import Engine
from mooncake_cluster import cluster
from processes import Process, in_child, run_script
from valkey_server import server

__all__ = ["cluster", "server"]

PROMPT = list("abcdefgh")


@pytest.mark.parametrize("fixture", [None, "server", "cluster"])
def test_a_process_loads_what_another_one_has_computed(
    fixture: str | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    below = f"file:{tmp_path}"
    if fixture is not None:
        below = request.getfixturevalue(fixture).url
    program = """
        import sys
        from below_engine import Engine
        with Engine(sys.argv[1]) as engine:
            print(engine.load(sys.argv[2]))
            engine.compute(sys.argv[2])
            engine.until(lambda: engine.stats.written == int(sys.argv[3]))
    """
    for arguments, found in ((("abcd", "4"), 0), (("abcdefgh", "4"), 4), (("abcdefgh", "0"), 8)):
        assert run_script(program, below, *arguments) == f"{found}\n"


@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_a_killed_process_leaves_no_unfinished_page(at: int, tmp_path: Path) -> None:
    """It is killed while it writes this page, with the pages held."""
    program = """
import sys
from below_engine import Engine
from torch_kvswap.below import files
write, count = files.os.pwritev, 0
def stop(file, buffers, offset):
    global count
    count += 1
    if count >= int(sys.argv[2]):
        write(file, [buffers[0][:4096]], 0)
        print("stopped", flush=True)
        sys.stdin.read()
    return write(file, buffers, offset)
files.os.pwritev = stop
engine = Engine(f"file:{sys.argv[1]}", bytes_in_flight=8192)
engine.compute("abcdefgh")
sys.stdin.read()
"""
    Process(["-c", program, str(tmp_path), str(at)], "stopped").kill()
    with Engine(f"file:{tmp_path}") as engine:
        there = at - 1
        assert engine.load(PROMPT) == there
        engine.compute(PROMPT)
        engine.until(lambda: engine.stats.written == 8 - there)
    with Engine(f"file:{tmp_path}") as engine:
        assert engine.load(PROMPT) == 8
        assert engine.stats.damaged == 0


def test_a_process_ends_while_a_store_hangs() -> None:
    program = """
        from below_engine import Engine, key_of
        from memory_store import MemoryStore
        from patience import in_time
        from torch_kvswap.below import threads
        threads.DEADLINE = 0.01
        store = MemoryStore()
        store.held = {"exists"}
        engine = Engine(store)
        engine.prefixes.lookup([key_of("a")])
        assert in_time(lambda: len(store.waiting) == 1)
        print("ends")
    """
    assert run_script(program, ends_as_usual=True) == "ends\n"


def test_a_forked_child_leaves_the_store_alone(tmp_path: Path) -> None:
    with Engine(f"file:{tmp_path}") as engine:
        engine.share(PROMPT)

        def child() -> bool:
            try:
                engine.prefixes.lookup(["a"])
            except RuntimeError as error:
                engine.tier.close()
                return "forked" in str(error)
            return False

        assert in_child(child) == 1
        engine.share("xyz")
        with Engine(f"file:{tmp_path}") as other:
            assert other.load([*PROMPT, *"xyz"]) == 11
