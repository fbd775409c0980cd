"""SGLang's cache linker: its KV pools on the GPU, with host memory behind them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from torch_kvswap._native.loader import native
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.sglang.options import TESTED_VERSIONS, is_tested, read_options
from torch_kvswap.integrations.sglang.pools import LayerGroup, read_groups
from torch_kvswap.offload.handler import Job
from torch_kvswap.prefix.block_groups import BlockGroup
from torch_kvswap.prefix.cache import PrefixCache
from torch_kvswap.prefix.hashing import KEY_BYTES, PrefixKeys
from torch_kvswap.results import TransferError

_log = logging.getLogger(__name__)
_MIN_PAGE_TOKENS = 16  # smaller pages are many small copies: a warning says so
_LENGTHS = 64  # of a model with windows or states that the ranks compare
_TIER_SECONDS = 0.05  # that a lookup waits for a second tier, once for each request


class _Pages(NamedTuple):
    """The pages that transfers name.

    Attributes:
        keys (list[PrefixKeys]): of each group.
        ends (list[int]): for each group, where its part of `indices` ends.
        indices (torch.Tensor): the first of each page, on the GPU or on the host.
    """

    keys: list[PrefixKeys]
    ends: list[int]
    indices: torch.Tensor


@dataclass(eq=False)
class _Offload:
    """An offload that SGLang has not consumed.

    Attributes:
        pages (_Pages): its pages.
        after (tuple | None): events that the store waits for, until it is submitted. After the
            first one the indices are on the host.
        is_stored (bool | None): None until it has ended.
    """

    pages: _Pages
    after: tuple[Any, ...] | None = None
    is_stored: bool | None = None


class LayerCounter:
    """What SGLang's KV pools wait with before they hand out a layer: the forward's stream waits,
    the host does not.

    Args:
        layer_groups (Mapping[int, int]): of a load's job, for each layer.
    """

    def __init__(self, layer_groups: Mapping[int, int]) -> None:
        self.num_layers, self.consumer_index = max(layer_groups) + 1, -1
        self.jobs: dict[int, Job | None] = {}  # None: the load could not be submitted
        self._layer_groups = layer_groups

    def set_consumer(self, index: int) -> None:
        """Chooses the loads of the next forward, -1 for none."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Makes the current stream wait for a layer, or the last of several without one."""
        job = self.jobs.get(self.consumer_index)
        if job is not None:
            job.wait(layer_group=self._layer_groups.get(threshold))


