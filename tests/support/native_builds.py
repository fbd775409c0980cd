"""Folders of compiled test support, each built once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from fcntl import LOCK_EX, flock
from pathlib import Path
from tempfile import mkdtemp

BUILDS = Path(__file__).parents[2] / "build"


def build_once(
    name: str, made_from: Iterable[Path], settings: str, build: Callable[[Path], None]
) -> Path:
    """The folder that `build` fills from these files; the first process that asks calls it.

    Args:
        name (str): the folder's name begins with it.
        made_from (Iterable[Path]): files whose change makes another folder.
        settings (str): the same, for what the files do not say.
        build (Callable): fills a new folder. If it raises, the next that asks tries again.
    """
    digest = hashlib.sha256(settings.encode())
    for path in sorted(made_from):
        digest.update(path.name.encode() + path.read_bytes())
    folder = BUILDS / f"{name}-{digest.hexdigest()[:16]}"
    BUILDS.mkdir(exist_ok=True)
    with (BUILDS / f"{name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)  # one process compiles, the others wait for it
        if not folder.exists():
            made = Path(mkdtemp(prefix=f"{name}-", dir=BUILDS))
            build(made)
            made.rename(folder)
    return folder
