import re
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from serving_demo import demo
from torch_kvswap.handler import LOADS

pytestmark = pytest.mark.slow

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def small(tmp_path):
    """Arguments of a run of a second, over a text that stays as it is."""
    file = tmp_path / "text"
    file.write_bytes(Random(0).randbytes(2000))
    arguments = "--requests 8 --new-tokens 32 --gpu-blocks 20 --block-size 8"
    return [*arguments.split(), "--file", str(file)]


class ReversedLoads(demo.OffloadHandler):
    """Brings every request its own blocks in the wrong order."""

    def _submit(self, channel, ids, *arguments, **options):
        gpu_block_ids, page_ids, first_block = ids
        if channel == LOADS:
            page_ids = page_ids[::-1]
        ids = gpu_block_ids, page_ids, first_block
        return super()._submit(channel, ids, *arguments, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks_per_page", ["1", "3"])
def test_every_token_is_the_one_that_a_request_alone_gets(small, device, blocks_per_page, capsys):
    arguments = ["--device", device, "--blocks-per-page", blocks_per_page]
    assert demo.main([*small, *arguments]) == 0
    out, err = capsys.readouterr()
    assert int(re.search(r"(\d+) preemptions", out)[1]) > 3
    store, load = (re.search(rf"{way} +\d+ +(\d+) +([\d.]+)", out) for way in ("store", "load"))
    assert 0 < int(store[1]) < int(load[1])  # what did not change is not stored again
    block_bytes = 2 * 4 * 8 * 2 * 64 * 4
    for moved in (store, load):
        assert float(moved[2]) == pytest.approx(int(moved[1]) * block_bytes / 1e6, abs=0.05)
    assert f"{8 * 32} tokens compared, 0 requests differ" in out
    assert ("of the link" in out) == (device == "cuda")
    assert err == ""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits_per_value", [[], ["--bits-per-value", "12.5"]])
def test_encoded_pages_change_no_token(small, device, bits_per_value, capsys):
    arguments = ["--device", device, "--encoding", "lossless", *bits_per_value]
    assert demo.main([*small, *arguments]) == 0
    out, err = capsys.readouterr()
    assert int(re.search(r"(\d+) preemptions", out)[1]) > 3
    width = 12.5 if bits_per_value else 12.125
    for way in ("store", "load"):
        blocks, nbytes, link_bytes = re.search(
            rf"{way} +\d+ +(\d+) +([\d.]+) +([\d.]+)", out
        ).groups()
        assert float(nbytes) == pytest.approx(int(blocks) * 2 * 4 * 8 * 2 * 64 * 2 / 1e6, abs=0.05)
        assert float(link_bytes) == pytest.approx(float(nbytes) * width / 16, abs=0.1)
    assert f"{8 * 32} tokens compared, 0 requests differ" in out
    assert "24 answers compared, 0 differ" in out
    assert err == ""


def test_the_control_is_detected_with_encoded_pages(small, capsys):
    assert demo.main([*small, "--control", "--encoding", "lossless"]) == 0
    assert "256 tokens compared, 1 requests differ" in capsys.readouterr().out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_the_control_changes_the_tokens_of_one_request(small, device, seed, capsys):
    assert demo.main([*small, "--control", "--device", device, "--seed", seed]) == 0
    out = capsys.readouterr().out
    assert re.search(r"request \d, new token \d+ \(position \d+\): expected \d+, got \d+\n", out)
    assert "256 tokens compared, 1 requests differ" in out


def test_the_control_zeroes_a_block_of_the_first_request_whenever_it_comes_back():
    cache = [torch.ones(2, 4, 3)]
    control = demo.Control(SimpleNamespace(order_behind_load=lambda request: None), cache)
    first, other = (demo.Request(i, b"a", 1, 16, blocks=[1 + i]) for i in range(2))
    control.zero(first)
    control.zero(other)
    first.blocks = [3]  # from the host, which has what the block was before
    control.zero(first)
    assert cache[0][:, :, 0].tolist() == [[1, 0, 1, 0]] * 2
    assert control.request is first


def test_a_control_that_changes_nothing_fails(small, monkeypatch, capsys):
    monkeypatch.setattr(
        demo.Control, "zero", lambda self, request: setattr(self, "request", request)
    )
    assert demo.main([*small, "--control"]) == 1
    assert "should differ alone" in capsys.readouterr().err


def test_a_control_fails_if_other_requests_differ_too(small, monkeypatch, capsys):
    monkeypatch.setattr(demo, "OffloadHandler", ReversedLoads)
    assert demo.main([*small, "--control"]) == 1
    assert "should differ alone" in capsys.readouterr().err


def test_a_control_without_a_load_says_what_to_change(small, capsys):
    assert demo.main([*small, "--control", "--gpu-blocks", "200"]) == 2
    assert "nothing was loaded; give fewer --gpu-blocks" in capsys.readouterr().err


def test_a_run_without_a_swap_says_so(small, capsys):
    assert demo.main([*small, "--gpu-blocks", "200"]) == 0
    assert "nothing was swapped: give fewer --gpu-blocks" in capsys.readouterr().err


def test_wrong_tokens_are_printed_and_fail(small, monkeypatch, capsys):
    monkeypatch.setattr(demo, "OffloadHandler", ReversedLoads)
    assert demo.main(small) == 1
    out, err = capsys.readouterr()
    lines = err.splitlines()
    for line in lines:
        assert re.fullmatch(
            r"request \d, new token \d+ \(position \d+\): expected \d+, got \d+", line
        )
    assert f"256 tokens compared, {len(lines)} requests differ" in out
    assert lines


def test_a_failed_transfer_ends_the_demo_with_its_error(small, monkeypatch):
    reason = OSError("the link fell off")

    class FailingLoads(demo.OffloadHandler):
        def _read_ended(self, end, timeout):
            super()._read_ended(end, timeout)
            self._ended = [
                replace(result, state="failed", error=reason)
                if result.direction == "load"
                else result
                for result in self._ended
            ]

    monkeypatch.setattr(demo, "OffloadHandler", FailingLoads)
    with pytest.raises(RuntimeError, match=r"the load of request \d failed: the link") as caught:
        demo.main(small)
    assert caught.value.__cause__ is reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-blocks", "3"], "--gpu-blocks 3 cannot hold the longest request, which takes 14"),
        (["--file", "/no/such/file"], "no text for the prompts: .*'/no/such/file'; --file names"),
        (["--file", str(Path(__file__).parent)], "no text for the prompts: .*Is a directory"),
        (["--device", "cuda"], "--device cuda: torch finds no such device"),
        (["--bits-per-value", "12.5"], "--bits-per-value is for --encoding lossless"),
        (
            ["--encoding", "lossless", "--device", "mps"],
            "--encoding lossless is for --device cpu and cuda",
        ),
    ],
)
def test_a_user_error_is_one_clear_line(small, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo.main([*small, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.match(f"serving_demo: {message}", err)


def test_a_text_that_is_too_short_says_how_much_is_needed(tmp_path, capsys):
    file = tmp_path / "short"
    file.write_text("short")
    assert demo.main(["--file", str(file)]) == 2
    message = f"serving_demo: {file} has 5 bytes, prompts take up to 96\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_a_number_that_is_not_positive_is_refused(number, capsys):
    with pytest.raises(SystemExit) as caught:
        demo.main(["--requests", number])
    assert caught.value.code == 2
    assert f"argument --requests: '{number}' is not a positive number" in capsys.readouterr().err


def test_progress_is_shown_when_asked_for(small, capsys):
    assert demo.main([*small, "--progress"]) == 0
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("alone ")
    assert err[-1] == "serving 100 %"
