"""Memory, NUMA nodes and control groups (v1 and v2) of the machine, read from files."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import pytest
from error_text import error_text
from expecttest import assert_expected_inline
from fake_procfs import write
from patience import PATIENCE

from torch_kvswap._native.descriptors import Descriptors
from torch_kvswap.host_pool import system

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    return tmp_path


def limit(root: Path, folder: str, allowed: object, used: int, inactive: int = 0) -> None:
    write(root, f"{folder}/memory.max", f"{allowed}\n")
    write(root, f"{folder}/memory.current", f"{used}\n")
    write(root, f"{folder}/memory.stat", f"anon 7\ninactive_file {inactive}\nactive_file 9\n")


def limit_of_version_1(root: Path, folder: str, allowed: int, used: int, inactive: int) -> None:
    write(root, f"{folder}/memory.limit_in_bytes", f"{allowed}\n")
    write(root, f"{folder}/memory.usage_in_bytes", f"{used}\n")
    text = f"inactive_file 1\ntotal_inactive_file {inactive}\n"
    write(root, f"{folder}/memory.stat", text)


def test_a_machine_that_says_nothing_has_no_limits(tree: Path) -> None:
    assert system.available_bytes() is None
    assert list(system.control_group_limits()) == []
    assert not system.offers_huge_pages()
    assert system.numa_node_of("0000:18:00.0") is None
    assert system.cpus_of(0) == []
    assert system.numa_nodes() == []
    assert system.first_unwritable(0, 1) is None


@pytest.mark.parametrize(
    ("text", "offers"),
    [("always [madvise] never", True), ("[always] madvise never", True), ("never [deny]", False)],
)
def test_huge_pages_are_offered_unless_switched_off(tree: Path, text: str, offers: bool) -> None:
    write(tree, "sys/kernel/mm/transparent_hugepage/enabled", text + "\n")
    assert system.offers_huge_pages() == offers


def test_a_limit_of_version_2_ignores_droppable_files(tree: Path) -> None:
    write(tree, "proc/self/cgroup", "0::/jobs/one\n")
    limit(tree, "sys/fs/cgroup/jobs/one", 10 * GIB, 4 * GIB, GIB)
    assert list(system.control_group_limits()) == [
        (7 * GIB, 10 * GIB, "/sys/fs/cgroup/jobs/one/memory.max")
    ]


def test_the_groups_around_a_group_have_limits_too(tree: Path) -> None:
    write(tree, "proc/self/cgroup", "0::/jobs/one\n")
    limit(tree, "sys/fs/cgroup/jobs/one", "max", 4 * GIB)
    limit(tree, "sys/fs/cgroup/jobs", 8 * GIB, 5 * GIB)
    assert list(system.control_group_limits()) == [
        (3 * GIB, 8 * GIB, "/sys/fs/cgroup/jobs/memory.max")
    ]


def test_in_a_container_the_root_has_the_limit(tree: Path) -> None:
    write(tree, "proc/self/cgroup", "0::/a/path/of/the/host\n")
    limit(tree, "sys/fs/cgroup", 2 * GIB, GIB)
    assert [one.left for one in system.control_group_limits()] == [GIB]


def test_a_limit_of_version_1_is_found(tree: Path) -> None:
    write(tree, "proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/ab\n0::/\n")
    limit_of_version_1(tree, "sys/fs/cgroup/memory/docker/ab", 6 * GIB, 3 * GIB, 2 * GIB)
    limit_of_version_1(tree, "sys/fs/cgroup/memory", 0x7FFFFFFFFFFFF000, 9 * GIB, 0)  # no limit
    assert list(system.control_group_limits()) == [
        (5 * GIB, 6 * GIB, "/sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes")
    ]


def test_the_node_and_its_cpus_are_read(tree: Path) -> None:
    write(tree, "sys/bus/pci/devices/0000:18:00.0/numa_node", "1\n")
    write(tree, "sys/bus/pci/devices/0000:19:00.0/numa_node", "-1\n")
    write(tree, "sys/devices/system/node/node1/cpulist", "4-6,12\n")
    assert system.numa_node_of("0000:18:00.0") == 1
    assert system.numa_node_of("0000:19:00.0") is None
    write(tree, "sys/devices/system/node/online", "0-1,4\n")
    assert system.cpus_of(1) == [4, 5, 6, 12]
    assert system.numa_nodes() == [0, 1, 4]


def test_names_in_any_encoding_are_read_over(tree: Path) -> None:
    write(tree, "proc/self/maps", "")
    entry = b"1000-2000 rw-p 0 00:00 0 /caf\xe9.so\n"
    (tree / "proc/self/maps").write_bytes(entry)
    assert system.first_unwritable(0x1000, 0x3000) == 0x2000


def test_one_process_at_a_time_has_a_folder(tree: Path) -> None:
    def is_free() -> bool:
        with contextlib.closing(Descriptors(os.open, tree, os.O_RDONLY)) as file:
            try:
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with system.one_at_a_time(".", PATIENCE):
        assert not is_free()
        with system.one_at_a_time(".", 0.0):  # one that is stopped inside keeps nobody out for ever
            pass
    assert is_free()


# A pool that exceeds the memory of the machine is refused; the error names the limit and the remedy.


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    write(tmp_path, "proc/meminfo", "MemAvailable: 102400 kB\n")
    return tmp_path


def test_gib_and_the_pages_that_fit_are_named(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/box\n")
    write(root, "proc/meminfo", "MemAvailable: 52428800 kB\n")
    refused = [error_text(system.check_room, 60 * GIB, 100 * MIB)]
    write(root, "sys/fs/cgroup/box/memory.max", f"{20 * GIB}")
    write(root, "sys/fs/cgroup/box/memory.current", f"{16 * GIB}")
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
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "memlock_limit", lambda: 65536)
    assert "65536 bytes (ulimit -l" in system.advice(65537)
    assert system.advice(65536) == "ask for fewer pages"
    monkeypatch.setattr(system, "memlock_limit", lambda: None)
    assert system.advice(1 << 40) == "ask for fewer pages"
