"""The process in which tests run on the fake accelerator, one after another."""

import os

import torch

if is_rocm := "FAKE_ROCM" in os.environ:
    torch.version.hip = "7.2.0"  # before torch_kvswap is imported, which asks for it

from worker_process import serve

from fake_accelerator import load, load_as_rocm

if __name__ == "__main__":
    serve(load_as_rocm if is_rocm else load)
