"""The options of KVSwapLinker are read without SGLang."""

from __future__ import annotations

from typing import Any

import pytest

from torch_kvswap.integrations.sglang.options import LinkerOptions, read_options


def test_options_are_read() -> None:
    assert read_options({"host_bytes": 2e9}) == LinkerOptions(2_000_000_000)
    given = {"host_bytes": 1, "encoding": "lossless", "verify": "load", "below": "file:/pages"}
    assert read_options(given) == LinkerOptions(1, "lossless", "load", below="file:/pages")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_byte": 1}, "has host_byte, which KVSwapLinker does not know"),
        ({}, "host_bytes is None; it must be the bytes of host memory"),
        ({"host_bytes": True}, "host_bytes is True"),
        ({"host_bytes": float("inf")}, "host_bytes is inf"),
        ({"host_bytes": 1, "encoding": 7}, "encoding is 7; it must be a string"),
        ({"host_bytes": 1, "below": "file:/a", "server": "/b"}, "has below and server"),
    ],
    ids=["unknown", "missing", "switch", "infinite", "type", "both"],
)
def test_a_wrong_option_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(options)
