"""A handler of a device that torch drives: bytes, order, and how jobs end. Each test of an order has a
control, in which something else is the only thing that is missing."""

from __future__ import annotations

import pytest
import torch
from error_text import error_text
from paged_caches import LAYOUTS, check_round_trip
from patience import PATIENCE, in_time
from queued_devices import DEVICE, ROW, Rows, current, on_queued_device, queue_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_kvswap import HostPool, OffloadHandler, PagedLayout


def let_it_run(rows: Rows) -> None:
    """Every command was carried out."""
    queue = queue_of(rows.handler)
    assert in_time(lambda: queue.commands.is_empty)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("blocks_per_page", [1, 4])
@on_queued_device
def test_what_is_stored_comes_back_elsewhere_and_nothing_else_changes(
    accelerator, name, blocks_per_page
):
    results = check_round_trip(name, blocks_per_page, DEVICE)
    assert [result.copy_method for result in results] == ["generic", "generic"]


@on_queued_device
def test_a_store_of_adjacent_pages_is_one_copy(accelerator):
    rows = Rows()
    before = accelerator.counters()
    rows.handler.store(gpu_block_ids=[5, 1, 3], page_ids=[2, 0, 1]).synchronize(PATIENCE)
    after = accelerator.counters()
    assert [rows.page(page) for page in range(3)] == [{1}, {3}, {5}]
    assert after.copies_to_host - before.copies_to_host == 1
    assert after.copies_to_device - before.copies_to_device == 1  # of the ids


# Order: the rules of docs/ordering.md, and a control for each.


@pytest.mark.parametrize("waits", [True, False])
@on_queued_device
def test_a_store_waits_for_the_kernels_on_the_current_stream(accelerator, waits):
    rows = Rows()
    with accelerator.hold(current()):
        rows.write(3, 100)
        store = rows.store(3, 0, **({} if waits else {"after": ()}))
        let_it_run(rows)
        if not waits:
            store.synchronize(PATIENCE)
    store.synchronize(PATIENCE)
    assert rows.page(0) == ({100} if waits else {3})


@pytest.mark.parametrize("waits", [True, False])
@on_queued_device
def test_a_load_waits_for_the_kernels_on_the_current_stream(accelerator, waits):
    rows = Rows()
    rows.set_page(0, 100)
    seen = torch.zeros(ROW, dtype=torch.int32, device=DEVICE)
    with accelerator.hold(current()):
        seen.copy_(rows.tensors[0][3])
        load = rows.load(0, 3, **({} if waits else {"after": ()}))
        let_it_run(rows)
        if not waits:
            load.synchronize(PATIENCE)
    load.synchronize(PATIENCE)
    assert set(seen.cpu().tolist()) == ({3} if waits else {100})
    assert rows.block(3) == {100}


@pytest.mark.parametrize("names_it", [True, False])
@pytest.mark.parametrize("kind", ["stream", "event"])
@on_queued_device
def test_a_job_starts_after_all_streams_and_events_of_a_tuple(accelerator, kind, names_it):
    rows, stream, idle = Rows(), torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    event, early = torch.Event(DEVICE), torch.Event(DEVICE)
    early.record(stream)
    with accelerator.hold(stream):
        rows.write(3, 100, stream)
        event.record(stream)
        last = (stream if kind == "stream" else event,) if names_it else ()
        store = rows.store(3, 0, after=(early, *last, idle))
        let_it_run(rows)
        if not names_it:
            store.synchronize(PATIENCE)
    store.synchronize(PATIENCE)
    assert rows.page(0) == ({100} if names_it else {3})
    stream.synchronize()  # before the cache is freed


@on_queued_device
def test_an_event_that_is_recorded_again_does_not_delay_the_job(accelerator):
    rows, stream, event = Rows(), torch.Stream(device=DEVICE), torch.Event(DEVICE)
    with accelerator.hold(stream) as first:
        event.record(stream)
        store = rows.store(3, 0, after=event)
        first.release()
        with accelerator.hold(stream):
            event.record(stream)
            store.synchronize(PATIENCE)
            assert not event.query()


