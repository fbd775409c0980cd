"""Which vLLM engines share pages at a server: those with equal models and options."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import vllm_engine  # noqa: F401  skips where vLLM's tests do not run
from patience import in_time
from served_engine import serving as page_server
from vllm import config as vllm_config
from vllm_engine import folder
from vllm_serving import CHUNKS, PROMPTS, check, serving

from torch_kvswap.integrations.vllm import identity

__all__ = ["folder"]


def engine(folder: Path, name: str, **how: Any) -> Any:
    extra = {"host_server": f"{folder}/pages", "cpu_bytes_to_use": None}
    return serving(folder, transfer={"engine_id": name}, extra=extra, **how)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"revision": "other"}, "model_config.revision: other here, null at"),
        ({"hf_overrides": {"ffn_dim": 64}}, "model_config.hf_config.ffn_dim: 64 here, 128 at"),
        ({"seed": 7}, "model_config.seed: 7 here, 0 at"),
    ],
)
def test_engines_with_other_options_are_refused(folder, model, named):
    with page_server(f"{folder}/pages", 128), engine(folder, "a"):
        refused = pytest.raises(ValueError, match=f"the server has other pages: .*{named}")
        with refused, engine(folder, "b", model=model):
            pass


def test_other_environments_are_refused(folder, monkeypatch):
    with page_server(f"{folder}/pages", 128), engine(folder, "a"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        refused = pytest.raises(ValueError, match=r"environment\.VLLM_BATCH_INVARIANT")
        with refused, engine(folder, "b"):
            pass


def test_engines_share_pages_from_other_folders(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    same = {"model": folder.name}
    with (
        page_server(f"{folder}/pages", 128) as server,
        engine(folder, "a") as a,
        engine(folder, "b", model=same, batched=128) as b,
    ):
        a.serve(PROMPTS)
        assert in_time(lambda: server._manager.stats().stored == CHUNKS)
        b.serve(PROMPTS)
        check(b, PROMPTS)
        assert in_time(lambda: server._manager.stats().loaded == CHUNKS)


def test_addresses_ranks_and_memory_do_not_count(folder, monkeypatch):
    with serving(folder) as a:
        before = identity.describe_engine(a.config)
        a.config.instance_id = a.config.kv_transfer_config.engine_id = "b"
        a.config.parallel_config.data_parallel_rank = 1
        cache = a.config.cache_config
        cache.gpu_memory_utilization = 0.5
        cache.num_gpu_blocks = cache.num_gpu_blocks_override = cache.kv_cache_memory_bytes = 9
        for name in ("VLLM_DP_RANK", "VLLM_NIXL_SIDE_CHANNEL_PORT"):
            monkeypatch.setenv(name, "1")
        assert identity.describe_engine(a.config) == before


def test_words_of_a_models_configuration_are_no_folders(folder, monkeypatch):
    """An engine that is started in / has a folder opt beside it."""
    with serving(folder) as a:
        before = identity.describe_engine(a.config)
        (folder / "opt").mkdir()
        monkeypatch.chdir(folder)
        assert identity.describe_engine(a.config) == before


def test_media_without_names_are_refused(folder):
    with serving(folder) as a:
        model, cache = a.config.model_config, a.config.cache_config
        model.multimodal_config = vllm_config.MultiModalConfig(mm_processor_cache_gb=0)
        assert identity.describe_engine(a.config)
        cache.enable_prefix_caching = False
        with pytest.raises(ValueError, match="mm_processor_cache_gb is 0"):
            identity.describe_engine(a.config)


def test_secrets_count_but_are_not_described(folder):
    with serving(folder, model={"hf_token": "sesame"}) as a:
        before = json.dumps(identity.describe_engine(a.config))
        a.config.load_config.model_loader_extra_config = {"key": "sesame"}
        after = json.dumps(identity.describe_engine(a.config))
        assert after != before
        assert "sesame" not in before + after


def test_fields_that_are_left_out_exist_in_vllm():
    """A field that is misspelt here, or that vLLM has renamed, counts."""
    kinds = [kind for kind in vars(vllm_config).values() if dataclasses.is_dataclass(kind)]
    assert set(identity._LEFT_OUT.split()) <= {
        field.name for kind in kinds for field in dataclasses.fields(kind)
    }
