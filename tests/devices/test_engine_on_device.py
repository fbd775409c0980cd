"""The engine, the block manager and the demo on a device that torch drives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engine_bytes import CHECKS
from fake_accelerator import DEVICE_TYPE, Accelerator, needs_compiler
from fuzz import fuzz
from fuzz_cache import MismatchError
from fuzz_devices import Accelerated
from fuzz_engine import Server
from queued_devices import DEVICE, on_queued_device, run_on_device

EXAMPLES = Path(__file__).parents[2] / "examples"


class Unstalled(Accelerated):
    """Goes on by itself: the engine's model reads blocks of the device whenever it likes."""

    def stall(self, stream: Any, rng: Random) -> None:
        pass


@on_queued_device
def test_engines_load_the_bytes_of_the_keys(accelerator: Accelerator) -> None:
    counts = fuzz(lambda seed: Server(Unstalled(accelerator, seed), seed), 4)
    assert counts["compared"] > 20
    assert counts["evicted"] > 10


@on_queued_device
def test_as_a_control_blocks_that_were_not_computed_are_found(accelerator: Accelerator) -> None:
    with pytest.raises(MismatchError):
        fuzz(lambda seed: Server(Unstalled(accelerator, seed), seed, stale=True), 20)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@on_queued_device
def test_an_engine_loads_the_bytes_that_it_stored(
    accelerator: Accelerator, check: Callable[[str], None]
) -> None:
    check(DEVICE)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("control", [False, True])
def test_the_demo_serves_every_request_as_if_it_was_alone(control: bool, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(Random(0).randbytes(2000))
    arguments = f"--requests 5 --new-tokens 16 --gpu-blocks 15 --block-size 8 --file {text}"
    more = ["--control"] if control else []
    printed = run_on_device(
        """
        sys.path.insert(0, sys.argv[1])
        from serving_demo import demo
        sys.exit(demo.main(sys.argv[2:]))
        """,
        *(str(EXAMPLES), *arguments.split(), "--device", DEVICE_TYPE, *more),
    )
    found = re.search(r"(\d+) preemptions", printed)
    assert found is not None
    assert int(found[1]) > 0
    assert f"80 tokens compared, {int(control)} requests differ" in printed
