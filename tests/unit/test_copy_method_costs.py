"""The cost tables of the copy methods: where they come from, and what they predict."""

from __future__ import annotations

import json
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from torch_kvswap._native.log import warn_once
from torch_kvswap.copy_method import (
    DIRECTIONS,
    SHIPPED,
    CopyMethodCosts,
    cache_file,
    copy_method_options,
    read_costs,
    write_costs,
)

COSTS = {
    direction: {"strided": CopyMethodCosts(1e-5, 2e-6, 3e-6, 4e-6, {1024: 1e-7, 4096: 3e-7})}
    for direction in DIRECTIONS
}


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVSWAP_COPY_METHOD_COSTS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_size_in_between_lies_between_its_neighbours() -> None:
    costs = CopyMethodCosts(0, 0, 0, 0, {1024: 1.0, 4096: 3.0})
    sizes = (1, 1024, 2048, 4096, 8192)
    assert [costs.fragment_seconds(size) for size in sizes] == [1.0, 1.0, 2.0, 3.0, 6.0]


def test_json_gives_back_what_it_was_given() -> None:
    costs = COSTS["load"]["strided"]
    again = CopyMethodCosts.from_json(json.loads(json.dumps(costs.to_json())))
    assert again.fragment == pytest.approx(costs.fragment)
    assert (again.start, again.block) == pytest.approx((costs.start, costs.block))
    assert (again.submit_start, again.submit_copy) == pytest.approx((3e-6, 4e-6))


def test_a_gpu_that_is_not_known_has_the_generic_costs() -> None:
    read = read_costs("Imaginary 9000")
    assert read.source == "copy_method_costs.json, NVIDIA H200"
    for direction in DIRECTIONS:
        assert {"strided", "batch"} <= set(read.costs[direction])


def test_costs_of_another_gpu_are_named_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary 9000")
    gpu = torch.device("cuda:0")
    copy_method_options("strided", 1 << 20, gpu)
    assert not caplog.messages  # nothing is chosen
    for _ in range(2):
        copy_method_options("auto", 1 << 20, gpu)
    assert caplog.messages == [
        "the copy method is chosen by the costs on an NVIDIA H200: none are known for Imaginary "
        "9000; `python -m torch_kvswap calibrate` measures them, in some seconds, while the GPU is "
        "otherwise idle"
    ]
    caplog.clear()
    warn_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    copy_method_options("auto", 1 << 20, gpu)
    assert not caplog.messages


def test_every_shipped_table_can_be_read() -> None:
    for name in json.loads(SHIPPED.read_text()):
        assert read_costs(name).source == f"copy_method_costs.json, {name}"


def test_what_was_measured_here_comes_before_what_is_shipped() -> None:
    file = write_costs("Imaginary 9000", COSTS)
    assert file == cache_file("Imaginary 9000")
    read = read_costs("Imaginary 9000")
    assert read.source == str(file)
    assert read.costs["store"]["strided"].fragment == pytest.approx({1024: 1e-7, 4096: 3e-7})
    assert read_costs("Other GPU").source == "copy_method_costs.json, NVIDIA H200"


def test_a_file_that_is_named_comes_before_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_costs("Imaginary 9000", COSTS)
    named = tmp_path / "mine.json"
    named.write_text(cache_file("Imaginary 9000").read_text())
    monkeypatch.setenv("KVSWAP_COPY_METHOD_COSTS", str(named))
    assert read_costs("Imaginary 9000").source == str(named)


@pytest.mark.parametrize("kind", ["too long", "of another user", "without a home"])
def test_a_cache_that_cannot_be_looked_at_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    if kind == "too long":
        monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x" * 5000)
    elif kind == "without a home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    else:  # root may look at all
        folder = cache_file("Imaginary 9000").parent

        def denied(inner: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: Path, *args: Any, **options: Any) -> Any:
                if path.is_relative_to(folder):
                    raise PermissionError(13, "Permission denied", str(path))
                return inner(path, *args, **options)

            return call

        for name in ("stat", "open", "read_bytes", "read_text"):
            monkeypatch.setattr(Path, name, denied(getattr(Path, name)))
    assert read_costs("Imaginary 9000").source == "copy_method_costs.json, NVIDIA H200"
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "shipped costs of the copy methods are used, the cache cannot"
    )
    assert copy_method_options("auto", 0, torch.device("cuda", 0)).copy_method == -1


def test_a_cache_in_what_is_no_folder_is_empty(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert read_costs("Imaginary 9000").source == "copy_method_costs.json, NVIDIA H200"
    assert not caplog.records


@pytest.mark.parametrize("fails", ["write_text", "rename"])
def test_costs_that_cannot_be_written_leave_no_file(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(path: Path, *args: object) -> None:
        path.touch()  # a part was written
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, fails, full)
    with pytest.raises(OSError, match="No space left"):
        write_costs("Imaginary 9000", COSTS)
    assert list(cache_file("Imaginary 9000").parent.iterdir()) == []


FIELDS = {
    "start_us": "1",
    "block_us": "1",
    "submit_start_us": "1",
    "submit_copy_us": "1",
    "fragment_us": '{"512": 1}',
}


def with_cost(field: str, text: str | None) -> str:
    fields = {**FIELDS, field: text}
    written = ", ".join(f'"{name}": {value}' for name, value in fields.items() if value)
    return f'{{"store": {{"strided": {{{written}}}}}, "load": {{}}}}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        (with_cost("start_us", "NaN"), "ValueError: store.strided.start_us is nan"),
        (with_cost("start_us", "-1"), "ValueError: store.strided.start_us is -1"),
        (with_cost("fragment_us", '{"0": 1}'), "the size of store.strided.fragment_us.0 is 0"),
        (with_cost("fragment_us", "{}"), "store.strided.fragment_us needs at least one size"),
        *((with_cost(key, None), f"store.strided lacks '{key}'") for key in FIELDS),
        (with_cost("submit_us", "1"), "store.strided has the unknown key 'submit_us'"),
        ('{"store": {}}', "ValueError: the file lacks 'load'"),
        ('{"store": [], "load": {}}', "TypeError: store is a list; it must be an object"),
        ('{"store": {"stride": {}}, "load": {}}', "store has the unknown key 'stride'; the keys"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, reason: str
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    monkeypatch.setenv("KVSWAP_COPY_METHOD_COSTS", str(file))
    with pytest.raises(ValueError, match=reason) as refusal:
        read_costs("Imaginary 9000")
    message = str(refusal.value)
    assert message.startswith(f"the costs of the copy methods cannot be read from {file}: ")
    assert message.endswith("remove it; `python -m torch_kvswap calibrate` writes another one")


def test_a_file_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_COPY_METHOD_COSTS", "/nowhere/costs.json")
    with pytest.raises(ValueError, match="/nowhere") as refusal:
        read_costs("Imaginary 9000")
    assert_expected_inline(
        str(refusal.value),
        """the costs of the copy methods cannot be read from /nowhere/costs.json: FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/costs.json'; remove it; `python -m torch_kvswap calibrate` writes another one""",
    )
