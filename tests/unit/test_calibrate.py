"""Calibration measures the costs that transfers have."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_cache import new_threads, threads
from simulated_driver import Driver, on_device, simulated

import torch_kvswap.calibrate
from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap.calibrate import (
    MEASURED,
    SIZES,
    InlineHandler,
    Machine,
    Measure,
    Seconds,
    calibrate,
)
from torch_kvswap.copy_method import DIRECTIONS, CopyMethodCosts

CPU = torch.device("cpu")
ANY_CALL = 20e-6  # seconds of a call that submits nothing


def submit_seconds(costs: CopyMethodCosts, copy_method: str, slabs: int, blocks: int) -> float:
    copies = blocks * (slabs if copy_method == "batch" else 1)
    return costs.submit_start + copies * costs.submit_copy if blocks else 0.0


def machine_with(costs: dict[tuple[str, str], CopyMethodCosts]) -> Measure:
    def measure(copy_method: str, direction: str, size: int, slabs: int, blocks: int) -> Seconds:
        of_method = costs[direction, copy_method]
        submit = ANY_CALL + submit_seconds(of_method, copy_method, slabs, blocks)
        fragments = blocks * slabs * of_method.fragment_seconds(size)
        return Seconds(of_method.start + blocks * of_method.block + fragments, submit)

    return measure


def made_up() -> dict[tuple[str, str], CopyMethodCosts]:
    """Other costs for each copy method."""
    costs = {}
    for n, kind in enumerate(product(DIRECTIONS, MEASURED), 1):
        fragment = {size: (n * 30 + size / 50) * 1e-9 for size in SIZES}
        costs[kind] = CopyMethodCosts(n * 5e-6, n * 0.3e-6, n * 2e-6, n * 0.5e-6, fragment)
    return costs


def test_it_finds_the_start_the_block_every_fragment_and_the_submission() -> None:
    truth = made_up()
    found = calibrate(machine_with(truth))
    assert {
        (direction, copy_method) for direction in found for copy_method in found[direction]
    } == set(truth)
    for (direction, copy_method), expected in truth.items():
        costs = found[direction][copy_method]
        assert costs.start == pytest.approx(expected.start)
        assert costs.block == pytest.approx(expected.block)
        assert costs.submit_start == pytest.approx(expected.submit_start)
        assert costs.submit_copy == pytest.approx(expected.submit_copy)
        assert costs.fragment == pytest.approx(expected.fragment)


def test_a_machine_so_busy_that_more_blocks_take_less_time_is_refused() -> None:
    def measure(copy_method: str, direction: str, size: int, slabs: int, blocks: int) -> Seconds:
        noise = 1e-5 / max(blocks, 0.5)
        return Seconds(noise, 1e-4 - noise)

    with pytest.raises(RuntimeError, match=r"^a store by copy_method='strided' seemed to take no"):
        calibrate(measure)


@pytest.mark.parametrize("blocks", [0, 1, 64])
@pytest.mark.parametrize("size", [512, 4096, SIZES[-1]])
def test_a_disturbed_measurement_hardly_changes_what_submission_is_predicted_to_take(
    size: int, blocks: int
) -> None:
    """Neither does every call submit its job after that, nor none."""
    truth = made_up()
    undisturbed = machine_with(truth)

    def measure(copy_method: str, direction: str, of: int, slabs: int, count: int) -> Seconds:
        seconds = undisturbed(copy_method, direction, of, slabs, count)
        is_disturbed = of == size and min(count, 2) == min(blocks, 2)
        return seconds._replace(submit=seconds.submit + 5e-3) if is_disturbed else seconds

    for direction, of_direction in calibrate(measure).items():
        for copy_method, costs in of_direction.items():
            expected = truth[direction, copy_method]
            assert costs.submit_start == pytest.approx(expected.submit_start)
            assert costs.submit_copy == pytest.approx(expected.submit_copy)


def test_costs_that_would_leave_every_submission_to_the_caller_are_refused() -> None:
    measure = machine_with(
        {kind: replace(costs, submit_start=0, submit_copy=0) for kind, costs in made_up().items()}
    )
    with pytest.raises(RuntimeError, match="submitting a store by copy_method='strided'"):
        calibrate(measure)


def test_the_machine_measures_calls_of_any_size() -> None:
    machine = Machine(torch.device("cpu"))
    try:
        for direction in DIRECTIONS:
            none, one = (machine.measure("auto", direction, 4096, 3, count) for count in (0, 1))
            assert one.total >= one.submit > 0
            assert none.submit > 0
    finally:
        machine.close()


def test_strided_copies_are_measured_with_layers_at_one_distance_and_the_others_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all layers lie at one distance, strided copies are faster than batches anyway."""
    machine = Machine(CPU)
    used: dict[str, OffloadHandler] = {}

    def handler_of(layout: PagedLayout, pool: HostPool, copy_method: str) -> OffloadHandler:
        used[copy_method] = OffloadHandler(layout, pool)
        return used[copy_method]

    monkeypatch.setattr(torch_kvswap.calibrate, "InlineHandler", handler_of)
    try:
        for copy_method in MEASURED:
            machine.measure(copy_method, "load", 4096, 5, 2)
    finally:
        machine.close()
    assert len({id(handler.pools[0]) for handler in used.values()}) == 1
    for copy_method, handler in used.items():
        (layout,) = handler.layouts
        distances, storages = set(np.diff(layout.bases)), set(layout.storages)
        if copy_method == "strided":
            assert (len(distances), len(storages)) == (1, 1)
        else:
            assert len(storages) == 5
            # PyTorch gives smaller tensors a part of an allocation.
            assert all(tensor.untyped_storage().nbytes() > 10 << 20 for tensor in layout.tensors)


