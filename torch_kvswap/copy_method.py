"""Copy methods: the caller's choice, and the measured costs behind the automatic choice."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_kvswap._native.arguments import INT64_MAX, kind_of, read_int
from torch_kvswap._native.loader import native
from torch_kvswap._native.log import log, warn_once
from torch_kvswap.devices.kind import is_native

COPY_METHODS = tuple(native.copy_methods())
AUTO, COPY_ENGINES = "auto", "copy_engines"  # the latter chooses without kernels
CHOICES = (AUTO, COPY_ENGINES, *(method for method in COPY_METHODS if method != "host"))
DIRECTIONS = ("store", "load")
SHIPPED = Path(__file__).with_name("copy_method_costs.json")
REFERENCE_GPU = "NVIDIA H200"  # its shipped costs are used for GPUs without costs of their own
DEFAULT_STAGING_BYTES = 256 << 20
_MAX_MICROSECONDS = 1e12
_FIELDS = ("start_us", "block_us", "submit_start_us", "submit_copy_us")  # as in CopyMethodCosts


@dataclass(frozen=True)
class CopyMethodCosts:
    """Costs of one copy method: the time of a transfer, and the host time to submit it.

    Attributes:
        start (float): seconds per transfer.
        block (float): seconds per block.
        submit_start (float): fixed seconds of submitting a transfer, beyond those of a call whose
            job another thread submits.
        submit_copy (float): seconds that it takes for each copy of the transfer: a fragment
            ("batch"), a block's run of equidistant slabs ("strided") or a block (other methods),
            in each layer group.
        fragment (Mapping[int, float]): seconds per fragment, by fragment size in bytes; at least
            one size. Interpolated in the logarithm of the size; proportional to the size above the
            largest entry, constant below the smallest.
    """

    start: float
    block: float
    submit_start: float
    submit_copy: float
    fragment: Mapping[int, float]

    def fragment_seconds(self, nbytes: int) -> float:
        """Predicted seconds for one fragment of `nbytes` bytes."""
        return native.fragment_seconds(sorted(self.fragment.items()), nbytes)

    def native(self) -> tuple[float, float, float, float, list[tuple[int, float]]]:
        """The costs as native.CopyMethodOptions takes them."""
        fragments = sorted(self.fragment.items())
        return self.start, self.block, self.submit_start, self.submit_copy, fragments

    @classmethod
    def from_json(cls, content: Mapping[str, Any], name: str = "costs") -> CopyMethodCosts:
        """Reads what to_json() has written; `name` is its place in the file, for errors."""
        _check_keys(name, content, required=(*_FIELDS, "fragment_us"))
        start, block, submit_start, submit_copy = (
            _read_microseconds(f"{name}.{field}", content[field]) / 1e6 for field in _FIELDS
        )
        fragment = {}
        _check_keys(f"{name}.fragment_us", content["fragment_us"])
        for size, microseconds in content["fragment_us"].items():
            field = f"{name}.fragment_us.{size}"
            nbytes = read_int(f"the size of {field}", int(size), 1, INT64_MAX)
            fragment[nbytes] = _read_microseconds(field, microseconds) / 1e6
        if not fragment:
            raise ValueError(f"{name}.fragment_us needs at least one size, in bytes")
        return cls(start, block, submit_start, submit_copy, fragment)

    def to_json(self) -> dict[str, Any]:
        """The costs in microseconds, rounded, as JSON content."""
        return {
            "start_us": round(self.start * 1e6, 3),
            "block_us": round(self.block * 1e6, 4),
            "submit_start_us": round(self.submit_start * 1e6, 3),
            "submit_copy_us": round(self.submit_copy * 1e6, 4),
            "fragment_us": {
                str(size): round(seconds * 1e6, 4)
                for size, seconds in sorted(self.fragment.items())
            },
        }


Costs = dict[str, dict[str, CopyMethodCosts]]  # by direction, then by copy method


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured costs of the copy methods.

    Attributes:
        costs (Costs): by direction, then by copy method.
        source (str): where the costs are from, for messages.
        is_of_other_gpu (bool): whether they were measured on another GPU than the given one.
    """

    costs: Costs
    source: str
    is_of_other_gpu: bool = False


def read_costs(gpu: str) -> MeasuredCosts:
    """Reads the costs for a GPU, "" if its name is not known, from the first source that exists.

    The sources are: the file named by KVSWAP_COPY_METHOD_COSTS, the user's cache, the shipped costs
    for this GPU, the shipped costs for REFERENCE_GPU. A cache file that cannot be opened is skipped
    with a warning in the log.

    Raises:
        ValueError: the file named by KVSWAP_COPY_METHOD_COSTS cannot be opened, or a file is
            malformed.
    """
    given = os.environ.get("KVSWAP_COPY_METHOD_COSTS")
    if given:
        try:
            content = Path(given).read_bytes()
        except OSError as error:
            raise _unreadable(Path(given), error) from error
        return MeasuredCosts(_read(Path(given), content), given)
    try:
        cached = cache_file(gpu)
        content = cached.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        pass  # `calibrate` has not run on this machine
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        log.warning(
            "shipped costs of the copy methods are used, the cache cannot be read: %s", error
        )
    else:
        return MeasuredCosts(_read(cached, content), str(cached))
    return shipped_costs(gpu)


