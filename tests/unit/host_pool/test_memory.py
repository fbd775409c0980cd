"""Mapped memory has the requested size, uses huge pages where there are some, and is safe in a
fork.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from fake_procfs import write
from processes import in_child, live_fork
from simulated_driver import Driver, simulated

from torch_kvswap._native.loader import native
from torch_kvswap.host_pool import memory, system
from torch_kvswap.host_pool.memory import Mapping, create_file, map_new

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
MIB = 1 << 20
GPU = torch.device("cuda", 0)


def resident() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def mapping(kind: str, nbytes: int) -> Mapping:
    return map_new(nbytes, MIB, shared=kind == "shared")


KINDS = pytest.mark.parametrize("kind", ["private", "shared"])


@KINDS
def test_just_touched_memory_is_resident(kind: str) -> None:
    size = 20 * MIB + 4096  # no multiple of a huge page
    mapping(kind, size).touch(0, MIB)  # what threads, and a look at other processes, need once
    before = resident()
    mapped = mapping(kind, size)
    assert resident() - before < MIB
    mapped.touch(0, size)
    grown = resident() - before
    assert size - MIB < grown < size + 2 * MIB


def is_resident(mapped: Mapping, first: int, last: int) -> list[bool]:
    """Whether each page of the system in these bytes has memory."""
    pages = (ctypes.c_ubyte * ((last - first) // mmap.PAGESIZE))()
    place = ctypes.c_void_p(mapped.address + first), ctypes.c_size_t(last - first)
    assert ctypes.CDLL(None).mincore(*place, pages) == 0
    return [bool(page & 1) for page in pages]


@KINDS
def test_only_what_was_asked_for_is_touched(kind: str) -> None:
    mapped = mapping(kind, 64 * MIB)
    # Without huge pages, which reach beyond what is touched.
    no_huge_page = ctypes.c_void_p(mapped.address), ctypes.c_size_t(64 * MIB), 15
    assert ctypes.CDLL(None).madvise(*no_huge_page) == 0
    first, last = 17 * MIB + mmap.PAGESIZE, 24 * MIB + 2 * mmap.PAGESIZE
    mapped.touch(first + 5, last - 5)
    assert all(is_resident(mapped, first, last))
    assert not any(is_resident(mapped, 0, first) + is_resident(mapped, last, 64 * MIB))


def test_without_threads_the_caller_touches() -> None:
    mapped = Mapping(16 * MIB)
    before = resident()
    native.touch_host(mapped.address, mapped.nbytes, 0, False, [])
    assert resident() - before > 15 * MIB


@KINDS
def test_touching_changes_no_byte(kind: str) -> None:
    mapped = mapping(kind, 5 * MIB + 77)
    mapped.tensor.random_()
    copy = mapped.tensor.clone()
    mapped.touch(100, 4 * MIB + 1)
    mapped.touch(0, mapped.nbytes)
    assert torch.equal(mapped.tensor, copy)


@KINDS
@pytest.mark.parametrize("hole", [0, MIB])
def test_touching_missing_memory_is_an_error(kind: str, hole: int) -> None:
    mapped = mapping(kind, 2 * MIB)
    address = ctypes.c_void_p(mapped.address + hole)
    ctypes.CDLL(None).munmap(address, ctypes.c_size_t(mmap.PAGESIZE))
    with pytest.raises(RuntimeError, match="the kernel has no memory for 2097152 bytes"):
        mapped.touch(0, 2 * MIB)


def on_huge_pages(mapped: Mapping) -> int:
    """Bytes of the mapping that the kernel has put on huge pages."""
    smaps = Path("/proc/self/smaps").read_text(errors="replace")
    found = re.search(rf"(?ms)^{mapped.address:x}-.*?^VmFlags", smaps)
    assert found
    huge = r"(?:AnonHugePages|ShmemPmdMapped|FilePmdMapped):\s+(\d+) kB"
    return sum(map(int, re.findall(huge, found[0]))) << 10


def test_a_private_mapping_lies_on_huge_pages() -> None:
    if not system.offers_huge_pages():
        pytest.skip("this kernel makes none")
    mapped = Mapping(16 * MIB)
    assert on_huge_pages(mapped) == 0
    mapped.touch(0, 16 * MIB)
    assert on_huge_pages(mapped) == 16 * MIB


def test_a_shared_mapping_lies_on_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    version = tuple(map(int, os.uname().release.split(".")[:2]))
    if version < (6, 1) or not setting.exists() or "[deny]" in setting.read_text():
        pytest.skip("this kernel makes none")
    mapped = mapping("shared", 16 * MIB)
    mapped.touch(0, 16 * MIB)
    assert on_huge_pages(mapped) == 16 * MIB


@KINDS
def test_writing_behind_the_end_is_caught(kind: str) -> None:
    mapped = mapping(kind, 2 * mmap.PAGESIZE)

    def write() -> None:
        ctypes.memset(mapped.address + 2 * mmap.PAGESIZE, 1, 1)

    assert in_child(write) == -signal.SIGSEGV


def test_a_fork_has_zeros_of_its_own() -> None:
    mapped = Mapping(64 * MIB)  # more than malloc() keeps of what it has given out
    mapped.tensor.fill_(7)
    before = resident()
    zeros = bytes(mapped.nbytes)
    # No torch in the child: the threads of its operators are the parent's.
    assert in_child(lambda: ctypes.string_at(mapped.address, mapped.nbytes) == zeros) == 1
    with live_fork():
        first = faults()
        mapped.tensor.fill_(8)  # no page of it is copied
        assert faults() - first < 100
    assert mapped.tensor.eq(8).all()
    assert resident() - before < 8 * MIB


def faults() -> int:
    """Page faults of this process so far that needed no disk."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[7])


