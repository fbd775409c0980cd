"""What devices that torch drives lack is refused, and torch pins their memory."""

from __future__ import annotations

import torch
from error_text import one_line
from logged import logged
from patience import PATIENCE
from queued_devices import DEVICE, Rows, on_queued_device, queue_of

from torch_kvswap import HostPool, OffloadHandler, PagedLayout


@on_queued_device
def test_a_method_that_the_device_lacks_is_refused(accelerator):
    rows = Rows()
    assert one_line(OffloadHandler, rows.layout, rows.pool, copy_method="strided") == (
        "ValueError: copy_method='strided' is no copy method of fakeaccel:0; it can be auto, "
        "copy_engines, generic"
    )


@on_queued_device
def test_pages_that_are_not_pinned_are_copied_synchronously(accelerator):
    layout = PagedLayout([torch.arange(8, dtype=torch.int32, device=DEVICE)])
    pool = HostPool(layout, 4, pinned=False)
    with logged() as messages, OffloadHandler(layout, pool) as handler:
        handler.store(gpu_block_ids=[3], page_ids=[0]).synchronize(PATIENCE)
        handler.load(page_ids=[0], gpu_block_ids=[5]).synchronize(PATIENCE)
        assert {result.copy_method for result in handler.poll()} == {"generic"}
        queue = queue_of(handler)
    assert layout.tensors[0].cpu().tolist() == [0, 1, 2, 3, 4, 3, 6, 7]
    assert messages in (
        [],  # it was logged before in this process
        [
            "host pages for fakeaccel:0 are not pinned: their copies are synchronous, and delay "
            "other transfers of the device"
        ],
    )
    assert queue.lost is None


@on_queued_device
def test_doctor_says_what_the_device_has(accelerator):
    from torch_kvswap.cli.doctor import report

    assert report()["device fakeaccel"].text == "driven by PyTorch"


@on_queued_device
def test_a_pool_has_memory_that_torch_pins(accelerator):
    rows = Rows()
    pool = HostPool(rows.layout, 3, pinned=True)
    assert pool.is_pinned
    assert pool.pages.is_pinned()
    assert pool.wait_ready()
    assert not pool.pages.any()
    assert not HostPool(rows.layout, 3, pinned=False).is_pinned
    shared = one_line(HostPool, rows.layout, 4, pinned=True, shared=True)
    assert shared.startswith("ValueError: the memory of a shared pool cannot be pinned")
    assert [
        one_line(HostPool, rows.layout, 1, **{name: value}).partition(" is not")[0]
        for name, value in (("huge_pages", True), ("numa_node", 0))
    ] == ["ValueError: huge_pages=True", "ValueError: numa_node"]
    with logged() as messages:
        assert not HostPool(rows.layout, 4, shared=True).is_pinned
    assert len(messages) == 1