class KVSwapLinker(UnifiedCacheLinker):
    """SGLang's prefixes in host memory, in a PrefixCache. SGLang makes one in each rank.

    All calls come from SGLang's scheduler thread. They return without waiting for copies, except
    finish_layer_wise_loading(), reset() and close(), which SGLang calls to wait.

    Raises:
        ValueError: an option is wrong, or the model or configuration is not served; the error names
            it.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        self.options = read_options(extra_config or {})
        self.forward_stream = forward_stream
        self._groups = read_groups(server_args, params, components)
        self._device = self._groups[0].layout.device
        self.pools = {group.name: group.layout for group in self._groups}
        self._page_tokens = params.page_size
        self._rank, self._world, several = _part_of(params, self._groups)
        self._lengths = _LENGTHS if several and len(self._groups) > 1 else 1
        self.cache = self._open(_model_name(server_args), params)
        first, last_tensors = 0, dict[int, int]()
        for group in self._groups:
            last_tensors |= {layer: first + at for layer, at in group.last_tensors.items()}
            first += len(group.layout.tensors)
        self._parts = len(last_tensors)
        # Which layer group of a load has the last tensor of a layer.
        parts = {
            layer: native.layer_group_of(at, self._parts, first)
            for layer, at in last_tensors.items()
        }
        self.layer_done_counter = LayerCounter(parts)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued = dict[str, Any]()  # transfers of the next loads, by request
        self._offloads = deque[_Offload]()
        self._numbers = itertools.count()
        self._waited = dict[str, None]()  # requests that have waited for a second tier
        self._has_refused = False
        self._salt = bytes(KEY_BYTES)

    def _open(self, model: str, params: Any) -> PrefixCache:
        options, layouts = self.options, [group.layout for group in self._groups]
        how: dict[str, Any] = {"encoding": options.encoding, "verify": options.verify}
        path = options.server
        if path is not None and self._world > 1 and "{rank}" not in path:
            raise ValueError(
                f"linker_extra_config: server is {path!r}, but each of {self._world} ranks has "
                "other bytes and needs a server of its own; write {rank} where the paths differ"
            )
        pages = self._divide(how)
        blocks = [
            BlockGroup(
                count,
                self._page_tokens,
                is_state=group.name == PoolName.MAMBA,
                window_tokens=self._window(params) if group.name == PoolName.SWA else None,
            )
            for group, count in zip(self._groups, pages, strict=True)
        ]
        below: dict[str, Any] = {}
        if path is not None:
            path = path.replace("{rank}", str(self._rank))
            part: dict[str, Any] = {"model": model, "rank": self._rank, "world": self._world}
            cache = PrefixCache.connect(path, layouts, blocks, **part, **how)
        else:
            if options.below is not None:
                below = {"below": options.below, "below_model": model}
                below |= {"below_rank": self._rank, "below_world": self._world}
            sized = zip(layouts, pages, strict=True)
            pools = [HostPool(layout, count, **how) for layout, count in sized]
            cache = PrefixCache(layouts, pools, blocks, **below)
        named = zip(self._groups, cache.pools, strict=True)
        _log.info(
            "KVSwapLinker: rank %d of %d, %s, encoding %s, verify %s, %s; loads go layer by layer",
            *(self._rank, self._world),
            ", ".join(
                f"{group.name.value}: {pool.num_pages} pages of {pool.page_bytes} bytes"
                for group, pool in named
            ),
            *(options.encoding, options.verify),
            f"server {path}" if path else f"below {options.below}",
        )
        if self._page_tokens < _MIN_PAGE_TOKENS:
            _log.warning(
                "KVSwapLinker: pages of %d tokens are many small copies; --page-size 64 is faster",
                self._page_tokens,
            )
        version = importlib.metadata.version("sglang")
        if not is_tested(version):
            _log.warning(
                "KVSwapLinker was tested with SGLang %s, this is %s",
                *(" and ".join(TESTED_VERSIONS), version),
            )
        return cache

    def _divide(self, of_pool: dict[str, Any]) -> list[int]:
        """Host pages of each group, in the proportions that SGLang gives the groups on the GPU."""
        layouts, pages = [group.layout for group in self._groups], []
        on_gpu = [layout.num_blocks * layout.block_bytes for layout in layouts]
        for group, share in zip(self._groups, on_gpu, strict=True):
            with HostPool(group.layout, 1, **of_pool) as one:
                room = self.options.host_bytes * share // sum(on_gpu)
                pages.append(room // one.page_bytes)
                if pages[-1] == 0:
                    raise ValueError(
                        f"linker_extra_config: host_bytes is {self.options.host_bytes}, of which "
                        f"{room} are for {group.name.value}, whose pages have {one.page_bytes}; "
                        "set more"
                    )
        return pages

    def _window(self, params: Any) -> int:
        """The window whose pages SGLang loads: whole pages, and the token that is computed."""
        pages = -(-params.swa_retain_window // self._page_tokens)
        return int(pages * self._page_tokens + 1)

    # Lookups and loads.

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """The lengths of the prefix, in pages, that this rank can load."""
        hashes = next(list(one.keys) for one in transfers if one.name == PoolName.KV)
        keys = [self._keys(number, hashes) for number in range(len(self._groups))]
        longest = self._look_up(rid, keys)
        if len(self._groups) == 1:
            return list(range(1, longest + 1))
        lengths = list[int]()
        while longest and len(lengths) < self._lengths:
            lengths.insert(0, longest)
            shorter = [of_group[: longest - 1] for of_group in keys]
            longest = self.cache.lookup(shorter, again=True).ready if longest > 1 else 0
        return lengths

    def _look_up(self, rid: str, keys: list[PrefixKeys]) -> int:
        found = self.cache.lookup(keys, again=rid in self._waited)
        has_tier = self.options.below is not None or self.options.server is not None
        if not has_tier or rid in self._waited:
            return found.ready
        self._waited[rid] = None
        if len(self._waited) > 4096:
            del self._waited[next(iter(self._waited))]
        deadline = time.monotonic() + _TIER_SECONDS
        while (found.asking or found.pending) and time.monotonic() < deadline:
            time.sleep(0.001)
            self._poll()
            found = self.cache.lookup(keys, again=True)
        return found.ready

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Queues a load. A page that has gone by then fails it, with the requests of its step."""
        if not any(one.keys for one in transfers):
            return False
        if rid in self._queued:
            raise RuntimeError(f"a load of request {rid} is queued already")
        self._queued[rid] = transfers
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Starts the queued loads as one job, group of layers after group of layers."""
        if not self._queued:
            return -1
        queued, self._queued = [*itertools.chain(*self._queued.values())], {}
        index, job = next(self._numbers), None
        try:
            pages = self._read(queued)
            blocks, after = self._blocks(pages), self._after()
            job = self.cache.load(pages.keys, blocks, after=after, layer_groups=self._parts)
            if job is None:
                _log.warning("a load found pages that the host has no longer; its requests end")
        except Exception:
            _log.exception("a load could not be submitted; its requests end")
        self.layer_done_counter.jobs[index] = job
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Blocks the host until the loads have ended. False: their requests must end."""
        jobs = self.layer_done_counter.jobs
        if counter_index not in jobs:
            return True
        job = jobs.pop(counter_index)
        if job is None:
            return False
        with contextlib.suppress(TransferError):
            job.synchronize()
        self._poll()  # forgets pages that could not be loaded
        return job.result is not None and job.result.ok

    # Offloads.

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:
        """Begins to store pages. What becomes of them pop_completed_offload() says: ranks consume
        equally many, so that none may refuse what another accepts.

        The numbers of the pages are on the GPU, and the scheduler's stream may wait for the forward
        in flight. So they are copied beside it, and a later step submits the store.
        """
        if not any(one.keys for one in transfers):
            return False
        pages = self._read(transfers)
        if pages.indices.is_cuda:
            on_host = torch.empty_like(pages.indices, device="cpu", pin_memory=True)
            pages = pages._replace(indices=on_host.copy_(pages.indices, non_blocking=True))
        offload = _Offload(pages)
        if self._device.type == "cpu":
            self._store(offload)
        else:
            offload.after = tuple(self.record_offload_ready())
        self._offloads.append(offload)
        return True

    def _store(self, offload: _Offload) -> None:
        """Submits the store of an offload."""
        after, offload.after = offload.after, None
        try:
            keys, blocks = offload.pages.keys, self._blocks(offload.pages)
            stored = self.cache.store(keys, blocks, after=after, tag=offload)
        except Exception:
            _log.exception("pages could not be stored")
            offload.is_stored = False
            return
        if stored.job is None:
            offload.is_stored = stored.state == "present"
            if not offload.is_stored and not self._has_refused:
                self._has_refused = True
                _log.warning(
                    "the host has no room for %d pages at once, which are not stored; set more "
                    "host_bytes (said once)",
                    sum(map(len, keys)),
                )

    def num_completed_offloads(self) -> int:
        """SGLang asks in each step."""
        for offload in self._offloads:
            if offload.after is not None and offload.after[0].query():
                self._store(offload)
        self._poll()
        ended = itertools.takewhile(lambda one: one.is_stored is not None, self._offloads)
        return sum(1 for _ in ended)

    def pop_completed_offload(self) -> bool:
        return bool(self._offloads.popleft().is_stored)

    def _poll(self) -> None:
        for result in self.cache.poll():
            if isinstance(result.tag, _Offload):
                result.tag.is_stored = result.ok
            if not result.ok:
                _log.warning("a %s ended as %s: %s", result.direction, result.state, result.error)

    # The rest.

    def reset(self) -> None:
        """Forgets all pages, for example because the weights have changed."""
        self._quiesce()
        self.cache.manager.reset()
        if self.options.below is not None:  # which keeps what was computed with the old weights
            self._salt = os.urandom(KEY_BYTES)
            _log.info("reset: what is below is not found any more by this process")

    def close(self) -> None:
        """Waits for all jobs, and frees the host memory."""
        self._quiesce()
        self.cache.close()
        if self.options.server is None:
            for pool in self.cache.pools:
                pool.close()

    def _quiesce(self) -> None:
        self._queued.clear()
        with contextlib.suppress(TransferError):
            self.cache.synchronize()
        self._poll()
        self._offloads.clear()
        self.layer_done_counter.jobs.clear()
        self.layer_done_counter.set_consumer(-1)

    def _keys(self, number: int, hashes: Sequence[str]) -> PrefixKeys:
        """The keys of pages in a group, from SGLang's hashes (SHA-256), the same in all groups."""
        keys = np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8)
        keys = keys.reshape(len(hashes), KEY_BYTES)
        salted = keys ^ np.frombuffer(self._salt, np.uint8)
        salted[:, 0] ^= number
        return PrefixKeys(salted.tobytes(), self._page_tokens)

    def _read(self, transfers: Sequence[Any]) -> _Pages:
        keys, ends, firsts = list[PrefixKeys](), list[int](), list[torch.Tensor]()
        for number, group in enumerate(self._groups):
            own = [one for one in transfers if one.name == group.name and one.keys]
            keys.append(self._keys(number, [key for one in own for key in one.keys]))
            firsts += (one.device_indices[:: group.index_step].to(torch.int64) for one in own)
            ends.append(sum(map(len, firsts)))
        return _Pages(keys, ends, torch.cat(firsts))

    def _blocks(self, pages: _Pages) -> list[Any]:
        """The GPU blocks of each group. Waits for the stream that has chosen them, if they are not
        on the host.

        Raises:
            ValueError: an index is not the first of a page.
        """
        blocks, on_host = [], pages.indices.cpu().numpy()
        for group, firsts in zip(self._groups, np.split(on_host, pages.ends[:-1]), strict=True):
            if (firsts % group.index_step).any():
                raise ValueError(f"SGLang's indices of {group.name.value} are no whole pages")
            blocks.append(firsts // group.index_step)
        return blocks

    def _after(self) -> tuple[Any, ...] | None:
        """What a load waits for: the scheduler's stream, and the forward that may be running, which
        may still use what was freed for the load."""
        if self._device.type == "cpu" or self.forward_stream is None:
            return None
        return torch.cuda.current_stream(self._device), self.forward_stream


def _part_of(params: Any, groups: Sequence[LayerGroup]) -> tuple[int, int, bool]:
    """Which part of the model this rank has, of how many, and whether SGLang asks several ranks."""
    group = params.attn_tp_cache_group or params.tp_cache_group
    rank, world = 0, 1
    if group is not None:
        rank = torch.distributed.get_rank(group)
        world = torch.distributed.get_world_size(group)
    several = world * params.attn_cp_size > 1
    if all(one.is_mla for one in groups):
        rank, world = 0, 1
    stage = params.pp_rank * params.attn_cp_size + params.attn_cp_rank
    return stage * world + rank, params.pp_size * params.attn_cp_size * world, several


def _model_name(server_args: Any) -> str:
    """The model, and what else the bytes of a page depend on, for engines that share pages."""
    named = ["model_path", "revision", "dtype", "quantization", "kv_cache_dtype"]
    named += ["json_model_override_args", "page_size"]
    parts = [f"{name} {getattr(server_args, name, None)}" for name in named]
    return ", ".join([*parts, f"sglang {importlib.metadata.version('sglang')}"])