def test_a_fork_may_drop_its_mapping() -> None:
    mapped = Mapping(MIB)
    mapped.tensor.fill_(7)

    def drop() -> bool:
        mapped.release()
        gc.collect()
        return True

    assert in_child(drop) == 1
    assert mapped.tensor.eq(7).all()


def test_a_file_keeps_its_size_without_a_name() -> None:
    made = create_file(10_000)
    file = made.fd
    assert os.fstat(file).st_size == 3 * mmap.PAGESIZE
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    fixed = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & fixed == fixed
    assert os.fstat(file).st_nlink == 0
    assert not os.get_inheritable(file)


def test_a_file_without_room_is_closed() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OverflowError):
        create_file(1 << 63)
    assert os.listdir("/proc/self/fd") == before


def test_memory_that_cannot_be_mapped_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"no room for a mapping of \d+ bytes: Cannot allocate"):
        Mapping(1 << 60)


def test_a_file_that_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "file", "x" * mmap.PAGESIZE)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(RuntimeError, match=r"does not map \d+ bytes: Permission denied"):
        Mapping(mmap.PAGESIZE, file)


def reserved() -> int:
    """Bytes of addresses without memory, such as the page behind a mapping."""
    found = re.findall(r"(?m)^([0-9a-f]+)-([0-9a-f]+) ---p", Path("/proc/self/maps").read_text())
    return sum(int(last, 16) - int(first, 16) for first, last in found)


@KINDS
def test_a_mapping_keeps_no_other_addresses(kind: str) -> None:
    gc.collect()
    before = reserved()
    mapped = [mapping(kind, MIB) for _ in range(4)]
    assert reserved() - before == 4 * mmap.PAGESIZE
    del mapped
    gc.collect()
    assert reserved() == before


def test_memory_is_placed_on_an_existing_node() -> None:
    mapped = Mapping(4 * MIB)
    assert native.bind_host(mapped.address, mapped.nbytes, 0)
    mapped.touch(0, 4 * MIB)
    policies = Path("/proc/self/numa_maps")
    if not policies.exists():
        pytest.skip("this kernel knows no nodes")
    address = f"{mapped.address:x} "
    lines = [line for line in policies.read_text().splitlines() if line.startswith(address)]
    assert "prefer" in lines[0]


@simulated
def test_the_node_of_the_gpu_is_found(driver: Driver) -> None:
    for attribute, value in ((50, 1), (33, 0xAB), (34, 0x1C)):  # PCI domain, bus and device
        driver.set_attribute(attribute, value)
    nodes = []
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        write(Path(folder), "sys/bus/pci/devices/0001:ab:1c.0/numa_node", "3\n")
        patch.setattr(system, "ROOT", Path(folder))
        bind = lambda address, nbytes, node: nodes.append((nbytes, node)) or True  # noqa: E731
        patch.setattr(native, "bind_host", bind)
        mapped = Mapping(MIB)
        mapped.place(GPU)
        driver.set_attribute(33, 0)  # there is no such device
        mapped.place(GPU)
        driver.fail("cuDeviceGetAttribute")
        mapped.place(GPU)
    assert nodes == [(MIB, 3)]


def test_where_binding_is_forbidden_the_nodes_cpus_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    write(tmp_path, "sys/devices/system/node/node0/cpulist", f"{cpus[0]}\n")
    monkeypatch.setattr(system, "ROOT", tmp_path)
    monkeypatch.setattr(memory, "_node_of", lambda device: 0)
    monkeypatch.setattr(native, "bind_host", lambda *arguments: False)
    calls = []
    touch = native.touch_host
    monkeypatch.setattr(
        native, "touch_host", lambda *arguments: (calls.append(arguments[4]), touch(*arguments))[1]
    )
    mapped = Mapping(MIB)
    mapped.place(GPU)
    mapped.touch(0, MIB)
    assert calls == [[cpus[0]]]
    assert sorted(os.sched_getaffinity(0)) == cpus  # this thread keeps its own


OLD_KERNEL = """
    #include <cerrno>
    #include <cstddef>
    #include <sys/syscall.h>
    #include <unistd.h>

    /* Before Linux 4.14 there is no WIPEONFORK, before 5.14 no POPULATE_WRITE, before 6.1 no COLLAPSE. */
    extern "C" int madvise(void* address, size_t bytes, int advice) noexcept {
      if (advice == 18 || advice == 23 || advice == 25) return errno = EINVAL, -1;
      return syscall(SYS_madvise, address, bytes, advice);
    }
"""


@pytest.mark.slow
def test_an_old_kernel_is_enough(tmp_path: Path) -> None:
    source, library = tmp_path / "old.cpp", tmp_path / "old.so"
    source.write_text(textwrap.dedent(OLD_KERNEL))
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    body = f"""
        import ctypes, os, sys
        sys.path.insert(0, {os.fspath(Path(__file__).parent)!r})
        from processes import in_child
        from test_memory import MIB, mapping, resident
        for kind in ("private", "shared"):
            mapping(kind, 64 * MIB + 4096).touch(0, MIB)
            before = resident()
            mapped = mapping(kind, 64 * MIB + 4096)
            mapped.touch(0, mapped.nbytes)
            print(kind, 63 < (resident() - before) / MIB < 66)
            ctypes.memset(mapped.address, 7, mapped.nbytes)
            print(in_child(lambda: ctypes.string_at(mapped.address + 5 * MIB, 1) == bytes([7])))
            del mapped
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env={
            **os.environ,
            "LD_PRELOAD": os.fspath(library),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["private True", "1", "shared True", "1"]
