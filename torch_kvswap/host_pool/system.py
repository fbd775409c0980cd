"""What this machine has and allows, from /proc and /sys: memory, huge pages, NUMA nodes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch_kvswap._native.arguments import bytes_text
from torch_kvswap._native.descriptors import Descriptors

# By the transfers of a lane in a second, in 10^9.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_LANE_BYTES = {1: 250e6, 2: 500e6, 3: 985e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}

ROOT = Path("/")  # contains proc and sys; tests use another folder


class Limit(NamedTuple):
    """A memory limit of a control group: bytes that are left, and allowed, and the file with it."""

    left: int
    allowed: int
    file: str


class Link(NamedTuple):
    """The PCIe link of a device; 0 where the kernel does not know.

    Attributes:
        lanes (int): in use.
        most_lanes (int): of the device.
        generation (int): in use. An idle link has a lower one than it can.
    """

    lanes: int
    most_lanes: int
    generation: int

    @property
    def bytes_per_second(self) -> float:
        """What the lanes in use move at the generation in use, without the headers of packets."""
        return self.lanes * _LANE_BYTES.get(self.generation, 0.0)


def available_bytes() -> int | None:
    """Bytes available without swapping; None if the kernel does not report them."""
    return _meminfo().get("MemAvailable")


def offers_huge_pages() -> bool:
    """Whether the kernel makes transparent huge pages on request."""
    text = _read("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(.+)\]", text)
    return chosen is not None and chosen[1] not in ("never", "deny")


def memlock_limit() -> int | None:
    """Bytes that this process may lock; None if unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def numa_node_of(pci_address: str) -> int | None:
    """The NUMA node of a PCI device; None on a machine with one node."""
    text = _read(f"sys/bus/pci/devices/{pci_address}/numa_node").strip()
    return int(text) if text.isdecimal() else None


def link_of(pci_address: str) -> Link:
    """The link of a PCI device."""
    device = ROOT / "sys/bus/pci/devices" / pci_address

    def number(file: Path) -> float:
        found = re.match(r"\d+(\.\d+)?", _read(file))
        return float(found[0]) if found else 0.0

    return Link(
        int(number(device / "current_link_width")),
        int(number(device / "max_link_width")),
        _GENERATIONS.get(number(device / "current_link_speed"), 0),
    )


def nodes_of_process() -> list[int]:
    """The NUMA nodes on whose CPUs this process may run."""
    own = os.sched_getaffinity(0)
    return [node for node in numa_nodes() if not own.isdisjoint(cpus_of(node))]


def numa_nodes() -> list[int]:
    """The numbers of the NUMA nodes; empty if the kernel does not report them."""
    return _numbers("sys/devices/system/node/online")


def cpus_of(numa_node: int) -> list[int]:
    """The numbers of a NUMA node's CPUs."""
    return _numbers(f"sys/devices/system/node/node{numa_node}/cpulist")


