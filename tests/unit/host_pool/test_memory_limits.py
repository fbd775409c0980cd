"""A pool that exceeds the memory of the machine is refused; the error names the limit and the
remedy.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from error_text import error_text
from expecttest import assert_expected_inline
from fake_procfs import write
from processes import in_child, live_fork

from torch_kvswap.host_pool import system
from torch_kvswap.host_pool.memory import map_new

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    write(tmp_path, "proc/meminfo", "MemAvailable: 102400 kB\n")
    return tmp_path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """It has 100 MiB available, whatever is used, and these processes."""
    processes = [str(os.getpid())]
    monkeypatch.setattr(system, "available_bytes", lambda: 100 * MIB)
    monkeypatch.setattr(system, "control_group_limits", lambda: [])
    monkeypatch.setattr(system, "_processes", lambda: processes)
    return processes


def refusal(mib: int, shared: bool) -> str:
    """Why there is no such pool; "" if there is."""
    try:
        map_new(mib * MIB, MIB, shared=shared).release()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shared", [False, True])
def test_pools_of_all_processes_share_the_room(shared: bool, machine: list[str]) -> None:
    def is_shared() -> bool:
        named = f"{60 * MIB} bytes of them promised to other host pools"
        return refusal(40, shared) == "" and named in refusal(41, shared)

    first = map_new(60 * MIB, MIB, shared=shared)
    with live_fork() as child:  # it has no memory of its own
        machine.append(str(child))
        assert in_child(is_shared) == 1
        assert is_shared()
    first.touch(0, 60 * MIB)  # what is touched is not available any more
    assert refusal(100, shared) == ""
    first.release()


@pytest.mark.parametrize("shared", [False, True])
def test_two_that_ask_at_once_never_overcommit(
    shared: bool, machine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    promised, second = system.promised_bytes, []

    def ask_meanwhile(own: int) -> tuple[int, int]:
        monkeypatch.setattr(system, "promised_bytes", promised)
        second.append(refusal(60, shared))
        return promised(own)

    monkeypatch.setattr(system, "promised_bytes", ask_meanwhile)
    assert refusal(60, shared) == ""
    assert "promised to other host pools" in second[0]


def test_gib_and_the_pages_that_fit_are_named(tree: Path) -> None:
    write(tree, "proc/self/cgroup", "0::/box\n")
    write(tree, "proc/meminfo", "MemAvailable: 52428800 kB\n")
    refused = [error_text(system.check_room, 60 * GIB, 100 * MIB)]
    write(tree, "sys/fs/cgroup/box/memory.max", f"{20 * GIB}")
    write(tree, "sys/fs/cgroup/box/memory.current", f"{16 * GIB}")
    for nbytes, page_bytes in ((60 * GIB, 100 * MIB), (5 * GIB, GIB), (5 * GIB, 5 * GIB)):
        refused.append(error_text(system.check_room, nbytes, page_bytes))
    system.check_room(4 * GIB, GIB)
    assert_expected_inline(
        "\n".join(refused),
        """\
NoRoomError: the pages need 64424509440 bytes (60.0 GiB) of host memory, of which
53687091200 bytes (50.0 GiB) are available (MemAvailable in /proc/meminfo); ask for
fewer pages (num_pages=512 fits), or end what uses the memory
NoRoomError: the pages need 64424509440 bytes (60.0 GiB) of host memory, of which
53687091200 bytes (50.0 GiB) are available (MemAvailable in /proc/meminfo); ask for
fewer pages (num_pages=40 fits), or end what uses the memory
NoRoomError: the pages need 5368709120 bytes (5.0 GiB) of host memory, and the control
group of this process has 4294967296 bytes (4.0 GiB) left of 21474836480 bytes (20.0
GiB) (/sys/fs/cgroup/box/memory.max); ask for fewer pages (num_pages=4 fits), or raise
the memory limit of the container or service
NoRoomError: the pages need 5368709120 bytes (5.0 GiB) of host memory, and the control
group of this process has 4294967296 bytes (4.0 GiB) left of 21474836480 bytes (20.0
GiB) (/sys/fs/cgroup/box/memory.max); ask for smaller pages (one has 5368709120 bytes
(5.0 GiB)), or raise the memory limit of the container or service""",
    )


def test_a_machine_that_says_nothing_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    system.check_room(1 << 60, MIB)


def test_the_advice_names_too_low_a_memlock_limit(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "memlock_limit", lambda: 65536)
    assert "65536 bytes (ulimit -l" in system.advice(65537)
    assert system.advice(65536) == "ask for fewer pages"
    monkeypatch.setattr(system, "memlock_limit", lambda: None)
    assert system.advice(1 << 40) == "ask for fewer pages"
