"""Calibration measures the costs that transfers have."""

from __future__ import annotations

import pytest
import torch

from torch_kvswap.calibrate import COPY_METHODS, SIZES, STEPS, Machine, Seconds, calibrate
from torch_kvswap.copy_method import CopyMethodCosts


def machine_with(costs: dict[tuple[str, str], CopyMethodCosts]) -> Seconds:
    def seconds(copy_method: str, direction: str, size: int, slabs: int, blocks: int) -> float:
        return costs[direction, copy_method].seconds(blocks, slabs, size)

    return seconds


def made_up() -> dict[tuple[str, str], CopyMethodCosts]:
    """Other figures for each copy_method."""
    costs = {}
    for direction, copy_methods in COPY_METHODS.items():
        for copy_method in copy_methods:
            n = 1 + len(costs)
            fragment = {size: (n * 30 + size / 50) * 1e-9 for size in SIZES}
            costs[direction, copy_method] = CopyMethodCosts(n * 5e-6, n * 0.3e-6, fragment)
    return costs


def test_it_finds_the_start_the_block_and_every_fragment() -> None:
    truth = made_up()
    found = calibrate(machine_with(truth))
    assert {
        (direction, copy_method) for direction in found for copy_method in found[direction]
    } == set(truth)
    for (direction, copy_method), expected in truth.items():
        costs = found[direction][copy_method]
        assert costs.start == pytest.approx(expected.start)
        assert costs.block == pytest.approx(expected.block)
        assert costs.fragment == pytest.approx(expected.fragment)


def test_noise_makes_no_cost_negative() -> None:
    def seconds(copy_method: str, direction: str, size: int, slabs: int, blocks: int) -> float:
        return 1e-5 / blocks  # more blocks take less

    for of_direction in calibrate(seconds).values():
        for costs in of_direction.values():
            assert min(costs.start, costs.block, *costs.fragment.values()) >= 0


def test_progress_ends_when_all_is_measured() -> None:
    steps: list[None] = []
    calibrate(machine_with(made_up()), lambda: steps.append(None))
    assert len(steps) == STEPS


def test_a_kernel_is_never_chosen_for_stores() -> None:
    assert "kernel" not in calibrate(machine_with(made_up()))["store"]


def test_the_machine_moves_blocks_on_the_path_that_is_asked_for() -> None:
    machine = Machine(torch.device("cpu"))
    try:
        assert machine.seconds("batch", "store", 4096, 3, 2) > 0
        assert machine.seconds("batch", "load", 512, 1, 2) > 0
    finally:
        machine.close()


@pytest.mark.gpu
def test_a_gpu_is_calibrated() -> None:
    machine = Machine(torch.device("cuda", 0))
    try:
        costs = calibrate(machine.seconds)
    finally:
        machine.close()
    for direction, copy_methods in COPY_METHODS.items():
        assert set(costs[direction]) == set(copy_methods)
        big = max(SIZES)
        for of_method in costs[direction].values():
            assert 1e9 < big / of_method.fragment_seconds(big) < 2e11  # bytes a second
