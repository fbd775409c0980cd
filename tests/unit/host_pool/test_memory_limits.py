"""A pool that exceeds the memory of the machine is refused; the error names the limit and the
remedy.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from error_text import error_text
from expecttest import assert_expected_inline
from fake_procfs import write

from torch_kvswap.host_pool import system

MIB = 1 << 20


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    text = "MemAvailable: 102400 kB\nHugePages_Total: 4\nHugePages_Free: 3\nHugepagesize: 2048 kB\n"
    write(tmp_path, "proc/meminfo", text)
    return tmp_path


def test_what_is_available_is_the_limit(tree: Path) -> None:
    system.check_room(100 * MIB, reserved=False)
    assert_expected_inline(
        error_text(system.check_room, 100 * MIB + 1, reserved=False),
        """\
ValueError: the pages need 104857601 bytes of host memory, of which 104857600 are
available (MemAvailable in /proc/meminfo); ask for fewer pages, or end what uses the
memory""",
    )


def test_a_control_group_may_allow_less(tree: Path) -> None:
    write(tree, "proc/self/cgroup", "0::/box\n")
    write(tree, "sys/fs/cgroup/box/memory.max", f"{64 * MIB}")
    write(tree, "sys/fs/cgroup/box/memory.current", f"{16 * MIB}")
    system.check_room(48 * MIB, reserved=False)
    assert_expected_inline(
        error_text(system.check_room, 48 * MIB + 1, reserved=False),
        """\
ValueError: the pages need 50331649 bytes of host memory, and the control group of this
process has 50331648 left of 67108864 (/sys/fs/cgroup/box/memory.max); ask for fewer
pages, or raise the memory limit of the container or service""",
    )


def test_reserved_huge_pages_are_enough_or_not(tree: Path) -> None:
    system.check_room(6 * MIB, reserved=True)
    assert_expected_inline(
        error_text(system.check_room, 6 * MIB + 1, reserved=True),
        """\
ValueError: the pages need 4 reserved huge pages of 2097152 bytes, of which 3 are free
(HugePages_Free in /proc/meminfo); reserve more (sysctl vm.nr_hugepages=5), ask for
fewer pages, or leave huge_pages=True out""",
    )


def test_a_machine_that_says_nothing_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    system.check_room(1 << 60, reserved=False)


def test_the_advice_names_the_limit_on_locked_memory_only_if_it_is_too_low(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "memlock_limit", lambda: 65536)
    assert "65536 bytes (ulimit -l" in system.advice(65537)
    assert system.advice(65536) == "ask for fewer pages"
    monkeypatch.setattr(system, "memlock_limit", lambda: None)
    assert system.advice(1 << 40) == "ask for fewer pages"


def test_under_wsl_the_advice_is_about_wsl(tree: Path) -> None:
    write(tree, "proc/version", "Linux version 5.15.90.1-microsoft-standard-WSL2\n")
    assert ".wslconfig" in system.advice(1)
