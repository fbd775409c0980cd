"""A server of host pages in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory

import torch

from torch_kvswap import HostPool, PagedLayout


def tiny_cache() -> PagedLayout:
    """Of one byte: what is measured is the server."""
    return PagedLayout([torch.zeros(1, 1, dtype=torch.uint8)])


@contextmanager
def serving(pages: int) -> Iterator[str]:
    """The socket of a server with so many pages of such a cache, whose memory nobody touches."""
    memory = pages * HostPool.page_bytes_of(tiny_cache())
    with TemporaryDirectory() as folder:
        path = f"{folder}/pages"
        command = [sys.executable, "-m", "torch_kvswap", "serve", "--socket", path]
        with Popen(
            [*command, "--memory", f"{memory}B"], stdout=PIPE, cwd=Path(__file__).parents[1]
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()  # it serves
            try:
                yield path
            finally:
                process.terminate()