def shipped_costs(gpu: str) -> MeasuredCosts:
    """The costs that the package has for a GPU, otherwise those for REFERENCE_GPU."""
    shipped = json.loads(SHIPPED.read_text())
    name = gpu if gpu in shipped else REFERENCE_GPU
    return MeasuredCosts(
        _parse(shipped[name]), f"{SHIPPED.name}, {name}", bool(gpu) and name != gpu
    )


def write_costs(gpu: str, costs: Costs) -> Path:
    """Writes costs to the user's cache, for all later processes. Returns the file.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: there is no home directory.
    """
    content = {
        direction: {
            copy_method: of_method.to_json() for copy_method, of_method in costs[direction].items()
        }
        for direction in DIRECTIONS
    }
    file = cache_file(gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.rename(file)  # atomically: another process may read the file
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return file


def cache_file(gpu: str) -> Path:
    """The cache file for this GPU and driver, in XDG_CACHE_HOME or ~/.cache.

    Raises:
        RuntimeError: there is no home directory.
    """
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu)
    driver = native.driver_version()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "torch_kvswap" / f"copy-method-costs-{name}-{driver}.json"


def _read(file: Path, content: bytes) -> Costs:
    try:
        return _parse(json.loads(content))
    except (TypeError, ValueError, RecursionError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(
        f"the costs of the copy methods cannot be read from {file}: {type(error).__name__}: "
        f"{error}; remove it; `python -m torch_kvswap calibrate` writes another one"
    )


def _parse(content: Mapping[str, Any]) -> Costs:
    _check_keys("the file", content, required=DIRECTIONS, optional=("source",))
    costs: Costs = {}
    for direction in DIRECTIONS:
        _check_keys(direction, content[direction], optional=COPY_METHODS)
        costs[direction] = {
            copy_method: CopyMethodCosts.from_json(of_method, f"{direction}.{copy_method}")
            for copy_method, of_method in content[direction].items()
        }
    return costs


def _check_keys(
    name: str,
    content: object,
    required: Collection[str] = (),
    optional: Collection[str] = (),
) -> None:
    """Checks that the content is an object with these keys, or with any if none are given."""
    if not isinstance(content, dict):
        raise TypeError(f"{name} is {kind_of(content)}; it must be an object")
    for key in required:
        if key not in content:
            raise ValueError(f"{name} lacks {key!r}")
    known = {*required, *optional}
    unknown = [key for key in content if known and key not in known]
    if unknown:
        raise ValueError(f"{name} has the unknown key {unknown[0]!r}; the keys are {sorted(known)}")


def _read_microseconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {kind_of(value)}; it must be a number of microseconds")
    if not 0 <= value <= _MAX_MICROSECONDS:  # also rejects NaN
        raise ValueError(f"{name} is {value}; it must be 0 to {_MAX_MICROSECONDS:g} microseconds")
    return float(value)


def copy_method_options(
    copy_method: str | None,
    staging_bytes: int,
    device: torch.device,
    costs: Costs | None = None,
) -> native.CopyMethodOptions:
    """The options of a native handler that choose the copy method, from those of OffloadHandler.

    Costs of None are those of the device. A cache on the CPU has none.

    Raises:
        TypeError: staging_bytes is not an integer.
        ValueError: the method does not exist, staging_bytes is negative, or the costs cannot be
            read.
    """
    name = "copy_method"
    if copy_method is None:
        name = "KVSWAP_COPY_METHOD"
        copy_method = os.environ.get(name) or AUTO
    setting = f"{name}={copy_method!r}"
    if copy_method not in CHOICES:
        raise ValueError(f"{setting}; expected one of {', '.join(CHOICES)}")
    number = -1 if copy_method in (AUTO, COPY_ENGINES) else COPY_METHODS.index(copy_method)
    staging_bytes = read_int("staging_bytes", staging_bytes)
    if costs is None and device.type == "cuda" and is_native("cuda"):
        gpu = gpu_name(device)
        measured = read_costs(gpu)
        costs = measured.costs
        if measured.is_of_other_gpu and number < 0:
            warn_once(
                f"the copy method is chosen by the costs on an {REFERENCE_GPU}: none are known for "
                f"{gpu}; `python -m torch_kvswap calibrate` measures them, in some seconds, "
                "while the GPU is otherwise idle"
            )
    known = [costs[direction] if costs else {} for direction in DIRECTIONS]
    table = [
        [of[method].native() if method in of else None for method in COPY_METHODS] for of in known
    ]
    without_kernels = copy_method == COPY_ENGINES
    return native.CopyMethodOptions(number, without_kernels, setting, staging_bytes, table)


def check_job_method(copy_method: object) -> None:
    """Raises ValueError unless a job can have this method: COPY_ENGINES, or None as its handler."""
    if copy_method is not None and copy_method != COPY_ENGINES:
        raise ValueError(
            f"copy_method={copy_method!r}; for one job it can be {COPY_ENGINES} or None (as the "
            "handler); pass other methods to OffloadHandler"
        )


def gpu_name(device: torch.device) -> str:
    """The GPU's name; "" if torch sees no GPU."""
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