def _numbers(file: str) -> list[int]:
    """The numbers in a file of the form "0-3,8"."""
    numbers: list[int] = []
    for part in re.findall(r"[\d-]+", _read(file)):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def control_group_limits() -> Iterator[Limit]:
    """The memory limits of this process's control groups and their parents, versions 1 and 2."""
    for line in _read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, names = ["unified", "."], ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mounts = ["memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be that of the host; then the root has the limit.
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            for mount in mounts:
                limit = _limit(Path("sys/fs/cgroup", mount, folder), *names)
                if limit is not None:
                    yield limit


def _limit(folder: Path, limit_name: str, usage_name: str, inactive_name: str) -> Limit | None:
    allowed, used = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not allowed.isdecimal() or int(allowed) >= 1 << 60 or not used.isdecimal():
        return None  # no limit: "max", or the largest number of version 1
    found = re.search(rf"^{inactive_name} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
    inactive = int(found[1]) if found else 0  # file pages, which the kernel drops when needed
    return Limit(int(allowed) - int(used) + inactive, int(allowed), f"/{folder / limit_name}")


def first_unwritable(first: int, last: int) -> int | None:
    """The first of these addresses that this process cannot write; None if there is none, or the
    kernel does not say.
    """
    lines = _read("proc/self/maps").splitlines()  # sorted
    if not lines:
        return None
    for line in lines:
        begin, end, access = re.split("[- ]", line, maxsplit=3)[:3]
        if int(begin, 16) <= first < int(end, 16) and access.startswith("rw"):
            first = int(end, 16)
    return first if first < last else None


def _meminfo() -> dict[str, int]:
    """The values of /proc/meminfo, in bytes if they have a unit."""
    lines = re.findall(r"^(\w+):\s+(\d+)( kB)?$", _read("proc/meminfo"), re.MULTILINE)
    return {name: int(number) << (10 if unit else 0) for name, number, unit in lines}


def _read(file: str | Path) -> str:
    """The text of a file below ROOT, or "" if it cannot be read."""
    try:
        return (ROOT / file).read_text("utf-8", errors="surrogateescape")  # names have any bytes
    except OSError:
        return ""


@contextlib.contextmanager
def one_at_a_time(folder: str, seconds: float) -> Iterator[None]:
    """Keeps out the other processes of the machine that see the same folder.

    A process that is stopped inside delays the others by `seconds` at most.
    """
    with contextlib.closing(Descriptors(os.open, ROOT / folder, os.O_RDONLY | os.O_CLOEXEC)) as own:
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(own.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() >= until:
                break
            time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.flock(own.fd, fcntl.LOCK_UN)  # a child may have it by a fork meanwhile


class NoRoomError(ValueError):
    """The machine has no room for a pool.

    Attributes:
        problem (str): what is too little, without advice.
        room (int): bytes that a pool can have.
        otherwise (str): what else than a smaller pool helps.
    """

    problem: str
    room: int
    otherwise: str


def check_room(nbytes: int, page_bytes: int) -> None:
    """Raises NoRoomError if the machine has no room now for a pool of this size and pages. The
    message has the limit, and how many pages fit.

    Without this check the kernel would kill the process when it touches the memory.
    """
    available, limits = available_bytes(), list(control_group_limits())
    rooms = [limit.left for limit in limits]
    if available is not None:
        rooms.append(available)
    room = min(rooms, default=nbytes)
    if nbytes <= room:
        return
    needed = f"the pages need {bytes_text(nbytes)} of host memory"
    if available is not None and nbytes > available:
        problem = (
            f"{needed}, of which {bytes_text(available)} are available (MemAvailable in "
            "/proc/meminfo)"
        )
        otherwise = "end what uses the memory"
    else:
        limit = next(limit for limit in limits if nbytes > limit.left)
        problem = (
            f"{needed}, and the control group of this process has "
            f"{bytes_text(max(limit.left, 0))} left of {bytes_text(limit.allowed)} ({limit.file})"
        )
        otherwise = "raise the memory limit of the container or service"
    error = NoRoomError(f"{problem}; {_smaller_pool(room, page_bytes)}{otherwise}")
    error.problem, error.room, error.otherwise = problem, room, otherwise
    raise error


def _smaller_pool(room: int, page_bytes: int) -> str:
    """Advice to ask for a pool that fits into `room` bytes, ending with "or"; "" without room."""
    if room <= 0:
        return ""
    if room < page_bytes:
        return f"ask for smaller pages (one has {bytes_text(page_bytes)}), or "
    return f"ask for fewer pages (num_pages={room // page_bytes} fits), or "


def advice(nbytes: int) -> str:
    """What the user can do if the driver does not pin this many bytes."""
    limit = memlock_limit()
    if limit is None or limit >= nbytes:
        return "ask for fewer pages"
    return (
        f"raise the limit on locked memory, {bytes_text(limit)} (ulimit -l unlimited; in a "
        "container --ulimit memlock=-1), ask for fewer pages"
    )
