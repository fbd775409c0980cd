"""Memory, NUMA nodes and control groups (v1 and v2) of the machine, read from files."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_procfs import write

from torch_kvswap.host_pool import system

GIB = 1 << 30


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


def test_huge_bytes_lie_between_two_addresses(tree: Path) -> None:
    entries = [
        ("1000-2000", "AnonHugePages", 64),
        ("2000-3000", "AnonHugePages", 1),
        ("3000-4000", "ShmemPmdMapped", 2),
        ("4000-5000", "FilePmdMapped", 4),
        ("5000-6000", "Rss", 8),
        ("6000-7000", "AnonHugePages", 64),
    ]
    lines = [f"{ends} rw-p 0 00:00 0\n{name}:   {size} kB\n" for ends, name, size in entries]
    write(tree, "proc/self/smaps", "".join(lines))
    assert system.huge_bytes(0x2000, 0x6000) == 7 << 10


def test_names_in_any_encoding_are_read_over(tree: Path) -> None:
    write(tree, "proc/self/smaps", "")
    entry = b"1000-2000 r--p 0 00:00 0 /caf\xe9.so\nAnonHugePages:   4 kB\n"
    (tree / "proc/self/smaps").write_bytes(entry)
    assert system.huge_bytes(0x1000, 0x2000) == 4 << 10
