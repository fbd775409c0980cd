"""Options that users set in the configuration of vLLM's connector."""

from __future__ import annotations

import math
import re

import pytest
from processes import run_script

from torch_kvswap.integrations.vllm.options import SpecOptions, read_options, read_tiers


def test_every_option_of_ours_is_read_and_those_of_vllm_are_left_to_it():
    ours = {
        "cpu_bytes_to_use": 7.0,  # vLLM makes a float of it for --kv-offloading-size
        "eviction_policy": "arc",
        "store_threshold": 2,
        "copy_method": "strided",
        "staging_bytes": 0,
        "encoding": "lossless",
        "bits_per_value": 12.5,
        "verify": "load",
        "pin_in_background": True,
    }
    of_vllm = {
        "spec_name": "x",
        "spec_module_path": "y",
        "blocks_per_chunk": 4,
        "block_size": 64,
        "offload_prompt_only": False,
        "self_describing_kv_events": True,
        "sync_load_budget_bytes": 5,
        "canonical_layout": False,
        "cache_policy_module_path": None,
        "secondary_tiers": [],
        "tier_poll_interval_s": 0.1,  # of tiers, and there are none
        "backpressure": {},
    }
    read = read_options(ours | of_vllm)
    assert read == SpecOptions(7, "arc", 2, "strided", 0, "lossless", 12.5, "load", True)
    assert type(read.cpu_bytes_to_use) is int


def test_a_size_in_gib_need_not_be_a_whole_number_of_bytes():
    """vLLM multiplies --kv-offloading-size by 2**30."""
    assert read_options({"cpu_bytes_to_use": 10.3 * (1 << 30)}).cpu_bytes_to_use == 11059540787


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cpu_bytes_to_use": None}, "cpu_bytes_to_use is None; it must be a whole number"),
        (
            {"cpu_bytes": 1, "polic": 2},
            "has cpu_bytes, polic, which KVSwapConnector does not know; it takes cpu_bytes_to_",
        ),
        ({"cpu_bytes_to_use": math.inf}, "cpu_bytes_to_use is inf; it must be a whole number"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use is True; it must be a whole number"),
        ({"staging_bytes": 1.5}, "staging_bytes is 1.5; it must be a whole number from 0 on"),
        ({"eviction_policy": "mru"}, "eviction_policy is 'mru'; it must be lru or arc"),
        ({"copy_method": 3}, "copy_method is 3; it must be auto or copy_engines or batch or"),
        ({"encoding": "zstd"}, "encoding is 'zstd'; it must be raw or"),
        (
            {"encoding": "lossless", "bits_per_value": 12},
            "kv_connector_extra_config: bits_per_value is 12; it can be 12.125 or 12.5",
        ),
        (
            {"bits_per_value": 12.5},
            "kv_connector_extra_config: bits_per_value is 12.5, but encoding is 'raw'",
        ),
        ({"verify": True}, "verify is True; it must be off or load"),
        ({"pin_in_background": 1}, "pin_in_background is 1; it must be true"),
    ],
)
def test_a_wrong_option_is_refused_by_name_and_value(wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        read_options({"cpu_bytes_to_use": 1, **wrong})


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("kv_load_failure_policy", "put it beside kv_connector_extra_config, in kv_transfer_conf"),
        ("num_cpu_blocks", "set cpu_bytes_to_use, bytes of host memory of all workers"),
        ("lazy_offload", "leave it out: a chunk is stored when it has been computed"),
    ],
)
def test_an_option_of_elsewhere_is_refused_with_its_place(option, instead):
    with pytest.raises(ValueError, match=f"kv_connector_extra_config has {option}; {instead}"):
        read_options({"cpu_bytes_to_use": 1, option: 1})


def test_the_bytes_of_host_memory_must_be_given():
    with pytest.raises(ValueError, match="needs cpu_bytes_to_use, bytes of host memory"):
        read_options({})


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("canonical_layout", True, "as the GPU has them; or use spec_name KVSwapTieringOffload"),
        ("cache_policy_module_path", "a.b", "leave it out and set eviction_policy to lru or arc"),
        ("secondary_tiers", [{"type": "fs"}], "or use spec_name KVSwapTieringOffloadingSpec"),
        ("max_tracker_size", 64000, "leave it out: KVSwapOffloadingSpec counts the offers"),
    ],
)
def test_an_option_that_only_vllm_has_is_refused_with_what_to_use_instead(option, value, instead):
    said = rf"kv_connector_extra_config: {option} is for vLLM's .*{re.escape(instead)}"
    with pytest.raises(ValueError, match=said):
        read_options({"cpu_bytes_to_use": 1, option: value})


FS = {"type": "fs", "root_dir": "/rows"}


def test_with_tiers_there_may_be_options_of_tiers():
    of_tiers = {"secondary_tiers": [FS], "canonical_layout": True}
    assert read_options({"cpu_bytes_to_use": 10, **of_tiers}, has_tiers=True) == SpecOptions(10)


def test_tiers_have_their_own_backpressure_over_the_common_one():
    common = {"backpressure_cls": "EMABackpressureDetector", "high": 2}
    given = {"backpressure": common, "tier_poll_interval_s": 0}
    given["secondary_tiers"] = [FS, {**FS, "backpressure": {"high": 3}}]
    tiers, interval = read_tiers(given, 0.001)
    assert tiers == [{**FS, "backpressure": {**common, "high": high}} for high in (2, 3)]
    assert interval == 0
    assert given["secondary_tiers"][0] == FS
    own = {**FS, "backpressure": {}}  # vLLM says what is missing
    assert read_tiers({"secondary_tiers": [FS, own]}, 0.001) == ([FS, own], 0.001)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"secondary_tiers": FS}, "secondary_tiers is 'dict'; it must be a list of tiers"),
        ({"secondary_tiers": [FS, "fs"]}, "secondary_tiers[1] is 'str'; it must be a dictionary"),
        ({"secondary_tiers": [{"root_dir": "/secret"}]}, "is 'a dictionary without a type'; it"),
        ({"backpressure": 3}, "backpressure is 3; it must be a dictionary"),
        (
            {"secondary_tiers": [{**FS, "backpressure": True}]},
            "secondary_tiers[0]: backpressure is True; it must be a dictionary",
        ),
        ({"tier_poll_interval_s": "1"}, "tier_poll_interval_s is '1'; it must be a number of sec"),
    ],
)
def test_a_wrong_option_of_tiers_is_refused_by_name_and_value(wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        read_tiers(wrong, 0.001)
    assert "secret" not in str(raised.value)


def test_without_vllm_it_says_what_to_install():
    script = """
    sys.modules["vllm"] = None
    try:
        from torch_kvswap.integrations.vllm import KVSwapConnector
    except ImportError as error:
        print(error)
    """
    assert "needs vLLM 0.33 or later: pip install vllm" in run_script(script)
