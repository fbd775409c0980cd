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

# Files of pools, see memory.create_file() and memory.promise().
_POOL_FILE = re.compile(r"/memfd:torch_kvswap(?: (\d+) ([0-9a-f]+)-([0-9a-f]+))? \(deleted\)")
_SMALL_PART = 1 << 10  # of the free memory: smaller pools ignore what others were promised

TURN = 1.0  # seconds that a pool waits while others promise memory; tests set it
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


def _mapped_bytes(process: str, first: int, last: int) -> int:
    """Bytes with memory in a process's mappings between two addresses."""
    kilobytes, inside = 0, False
    for line in _read(f"proc/{process}/smaps").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = first <= int(found[1], 16) and int(found[2], 16) <= last
        elif inside and (found := re.match(r"Rss:\s+(\d+) kB", line)):
            kilobytes += int(found[1])
    return kilobytes << 10


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


def promised_bytes(own: int, is_exact: bool = True) -> tuple[int, int]:
    """Bytes that pools have been promised and have not touched, as far as the kernel shows them to
    this process: of this user's processes, and of those of them in its control group.

    Args:
        own (int): file descriptor of a pool that is left out.
        is_exact (bool): False counts what private pools have touched, too. To know how much that
            is, the kernel walks through all memory of their processes.
    """
    seen = {os.fstat(own).st_ino}
    group, promised, in_group = _read("proc/self/cgroup"), 0, 0
    for process in _processes():
        for found, status in _pool_files(process):
            pid, first, last = found.groups()
            if status.st_ino in seen or pid not in (None, process):  # None: forked children share
                continue
            seen.add(status.st_ino)
            left = status.st_size - 512 * status.st_blocks
            if pid is not None and is_exact:
                left -= _mapped_bytes(process, int(first, 16), int(last, 16))
            promised += max(left, 0)
            in_group += max(left, 0) if _read(f"proc/{process}/cgroup") == group else 0
    return promised, in_group


def _processes() -> list[str]:
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(ROOT / "proc") if name.isdecimal()]
    return []


def _pool_files(process: str) -> Iterator[tuple[re.Match[str], os.stat_result]]:
    """The open files of a process that stand for memory of a pool."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for file in (ROOT / "proc" / process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if found := _POOL_FILE.fullmatch(os.readlink(file)):
                    yield found, file.stat()


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


def promising() -> contextlib.AbstractContextManager[None]:
    """Keeps others from promising memory and counting promises, in processes that see the same."""
    return one_at_a_time("proc", TURN)


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


def check_room(nbytes: int, page_bytes: int, *, own: int | None = None) -> None:
    """Raises NoRoomError if the machine has no room for a pool of this size and pages. The message
    has the limit, and how many pages fit.

    Without this check the kernel would kill the process when it touches the memory. With `own`, the
    pool's file, what other pools have been promised is no room. They see this file already: of
    those that ask at the same time never too many get memory, and with promising() not too few.
    """
    available, limits = available_bytes(), list(control_group_limits())
    rooms = [limit.left for limit in limits]
    if available is not None:
        rooms.append(available)
    promised = in_group = 0
    if own is not None and nbytes > min(rooms, default=nbytes) // _SMALL_PART:
        for is_exact in (False, True):
            promised, in_group = promised_bytes(own, is_exact)
            rooms = [limit.left - in_group for limit in limits]
            if available is not None:
                rooms.append(available - promised)
            if nbytes <= min(rooms, default=nbytes):
                break
    if nbytes <= min(rooms, default=nbytes):
        return
    needed = f"the pages need {bytes_text(nbytes)} of host memory"
    if available is not None and nbytes > available - promised:
        problem = (
            f"{needed}, of which {bytes_text(available)} are available (MemAvailable in "
            f"/proc/meminfo){_promised_text(promised)}"
        )
        otherwise = "end what uses the memory"
    else:
        limit = next(limit for limit in limits if nbytes > limit.left - in_group)
        problem = (
            f"{needed}, and the control group of this process has "
            f"{bytes_text(max(limit.left, 0))} left of {bytes_text(limit.allowed)} ({limit.file})"
            f"{_promised_text(in_group)}"
        )
        otherwise = "raise the memory limit of the container or service"
    error = NoRoomError(f"{problem}; {_smaller_pool(min(rooms), page_bytes)}{otherwise}")
    error.problem, error.room, error.otherwise = problem, min(rooms), otherwise
    raise error


def _promised_text(nbytes: int) -> str:
    if not nbytes:
        return ""
    return f", {bytes_text(nbytes)} of them promised to other host pools, which have not used them"


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
