"""Devices for random jobs: the CPU, the simulated driver and a GPU.

A device has streams. A kernel copies between rows and blocks on one of them. Methods that return
bool return False where the simulated driver refused the call and did nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from caller_submits import CallerBegins
from simulated_cache import HURTS_A_JOB, run_until
from simulated_driver import DEVICE, HOST, Driver
from simulated_driver.cuda import CudaError
from simulated_driver.handles import Event, Stream
from torch import Tensor

from torch_kvswap import OffloadHandler
from torch_kvswap._native.loader import native

if TYPE_CHECKING:
    from torch_kvswap import HostPool, Job, PagedLayout, PrefixCache

HAS_KERNELS = bool(native.kernel_version())
Pairs = Sequence[tuple[Tensor, Tensor]]


class Device:
    """The CPU, where everything has happened when a call returns."""

    name = "cpu"
    block_shapes: Sequence[tuple[int, ...]] = [
        (1,),
        (5,),
        (13,),
        (3, 5),
        (4, 2, 8),
        (16, 3),
        (656,),
        (16, 8, 8),
        (2, 3, 64),
    ]
    large_shapes: Sequence[tuple[int, ...]] = [(16, 8, 8), (64, 48)]
    block_bytes = 1 << 15  # at most, in all tensors of a group
    memory_bytes = 1 << 23  # for what kernels write, and as much for what they read
    copy_methods: Sequence[str] = ("auto",)
    handler: type[OffloadHandler] = OffloadHandler

    # Memory.

    def cache_memory(self, raw: Tensor) -> Tensor:
        """These bytes, in memory for a cache."""
        return raw

    def rows(self, raw: Tensor) -> Tensor:
        """These bytes, in memory that kernels read or write."""
        return raw

    def layout(
        self, tensors: Sequence[Tensor] | Mapping[str, Tensor], block_dim: int
    ) -> PagedLayout:
        from torch_kvswap import PagedLayout

        return PagedLayout(tensors, block_dim)

    def pool(self, layout: PagedLayout, pages: int, per_page: int, gap: int) -> HostPool:
        from host_pools import with_gaps

        from torch_kvswap import HostPool

        return with_gaps(layout, pages, per_page, gap) if gap else HostPool(layout, pages, per_page)

    # Streams.

    def streams(self, count: int) -> list[Any]:
        """Streams of one caller."""
        return [None]

    def relays(self) -> list[Any]:
        """Streams for waiting only, that many callers use."""
        return []

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Makes the stream the current one."""
        yield

    def copy(self, pairs: Pairs, stream: Any) -> bool:
        """A kernel on the stream, which is current where one can be; pairs of target and source."""
        for target, source in pairs:
            target.copy_(source)
        return True

    def wait(self, stream: Any, other: Any) -> bool:
        """Lets the stream wait for what the other one was given so far."""
        return True

    @contextmanager
    def afters(self, stream: Any) -> Iterator[list[Any]]:
        """What a job can pass as `after` for all that the stream was given so far."""
        yield [None]

    def stall(self, stream: Any, rng: random.Random) -> None:
        """Holds the stream up for a while."""

    def is_idle(self, stream: Any) -> bool:
        return True

    def synchronize(self, streams: Sequence[Any]) -> None:
        """Waits for what the streams were given."""

    # What happens meanwhile.

    def let_run(self, rng: random.Random) -> None:
        """The device goes on by some steps, where it does so only when told."""

    def fail_sometime(self, rng: random.Random) -> None:
        """A call of the driver will fail, where that can be."""

    def faults(self) -> tuple[int, bool]:
        """How many calls were made to fail, and whether more will fail."""
        return 0, False

    @contextmanager
    def running(self) -> Iterator[None]:
        """The device goes on by itself, for a call that waits until jobs have ended."""
        yield

    def wait_for(self, handler: OffloadHandler | PrefixCache, jobs: list[Job] | None) -> None:
        """Until the jobs, or all of them, have ended, well or not."""
        from torch_kvswap import TransferError

        with suppress(TransferError):
            handler.synchronize(jobs, timeout=60)

    def finish(self) -> str:
        """Lets everything go; says what was wrong."""
        return ""


