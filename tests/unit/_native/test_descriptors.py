"""Descriptors that arrived together are closed together, whatever became of one of them."""

from __future__ import annotations

import os
from array import array

import pytest

from torch_kvswap._native.descriptors import Descriptors


def test_one_unclosable_descriptor_leaves_no_other_open() -> None:
    gone, other = (os.memfd_create("test") for _ in range(2))
    fds = array("i", [gone, other]).tobytes()
    came = Descriptors(lambda _: (b"", [(0, 0, fds)]), None)
    assert came.fds == [gone, other]
    os.close(gone)
    came.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(other)
    came.close()
    assert came.fds == []