@pytest.mark.parametrize("waits", [True, False])
@on_queued_device
def test_a_stream_that_waits_for_a_load_sees_its_bytes(accelerator, waits):
    rows, stream = Rows(), torch.Stream(device=DEVICE)
    rows.set_page(0, 100)
    seen = torch.zeros(ROW, dtype=torch.int32, device=DEVICE)
    torch.accelerator.synchronize()
    with accelerator.hold_copies():
        load = rows.load(0, 3)
        if waits:
            load.wait(stream)
        with stream:
            seen.copy_(rows.tensors[0][3])
        if not waits:
            stream.synchronize()
    load.synchronize(PATIENCE)
    stream.synchronize()
    assert set(seen.cpu().tolist()) == ({100} if waits else {3})


@pytest.mark.parametrize("layer", [0, 1])
@on_queued_device
def test_a_stream_can_wait_for_a_group_of_layers(accelerator, layer):
    rows, stream = Rows(tensors=2), torch.Stream(device=DEVICE)
    rows.set_page(0, 100)
    seen = torch.zeros(ROW, dtype=torch.int32, device=DEVICE)
    torch.accelerator.synchronize()
    with accelerator.hold_copies():
        load = rows.load(0, 3, layer_groups=2)
        load.wait(stream, layer_group=0)
        with stream:
            seen.copy_(rows.tensors[layer][3])
        accelerator.let_copies(3)  # the ids, the first layer, and the ids again
        stream.synchronize()
        assert not load.query()
    load.synchronize(PATIENCE)
    assert set(seen.cpu().tolist()) == ({100} if layer == 0 else {3})


@on_queued_device
def test_a_handler_of_another_device_than_the_current_one_uses_its_own(accelerator):
    other = "fakeaccel:1"
    layout = PagedLayout([torch.arange(8, dtype=torch.int32, device=other)])
    with OffloadHandler(layout, HostPool(layout, 4)) as handler:
        stream = torch.accelerator.current_stream(other)
        with accelerator.hold(stream):
            layout.tensors[0].add_(100)
            store = handler.store(gpu_block_ids=[3], page_ids=[0])
            load = handler.load(page_ids=[0], gpu_block_ids=[5])
            load.wait()
            assert not store.query()
        seen = layout.tensors[0].cpu()
        text = error_text(handler.store, gpu_block_ids=[3], page_ids=[0], after=current())
    assert torch.accelerator.current_device_index() == 0
    assert seen.tolist() == [100, 101, 102, 103, 104, 103, 106, 107]
    assert text.startswith("ValueError: after= is a stream of fakeaccel:0, the cache is on")


@on_queued_device
def test_what_is_no_stream_is_refused_with_what_can_be_passed(accelerator):
    rows, stream = Rows(), torch.Stream(device=DEVICE)
    with rows.handler as handler:
        job = handler.store(gpu_block_ids=[0], page_ids=[0])
        errors = [
            error_text(job.wait, 1),
            error_text(handler.store, gpu_block_ids=[0], page_ids=[0], after="x"),
            error_text(handler.store, gpu_block_ids=[0], page_ids=[0], after=(stream, 7)),
            error_text(handler.store, gpu_block_ids=[0], page_ids=[0], after=(None,)),
        ]
        job.synchronize(PATIENCE)
    assert [" ".join(error.split()) for error in errors] == [
        "TypeError: stream must be None (the current stream) or a torch.Stream, not an int",
        "TypeError: after= must be None (the current stream), a torch.Stream, a torch.Event or "
        "a tuple of streams and events, not a str",
        "TypeError: after[1] must be a torch.Stream or a torch.Event, not an int",
        "TypeError: after[0] must be a torch.Stream or a torch.Event, not None",
    ]


@pytest.mark.parametrize("mode", [TorchFunctionMode, TorchDispatchMode])
@on_queued_device
def test_a_mode_of_torch_does_not_see_the_copies(accelerator, mode):
    rows, seen = Rows(), []

    class Mode(mode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            seen.append(str(function))
            return function(*arguments, **(options or {}))

        __torch_dispatch__ = __torch_function__

    with Mode():
        load = rows.load(0, 3)
        load.wait()
        load.synchronize(PATIENCE)
    assert not [name for name in seen if "copy" in name or "index" in name]
