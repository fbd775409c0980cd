"""Which engines find each other's pages: those with equal models, options and weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_engine
from patience import in_time
from processes import Process
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang_engine import Engine, PoolName, PoolTransfer, ServerArgs, hashes_of, mha_pool

from torch_kvswap.integrations import sglang as door

PROMPT = list(range(100, 122))  # five pages can be loaded


def serving(path: str) -> Process:
    return Process(["-m", "torch_kvswap", "serve", "--socket", path, "--memory", "4MiB"], "serving")


def describe(**options: Any) -> str:
    return door._describe_model(ServerArgs(**{"model_path": "model", **options}))


def test_engines_with_other_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = f"{tmp_path}/pages"
    with serving(server):
        first = Engine(mha_pool(), server=server)
        other = ServerArgs(model_path="model", quantization_param_path="/scales.json")
        monkeypatch.setattr(sglang_engine, "SERVER_ARGS", other)
        with pytest.raises(ValueError, match=r"the server has other pages: .*/scales\.json"):
            Engine(mha_pool(), server=server)
        first.cache.release_host_resources()


def test_engines_do_not_load_pages_of_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = f"{tmp_path}/pages"
    serves = SimpleNamespace(weight_version="default")
    monkeypatch.setattr(door, "get_serving", lambda: serves)
    with serving(server):
        updated, old = [Engine(mha_pool(), server=server) for _ in range(2)]
        updated.cache.reset()
        updated.allocator.clear()
        old.serve(PROMPT)
        assert in_time(lambda: old.step() or not old.cache.linker.pending_offloads)
        ask = [PoolTransfer(name=PoolName.KV, keys=hashes_of(PROMPT[:20]))]
        assert in_time(lambda: updated.linker.lookup("control", ask) == [1, 2, 3, 4, 5])
        serves.weight_version = "2"
        assert updated.serve(PROMPT) == (0, True)
        updated.forget_gpu()
        assert updated.serve(PROMPT) == (20, True)
        for engine in (updated, old):
            engine.cache.release_host_resources()


def test_a_folder_is_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set[str]()
    for folder in (tmp_path / "a", tmp_path / "b"):
        (folder / "model").mkdir(parents=True)
        monkeypatch.chdir(folder)
        names.add(describe())
        assert describe() == describe(model_path=f"{folder}/model/")
    assert len(names) == 2


def test_secrets_are_not_described() -> None:
    described = describe(model_loader_extra_config='{"key": "sesame"}', api_key="sesame")
    assert described != describe(model_loader_extra_config='{"key": "cumin"}')
    assert "sesame" not in described


def test_addresses_devices_and_memory_do_not_count() -> None:
    assert describe(port=1, base_gpu_id=1, mem_fraction_static=0.5) == describe()


def test_sets_are_described_alike_in_all_processes() -> None:
    modules = ["k_proj", "o_proj", "q_proj"]
    assert describe(lora_target_modules={*modules}) == describe(lora_target_modules=modules)


def test_which_options_of_sglang_count() -> None:
    """New options count. One that engines of a machine cannot have equal, or that may have secrets,
    belongs into _LEFT_OUT."""
    names, plain = sorted(field.name for field in record_fields(ServerArgs)), describe()
    counts = [(name, describe(**{name: "changed"}) != plain) for name in names]
    digest = hashlib.sha256(repr(counts).encode()).hexdigest()
    assert digest[:16] == "6be9a1813a572030", "review SGLang's new options, then change this"
