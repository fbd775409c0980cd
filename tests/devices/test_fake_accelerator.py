"""The fake accelerator behaves like an accelerator of PyTorch, and what it is told to do wrong, it does."""

import ctypes
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_accelerator import (
    DEVICE_TYPE,
    Accelerator,
    load,
    needs_compiler,
    on_fake_accelerator,
)
from fake_accelerator.accelerator import CALLS
from fake_accelerator.tests import environment, workers
from patience import PATIENCE, in_time
from processes import in_child, run_script

NUM_VALUES = 64


def device_and_page(value: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of a value on the device, where nothing is pending, and pinned memory of zeros."""
    on_device = torch.full((NUM_VALUES,), value, dtype=torch.int64, device=DEVICE_TYPE)
    torch.accelerator.synchronize()
    return on_device, torch.zeros(NUM_VALUES, dtype=torch.int64).pin_memory()


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def event(stream: torch.Stream | None = None, **options: bool) -> torch.Event:
    """An event that was recorded on the stream."""
    made = torch.Event(DEVICE_TYPE, **options)
    made.record(stream or current())
    return made


def values(tensor: torch.Tensor) -> set[int]:
    return {int(value) for value in tensor.tolist()}


# What PyTorch sees.


@on_fake_accelerator
def test_pinned_memory_is_known_and_other_memory_is_not(accelerator):
    pinned = torch.zeros(64).pin_memory()
    assert pinned.is_pinned()
    assert pinned[63:].is_pinned()
    assert torch.empty(8, pin_memory=True).is_pinned()
    assert not torch.zeros(64).is_pinned()
    address, size = pinned.data_ptr(), pinned.nbytes
    again = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
    assert again.is_pinned()
    del pinned
    assert not again.is_pinned()


# Order.


@on_fake_accelerator
def test_a_copy_to_pinned_memory_returns_before_it_has_run(accelerator):
    cache, page = device_and_page()
    with accelerator.hold(current()):
        page.copy_(cache, non_blocking=True)
        assert values(page) == {0}
        assert not current().query()
        assert accelerator.pending() == (
            "fakeaccel:0 stream 0: hold\nfakeaccel:0 stream 0: copy 512 bytes to the host\n"
        )
    current().synchronize()
    assert values(page) == {1}
    assert current().query()
    assert accelerator.pending() == ""


@pytest.mark.parametrize("how", ["blocking", "pageable", "of another dtype", "strided"])
@pytest.mark.parametrize("to_host", [False, True])
@on_fake_accelerator
def test_other_copies_wait_until_they_have_run(accelerator, how, to_host):
    cache, page = device_and_page()
    if how == "pageable":
        page = page.clone()
    elif how == "of another dtype":
        page = page.to(torch.int32).pin_memory()
    elif how == "strided":
        cache, page = cache[::2], page[::2]
    src, dst = (cache, page) if to_host else (page, cache)
    before, hold = src.cpu().clone(), accelerator.hold(current())
    ended = threading.Event()

    def copy_and_say() -> None:
        dst.copy_(src, non_blocking=how != "blocking")
        ended.set()

    thread = threading.Thread(target=copy_and_say)
    thread.start()
    assert in_time(lambda: " bytes to " in accelerator.pending())
    assert not ended.is_set()
    hold.release()
    thread.join(PATIENCE)
    assert ended.is_set()
    assert torch.equal(dst.cpu().to(before.dtype), before)


@pytest.mark.parametrize(
    "name", ["add_", "copy_", "fill_", "index", "index_copy_", "index_put_", "index_select", "out="]
)
@on_fake_accelerator
def test_an_operator_returns_before_it_has_run(accelerator, name):
    cache, other = (torch.zeros(4, 2, device=DEVICE_TYPE) for _ in range(2))
    ids, rows = torch.tensor([3, 1]).to(DEVICE_TYPE), torch.ones(2, 2, device=DEVICE_TYPE)
    out = torch.zeros(2, 2, device=DEVICE_TYPE)
    torch.accelerator.synchronize()
    before, stream = accelerator.counters().calls["synchronize"], torch.Stream(DEVICE_TYPE)
    with accelerator.hold(stream), stream:
        rows.fill_(5)
        found = {
            "add_": lambda: out.add_(rows),
            "copy_": lambda: out.copy_(rows),
            "fill_": lambda: out.fill_(5),
            "index": lambda: torch.cat([rows, rows])[ids],
            "index_copy_": lambda: cache.index_copy_(0, ids, rows)[1::2],
            "index_put_": lambda: cache.index_put_((ids,), rows)[1::2],
            "index_select": lambda: torch.cat([rows, rows]).index_select(0, ids),
            "out=": lambda: torch.index_select(other.fill_(5), 0, ids, out=out),
        }[name]()
        assert not stream.query()
        assert accelerator.counters().calls["synchronize"] == before
    stream.synchronize()
    assert found.tolist() == [[5, 5], [5, 5]]


def load_after_compute(accelerator: Accelerator, wait: bool) -> set[int]:
    """What a stream reads of a tensor that another one writes, if it waits for that or does not."""
    cache, page = device_and_page(0)
    compute, copies = torch.Stream(DEVICE_TYPE), torch.Stream(DEVICE_TYPE)
    with accelerator.hold(compute):
        with compute:
            cache.fill_(1)
            written = event()
        with copies:
            if wait:
                copies.wait_event(written)
            page.copy_(cache, non_blocking=True)
        if not wait:
            copies.synchronize()
        assert copies.query() == (not wait)
    copies.synchronize()
    compute.synchronize()
    return values(page)


@on_fake_accelerator
def test_a_stream_that_waits_for_an_event_sees_the_bytes_before_it(accelerator):
    assert load_after_compute(accelerator, wait=True) == {1}


@on_fake_accelerator
def test_a_stream_that_does_not_wait_sees_old_bytes(accelerator):
    assert load_after_compute(accelerator, wait=False) == {0}


@on_fake_accelerator
def test_held_copies_stop_on_all_streams_and_are_let_go_one_by_one(accelerator):
    streams = [torch.Stream(DEVICE_TYPE) for _ in range(2)]
    cache, page = device_and_page()
    pages = [page, page.clone().pin_memory()]
    with accelerator.hold_copies():
        for stream, to in zip(streams, pages, strict=True):
            with stream:
                to.copy_(cache, non_blocking=True)
        cache.add_(0)
        current().synchronize()
        assert [stream.query() for stream in streams] == [False, False]
        accelerator.let_copies(1)
        assert in_time(lambda: any(stream.query() for stream in streams))
        assert sorted(stream.query() for stream in streams) == [False, True]
    torch.accelerator.synchronize()
    assert [values(to) for to in pages] == [{1}, {1}]


@on_fake_accelerator
def test_a_copy_to_another_device_is_in_the_order_of_both(accelerator):
    near = torch.zeros(4, device=f"{DEVICE_TYPE}:0")
    far = torch.zeros(4, device=f"{DEVICE_TYPE}:1")
    streams = [torch.accelerator.current_stream(index) for index in range(2)]
    with accelerator.hold(streams[0]):
        near.fill_(3)
        far.copy_(near)
        far.add_(1)
        assert not streams[1].query()
    streams[1].synchronize()
    assert far.tolist() == [4] * 4
    with accelerator.hold(streams[1]):
        far.fill_(5)
        far.copy_(near)
        assert not streams[0].query()
    assert far.tolist() == [3] * 4


# Memory.


@on_fake_accelerator
def test_fresh_memory_is_not_zero(accelerator):
    for memory in (
        torch.empty(8, dtype=torch.uint8, device=DEVICE_TYPE),
        torch.empty(8, dtype=torch.uint8, pin_memory=True),
    ):
        assert memory.tolist() == [0xCD] * 8


@on_fake_accelerator
def test_the_host_dies_if_it_touches_device_memory(accelerator):
    cache, page = device_and_page()

    def read(tensor: torch.Tensor) -> bytes:
        return ctypes.string_at(tensor.data_ptr(), 8)

    def write(tensor: torch.Tensor) -> object:
        return ctypes.memset(tensor.data_ptr(), 7, 8)

    assert in_child(lambda: read(page) == bytes(8)) == 1
    assert in_child(lambda: read(cache)) == -signal.SIGSEGV
    assert in_child(lambda: write(cache)) == -signal.SIGSEGV


@on_fake_accelerator
def test_memory_is_freed_after_what_its_stream_has_to_do(accelerator):
    cache, page = device_and_page()
    before = accelerator.counters()
    with accelerator.hold(current()):
        page.copy_(cache, non_blocking=True)
        del cache
        assert accelerator.counters().live_blocks == before.live_blocks
    current().synchronize()
    assert accelerator.counters().live_blocks == before.live_blocks - 1
    assert accelerator.counters().live_bytes == before.live_bytes - 8 * NUM_VALUES
    assert values(page) == {1}


def free_under_a_copy(accelerator: Accelerator, record: bool) -> torch.Tensor:
    """Copies on a stream that is held, and frees the device memory before the copy runs."""
    cache, page = device_and_page()
    stream = torch.Stream(DEVICE_TYPE)
    with accelerator.hold(stream):
        with stream:
            page.copy_(cache, non_blocking=True)
        if record:
            cache.record_stream(stream)
        del cache
    return page


@on_fake_accelerator
def test_memory_that_another_stream_uses_is_kept_if_it_was_recorded(accelerator):
    page = free_under_a_copy(accelerator, record=True)
    torch.accelerator.synchronize()
    assert values(page) == {1}


@on_fake_accelerator
def test_memory_that_another_stream_uses_without_being_recorded_is_told(accelerator):
    page = free_under_a_copy(accelerator, record=False)
    with pytest.raises(RuntimeError, match=r"uses 512 bytes at 0x.*, which were freed"):
        torch.accelerator.synchronize()
    assert values(page) == {0}
    assert ", copy 512 bytes to the host: it uses 512 bytes" in accelerator.take_error()


@on_fake_accelerator
def test_pinned_memory_is_freed_after_the_copies_that_use_it(accelerator):
    cache, page = device_and_page()
    address = page.data_ptr()
    again = torch.frombuffer((ctypes.c_ubyte * 8).from_address(address), dtype=torch.uint8)
    with accelerator.hold(current()):
        cache.copy_(page.fill_(6), non_blocking=True)
        del page
        assert again.is_pinned()
    current().synchronize()
    assert not again.is_pinned()
    assert values(cache) == {6}


# Failures.


@pytest.mark.parametrize("call", CALLS)
@on_fake_accelerator
def test_each_call_can_fail(accelerator, call):
    cache, page = device_and_page()
    recorded = event()
    accelerator.fail(call, times=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{call} call .* fails, as the test wants"):
            {
                "allocate": lambda: torch.empty(1, device=DEVICE_TYPE),
                "copy": lambda: page.copy_(cache, non_blocking=True),
                "create_stream": lambda: torch.Stream(DEVICE_TYPE),
                "kernel": lambda: cache.add_(1),
                "query": recorded.query,
                "record": recorded.record,
                "synchronize": recorded.synchronize,
                "wait": lambda: current().wait_event(recorded),
            }[call]()
    torch.accelerator.synchronize()
    assert recorded.query()
    with pytest.raises(RuntimeError, match="there is no call copi"):
        accelerator.fail("copi")


@on_fake_accelerator
def test_a_copy_that_fails_when_it_runs_loses_the_device(accelerator):
    cache, page = device_and_page()
    accelerator.fail("copy", when_it_runs=True)
    page.copy_(cache, non_blocking=True)
    with pytest.raises(RuntimeError, match=r"fakeaccel:0 is lost: .*to the host: it fails"):
        torch.accelerator.synchronize()
    assert values(page) == {0}


def calls_that_use(stream: torch.Stream) -> dict[str, Callable[[], object]]:
    """Calls that need the device, each with objects that exist already."""
    cache, page = device_and_page()
    recorded = event()
    return {
        "allocate": lambda: torch.empty(1, device=DEVICE_TYPE),
        "copy": lambda: page.copy_(cache, non_blocking=True),
        "create a stream": lambda: torch.Stream(DEVICE_TYPE),
        "compute": lambda: cache.add_(1),
        "query an event": recorded.query,
        "query a stream": stream.query,
        "record": recorded.record,
        "synchronize the device": torch.accelerator.synchronize,
        "synchronize with an event": recorded.synchronize,
        "synchronize with a stream": stream.synchronize,
        "wait": lambda: stream.wait_event(recorded),
    }


@on_fake_accelerator
def test_a_lost_device_fails_every_call_but_those_that_free(accelerator):
    stream = torch.Stream(DEVICE_TYPE)
    calls, other = calls_that_use(stream), torch.ones(1, device=f"{DEVICE_TYPE}:1")
    for call in calls.values():
        call()
    accelerator.lose(message="it fell off the bus")
    for call in calls.values():
        with pytest.raises(RuntimeError, match=r"^fakeaccel:0 is lost: it fell off the bus"):
            call()
    assert other.tolist() == [1]
    calls.clear()
    del call
    counters = accelerator.counters()
    assert (counters.live_blocks, counters.live_events) == (0, 0)


# Processes.


@on_fake_accelerator
def test_a_forked_process_is_told_that_it_cannot_use_the_device(accelerator):
    cache, page = device_and_page()

    def fails() -> bool:
        for call in (cache.cpu, current().synchronize, lambda: cache.add_(1)):
            with pytest.raises(RuntimeError, match="cannot be used in a forked process"):
                call()
        return values(page) == {0} and torch.fakeaccel._is_in_bad_fork()

    assert in_child(fails) == 1
    assert not torch.fakeaccel._is_in_bad_fork()


@pytest.mark.slow
@needs_compiler
def test_a_process_that_forks_before_it_uses_the_device_can_use_it_in_both():
    assert "ended well" in run_script(
        """
        import fake_accelerator, torch
        from processes import in_child

        accelerator = fake_accelerator.load()

        def works():
            tensor = torch.ones(2, device="fakeaccel").add_(1)
            return tensor.tolist() == [2, 2]

        assert in_child(works) == 1
        assert works()
        assert fake_accelerator.load() is accelerator
        accelerator.hold(torch.accelerator.current_stream())
        torch.ones(2, device="fakeaccel")
        print("ended well")
        """
    )


@on_fake_accelerator
def use_a_stream_of_before(accelerator: Accelerator) -> None:
    sys.modules[__name__].kept.query()


@on_fake_accelerator
def keep_a_stream(accelerator: Accelerator) -> None:
    sys.modules[__name__].kept = torch.Stream(DEVICE_TYPE)
    accelerator.hold(sys.modules[__name__].kept)
    accelerator.hold_copies()
    accelerator.fail("copy")
    accelerator.lose(1)


@on_fake_accelerator
def use_both_devices(accelerator: Accelerator) -> None:
    for index in range(2):
        assert torch.ones(2, device=f"{DEVICE_TYPE}:{index}").tolist() == [1, 1]
    assert accelerator.counters().live_streams == 0


@on_fake_accelerator
def lose_the_device(accelerator: Accelerator) -> None:
    cache, _ = device_and_page()
    cache.index_select(0, torch.tensor([NUM_VALUES]).to(DEVICE_TYPE))
    assert in_time(lambda: accelerator.pending() == "")


worker = workers.fixture()


@pytest.mark.slow
@needs_compiler
def test_a_test_leaves_nothing_to_the_next_but_streams_that_have_ended(worker):
    assert worker.call(__name__, "keep_a_stream", {}) is None
    assert worker.call(__name__, "use_both_devices", {}) is None
    failure = worker.call(__name__, "use_a_stream_of_before", {})
    assert failure is not None
    assert "stream 1 of fakeaccel:0 does not exist" in failure


@pytest.mark.slow
@needs_compiler
def test_a_test_fails_if_it_lost_the_device_and_did_not_look(worker):
    failure = worker.call(__name__, "lose_the_device", {})
    assert failure is not None
    assert "used wrongly:\nfakeaccel:0 stream 0, aten::index_select" in failure


def test_the_process_of_other_tests_has_no_fake_accelerator():
    assert torch.accelerator.current_accelerator() != torch.device("privateuseone")
    assert "fake" not in torch._C._get_privateuse1_backend_name()
    assert load.cache_info().currsize == 0
    assert "OMP_NUM_THREADS" in environment()


@needs_compiler
def test_the_program_of_the_documentation_runs():
    page = Path(__file__).parents[2] / "docs" / "fake_accelerator.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert run_script(program).splitlines() == [
        "False []",
        "store done None",
        "load failed fakeaccel:0: copy call 4 fails, as the test wants",
    ]
