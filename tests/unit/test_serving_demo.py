"""The demo of `make demo`: it runs, its tokens are right, and it finds wrong ones."""

import re

import pytest
from served_engine import serving

from serving_demo import demo

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The last rows of the table: without the host cache, and with it.
TABLE = r"^(of \d+ prompt tokens.*|preempted.*|tokens computed.*?) +(\d+) +(\d+)$"
SMALL = ["--requests", "6", "--new-tokens", "24", "--gpu-blocks", "15"]


@pytest.fixture(autouse=True)
def late_cpu(monkeypatch):
    """A forgotten wait, and a block that is used again too early, show on the CPU."""
    monkeypatch.setenv("KVSWAP_LATE_CPU", "1")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("encoding", ["raw", "lossless"])
def test_every_token_is_right(device, encoding, capsys):
    assert demo.main([*SMALL, "--device", device, "--encoding", encoding]) == 0
    printed = capsys.readouterr().out
    rows = {name: list(map(int, pair)) for name, *pair in re.findall(TABLE, printed, re.MULTILINE)}
    (nothing, reused), both, (again, never) = rows.values()
    assert (nothing, never) == (0, 0)
    assert min(reused, *both, again) > 0
    assert "144 tokens compared, 0 requests differ" in printed


@pytest.mark.slow
def test_demos_on_one_server_reuse_more(tmp_path, capsys):
    def reused(*options):
        assert demo.main([*SMALL, *options]) == 0
        printed = capsys.readouterr().out
        assert "144 tokens compared, 0 requests differ" in printed
        (_, count), *_ = [row[1:] for row in re.findall(TABLE, printed, re.MULTILINE)]
        return int(count)

    path = str(tmp_path / "pages")
    with serving(path, pages=768):  # as much memory as two have of their own
        first, second = reused("--server", path), reused("--server", path)
        with pytest.raises(SystemExit, match=r"^--server: .*: demo, seed 1 here, demo, seed 0 at"):
            demo.main([*SMALL, "--server", path, "--seed", "1"])
    alone = reused()
    assert first == alone
    assert second > 2 * alone


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--device", "meta", "the demo runs on cpu and cuda, not on meta"),
        ("--device", "gpu", "the demo runs on cpu and cuda, not on gpu"),
        ("--requests", "0", "'0' is no whole number from 1 on"),
    ],
)
def test_a_wrong_argument_is_named(option, value, why, capsys):
    with pytest.raises(SystemExit):
        demo.main([option, value])
    assert f"argument {option}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize("device", DEVICES)
def test_control_a_lost_block_changes_tokens(device, capsys):
    assert demo.main([*SMALL, "--device", device, "--control"]) == 0
    assert "144 tokens compared, 1 requests differ" in capsys.readouterr().out
