"""The kinds of memory between which tests copy."""

import pytest
import torch

PAIRS = [
    ("cpu", "cpu"),
    *(
        pytest.param(pair, marks=pytest.mark.gpu)
        for pair in (
            ("cpu", "cuda"),
            ("pinned", "cuda"),
            ("cuda", "cpu"),
            ("cuda", "pinned"),
            ("cuda", "cuda"),
        )
    ),
]


def place(tensor: torch.Tensor, where: str) -> torch.Tensor:
    return tensor.pin_memory() if where == "pinned" else tensor.to(where)
