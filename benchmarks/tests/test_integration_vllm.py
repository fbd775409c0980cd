"""The benchmark of vLLM engines: its prompts, the order of its rounds, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import integration_vllm
import pytest
from prefix_cache_model import PrefixCacheModel, block_keys
from vllm_server import make_prompts, replace_ends

pytestmark = pytest.mark.slow  # of a benchmark program


class Server:
    """Serves at once, with the hits that the model says, plus `more`."""

    more = 0
    tiers: dict[str, PrefixCacheModel] = {}  # noqa: RUF012  # by engine, also of a restarted one
    served: list[tuple[str, Any]] = []  # noqa: RUF012

    def __init__(self, name: str, settings: dict[str, Any], log: Path) -> None:
        self.name, self.settings = name, settings
        if "kv_transfer_config" in settings:
            extra = settings["kv_transfer_config"]["kv_connector_extra_config"]
            raw = 2 * 8 * 64 * 2 * 16 * 2  # bytes of a block
            page = raw * 12.125 / 16 if extra.get("encoding") == "lossless" else raw
            self.model = PrefixCacheModel(int(extra["cpu_bytes_to_use"] / page))
            if "secondary_tiers" in extra:
                self.model = Server.tiers.setdefault(name, self.model)

    def ready(self) -> dict[str, Any]:
        return {}

    def serve(self, **order: Any) -> dict[str, Any]:
        Server.served.append((self.name, order))
        how = {name: order[name] for name in ("prefixes", "prefix")}
        made = make_prompts(order["seed"], order["prompts"], order["lengths"], **how, vocabulary=99)
        chosen = [made[number] for number in order.get("order", range(len(made)))]
        cached = [0] * len(chosen)
        if self.name.startswith("hits") or self.name in Server.tiers:
            cached = [16 * self.model.serve(block_keys(prompt, 16)) for prompt in chosen]
            cached[-1] += 16 * self.more
        tokens = [[1, 2] for _ in chosen]
        answer = {"seconds": 1.0, "ttft": [0.1] * len(chosen), "cached": cached, "tokens": tokens}
        return answer | ({"steps": [0.01] * len(chosen)} if "beside" in order else {})

    def end(self) -> None:
        Server.served.append((self.name, "end"))

    def stop(self) -> None:
        pass


ARGUMENTS = ["--layers", "8", "--kv-heads", "2", "--head-size", "64", "--vocabulary", "99"]
ARGUMENTS += ["--tokens", "256", "--prefix", "64", "--turns", "3", "--prompts", "4", "--alone", "2"]
ARGUMENTS += ["--long-tokens", "512", "--long-new", "64"]


@pytest.fixture(params=[0, 1])
def more(request, monkeypatch):
    """Blocks that a Server, in place of a vLLM engine, finds too many."""
    monkeypatch.setattr(integration_vllm, "Server", Server)
    for name, value in {"more": request.param, "served": [], "tiers": {}}.items():
        monkeypatch.setattr(Server, name, value)
    return request.param


def test_it_fails_when_hits_differ_from_the_model_and_writes_all_it_measured(
    more, tmp_path, capsys
):
    file = tmp_path / "figures.json"
    assert integration_vllm.main([*ARGUMENTS, "--device", "cpu", "--json", str(file)]) == more
    written = json.loads(file.read_text())
    assert len(written["rounds"]) == 6 * 3 * 6
    raw, lossless = written["hits"]["raw"], written["hits"]["lossless"]
    assert raw["prompts"] == lossless["prompts"] == 24
    assert 0 < raw["blocks"] < lossless["blocks"]
    assert bool(raw["wrong"] + lossless["wrong"]) == bool(more)
    assert "blocks found on the host" in capsys.readouterr().out
    # Each engine is the first one of a turn in its turn, and all get the same prompts.
    names = [name for name, order in Server.served[2:] if not order.get("drop")]
    firsts = [names[turn * len(names) // 4] for turn in range(4)]
    assert len(set(firsts)) == 4
    seeds = [order["seed"] for _, order in Server.served[2:]]
    assert seeds == sorted(seeds)


def test_it_fails_when_a_restarted_engine_does_not_find_what_its_tier_has(more, tmp_path):
    (tmp_path / "tier").mkdir()
    files = ["--tier", str(tmp_path / "tier"), "--json", str(tmp_path / "figures.json")]
    assert integration_vllm.main([*ARGUMENTS, "--device", "cpu", *files]) == more
    written = json.loads((tmp_path / "figures.json").read_text())
    kinds = [one["kind"] for one in written["rounds"]]
    assert kinds.count("restarted") == kinds.count("cold") == 4 * 3
    assert [of_engine["prompts"] for of_engine in written["hits"].values()] == 3 * [4 * 3]
    assert all(bool(of_engine["wrong"]) == bool(more) for of_engine in written["hits"].values())
    ends = [name for name, order in Server.served if order == "end"]
    assert ends == 2 * list(written["hits"])
    assert not list((tmp_path / "tier").iterdir())


def test_continued_prompts_have_other_tokens_at_their_ends_only():
    made = make_prompts(3, 2, (50, 60), 1, 20, 99)
    ends = replace_ends(made, 16, "3", 99)
    assert [one[:-16] for one in ends] == [one[:-16] for one in made]
    assert [len(one) for one in ends] == [len(one) for one in made]
    assert all(one[-16:] != other[-16:] for one, other in zip(ends, made, strict=True))
    assert ends == replace_ends(made, 16, "3", 99)
