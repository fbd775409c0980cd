"""What the benchmarks leave behind: a table on the screen, and JSON with the machine."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from torch_kvswap._native.loader import native

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a program's table: its header, and what it says of a row."""

    header: str
    value: Callable[[Row], object]


def table_of(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> str:
    """Columns as wide as they need to be, numbers to the right. None is a dash."""
    values = [[column.value(row) for column in columns] for row in rows]
    headers = [column.header for column in columns]
    cells = [headers, *([_cell(value) for value in row] for row in values)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [
        all(isinstance(value, int | float | None) for value in column)
        for column in zip(*values, strict=True)
    ] or [False] * len(headers)
    lines = []
    for line in cells:
        padded = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def markdown_of(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> str:
    """The same for a page of the docs."""
    lines = [[column.header for column in columns], ["---"] * len(columns)]
    lines += [[_cell(column.value(row)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def machine(device: torch.device) -> dict[str, Any]:
    """What decides the figures, without what names the machine."""
    on_cuda = device.type == "cuda"
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "gpu": torch.cuda.get_device_name(device) if on_cuda else None,
        "driver": _driver(),
        "driver_cuda": native.driver_version() or None,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _driver() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read_text()) if file.exists() else None
    return found.group() if found else None


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.machine()


def write_json(file: Path, device: torch.device, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json_text({"machine": machine(device), **content}))


def json_text(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry, and for each item of an entry that is a list."""
    entries = [f" {json.dumps(name)}: {_lines(value)}" for name, value in content.items()]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _lines(value: object) -> str:
    if not (value and isinstance(value, list)):
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
