"""Tests marked gpu need CUDA: without it they are skipped, or fail if KVSWAP_REQUIRE_GPU is 1."""

import gc
import os

import pytest
import torch


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported stays: to look through all of it for garbage takes long


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get("KVSWAP_REQUIRE_GPU") == "1":
        pytest.fail("KVSWAP_REQUIRE_GPU is 1, but torch finds no CUDA device", pytrace=False)
    pytest.skip("no CUDA device")
