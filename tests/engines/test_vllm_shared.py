"""vLLM engines that share the pages of a server, under vLLM's real scheduler."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from patience import in_time
from served_engine import serving as page_server
from vllm_serving import Serving, expected_tokens, serving

BLOCK = 16
THEIRS = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
SPEC = {
    "spec_name": "KVSwapOffloadingSpec",
    "spec_module_path": "torch_kvswap.integrations.vllm",
}


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(512), k=length)


PROMPTS = {f"{n}": prompt(n, 33 + 16 * n) for n in range(5)}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return f"{tmp_path}/pages"


def engine(folder: Path, path: str, name: str, **how: Any) -> Any:
    transfer = {"engine_id": name, **how.pop("transfer", {})}
    extra = {"host_server": f"unix:{path}", "cpu_bytes_to_use": None, **how.pop("extra", {})}
    if transfer.get("kv_connector"):
        extra |= SPEC
    return serving(folder, transfer=transfer, extra=extra, **how)


def manager_of(engine: Serving) -> Any:
    return engine.scheduler.connector.connector_scheduler.manager


def check(engine: Serving, prompts: dict[str, list[int]], count: int = 4) -> None:
    for name, one in prompts.items():
        assert engine.tokens[name] == expected_tokens(one, count), name


def test_an_engine_finds_what_another_has_stored(tmp_path, path):
    with page_server(path) as server, engine(tmp_path, path, "a") as a, engine(tmp_path, path, "b") as b:
        a.serve(PROMPTS)
        check(a, PROMPTS)
        b.serve(PROMPTS)
        check(b, PROMPTS)
        print(server._manager.stats())
