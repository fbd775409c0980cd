"""The prefix cache and the block manager on a device that torch drives."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from fuzz import fuzz
from fuzz_cache import MismatchError
from fuzz_devices import Accelerated
from fuzz_prefixes import Server
from queued_devices import on_queued_device


class Unstalled(Accelerated):
    """Goes on by itself: the model reads blocks of the device whenever it likes."""

    def stall(self, stream: Any, rng: Random) -> None:
        pass


@on_queued_device
def test_prefix_caches_load_the_bytes_of_the_keys(accelerator):
    counts = fuzz(lambda seed: Server(Unstalled(accelerator, seed), seed), 4)
    assert counts["compared"] > 0
    assert counts["evicted"] > 0


@on_queued_device
def test_as_a_control_blocks_that_were_not_computed_are_found(accelerator):
    with pytest.raises(MismatchError):
        fuzz(lambda seed: Server(Unstalled(accelerator, seed), seed, stale=True), 20)
