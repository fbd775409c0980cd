"""Random calls of a handler on the simulated driver. See tests/support/handler_states.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import pytest
from handler_states import LAYERS, PAGES, HandlerMachine, afters, run_states
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import invariant, rule
from simulated_cache import HURTS_A_JOB, new_threads, threads
from simulated_driver import HOST, Driver, place, pool, simulated
from simulated_driver.cuda import CudaError
from simulated_driver.handles import Event, Stream
from torch import Tensor

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap._native.loader import native

KERNELS, OTHER = 42, 43  # streams: of the kernels, which is current; another that is behind it
HAS_KERNELS = bool(native.kernel_version())


class Machine(HandlerMachine):
    driver: ClassVar[Driver]

    copy_methods = ("auto", "staged", "kernel") if HAS_KERNELS else ("auto",)
    kinds_of_loads = ("load", "load", "expedited", "layers", "gate")
    hurts_a_job = HURTS_A_JOB
    may_lose_the_device = (
        "cuCtxPushCurrent",
        "cuEventElapsedTime",
        "cuEventQuery",
        "cuStreamQuery",
    )
    device_errors = CudaError

    def begin(self) -> None:
        self.driver.reset()
        self.driver.set_stream(0, KERNELS)

    def rows_of(self, raw: Tensor) -> Tensor:
        rows = self.driver.memory(raw.numel(), HOST).view(raw.shape)
        rows.copy_(raw)
        return rows

    def make_cache(self, raw: list[Tensor], per_page: int) -> tuple[PagedLayout, HostPool]:
        layout = place(self.driver, PagedLayout(raw))
        return layout, pool(self.driver, layout, PAGES, per_page)

    def make_handler(self, **options: Any) -> OffloadHandler:
        self.driver.set_mode("manual")
        self.threads = threads()
        if options["copy_method"] != "auto":  # the first such handler loads the kernels
            method = options["copy_method"]
            OffloadHandler(self.layout, self.host, copy_method=method).close()
        first = self.driver.cuda.create_stream()
        self.driver.cuda.destroy_stream(first)
        handler = super().make_handler(**options)
        self.gate = handler.gate(LAYERS)
        self.streams = [KERNELS, OTHER, *range(first + 1, first + 10)]
        return handler

    def bytes_of(self, tensor: Tensor) -> Tensor:
        return tensor

    def stop(self) -> None:
        self.driver.set_mode("manual")

    def go_on(self) -> None:
        self.driver.set_mode("immediate")

    def run_some(self, number: int, steps: int) -> None:
        for _ in range(steps):
            self.driver.step(self.streams[number % len(self.streams)])

    def run_all(self) -> None:
        self.driver.run()

    def hold_up(self, other: bool) -> int:
        return self.driver.hold(OTHER if other else KERNELS)

    def let_go(self, hold: int) -> None:
        self.driver.release(hold)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.driver.cuda.copy_batch(list(pairs), KERNELS)

    def is_idle(self) -> bool:
        return self.driver.cuda.is_done(stream=KERNELS)

    @contextmanager
    def behind(self, after: str) -> Iterator[Any]:
        if after == "nothing" and self.is_idle():
            yield ()
        elif after not in ("other", "event"):
            yield Stream(KERNELS) if after == "stream" else None
        else:
            event = self.driver.cuda.create_event(timed=False)
            try:
                self.driver.cuda.record(event, KERNELS)
                self.driver.cuda.wait(OTHER, event)
                yield Stream(OTHER) if after == "other" else Event(event)
            finally:
                with suppress(CudaError):
                    self.driver.cuda.record(event, OTHER)  # means another moment from now on
                self.driver.cuda.destroy_event(event)

    def make_fail(self, name: str, nth: int) -> None:
        self.driver.fail(name, nth)

    def calls(self, name: str) -> int:
        return self.driver.calls(name)

    def take_away(self) -> None:
        self.driver.lose()

    @property
    def is_lost(self) -> bool:
        try:
            self.is_idle()
        except CudaError:
            return True
        return super().is_lost

    def check_rest(self) -> None:
        self.is_used_well()
        assert new_threads(self.threads) == 0
        assert self.driver.live("streams") == 1  # the gate's, which stays
        assert self.driver.live("events") == 2 or self.is_lost
        assert self.driver.pending() == "" or self.is_lost

    @invariant()
    def is_used_well(self) -> None:
        assert self.driver.unexpected_violations() == ""

    # Gates

    def options_of(self, kind: str) -> dict[str, Any]:
        if kind == "gate" and self.has_faults():
            # A gate that cannot be opened stays closed: tests/sim/test_handler_faults.py.
            kind = "layers"
        return {"gate": self.gate} if kind == "gate" else super().options_of(kind)

    @rule(layer=st.integers(0, LAYERS - 1), after=afters, held=st.booleans())
    def look_behind_the_gate(self, layer: int, after: str, held: bool) -> None:
        """Right after a load with the gate. held: which another one lets wait."""
        flight = self.last
        if flight is None or flight.is_store or self.is_lost or self.has_faults():
            return
        before, blocks = len(self.model.flights), list(flight.targets)
        if held:
            self.submit(blocks, list(range(PAGES)), 1, "current", "gate")
            self.hold(other=True)
            after = "other"
        self.submit(blocks, list(range(PAGES))[::-1], 0, after, "gate")
        if blocks and len(self.model.flights) == before + 1 + held:
            self.gate.wait(layer)
            self.copy_what_is_seen(blocks[0], layer, self.model.blocks[blocks[0]])


class Unordered(Machine):
    waits = False


@pytest.mark.slow
@simulated
def test_a_handler_does_what_the_model_does_whatever_is_called_and_fails(driver: Driver) -> None:
    Machine.driver = driver
    run_states(Machine, 200)


@simulated
def test_jobs_that_wait_for_no_kernel_are_found(driver: Driver) -> None:
    Machine.driver = driver
    with pytest.raises((AssertionError, Flaky)):
        run_states(Unordered, 400)
