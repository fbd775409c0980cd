"""A preempted request in each of its states, while copies on the simulated device run as late as
possible.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from continuous_batching import (
    KINDS,
    Steps,
    config,
    first_parts_of,
    model,
    needs_transformers,
    ours,
    prompts,
    small,
)
from patience import PATIENCE
from simulated_driver import Driver, place, pool, simulated

if TYPE_CHECKING:
    from continuous_batching import Seen

pytestmark = needs_transformers


@contextlib.contextmanager
def late(driver: Driver, kind: str = "full", guarded: bool = True) -> Iterator[tuple[Seen, Steps]]:
    """Ours, enabled, on the simulated driver, and a batching of prompts. The model computes at once,
    on the host: a batch waits for a copy by having it done. guarded: without it no batch waits for
    anything."""
    from simulated_cache import run_until

    from torch_kvswap.integrations.transformers import cache_view
    from torch_kvswap.integrations.transformers import swap as transformers_swap

    layout = cache_view.PagedLayout
    swap = transformers_swap.Swap
    driver.set_mode("manual")
    driver.set_stream(0, 42)

    def finish(self: Any, job: Any) -> None:
        run_until(driver, job.query)

    def placed(*tensors: Any, **named: Any) -> Any:
        return place(driver, layout(*tensors, **named))

    def pinned(layout: Any, num_pages: int, *, encoding: str, verify: str) -> Any:
        assert (encoding, verify) == ("raw", "off")
        return pool(driver, layout, num_pages)

    pinned.page_bytes_of = transformers_swap.HostPool.page_bytes_of  # type: ignore[attr-defined]
    with (
        mock.patch.object(cache_view, "PagedLayout", placed),
        mock.patch.object(transformers_swap, "HostPool", pinned),
        mock.patch.object(swap, "_make_stream_wait", finish if guarded else lambda self, job: None),
        mock.patch.object(swap, "wait", lambda self, load: finish(self, load.job)),
        ours() as seen,
    ):
        steps = Steps(model(kind), prompts(), config(small(kind)))
        try:
            yield seen, steps
        finally:
            driver.set_mode("immediate")
            driver.run()


def run_to_the_end(steps: Steps, driver: Driver, every: int = 4) -> list[list[int]]:
    """To the end, with the copies done at each fourth batch."""
    deadline = time.monotonic() + PATIENCE
    number = 0
    while number == 0 or steps.scheduler.has_pending_requests():
        assert time.monotonic() < deadline, "this does not end"
        steps.step()
        if number % every == 0:
            driver.run()
        number += 1
    return steps.results()


def alone(kind: str, inputs: list[list[int]]) -> list[list[int]]:
    return Steps(model(kind), inputs, config(500, gib=0.0)).finish()


def parked_of(seen: Seen) -> Any:
    return seen.managers[0].parked


@pytest.mark.parametrize("kind", KINDS)
@simulated
def test_copies_that_come_late_spoil_no_block(driver, kind):
    want = alone(kind, prompts())
    with first_parts_of(5000), late(driver, kind) as (seen, steps):
        assert run_to_the_end(steps, driver) == want
    assert seen.parked == seen.back > 0
    assert nothing_is_left(seen, steps)


def nothing_is_left(seen: Seen, steps: Steps) -> bool:
    """And no request has come back with other bytes."""
    return seen.is_empty and steps.free_blocks == 1 and seen.wrong == 0


@simulated
def test_control_late_copies_without_waits_spoil_blocks(driver):
    """The control of the test above."""
    want = alone("full", prompts())
    with late(driver, guarded=False) as (seen, steps):
        assert run_to_the_end(steps, driver, every=40) != want
    assert seen.wrong > 0


@simulated
def test_a_forking_batch_waits_for_all_copies(driver):
    """Forks copy into free blocks after their batch."""
    from torch_kvswap.integrations.transformers.swap import Swap

    with late(driver) as (seen, steps):
        steps.until(lambda: seen.parked > 0)
        [parked] = parked_of(seen).requests.values()
        [manager] = seen.managers
        forks = steps.scheduler._requests_to_fork
        with mock.patch.object(Swap, "_make_stream_wait") as waited:
            manager.restore_scheduled_requests([])
            waited.assert_not_called()
            forks.append(parked.state)
            manager.restore_scheduled_requests([])
        waited.assert_called_once_with(parked.stored.stores[0])
        forks.clear()


def waiting_for_its_store(steps: Steps, seen: Seen, driver: Driver) -> str:
    steps.until(lambda: seen.parked > 0)
    [(name, parked)] = parked_of(seen).requests.items()
    assert not parked.stored.stores[0].query()
    return name


def stored(steps: Steps, seen: Seen, driver: Driver) -> str:
    from simulated_cache import run_until

    name = waiting_for_its_store(steps, seen, driver)
    store = parked_of(seen).requests[name].stored.stores[0]
    run_until(driver, store.query)
    assert store.result.ok
    return name


def loading(steps: Steps, seen: Seen, driver: Driver) -> str:
    def some() -> list[str]:
        requests = parked_of(seen).requests if seen.managers else {}
        return [name for name, parked in requests.items() if parked.load is not None]

    steps.until(lambda: bool(some()))
    [name, *_] = some()
    assert not parked_of(seen).requests[name].load.job.query()
    return name


def running(steps: Steps, seen: Seen, driver: Driver) -> str:
    name = loading(steps, seen, driver)
    deadline = time.monotonic() + PATIENCE
    while name in parked_of(seen).requests:
        assert time.monotonic() < deadline, "it does not come back"
        driver.run()
        steps.step()
    assert name in steps.scheduler.active_requests
    return name


STATES = {state.__name__: state for state in (waiting_for_its_store, stored, loading, running)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", STATES)
@simulated
def test_a_request_that_is_cancelled_leaves_nothing_behind(driver, kind, state):
    want = alone(kind, prompts())
    with late(driver, kind) as (seen, steps):
        name = STATES[state](steps, seen, driver)
        held = seen.swap.pool.num_pages - len(seen.swap._free)
        steps.cancel(name)
        steps.step()
        assert name not in parked_of(seen).requests
        assert steps.state(name) is None
        assert seen.swap.pool.num_pages - len(seen.swap._free) < held or state == "running"
        got = run_to_the_end(steps, driver)
    del want[steps.names.index(name)]
    assert got == want
    assert nothing_is_left(seen, steps)


@pytest.mark.parametrize("state", STATES)
@simulated
def test_when_all_requests_fail_nothing_is_left(driver, state):
    with late(driver) as (seen, steps):
        STATES[state](steps, seen, driver)
        steps.processor.fail_all_requests(RuntimeError("the model has failed"))
    assert nothing_is_left(seen, steps)
    assert not steps.scheduler.has_pending_requests()


@pytest.mark.parametrize("direction", ["store", "load"])
@simulated
def test_a_request_whose_copy_fails_is_computed_again(driver, direction):
    want = alone("full", prompts())
    with late(driver) as (seen, steps):
        if direction == "store":
            steps.until(lambda: steps.scheduler.starved_requests or seen.parked > 0)
        else:
            stored(steps, seen, driver)
        with failing(driver, direction) as failed:
            steps.until(lambda: bool(failed) or bool(driver.run() and False))
            got = run_to_the_end(steps, driver)
    metrics = seen.swap.handler.metrics()
    assert (metrics.stores if direction == "store" else metrics.loads).failed > 0
    assert got == want
    assert seen.back < seen.parked
    assert nothing_is_left(seen, steps)


@contextlib.contextmanager
def failing(driver: Driver, direction: str) -> Iterator[list[Any]]:
    """The next job of this direction fails in the driver. What it yields has the job then."""
    from torch_kvswap.offload.handler import OffloadHandler

    submit = getattr(OffloadHandler, direction)
    failed: list[Any] = []

    def fails_once(self: Any, *args: Any, **named: Any) -> Any:
        if not failed:
            for call in ("cuMemcpyBatchAsync", "cuMemcpy2DAsync", "cuMemcpy3DAsync"):
                if driver.library.simulated_knows(call.encode()):
                    driver.fail(call, 1)
        job = submit(self, *args, **named)
        if not failed:
            failed.append(job)
            while self.metrics().stores.queued + self.metrics().loads.queued:
                time.sleep(1e-3)  # joined with the next it would be tried again, by itself
        return job

    with mock.patch.object(OffloadHandler, direction, fails_once):
        yield failed


@simulated
def test_a_refused_store_ends_the_generation(driver):
    from torch_kvswap.offload.handler import OffloadHandler

    with late(driver) as (seen, steps):
        refused = mock.Mock(side_effect=RuntimeError("the device is lost"))
        with (
            mock.patch.object(OffloadHandler, "store", refused),
            pytest.raises(RuntimeError, match="the device is lost"),
        ):
            steps.until(lambda: False)
        assert len(seen.swap._free) == seen.swap.pool.num_pages
        steps.processor.fail_all_requests(RuntimeError("the device is lost"))
    assert seen.is_empty


@simulated
def test_running_requests_get_blocks_of_loading_ones(driver):
    want = alone("full", prompts())
    with late(driver) as (seen, steps):
        name = loading(steps, seen, driver)
        manager = seen.managers[0]
        before = len(seen.swap._free)
        assert manager.offload_requests()
        assert parked_of(seen).requests[name].load is None
        assert not any(manager.view.tables(name))
        assert len(seen.swap._free) == before  # what is on the host stays there
        assert steps.scheduler.block_new_requests
        assert run_to_the_end(steps, driver) == want
    assert nothing_is_left(seen, steps)


@simulated
def test_a_scheduler_may_resume_requests_by_itself(driver):
    want = alone("full", prompts())
    with late(driver) as (seen, steps):
        del steps.scheduler._get_waiting_candidates
        driver.set_mode("immediate")
        assert run_to_the_end(steps, driver) == want
    assert seen.parked == seen.back > 0
    assert nothing_is_left(seen, steps)


@simulated
def test_ranks_resume_when_the_slowest_has_loaded(driver):
    with late(driver) as (seen, steps):
        name = loading(steps, seen, driver)
        helper = mock.Mock()
        parked_of(seen)._helper = helper
        # Another rank still loads; then its load has failed.
        for others, is_parked, computed_again in ((1, True, False), (0, False, True)):
            helper.tp_all_reduce_min = lambda mine, on_cpu, least=others: mine.clamp(max=least)
            driver.run()
            state = parked_of(seen).requests[name].state
            parked_of(seen).ready(steps.scheduler.waiting_requests.values())
            assert (name in parked_of(seen).requests) == is_parked
            assert (steps.state(name) is not state) == computed_again
        steps.processor.fail_all_requests(RuntimeError("enough"))
    assert seen.is_empty


@simulated
def test_a_parked_request_blocks_no_fitting_one(driver):
    with late(driver) as (seen, steps):
        steps.until(lambda: len(parked_of(seen).requests) > 1 if seen.managers else False)
        parked = parked_of(seen)
        [first, second] = list(parked.requests.values())[:2]
        states = [first.state, second.state]
        assert first.load is second.load is None
        for refuses in ("fits", "allocate"):
            takes_second = mock.Mock(side_effect=lambda state, *demand: state is second.state)
            yes = mock.Mock(return_value=True)
            answers = {"has_margin": yes, "demand": yes, "fits": yes, "allocate": yes}
            with (
                mock.patch.multiple(parked.view, **(answers | {refuses: takes_second})),
                mock.patch.object(parked.swap, "load") as load,
            ):
                assert parked.ready(states) == []
            assert first.load is None
            assert second.load is load.return_value
            second.load = None
        steps.processor.fail_all_requests(RuntimeError("enough"))
    assert seen.is_empty
