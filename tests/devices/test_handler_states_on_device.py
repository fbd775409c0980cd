"""Random calls of a handler on the fake accelerator. See tests/support/handler_states.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import pytest
import torch
from fake_accelerator import Accelerator, Hold
from handler_states import PAGES, HandlerMachine, run_states
from hypothesis.errors import Flaky
from patience import in_time
from queued_devices import DEVICE, current, forget_queues, on_queued_device, queue_of
from torch import Tensor

from torch_kvswap import HostPool, PagedLayout


class Machine(HandlerMachine):
    """Copies between host and device are held, and let go one by one. All else runs by itself, except
    on a stream that is held."""

    accelerator: ClassVar[Accelerator]

    hurts_a_job = ("allocate", "copy", "kernel", "record", "wait")
    may_lose_the_device = ("query",)
    device_errors = RuntimeError
    fails_jobs_together = True

    def begin(self) -> None:
        forget_queues()
        self.accelerator.reset()
        self.other = torch.Stream(device=DEVICE)
        self.taken_away = False

    def rows_of(self, raw: Tensor) -> Tensor:
        if raw.count_nonzero():
            return raw.to(DEVICE)
        return torch.zeros_like(raw, device=DEVICE)  # not a copy, which would wait

    def make_cache(self, raw: list[Tensor], per_page: int) -> tuple[PagedLayout, HostPool]:
        layout = PagedLayout([tensor.to(DEVICE) for tensor in raw])
        return layout, HostPool(layout, PAGES, per_page)

    def bytes_of(self, tensor: Tensor) -> Tensor:
        return self.accelerator.peek(tensor)

    def stop(self) -> None:
        self.copies = self.accelerator.hold_copies()

    def go_on(self) -> None:
        self.copies.release()
        if self.is_lost:  # or what the handler has given up would still run
            self.accelerator.lose()

    def run_some(self, number: int, steps: int) -> None:
        self.accelerator.let_copies(steps)

    def run_all(self) -> None:
        self.copies.release()
        if not self.holds:
            with suppress(RuntimeError):
                torch.accelerator.synchronize()
        self.stop()

    def hold_up(self, other: bool) -> Hold:
        return self.accelerator.hold(self.other if other else current())

    def let_go(self, hold: Hold) -> None:
        hold.release()

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            while not self._copies(target, source):
                pass  # all of it or nothing

    def _copies(self, target: Tensor, source: Tensor) -> bool:
        try:
            target.copy_(source)
        except RuntimeError:
            if self.is_lost:
                raise
            assert self.faults
            return False
        return True

    def is_idle(self) -> bool:
        return bool(current().query())

    @contextmanager
    def behind(self, after: str) -> Iterator[Any]:
        if after == "nothing" and self.is_idle():
            yield ()
        elif after not in ("other", "event"):
            yield current() if after == "stream" else None
        else:
            event = torch.Event(DEVICE)
            event.record(current())
            self.other.wait_event(event)
            yield self.other if after == "other" else event
            with suppress(RuntimeError):
                event.record(self.other)  # means another moment from now on

    def make_fail(self, name: str, nth: int) -> None:
        self.accelerator.fail(name, nth)  # type: ignore[arg-type]

    def calls(self, name: str) -> int:
        return self.accelerator.counters().calls[name]  # type: ignore[index]

    def take_away(self) -> None:
        self.accelerator.lose()
        self.taken_away = True

    @property
    def is_lost(self) -> bool:
        return self.taken_away or super().is_lost

    def check_rest(self) -> None:
        queue = queue_of(self.handler)
        if self.is_lost:
            return
        assert in_time(lambda: queue.commands.is_empty)
        assert (queue.records, queue._streams) == ({}, {})
        torch.accelerator.synchronize()
        assert self.accelerator.pending() == ""


class Unordered(Machine):
    waits = False


@pytest.mark.slow
@on_queued_device
def test_a_handler_does_what_the_model_does_whatever_is_called_and_fails(
    accelerator: Accelerator,
) -> None:
    Machine.accelerator = accelerator
    run_states(Machine, 120)


@on_queued_device
def test_jobs_that_wait_for_no_kernel_are_found(accelerator: Accelerator) -> None:
    Machine.accelerator = accelerator
    with pytest.raises((AssertionError, Flaky)):
        run_states(Unordered, 400)