@simulated
def test_a_handler_that_is_measured_submits_all_itself_whatever_the_costs_are(
    driver: Driver, tmp_path: Path
) -> None:
    """Costs that leave all to another thread are the control, and then a file without any."""
    layout = on_device(driver, torch.zeros(4, 200, 512, dtype=torch.uint8))
    ids = list(range(200))
    file = tmp_path / "costs.json"
    costs = CopyMethodCosts(1e-6, 1e-6, 51e-6, 0.0, {512: 1e-6}).to_json()
    file.write_text(json.dumps({key: {"strided": costs} for key in DIRECTIONS}))

    def new_threads_of(handler: OffloadHandler) -> int:
        before = threads()
        with handler:
            store = handler.store(gpu_block_ids=ids, page_ids=ids, after=())
            load = handler.load(gpu_block_ids=ids, page_ids=ids, after=())
            handler.synchronize([store, load])
            return new_threads(before)

    with pytest.MonkeyPatch.context() as environment, HostPool(layout, 200) as pool:
        environment.setenv("KVSWAP_COPY_METHOD_COSTS", str(file))
        assert new_threads_of(OffloadHandler(layout, pool, copy_method="strided")) == 2
        assert new_threads_of(InlineHandler(layout, pool, "strided")) == 0
        file.write_text("{}")
        assert new_threads_of(InlineHandler(layout, pool, "batch")) == 0


@simulated
def test_a_transfer_that_another_thread_submitted_is_no_measurement(driver: Driver) -> None:
    layout = on_device(driver, torch.zeros(4, 8, 512, dtype=torch.uint8))
    with (
        HostPool(layout, 8) as pool,
        OffloadHandler(layout, pool, copy_method="batch", submit_thread=True) as handler,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(Machine, "_handler", lambda *_: handler)
        with pytest.raises(RuntimeError, match=r"a store by copy_method='batch' was queued"):
            Machine(torch.device("cpu")).measure("batch", "store", 512, 4, 2)


@pytest.mark.gpu
def test_a_gpu_is_calibrated() -> None:
    machine = Machine(torch.device("cuda", 0))
    try:
        costs = calibrate(machine.measure)
    finally:
        machine.close()
    for direction in DIRECTIONS:
        assert set(costs[direction]) == set(MEASURED)
        big = max(SIZES)
        for of_method in costs[direction].values():
            assert of_method.fragment_seconds(big) > 0
        assert costs[direction]["strided"].submit_copy > 1e-7  # a driver call for each block
        assert costs[direction]["batch"].submit_copy > 1e-8
