"""Writes files that stand for those of /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def write(root: Path, file: str, text: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