class Simulated(Device):
    """The simulated driver. mode: of `Driver.set_mode`. alone: whether one thread submits."""

    name = "simulated"
    large_shapes = ((64, 576), (64, 8, 128), (48, 8, 128))
    block_bytes = 1 << 18

    def __init__(self, driver: Driver, mode: str, seed: int, alone: bool = True) -> None:
        self.driver, self.mode, self.alone = driver, mode, alone
        self.name = f"simulated, {mode}"
        self.copy_methods = [
            "auto",
            "batch",
            "strided",
            *(["staged", "kernel"] if HAS_KERNELS else []),
        ]
        if HAS_KERNELS and random.Random(f"{seed} begun").random() < 0.3:
            self.handler = CallerBegins
            self.copy_methods = ["staged"]
            self.block_bytes, self.memory_bytes = 1 << 20, 1 << 25
            self.block_shapes = self.large_shapes = ((64, 1024), (128, 1000))
        driver.reset()
        driver.set_mode(mode, seed)
        driver.set_stream(0, 42)
        self.made = 50
        self.holds: list[int] = []
        self.planned: dict[str, list[int]] = {}

    def cache_memory(self, raw: Tensor) -> Tensor:
        self.driver.adopt(raw, DEVICE)
        return raw

    def rows(self, raw: Tensor) -> Tensor:
        self.driver.adopt(raw, DEVICE)
        return raw

    def layout(
        self, tensors: Sequence[Tensor] | Mapping[str, Tensor], block_dim: int
    ) -> PagedLayout:
        made = super().layout(tensors, block_dim)
        made.device = torch.device("cuda", 0)
        return made

    def pool(self, layout: PagedLayout, pages: int, per_page: int, gap: int) -> HostPool:
        from host_pools import unpinned, with_gaps

        of_gap = {"make": with_gaps, "gap": gap} if gap else {}
        made = unpinned(layout, pages, per_page, **of_gap)
        self.driver.adopt(made._memory.mapping.tensor, HOST)
        return made

    def streams(self, count: int) -> list[Any]:
        self.made += count
        return [Stream(self.made - i) for i in range(count)]

    def relays(self) -> list[Any]:
        return [Stream(44), Stream(45)]

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        if self.alone:
            self.driver.set_stream(0, stream.cuda_stream)
        yield

    def copy(self, pairs: Pairs, stream: Any) -> bool:
        return self._does(lambda: self.driver.cuda.copy_batch(list(pairs), stream.cuda_stream))

    def _does(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except CudaError:
            assert self.planned
            return False
        return True

    def wait(self, stream: Any, other: Any) -> bool:
        if stream.cuda_stream == other.cuda_stream:
            return True
        try:
            event = self.driver.cuda.create_event(timed=False)
        except CudaError:
            assert self.planned
            return False
        try:
            return self._does(lambda: self.driver.cuda.record(event, other.cuda_stream)) and (
                self._does(lambda: self.driver.cuda.wait(stream.cuda_stream, event))
            )
        finally:
            self.driver.cuda.destroy_event(event)

    @contextmanager
    def afters(self, stream: Any) -> Iterator[list[Any]]:
        current = [None, None] if self.alone else []
        try:
            event = self.driver.cuda.create_event(timed=False)
        except CudaError:
            yield [*current, stream]
            return
        recorded = self._does(lambda: self.driver.cuda.record(event, stream.cuda_stream))
        try:
            yield [*current, stream, *([Event(event)] if recorded else [])]
        finally:
            self._does(lambda: self.driver.cuda.record(event, 44))  # another point from now on
            self.driver.cuda.destroy_event(event)

    def stall(self, stream: Any, rng: random.Random) -> None:
        # A job that fails while it is enqueued waits for what is ahead of it.
        if self.mode != "immediate" and not self.faults()[1] and len(self.holds) < 4:
            self.holds.append(self.driver.hold(stream.cuda_stream))

    def is_idle(self, stream: Any) -> bool:
        try:
            return self.driver.cuda.is_done(stream=stream.cuda_stream)
        except CudaError:
            return False

    def synchronize(self, streams: Sequence[Any]) -> None:
        self.release()
        assert run_until(self.driver, lambda: all(self.is_idle(stream) for stream in streams))

    @contextmanager
    def running(self) -> Iterator[None]:
        self.release()
        if self.mode != "manual":
            yield
            return
        self.driver.set_mode("immediate")
        yield
        self.driver.set_mode("manual")

    def release(self) -> None:
        while self.holds:
            self.driver.release(self.holds.pop())

    def let_run(self, rng: random.Random) -> None:
        if self.mode == "manual":
            for _ in range(rng.choice([0, 1, 3, 10])):
                self.driver.step(rng.choice([*range(101, 110), *range(42, self.made + 1)]))
            if rng.random() < 0.1:
                self.driver.run()
        if self.holds and rng.random() < 0.2:
            self.release()

    def fail_sometime(self, rng: random.Random) -> None:
        if not self.holds and self.alone:
            name, nth = rng.choice(HURTS_A_JOB), rng.randint(1, 8)
            self.planned.setdefault(name, []).append(self.driver.fail(name, nth))

    def faults(self) -> tuple[int, bool]:
        calls = {name: self.driver.calls(name) for name in self.planned}
        happened = sum(calls[name] >= at for name in calls for at in self.planned[name])
        return happened, any(calls[name] < max(self.planned[name]) for name in calls)

    def wait_for(self, handler: OffloadHandler | PrefixCache, jobs: list[Job] | None) -> None:
        from torch_kvswap import TransferError

        def ended() -> bool:
            try:
                handler.synchronize(jobs, timeout=0.001)
            except TimeoutError:
                return False
            except TransferError:
                return True
            return True

        self.release()
        run_until(self.driver, ended)

    def finish(self) -> str:
        self.release()
        self.driver.set_mode("immediate")
        return self.driver.unexpected_violations()


class Gpu(Device):
    """One GPU. Kernels add 0 to what they read, so that they are kernels and no copies."""

    large_shapes = ((16, 8, 128), (64, 576), (64, 8, 128), (128, 1000))
    copy_methods = ("auto", "auto", "batch", "strided", "staged", "kernel")
    block_bytes = 1 << 20
    memory_bytes = 1 << 26

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

    def finish(self) -> str:
        torch.cuda.synchronize(self.device)
        return ""
