"""The rule that chooses the copy method of a transfer, whatever is available."""

from __future__ import annotations

import pytest

from torch_kvswap._native.loader import native

KIB, MIB = 1 << 10, 1 << 20
ONE, APART, WHOLE = "one tensor", "layers one by one", "whole blocks"


def chosen(
    layers: int, kib: int, arrangement: str, blocks: int, *, without: str = "", **state: bool
) -> str:
    runs = layers if arrangement == APART else 1
    fragments = 1 if arrangement == WHOLE else layers
    preferred = native.preferred_copy_methods(
        layers * kib * KIB, layers, runs, fragments, blocks, **state
    )
    assert sorted(preferred) == ["batch", "kernel", "staged", "strided"]
    return next(method for method in preferred if method not in without.split())


# The methods of 1, 2, 8 and 512 blocks.
LOADS = [
    (160, 8, ONE, "strided kernel staged staged"),
    (160, 8, APART, "kernel kernel staged staged"),
    (160, 2, ONE, "strided kernel kernel staged"),
    (160, 2, APART, "kernel kernel kernel staged"),
    (64, 32, ONE, "strided kernel staged staged"),
    (61, 18, APART, "kernel kernel staged staged"),
    (1, 2048, ONE, "batch batch batch batch"),  # large fragments
    (4, 1024, APART, "batch batch batch batch"),
    (8, 512, APART, "kernel staged staged staged"),
    (160, 8, WHOLE, "batch batch batch batch"),
    (61, 1, WHOLE, "batch kernel kernel staged"),
]
STORES = [
    (160, 8, ONE, "strided strided staged staged"),
    (160, 8, APART, "staged staged staged staged"),
    (160, 2, ONE, "strided strided strided staged"),
    (160, 2, APART, "staged staged staged staged"),
    (16, 1, ONE, "strided strided strided staged"),
    (1, 2048, ONE, "batch batch batch batch"),
]


@pytest.mark.parametrize(
    ("is_store", "layers", "kib", "arrangement", "methods"),
    [*((False, *load) for load in LOADS), *((True, *store) for store in STORES)],
)
def test_the_method_follows_shape_and_size(
    is_store: bool, layers: int, kib: int, arrangement: str, methods: str
) -> None:
    found = (chosen(layers, kib, arrangement, count, is_store=is_store) for count in (1, 2, 8, 512))
    assert " ".join(found) == methods


def test_a_small_store_has_16_strided_copies() -> None:
    assert chosen(16, 1, ONE, 16, is_store=True) == "strided"
    assert chosen(16, 1, ONE, 17, is_store=True) == "staged"


def test_a_kernel_copies_4_mib_unless_expedited() -> None:
    assert chosen(4, 256, APART, 4) == "kernel"
    assert chosen(4, 256, APART, 5) == "staged"
    assert chosen(4, 256, APART, 5, is_expedited=True) == "kernel"
    assert chosen(4, 256, ONE, 1, is_expedited=True) == "strided"


def test_large_fragments_without_batches_are_staged() -> None:
    assert chosen(1, 2048, ONE, 8, without="batch") == "staged"
    assert chosen(1, 2048, ONE, 1, without="batch") == "strided"


@pytest.mark.parametrize(
    ("layers", "arrangement", "method"),
    [(4, ONE, "strided"), (3, ONE, "batch"), (160, APART, "batch"), (160, WHOLE, "batch")],
)
def test_without_kernels_few_runs_are_strided(layers: int, arrangement: str, method: str) -> None:
    for blocks in (2, 512):
        assert chosen(layers, 8, arrangement, blocks, without="kernel staged") == method


def test_large_transfers_without_staging_memory_use_copy_engines() -> None:
    assert chosen(160, 8, APART, 512, without="staged") == "batch"
    assert chosen(160, 8, APART, 512, without="staged batch strided") == "kernel"


@pytest.mark.parametrize(
    ("arrangement", "blocks", "method"),
    [
        (ONE, 51, "strided"),  # 64 MiB at most
        (ONE, 52, "staged"),
        (APART, 3, "batch"),  # 512 fragments at most
        (APART, 4, "staged"),
    ],
)
def test_crowded_gpus_use_copy_engines(arrangement: str, blocks: int, method: str) -> None:
    assert chosen(160, 8, arrangement, blocks, is_crowded=True) == method
    assert chosen(160, 8, arrangement, blocks) in ("kernel", "staged")
