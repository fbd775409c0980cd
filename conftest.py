"""Tests marked gpu need CUDA: without it they are skipped, or fail if KVSWAP_REQUIRE_GPU is 1."""

import gc
import os

import pytest
import torch

# Each stream of a test gets a hardware queue of its own: a stream that a test holds up must not
# hold up others that share its queue. CUDA reads it when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# Tensors of tests are small. OpenMP's threads wait for each other in a loop, which takes a hundred
# times as long where other processes need the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported stays: to look through all of it for garbage takes long


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get("KVSWAP_REQUIRE_GPU") == "1":
        pytest.fail("KVSWAP_REQUIRE_GPU is 1, but torch finds no CUDA device", pytrace=False)
    pytest.skip("no CUDA device")
