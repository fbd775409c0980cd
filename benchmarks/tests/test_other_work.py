"""What a benchmark does to make a call cold."""

from __future__ import annotations

import other_work
import pytest
import torch
from other_work import OtherWork

pytestmark = pytest.mark.slow  # of a benchmark program


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_so_many_calls_of_all_kinds_are_made_each_time(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list(other_work._torch_calls(torch.device(device)))
    made: list[int] = []

    def counted(_: torch.device) -> list[object]:
        return [
            lambda number=number, call=call: (made.append(number), call())
            for number, call in enumerate(calls)
        ]

    monkeypatch.setattr(other_work, "_torch_calls", counted)
    work = OtherWork(torch.device(device), mib=1, calls=30)
    work()
    assert made == [number % len(calls) for number in range(60)]
    assert len(calls) >= 15


def test_the_memory_is_there_and_has_the_size_that_was_asked_for() -> None:
    work = OtherWork(torch.device("cpu"), mib=3, calls=1)
    assert work._memory.nbytes == 3 << 20
    assert work._memory.sum() == (3 << 20) // 8  # each word was written
