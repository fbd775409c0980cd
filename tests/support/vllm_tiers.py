"""Engines with vLLM's file tier below our host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import in_time
from vllm_engine import SPEC, Ranks, config

from torch_kvswap.integrations.vllm import spec as spec_module
from torch_kvswap.integrations.vllm.pool import this_host
from torch_kvswap.integrations.vllm.tiering import KVSwapTieringOffloadingSpec

TIERS = SPEC


def tier(folder: Path, **more: Any) -> dict[str, Any]:
    return {**TIERS, "secondary_tiers": [{"type": "fs", "root_dir": f"{folder}/rows"}], **more}


def files(folder: Path) -> dict[Path, int]:
    """The rows in the tier, and when they were written."""
    return {one: one.stat().st_mtime_ns for one in (folder / "rows").rglob("*.bin")}


def on_one_host(patch: pytest.MonkeyPatch) -> None:
    """Ranks are threads of this process, without vLLM's groups of processes."""
    hosts = lambda replicas: [this_host()] * replicas.world  # noqa: E731
    patch.setattr(spec_module, "_hosts_of_workers", hosts)


class TieredRanks(Ranks):
    """With the file tier.

    Args:
        caches: of each rank, as vllm_engine.caches().
        how: more of vllm_engine.config().
    """

    def __init__(self, folder: Path, caches: list[Any], **how: Any) -> None:
        def spec(rank: int) -> Any:
            return KVSwapTieringOffloadingSpec(self.config(folder, len(caches), rank, **how))

        with pytest.MonkeyPatch.context() as patch:
            on_one_host(patch)
            super().__init__(spec, caches)

    @staticmethod
    def config(folder: Path, world: int, rank: int, **how: Any) -> Any:
        settings = config(world, rank=rank, **tier(folder, cpu_bytes_to_use=1 << 20) | how)
        return replace(settings, engine_id=str(folder))

    def store(self, context: Any, named: list[bytes], blocks: list[int]) -> None:
        output = self.manager.prepare_store(named, context)
        assert output.keys_to_store == named
        assert self.copy("store", blocks, output.store_spec) == set()
        self.manager.complete_store(named, context)
        self.settle()

    def load(self, context: Any, named: list[bytes], blocks: list[int]) -> None:
        spec = self.manager.prepare_load(named, context)
        assert self.copy("load", blocks, spec) == set()
        self.manager.complete_load(named, context)

    def settle(self) -> None:
        """Waits until the tier has done everything."""
        self.step()
        for tier in self.manager.secondary_tiers:
            tier.drain_jobs()
        self.manager._process_finished_jobs()

    def found(self, context: Any, named: list[bytes]) -> list[str]:
        """What has become of keys that were looked up until all was known."""

        def known() -> bool:
            results[:] = [self.manager.lookup(key, context).name for key in named]
            self.settle()
            return {"RETRY", "HIT_PENDING"}.isdisjoint(results)

        results: list[str] = []
        assert in_time(known)
        return results

    def end(self, context: Any) -> None:
        self.manager.on_request_finished(context)
