"""Whether a machine has room for a pool, and why its driver may not pin it."""

from __future__ import annotations

from torch_kvswap.host_pool import system


def check_room(nbytes: int, reserved: bool) -> None:
    """Raises ValueError, with the limit and the way out, when the machine has no room for a pool of
    this size, on reserved huge pages or not. The kernel kills a process that finds out later."""
    if reserved:
        _check_huge_pages(nbytes)
        return  # they are set aside already
    available = system.available_bytes()
    if available is not None and nbytes > available:
        raise ValueError(
            f"the pages need {nbytes} bytes of host memory, of which {available} are available "
            "(MemAvailable in /proc/meminfo); ask for fewer pages, or end what uses the memory"
        )
    for limit in system.control_group_limits():
        if nbytes > limit.left:
            raise ValueError(
                f"the pages need {nbytes} bytes of host memory, and the control group of this "
                f"process has {max(limit.left, 0)} left of {limit.allowed} ({limit.file}); ask for "
                "fewer pages, or raise the memory limit of the container or service"
            )


def _check_huge_pages(nbytes: int) -> None:
    pages = system.reserved_huge_pages()
    needed = -(-nbytes // pages.size)
    if needed > pages.free:
        more = pages.total + needed - pages.free
        raise ValueError(
            f"the pages need {needed} reserved huge pages of {pages.size} bytes, of which "
            f"{pages.free} are free (HugePages_Free in /proc/meminfo); reserve more (sysctl "
            f"vm.nr_hugepages={more}), ask for fewer pages, or leave huge_pages=True out"
        )


def advice(nbytes: int) -> str:
    """What may help where the driver does not pin so many bytes."""
    ways = []
    limit = system.memlock_limit()
    if limit is not None and limit < nbytes:
        ways.append(
            f"raise the limit on locked memory, {limit} bytes (ulimit -l unlimited; in a container "
            "--ulimit memlock=-1)"
        )
    if system.is_wsl():
        ways.append("under WSL allow the guest more memory (.wslconfig): part of it can be pinned")
    return ", ".join([*ways, "ask for fewer pages"])
