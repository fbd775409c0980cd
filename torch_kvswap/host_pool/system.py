"""What this machine has and allows: memory, huge pages, NUMA nodes, as /proc and /sys say it."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")  # where proc and sys are; tests have trees of their own


class Limit(NamedTuple):
    """Bytes that are left of what a control group allows, and the file that says so."""

    left: int
    allowed: int
    file: str


class HugePages(NamedTuple):
    """Reserved ones, and the bytes of one."""

    free: int
    total: int
    size: int


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the kernel does not say."""
    return _meminfo().get("MemAvailable")


def reserved_huge_pages() -> HugePages:
    memory = _meminfo()
    free, total = memory.get("HugePages_Free", 0), memory.get("HugePages_Total", 0)
    return HugePages(free, total, memory.get("Hugepagesize", 2 << 20))


def offers_huge_pages(shared: bool) -> bool:
    """Whether the kernel makes huge pages where a program asks for them."""
    name = "shmem_enabled" if shared else "enabled"
    text = _read(f"sys/kernel/mm/transparent_hugepage/{name}")
    chosen = re.search(r"\[(.+)\]", text)
    return chosen is not None and chosen[1] not in ("never", "deny")


def memlock_limit() -> int | None:
    """Bytes that this process may lock; None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def is_wsl() -> bool:
    return "microsoft" in _read("proc/version").lower()


def numa_node_of(pci_address: str) -> int | None:
    """The node to which a device is attached; None on a machine with one node."""
    text = _read(f"sys/bus/pci/devices/{pci_address}/numa_node").strip()
    return int(text) if text.isdecimal() else None


def cpus_of(numa_node: int) -> list[int]:
    cpus: list[int] = []
    for part in re.findall(r"[\d-]+", _read(f"sys/devices/system/node/node{numa_node}/cpulist")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def control_group_limits() -> Iterator[Limit]:
    """Of the groups of this process and those around them, versions 1 and 2."""
    for line in _read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, names = ["unified", "."], ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mounts = ["memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside of a container the path may be one of the host: then its root has the limit.
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            for mount in mounts:
                limit = _limit(Path("sys/fs/cgroup", mount, folder), *names)
                if limit is not None:
                    yield limit


def _limit(folder: Path, limit_name: str, usage_name: str, inactive_name: str) -> Limit | None:
    allowed, used = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not allowed.isdecimal() or int(allowed) >= 1 << 60 or not used.isdecimal():
        return None  # "max", or as much as version 1 can say
    found = re.search(rf"^{inactive_name} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
    inactive = int(found[1]) if found else 0  # files that make room when it is needed
    return Limit(int(allowed) - int(used) + inactive, int(allowed), f"/{folder / limit_name}")


def huge_bytes(first: int, last: int) -> int:
    """How many bytes of the mappings between two addresses lie on huge pages."""
    kilobytes, inside = 0, False
    for line in _read("proc/self/smaps").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = first <= int(found[1], 16) and int(found[2], 16) <= last
        elif inside and (
            found := re.match(
                r"(?:AnonHugePages|ShmemPmdMapped|FilePmdMapped|\w+_Hugetlb):\s+(\d+) kB", line
            )
        ):
            kilobytes += int(found[1])
    return kilobytes << 10


def _meminfo() -> dict[str, int]:
    """In bytes; what has no unit is a number."""
    lines = re.findall(r"^(\w+):\s+(\d+)( kB)?$", _read("proc/meminfo"), re.MULTILINE)
    return {name: int(number) << (10 if unit else 0) for name, number, unit in lines}


def _read(file: str | Path) -> str:
    try:
        return (ROOT / file).read_text()
    except OSError:
        return ""
