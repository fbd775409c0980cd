"""Options that users set in the configuration of vLLM's connector."""

from __future__ import annotations

import re

import pytest

from torch_kvswap.integrations.vllm.options import SpecOptions, read_options

TIERS = {"secondary_tiers": [{"type": "fs"}]}
SERVER = {"host_server": "/s", "cpu_bytes_to_use": None}


def test_our_options_are_read_and_vllms_left():
    ours = {
        "cpu_bytes_to_use": 7.0,  # in JSON 1e10 is such a number
        "eviction_policy": "arc",
        "store_threshold": 2,
        "copy_method": "strided",
        "staging_bytes": 0,
        "encoding": "lossless",
        "verify": "load",
        "pin_in_background": True,
    }
    of_vllm = {
        "blocks_per_chunk": 4,
        "block_size": 64,
        "offload_prompt_only": False,
        "self_describing_kv_events": True,
        "canonical_layout": False,
        "cache_policy_module_path": None,
        "host_server": None,
        "secondary_tiers": [],
    }
    read = read_options(ours | of_vllm)
    assert read == SpecOptions(7, "arc", 2, "strided", 0, "lossless", "load", True)
    assert type(read.cpu_bytes_to_use) is int


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"evict_policy": 1}, "KVSwapConnector does not know it; did you mean eviction_policy"),
        ({"x": 1}, "x is 1; KVSwapConnector does not know it; the options are cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use is True; it must be a whole number"),
        (
            {"cpu_bytes_to_use": 1.5},
            "cpu_bytes_to_use is 1.5; it must be a whole number, 1 or more",
        ),
        ({"staging_bytes": 1.5}, "staging_bytes is 1.5; it must be a whole number, 0 or more"),
        ({"eviction_policy": "mru"}, "eviction_policy is 'mru'; it must be 'lru' or 'arc'"),
        ({"verify": True}, "verify is True; it must be 'off' or 'load'"),
        ({"pin_in_background": 1}, "pin_in_background is 1; it must be true"),
        ({"kv_role": 1}, "kv_role is 1; put it next to kv_connector_extra_config, in kv_transfer"),
        ({"engine_id": 1}, "engine_id is 1; put it next to kv_connector_extra_config"),
        ({"spec_name": "CPUOffloadingSpec"}, "KVSwapConnector chooses it itself; leave it out"),
        ({"sync_load_budget_bytes": 9}, "KVSwapConnector chooses it itself; leave it out"),
        ({"canonical_layout": True}, "it is for vLLM's manager of secondary_tiers, and there are"),
        (TIERS | SERVER, "vLLM's secondary_tiers do not have it; leave it out"),
        (SERVER | {"host_server": "unix:/s"}, "host_server is 'unix:/s'; pass it without unix:"),
        (SERVER | {"host_server": ""}, "host_server is '', 0 bytes; the path of a socket has 1"),
        ({"host_server": "/s"}, "cpu_bytes_to_use is 1; the server at /s has the host"),
        (SERVER | {"eviction_policy": "arc"}, "eviction_policy is 'arc'; the server at /s"),
        (TIERS | {"encoding": "lossless"}, "vLLM's secondary_tiers do not have it; leave it out"),
        (TIERS | {"staging_bytes": -1}, "staging_bytes is -1; it must be a whole number, 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        read_options({"cpu_bytes_to_use": 1, **wrong})


@pytest.mark.parametrize("given", [{}, {"cpu_bytes_to_use": None}])
def test_the_bytes_of_host_memory_must_be_given(given):
    with pytest.raises(ValueError, match="needs cpu_bytes_to_use, bytes of host memory"):
        read_options(given)


def test_with_tiers_vllm_reads_its_managers_options():
    of_vllm = {"canonical_layout": True, "eviction_policy": "mine", "cache_policy_module_path": "a"}
    of_vllm |= {"backpressure": {}}
    assert read_options({"cpu_bytes_to_use": 10, **TIERS, **of_vllm}) == SpecOptions(10, "mine")
