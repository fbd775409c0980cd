"""A vendor's batched copies and pinned memory: chosen where they can be used, refused where not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import error_text as errors
import pytest
import torch
from fake_accelerator import DEVICE_TYPE, Accelerator
from fake_backend import Backend, PinningBackend
from logged import logged
from patience import PATIENCE
from queued_devices import DEVICE, Rows, current, on_queued_device, queue_of

from torch_kvswap import HostPool, OffloadHandler, PagedLayout, TransferError, swap_blocks_batch
from torch_kvswap.devices import backend as backends
from torch_kvswap.devices import register_device_backend


def error_text(*call: Any, **options: Any) -> str:
    """In one line."""
    return " ".join(errors.error_text(*call, **options).split())


# Registering


@contextmanager
def entry_point(load: Callable[[], object]) -> Iterator[None]:
    """A package declares a backend for the device type, which `load` returns."""

    def entry_points(group: str, name: str) -> list[Any]:
        assert (group, name) == ("torch_kvswap.device_backends", DEVICE_TYPE)
        return [SimpleNamespace(load=load, value="vendor.copies:backend")]

    before, metadata.entry_points = metadata.entry_points, entry_points  # type: ignore[assignment]
    backends._entry_points_read.clear()
    try:
        yield
    finally:
        metadata.entry_points = before
        backends._entry_points_read.clear()


@on_queued_device
def test_what_is_no_backend_is_refused(accelerator: Accelerator) -> None:
    backend = Backend(accelerator)
    texts = [
        error_text(register_device_backend, DEVICE_TYPE, object()),
        error_text(register_device_backend, "cuda", backend),
        error_text(register_device_backend, "quantum", backend).partition(":")[0],
        error_text(register_device_backend, f"{DEVICE_TYPE}:0", backend).replace("\n", " "),
        error_text(register_device_backend, torch.device(DEVICE_TYPE), backend),
    ]
    register_device_backend(DEVICE_TYPE, backend)
    register_device_backend(DEVICE_TYPE, backend)
    texts.append(error_text(register_device_backend, DEVICE_TYPE, Backend(accelerator)))
    assert texts == [
        "TypeError: backend, of type object, has no copy_batch(); see DeviceBackend",
        "ValueError: 'cuda' needs no backend: torch_kvswap drives it itself",
        "RuntimeError",
        "ValueError: device_type is 'fakeaccel:0', but a backend is for all devices of a type; "
        "pass 'fakeaccel'",
        "TypeError: device_type is a device; pass a str, such as 'npu'",
        "ValueError: 'fakeaccel' has a backend already; register one, once",
    ]


@pytest.mark.parametrize("works", [True, False])
@on_queued_device
def test_a_package_can_bring_a_backend(accelerator: Accelerator, works: bool) -> None:
    made = Backend(accelerator)

    def load() -> object:
        if works:
            return made
        raise ImportError("libvendor.so is missing")

    with entry_point(load), logged() as messages:
        rows = Rows()
    rows.store(3, 0).synchronize(PATIENCE)
    assert rows.page(0) == {3}
    assert rows.handler.poll()[0].copy_method == ("batch" if works else "generic")
    assert messages == (
        []
        if works
        else [
            "the backend for fakeaccel of vendor.copies:backend cannot be used: ImportError: "
            "libvendor.so is missing; blocks are copied with torch's operations"
        ]
    )


@on_queued_device
def test_a_thread_that_asks_while_another_one_loads_the_backend_gets_it(
    accelerator: Accelerator,
) -> None:
    made, found = Backend(accelerator), []
    other = threading.Thread(target=lambda: found.append(backends.find_device_backend(DEVICE_TYPE)))

    def load() -> object:
        other.start()
        other.join(0.2)  # it ends here if it does not wait
        return made

    with entry_point(load):
        found.append(backends.find_device_backend(DEVICE_TYPE))
        other.join(PATIENCE)
    assert found == [made, made]


# Copying


@on_queued_device
def test_fragments_are_merged_and_divided_into_calls(accelerator: Accelerator) -> None:
    backend = Backend(accelerator, most_copies=2)
    register_device_backend(DEVICE_TYPE, backend)
    rows = Rows()
    nbytes = rows.layout.block_bytes
    ids = {"gpu_block_ids": [1, 2, 4, 6, 7], "page_ids": [0, 1, 3, 4, 2]}
    rows.handler.store(**ids).synchronize(PATIENCE)
    assert backend.calls == [([2 * nbytes, nbytes], True), ([nbytes, nbytes], True)]
    assert [rows.page(page) for page in range(5)] == [{1}, {2}, {7}, {4}, {6}]


@pytest.mark.parametrize("waits", [True, False])
@on_queued_device
def test_a_batch_waits_for_the_kernels_on_the_current_stream(
    accelerator: Accelerator, waits: bool
) -> None:
    register_device_backend(DEVICE_TYPE, Backend(accelerator))
    rows = Rows()
    with accelerator.hold(current()):
        rows.write(3, 100)
        store = rows.store(3, 0, **({} if waits else {"after": ()}))
        if not waits:
            store.synchronize(PATIENCE)
    store.synchronize(PATIENCE)
    assert rows.page(0) == ({100} if waits else {3})


@on_queued_device
def test_a_batch_that_fails_ends_its_job(accelerator: Accelerator) -> None:
    register_device_backend(DEVICE_TYPE, Backend(accelerator))
    rows = Rows()
    accelerator.fail("batch")
    with pytest.raises(TransferError):
        rows.store(3, 0).synchronize(PATIENCE)
    rows.store(3, 0).synchronize(PATIENCE)
    assert rows.page(0) == {3}


@on_queued_device
def test_addresses_are_copied_by_the_backend(accelerator: Accelerator) -> None:
    cache = torch.arange(8, dtype=torch.int32, device=DEVICE)
    page = torch.zeros(8, dtype=torch.int32).pin_memory()
    backend = Backend(accelerator, most_copies=1)

    def copy(*sizes: int) -> None:
        sources = torch.tensor([cache.data_ptr() + 4 * at for at in (5, 0, 2)])
        targets = torch.tensor([page.data_ptr() + 4 * at for at in (1, 0, 4)])
        swap_blocks_batch(sources, targets, torch.tensor(sizes))

    refused = error_text(copy, 4, 0, 8)
    register_device_backend(DEVICE_TYPE, backend)
    texts = [error_text(copy, 4, -1, 8), error_text(copy, 4)]
    with accelerator.hold(current()):
        copy(4, 0, 8)
        assert not page.any()
    torch.accelerator.synchronize()
    assert page.tolist() == [0, 5, 0, 0, 2, 3, 0, 0]
    assert backend.calls == [([4], None), ([8], None)]
    assert "no batched copy of addresses is registered for fakeaccel" in refused
    assert texts == [
        "RuntimeError: torch_kvswap::swap_blocks_batch: sizes[1] is -1; expected 0 or more bytes",
        "RuntimeError: torch_kvswap::swap_blocks_batch: sizes has length 1, but src_ptrs has 3; expected the same number",
    ]


# Methods that a device lacks


@on_queued_device
def test_a_method_that_the_device_lacks_is_refused(accelerator: Accelerator) -> None:
    rows = Rows()
    lacking = [
        error_text(OffloadHandler, rows.layout, rows.pool, copy_method=method)
        for method in ("batch", "strided", "staged", "kernel")
    ]
    assert lacking == [
        f"ValueError: copy_method='{method}' is no copy method of fakeaccel:0; it can be auto, "
        "copy_engines, generic"
        for method in ("batch", "strided", "staged", "kernel")
    ]
    assert error_text(rows.handler.gate) == (
        "ValueError: a gate makes CUDA streams wait, but the cache is on fakeaccel:0, whose streams "
        "cannot wait for a word in memory; let them wait for each job with Job.wait()"
    )


@on_queued_device
def test_the_generic_method_can_be_forced(accelerator: Accelerator) -> None:
    backend = Backend(accelerator)
    register_device_backend(DEVICE_TYPE, backend)
    rows = Rows(copy_method="generic")
    rows.store(3, 0).synchronize(PATIENCE)
    assert rows.handler.poll()[0].copy_method == "generic"
    assert backend.calls == []


@on_queued_device
def test_pages_that_are_not_pinned_are_copied_synchronously_and_without_the_backend(
    accelerator: Accelerator,
) -> None:
    register_device_backend(DEVICE_TYPE, Backend(accelerator))
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
    assert error_text(OffloadHandler, layout, pool, copy_method="batch") == (
        "ValueError: copy_method='batch' needs pinned host pages; leave it out, or pin the pages"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSWAP_COPY_METHOD", "batch")
        assert error_text(OffloadHandler, layout, pool) == (
            "ValueError: KVSWAP_COPY_METHOD='batch' needs pinned host pages; leave it out, or pin "
            "the pages"
        )


@on_queued_device
def test_doctor_says_what_the_device_has(accelerator: Accelerator) -> None:
    from torch_kvswap.cli.doctor import report

    texts = [report()["device fakeaccel"]]
    register_device_backend(DEVICE_TYPE, PinningBackend(accelerator))
    texts.append(report()["device fakeaccel"])
    assert texts == [
        "lacks batched copies, strided copies, kernels, gates, host registration",
        "has batched copies, host registration; lacks strided copies, kernels, gates",
    ]


# Pinned memory


@on_queued_device
def test_a_pool_has_memory_that_torch_pins(accelerator: Accelerator) -> None:
    rows = Rows()
    progress: list[tuple[int, int]] = []
    pool = HostPool(rows.layout, 3, pinned=True, on_progress=lambda *of: progress.append(of))
    assert pool.is_pinned
    assert pool.pages.is_pinned()
    assert pool.wait_ready()
    assert progress == [(3, 3)]
    assert not pool.pages.any()
    assert not HostPool(rows.layout, 3, pinned=False).is_pinned
    shared = error_text(HostPool.create_shared, rows.layout, 4, pinned=True)
    assert shared.startswith("ValueError: the memory of a shared pool cannot be pinned")
    assert [
        error_text(HostPool, rows.layout, 1, **{name: value}).partition(" is not")[0]
        for name, value in (("huge_pages", True), ("numa_node", 0))
    ] == ["ValueError: huge_pages=True", "ValueError: numa_node"]
    with logged() as messages:
        assert not HostPool.create_shared(rows.layout, 4).is_pinned
    assert len(messages) == 1


@on_queued_device
def test_a_backend_pins_memory_also_of_shared_pools(accelerator: Accelerator) -> None:
    backend = PinningBackend(accelerator)
    register_device_backend(DEVICE_TYPE, backend)
    layout = PagedLayout([torch.arange(8, dtype=torch.int32, device=DEVICE)])
    pool = HostPool.create_shared(layout, 2048)
    assert pool.is_pinned
    assert backend.pinned == {pool.pages.data_ptr(): pool.nbytes}
    with OffloadHandler(layout, pool) as handler:
        handler.store(gpu_block_ids=[3], page_ids=[7]).synchronize(PATIENCE)
        assert pool.pages.view(torch.int32)[7].item() == 3
    pool.close()
    assert backend.pinned == {}


@on_queued_device
def test_memory_that_a_backend_does_not_pin_is_pageable(accelerator: Accelerator) -> None:
    backend = PinningBackend(accelerator)
    register_device_backend(DEVICE_TYPE, backend)
    backend.refuses = True
    layout = PagedLayout([torch.arange(8, dtype=torch.int32, device=DEVICE)])
    text = error_text(HostPool, layout, 4, pinned=True)
    assert "no more memory can be locked" in text
    with logged() as messages, OffloadHandler(layout, HostPool(layout, 4)) as handler:
        handler.store(gpu_block_ids=[3], page_ids=[0]).synchronize(PATIENCE)
        assert handler.poll()[0].copy_method == "generic"
    assert "no more memory can be locked" in messages[0]
