"""Random caches and random jobs on a GPU; tests/fuzz.py says how, and what is compared.

Prints how much was done: pytest -s shows it, or its report of passed tests (-rP).
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fuzz import Options, Scenario, fuzz, fuzz_seconds
from fuzz_cache import MismatchError
from fuzz_devices import Device, Pairs
from rigs import watchdog
from torch import Tensor

pytestmark = pytest.mark.gpu

STEPS = 1500
CAPTURING = threading.Lock()  # torch captures one graph at a time


@pytest.fixture(autouse=True)
def _no_hang(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    with watchdog(capfd, 3 * fuzz_seconds() + 180):
        yield


class Gpu(Device):
    """One GPU. Kernels add 0 to what they read, so that they are kernels and no copies."""

    large_shapes = ((16, 8, 128), (64, 576), (64, 8, 128), (128, 1000))
    paths = ("auto", "auto", "batch", "strided", "staged", "kernel")
    block_bytes = 1 << 20
    memory_bytes = 1 << 26
    has_gates = True

    def __init__(self, index: int = 0) -> None:
        self.name = f"cuda:{index}"
        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            torch.cuda._sleep(1)  # loads the kernel

    def cache_memory(self, raw: Tensor) -> Tensor:
        return raw.to(self.device)

    def rows(self, raw: Tensor) -> Tensor:
        return raw.to(self.device)

    def streams(self, count: int) -> list[Any]:
        return [torch.cuda.Stream(self.device) for _ in range(count)]

    def relays(self) -> list[Any]:
        """Default streams, those of other GPUs too: their handle is 0 on each of them."""
        return [torch.cuda.default_stream(index) for index in range(torch.cuda.device_count())]

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield

    def copy(self, pairs: Pairs, stream: Any) -> bool:
        with torch.cuda.stream(stream):
            for target, source in pairs:
                torch.add(source, 0, out=target)
        return True

    def wait(self, stream: Any, other: Any) -> bool:
        stream.wait_stream(other)
        return True

    @contextmanager
    def afters(self, stream: Any) -> Iterator[list[Any]]:
        event = torch.cuda.Event()
        event.record(stream)
        yield [None, None, stream, event]
        event.record()  # another point from now on

    def stall(self, stream: Any, rng: random.Random) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(rng.choice([100_000, 500_000, 2_000_000]))  # up to a millisecond

    def is_idle(self, stream: Any) -> bool:
        return bool(stream.query())

    def synchronize(self, streams: Sequence[Any]) -> None:
        for stream in streams:
            stream.synchronize()

    def capture(self, work: Callable[[Any], None]) -> Any:
        # A stream of its own: the one that torch makes for all captures is of one device for ever.
        with CAPTURING, torch.cuda.device(self.device):
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            work(stream)  # loads the kernels, which a capture must not
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                work(stream)
            with torch.cuda.stream(stream):
                graph.replay()  # makes ready what the first replay does
            torch.cuda.synchronize()
        return graph

    def replay(self, graph: Any, stream: Any) -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    def finish(self) -> str:
        torch.cuda.synchronize(self.device)
        return ""


def alone(seed: int, index: int = 0) -> Scenario:
    return Scenario(Gpu(index), seed, Options(steps=STEPS))


def several(seed: int) -> Scenario:
    rng = random.Random(f"{seed} several")
    sessions = rng.randint(2, 4)
    options = Options(steps=STEPS // 2, sessions=sessions, handlers=rng.choice([1, 1, 2]))
    return Scenario(Gpu(), seed, options)


def tell(counts: Counter[str]) -> None:
    seconds = counts["milliseconds"] / 1000
    print(
        f"\nfuzz: {counts['jobs']} jobs ({counts['jobs'] / seconds:.0f}/s, {counts['done']} done, "
        f"{counts['cancelled']} cancelled, {counts['failed']} failed), "
        f"{counts['bytes'] / 1e9:.2f} GB, {counts['replays']} replays, {counts['compared']} blocks "
        f"compared, {counts['scenarios']} scenarios in {seconds:.1f} s from seed {counts['seed']}"
    )


def test_random_jobs_on_a_gpu_leave_the_bytes_of_the_model() -> None:
    counts = fuzz(alone, 4)
    tell(counts)
    assert counts["done"] > 100
    assert counts["compared"] > 100


def test_random_jobs_of_several_threads_on_a_gpu_leave_the_bytes_of_the_model() -> None:
    counts = fuzz(several, 3)
    tell(counts)
    assert counts["done"] > 100
    assert counts["compared"] > 100


def test_random_jobs_on_all_gpus_at_once_leave_the_bytes_of_the_model() -> None:
    """A thread for each GPU, with a handler; waits go through streams of the others."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, here are {torch.cuda.device_count()}")
    counts: list[Counter[str]] = []
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            counts.append(fuzz(lambda seed: alone(seed, index), 2))
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(index,)) for index in range(torch.cuda.device_count())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for of_device in counts:
        tell(of_device)
        assert of_device["done"] > 100


@pytest.mark.parametrize("mistake", ["stores and loads do not wait", "reads do not"])
def test_as_a_control_what_does_not_wait_on_a_gpu_is_found(mistake: str) -> None:
    options = Options(
        steps=STEPS,
        after_nothing=mistake == "stores and loads do not wait",
        no_waits=mistake == "reads do not",
    )
    with pytest.raises(MismatchError, match=r"KVSWAP_FUZZ_SEED=\d"):
        fuzz(lambda seed: Scenario(Gpu(), seed, options), 20)
