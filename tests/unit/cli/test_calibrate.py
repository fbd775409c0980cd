"""`python -m torch_kvswap calibrate`: what it prints and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from torch_kvswap.calibrate import MEASURED, SIZES, Seconds
from torch_kvswap.cli import calibrate as command
from torch_kvswap.copy_method import DIRECTIONS, CopyMethodCosts, cache_file


class FakeMachine:
    """Measures transfers of which a microsecond is submission, and each copy one more."""

    submit = 1e-6

    def __init__(self, device: torch.device) -> None: ...

    def measure(
        self, copy_method: str, direction: str, size: int, slabs: int, blocks: int
    ) -> Seconds:
        costs = CopyMethodCosts(5e-6, 2e-6, 0, 0, {of: of * 1e-9 for of in SIZES})
        copies = blocks * (slabs if copy_method == "batch" else 1)
        submit = self.submit * (1 + copies) if blocks else 0.0
        fragments = blocks * slabs * costs.fragment_seconds(size)
        return Seconds(costs.start + blocks * costs.block + fragments, submit)

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary 9000")
    monkeypatch.setattr(command, "Machine", FakeMachine)


def test_the_costs_are_shown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    *table, kept = capsys.readouterr().out.splitlines()
    assert_expected_inline(
        "\n".join(table),
        """\
store         start, us      block, us     submit, us   per copy, us   fragments in GB/s:    1 KiB    4 KiB   16 KiB   64 KiB  512 KiB
strided            5.00           2.00           1.00           1.00                           1.0      1.0      1.0      1.0      1.0
batch              5.00           2.00           1.00           1.00                           1.0      1.0      1.0      1.0      1.0
staged             5.00           2.00           1.00           1.00                           1.0      1.0      1.0      1.0      1.0
kernel             5.00           2.00           1.00           1.00                           1.0      1.0      1.0      1.0      1.0
load          start, us      block, us     submit, us   per copy, us   fragments in GB/s:    1 KiB    4 KiB   16 KiB   64 KiB  512 KiB
strided            5.00           2.00           1.00           1.00                           1.0      1.0      1.0      1.0      1.0
batch              5.00           2.00           1.00           1.00                           1.0      1.0      1.0      1.0      1.0
staged             5.00           2.00           1.00           1.00                           1.0      1.0      1.0      1.0      1.0
kernel             5.00           2.00           1.00           1.00                           1.0      1.0      1.0      1.0      1.0""",
    )
    file = cache_file("Imaginary 9000")
    assert kept == f"kept in {file}"
    content = json.loads(file.read_text())
    for direction in DIRECTIONS:
        assert tuple(content[direction]) == MEASURED
        for costs in content[direction].values():
            assert (costs["submit_start_us"], costs["submit_copy_us"]) == (1.0, 1.0)


def test_a_calibration_that_fails_says_why_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeMachine, "submit", 0.0)
    assert command.main([]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("submitting a store by copy_method='strided' seemed to take no time")
    assert not cache_file("Imaginary 9000").exists()


@pytest.mark.parametrize(("gpus", "there"), [(1, "the only one is 0"), (2, "there are 0 to 1")])
@pytest.mark.parametrize("device", ["9", "-1"])
def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: int,
    there: str,
    device: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert command.main(["--device", device]) == 2
    assert capsys.readouterr() == ("", f"there is no GPU {device}; {there}\n")
