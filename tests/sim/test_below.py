"""Pages from a second tier of a prefix cache, on a device whose copies can fail."""

from __future__ import annotations

import pytest
import torch
from below_engine import key_of
from memory_store import MemoryStore
from patience import in_time
from simulated_cache import CURRENT, run_until
from simulated_driver import Driver, place, pool, simulated

from torch_kvswap import Job, PagedLayout, PrefixCache


def result_of(driver: Driver, job: Job | None) -> str:
    assert job is not None
    run_until(driver, job.query)
    assert job.result is not None
    return job.result.state


@pytest.mark.parametrize("marks", [True, False], ids=["", "a control that marks no pages"])
@simulated
def test_a_page_from_below_loads_after_failed_stores(driver: Driver, marks: bool) -> None:
    driver.set_mode("manual")
    driver.set_stream(0, CURRENT)
    tensor = torch.randint(256, (8, 4096), dtype=torch.uint8)
    layout = place(driver, PagedLayout([tensor]))
    objects: dict[str, bytes] = {}

    def engine() -> PrefixCache:
        return PrefixCache(
            layout,
            pool(driver, layout, 1),
            below=MemoryStore(objects),
            below_model="m",
            below_policy="all",
        )

    with engine() as writer:
        job = writer.store([key_of("a")], [1]).job
        assert result_of(driver, job) == "done"
        writer.poll()
        assert in_time(lambda: len(objects) == 2)
    with engine() as reader:
        if not marks:
            reader._below._mark_written = lambda pages: None  # type: ignore[union-attr]
        driver.fail("cuMemcpyAsync")
        job = reader.store([key_of("x")], [2]).job
        assert result_of(driver, job) == "failed"
        reader.poll()
        while reader.lookup([key_of("a")]).ready == 0:
            reader.poll(timeout=1.0)
        job = reader.load([key_of("a")], [3])
        assert result_of(driver, job) == ("done" if marks else "failed")
        assert torch.equal(tensor[3], tensor[1]) == marks
        reader.poll()
