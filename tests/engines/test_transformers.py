"""Continuous batching of transformers generates the same tokens with our offloading manager as
without it.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Record
from typing import Any
from unittest import mock

import pytest
import torch
from continuous_batching import (
    KINDS,
    Steps,
    config,
    first_parts_of,
    generation,
    model,
    needs_transformers,
    ours,
    prompts,
    small,
    tokens,
)

from torch_kvswap.integrations import transformers as integration
from torch_kvswap.integrations.transformers import swap
from torch_kvswap.integrations.transformers.cache_view import CacheView
from torch_kvswap.offload.handler import OffloadHandler

ENGINES = {"copy_method": "copy_engines"}


@needs_transformers
@pytest.mark.parametrize(
    ("inputs", "blocks", "how", "options", "mode"),
    [
        (prompts(8, shared=24), 26, {}, {}, torch.no_grad),
        (prompts(3), 22, {}, {"num_return_sequences": 3}, torch.no_grad),
        (prompts(), 20, {"scheduler_type": "fifo"}, {}, torch.no_grad),
        (prompts(), 20, {"scheduler_type": "prefill_first"}, {}, torch.no_grad),
        (prompts(), 20, {}, {}, torch.inference_mode),
    ],
    ids=["a common prefix", "forks", "fifo", "prefill_first", "inference mode"],
)
def test_requests_that_were_preempted_are_restored(inputs, blocks, how, options, mode):
    if mode is torch.inference_mode:  # older ones fail by themselves: their thread is not in it
        pytest.importorskip("transformers", minversion="5.24")
    net = model("full")
    want = tokens(net, inputs, config(500, gib=0.0), **options)
    with mode(), ours() as seen:
        assert tokens(net, inputs, config(blocks, **how), **options) == want
    assert seen.parked == seen.back > 0
    assert seen.wrong == 0
    assert seen.is_empty


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_a_parked_request_leaves_room_for_running_ones(kind):
    steps = Steps(model(kind), prompts(), config(500, gib=0.0))
    view = CacheView(steps.processor.cache)
    steps.until(lambda: len(steps.scheduler.active_requests) == 6)
    found = []
    for _ in range(20):  # all of them run, and none ends
        demand = view.demand(steps.scheduler)
        found.append(sum(demand.values()))
        before = blocks_held(view)
        steps.step()
        assert blocks_held(view) - before == found[-1]
    assert len(set(found)) > 1


@needs_transformers
def test_a_parked_request_takes_no_needed_block():
    steps = Steps(model("full"), prompts(1), config(20, gib=0.0))
    view = CacheView(steps.processor.cache)
    steps.step()
    (group,) = view.groups
    state = Record(request_id="parked", current_len=lambda: 2 * group.tokens_per_page)
    none = view.demand(steps.scheduler)
    free = steps.processor.cache.num_blocks - blocks_held(view)
    of_others = [dict.fromkeys(none, count) for count in (free - 2, free - 3)]
    assert [view.allocate(state, demand) for demand in of_others] == [False, True]
    assert len(group.block_table["parked"]) == 3


def blocks_held(view: Any) -> int:
    return sum(len(blocks) for group in view.groups for blocks in group.block_table.values())


@needs_transformers
@pytest.mark.parametrize("pages", [6, 0])
def test_what_finds_no_page_is_computed_again(pages):
    net, inputs = model("full"), prompts()
    want = tokens(net, inputs, config(500, gib=0.0))
    block_gib = 2 * 2 * 2 * 16 * 8 * 4 / 2**30  # 2 layers, keys and values, 2 heads of 16, 8 tokens
    with ours() as seen:
        assert tokens(net, inputs, config(20, gib=pages * block_gib)) == want
    [manager] = seen.managers
    if pages == 0:
        assert manager.parked is None
        return
    assert seen.parked < seen.swap.handler.metrics().stores.submitted + 4
    assert seen.swap.pool.num_pages == pages
    assert seen.is_empty


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_encoded_blocks_come_back_with_the_same_bytes(kind):
    net = model(kind, dtype=torch.bfloat16, head_dim=128)
    options: dict[str, Any] = {"copy_method": "auto", "staging_bytes": 3 << 20}
    with (
        first_parts_of(4096),
        mock.patch.object(swap, "OffloadHandler", wraps=OffloadHandler) as made,
        ours(encoding="lossless", **options) as seen,
    ):
        tokens(net, prompts(), config(small(kind)))
    assert options.items() <= made.call_args.kwargs.items()
    assert seen.parked == seen.back > 0
    assert seen.wrong == 0
    assert seen.is_empty
    pool, block_bytes = seen.swap.pool, seen.swap.handler.layouts[0].block_bytes
    assert pool.encoding == "lossless"
    assert pool.num_pages * block_bytes > 1.25 * config(0).cpu_offload_space * 2**30
    stores = seen.swap.handler.metrics().stores
    assert 0 < stores.link_bytes < 0.79 * stores.bytes


@needs_transformers
def test_a_request_with_a_rejected_block_is_recomputed():
    net, inputs = model("full", dtype=torch.bfloat16, head_dim=128), prompts()

    class Spoiling(OffloadHandler):
        """Slots lose their headers before the first load, as if stores had rejected blocks."""

        def load(self, **arguments: Any) -> Any:
            if not spoiled:
                spoiled.append(arguments["page_ids"][0])
                self.synchronize()
                self.pools[0].pages[spoiled[0]].zero_()
            return super().load(**arguments)

    spoiled: list[int] = []
    with mock.patch.object(swap, "OffloadHandler", Spoiling), ours(encoding="lossless") as seen:
        got = tokens(net, inputs, config(small("full")))
    assert spoiled
    assert list(map(len, got)) == list(map(len, tokens(net, inputs, config(500, gib=0.0))))
    assert seen.swap.handler.metrics().loads.rejected_blocks == 1
    assert (seen.back, seen.wrong) == (seen.parked - 1, 0)
    assert seen.is_empty


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"encoding": "zstd"}, "encoding is 'zstd'; it must be 'raw' or 'lossless'"),
        ({"verify": "on"}, "verify is 'on'; it must be 'off' or 'load'"),
        ({"staging_bytes": -1}, "staging_bytes is -1; it must be 0 or more"),
        ({"copy_method": "stage"}, "copy_method is 'stage'; it must be 'auto', 'copy_engines',"),
        ({**ENGINES, "encoding": "lossless"}, "copy_method='copy_engines' uses no kernels, but"),
        ({**ENGINES, "verify": "load"}, "copy_method='copy_engines' uses no kernels, but"),
    ],
)
def test_a_wrong_option_is_refused_when_enabled(options, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        integration.enable(**options)


@needs_transformers
def test_a_reused_manager_frees_all_pages():
    """For the next generation, and their memory with the last one."""
    net, inputs = model("full"), prompts()
    how = {"generation_config": generation(), "continuous_batching_config": config(20)}
    with ours() as seen:
        first = net.generate_batch(inputs, persistent_manager=True, **how)
        again = net.generate_batch(inputs, persistent_manager=True, max_new_tokens=40)
        net.destroy_cached_continuous_batching_manager()
    assert len(seen.managers) == 1
    assert [r.generated_tokens for r in first.values()] == [
        r.generated_tokens for r in again.values()
    ]
    assert seen.is_empty
    pool = weakref.ref(seen.swap.pool)
    seen.managers.clear()
    gc.collect()
    assert pool() is None


@needs_transformers
def test_the_example_of_the_docs_runs():
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with mock.patch.object(integration, "enable", wraps=integration.enable) as enable:
        exec(code, names)
    enable.assert_called_once_with()
    lengths = [len(result.generated_tokens) for result in names["results"].values()]
    assert lengths == [200] * 16


@needs_transformers
def test_disabling_brings_transformers_own_manager_back():
    from transformers.generation.continuous_batching import continuous_api

    theirs = continuous_api.OffloadingManager
    with integration.enable():
        assert continuous_api.OffloadingManager is not theirs
    assert continuous_api.OffloadingManager is theirs
    enabled = integration.enable()
    enabled.disable()
    enabled.disable()
    assert continuous_api.OffloadingManager is theirs
    with (
        integration.enable(),
        pytest.raises(RuntimeError, match="enabled for transformers already"),
    ):
        integration.enable()
    assert continuous_api.OffloadingManager is theirs


@contextlib.contextmanager
def installed(version: str) -> Iterator[None]:
    """As if this version of transformers was."""
    module = ModuleType("transformers")
    module.__version__ = version  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, transformers=module):
        yield


@pytest.mark.parametrize("version", ["5.17.0", "5.25.0.dev0", "6.0.0", "4.57.6", "strange"])
def test_an_unknown_version_is_refused_by_name(version):
    said = rf"transformers {version} may .* install transformers 5.18 to 5.24"
    with installed(version), pytest.raises(ImportError, match=said):
        integration.enable()


def test_without_transformers_it_says_what_to_install():
    said = r"install transformers by pip install 'torch_kvswap\[transformers\]'"
    with (
        mock.patch.dict(sys.modules, transformers=None),
        pytest.raises(ImportError, match=said),
    ):
        integration.enable()


@needs_transformers
@pytest.mark.gpu
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_on_a_gpu(kind, asynchronous):
    net, inputs = model(kind, "cuda"), prompts()
    options = {"use_async_batching": asynchronous}
    want = tokens(net, inputs, config(500, gib=0.0, **options))
    assert tokens(net, inputs, config(small(kind), **options)) == want
    with ours() as seen:
        assert tokens(net, inputs, config(small(kind), **options)) == want
    assert seen.parked == seen.back > 0
    assert seen.wrong == 0
    assert seen.is_empty
