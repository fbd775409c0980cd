"""Which copy method a transfer takes: the requested one, or what the rule prefers of those that are
available (tests/unit/test_copy_method.py has the rule itself).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
from host_pools import unpinned
from logged import logged
from patience import PATIENCE
from simulated_cache import (
    CHANNELS,
    let_threads_look,
    needs_kernels,
    new_threads,
    run_until,
    threads,
)
from simulated_driver import Driver, on_device, place, run, simulated, without_cuda

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap._native.loader import native
from torch_kvswap._native.log import warn_once
from torch_kvswap.copy_method import AUTO, CHOICES, COPY_ENGINES, COPY_METHODS, copy_method_options

FORCED = [copy_method for copy_method in CHOICES if copy_method not in (AUTO, COPY_ENGINES)]


def test_a_method_is_forced() -> None:
    for copy_method in FORCED:
        assert copy_method_options(copy_method, 0).copy_method == COPY_METHODS.index(copy_method)
    assert copy_method_options("auto", 0).copy_method == -1


def test_what_cannot_be_asked_for_is_refused() -> None:
    assert_expected_inline(
        error_text(copy_method_options, "fast", 0),
        """\
ValueError: copy_method is 'fast'; it must be 'auto', 'copy_engines', 'batch',
'strided', 'staged' or 'kernel'""",
    )
    assert_expected_inline(
        error_text(copy_method_options, "auto", -1),
        """ValueError: staging_bytes is -1; it must be 0 or more""",
    )
    assert_expected_inline(
        error_text(copy_method_options, "host", 0),
        """\
ValueError: copy_method is 'host'; it must be 'auto', 'copy_engines', 'batch',
'strided', 'staged' or 'kernel'""",
    )


def test_a_cpu_cache_has_its_own_method() -> None:
    layout = PagedLayout([torch.zeros(4, 8)])
    with OffloadHandler(layout, HostPool(layout, 2)) as handler:
        job = handler.store(gpu_block_ids=[1], page_ids=[1])
        assert job.result is not None
        assert job.result.copy_method == "host"


@pytest.mark.parametrize("copy_method", FORCED)
def test_a_method_that_the_device_lacks_is_refused(copy_method: str) -> None:
    layout = PagedLayout([torch.zeros(4, 8)])
    with pytest.raises(ValueError, match="cannot be used with") as refusal:
        OffloadHandler(layout, HostPool(layout, 2), copy_method=copy_method)
    assert str(refusal.value) == (
        f"copy_method='{copy_method}' cannot be used with host memory; it must be 'auto' or "
        "'copy_engines'"
    )
    OffloadHandler(layout, HostPool(layout, 2), copy_method="auto").close()


# The choice. On the simulated driver's clock each call that copies takes a millisecond.


def whole_cache(layers: int, blocks: int, fragment: int) -> torch.Tensor:
    """All layers in one tensor, at equal distances."""
    return torch.zeros(layers, blocks, fragment, dtype=torch.uint8)


def method_of(handler: OffloadHandler, blocks: int, kind: str = "store", **options: Any) -> str:
    ids = list(range(blocks))
    if kind == "store":
        job = handler.store(gpu_block_ids=ids, page_ids=ids, **options)
    else:
        options["expedited"] = kind == "expedited"
        job = handler.load(page_ids=ids, gpu_block_ids=ids, **options)
    handler.synchronize(job)
    assert job.result is not None
    return job.result.copy_method


@needs_kernels
@simulated
def test_the_first_available_method_is_taken(driver: Driver) -> None:
    """Of stores, loads, expedited loads and loads by copy engines."""
    layout = on_device(driver, whole_cache(4, 20, 64 << 10))
    taken = []
    for count in (1, 16, 17):  # 16 blocks have 4 MiB
        of_kinds = []
        for kind in (*CHANNELS, "load"):
            copy_method = "copy_engines" if len(of_kinds) == 3 else "auto"
            # Of a handler that knows nothing of earlier transfers.
            with OffloadHandler(layout, HostPool(layout, 20), copy_method=copy_method) as handler:
                of_kinds.append(method_of(handler, count, kind))
        taken.append(f"{count}: " + " ".join(of_kinds))
    assert taken == [
        "1: strided strided strided strided",
        "16: strided kernel kernel strided",
        "17: staged staged kernel strided",
    ]


@needs_kernels
@pytest.mark.parametrize(
    ("copy_method", "taken"), [("auto", "staged"), ("copy_engines", "strided")]
)
@simulated
def test_copy_engines_takes_no_kernels(driver: Driver, copy_method: str, taken: str) -> None:
    layout = on_device(driver, whole_cache(4, 20, 64 << 10))
    before = driver.live("allocations")
    with OffloadHandler(layout, HostPool(layout, 20), copy_method=copy_method) as handler:
        assert method_of(handler, 20, "load") == taken
        assert (driver.live("allocations") > before) == (taken == "staged")


@simulated
def test_pageable_memory_is_always_copied_by_batches(driver: Driver) -> None:
    """Pinned memory is the control."""
    layout = on_device(driver, whole_cache(4, 4, 512))
    taken = []
    for pinned in (True, False):
        for copy_method in ("copy_engines", "strided"):
            pool = (HostPool if pinned else unpinned)(layout, 4)
            with OffloadHandler(layout, pool, copy_method=copy_method) as handler:
                taken.append(method_of(handler, 2))
    assert taken == ["strided", "strided", "batch", "batch"]
    assert driver.calls("cuMemcpyBatchAsync") == 0  # takes pinned memory only


@needs_kernels
@simulated
def test_a_block_in_one_piece_is_one_copy(driver: Driver) -> None:
    """All layers of a block are neighbours, as in vLLM's BLHNC. Layer groups divide the block."""
    blocks, layers, size = 4, 4, 512 << 10
    whole = torch.randint(256, (blocks, layers, size), dtype=torch.uint8)
    layout = on_device(driver, whole, list(whole.unbind(1)))
    with OffloadHandler(layout, HostPool(layout, blocks), copy_method="auto") as handler:
        driver.log()
        handler.synchronize(handler.store(gpu_block_ids=[3], page_ids=[2]))
        handler.synchronize(handler.load(page_ids=[2], gpu_block_ids=[1]))
        copies = [line.split(" from ")[0] for line in driver.log().splitlines() if "copy" in line]
        assert len(copies) == 2, copies
        assert all(f"copy {layers * size} bytes" in copy for copy in copies)
        assert torch.equal(handler.pools[0].pages[2, 0], whole[3].flatten())
        assert torch.equal(whole[1], whole[3])
        assert method_of(handler, blocks, "load") == "batch"
        assert method_of(handler, blocks, "load", layer_groups=layers) == "staged"


# Which thread submits: the calling one what it takes 50 us at most.


def calls_that_submit(
    driver: Driver, layers: list[int], copy_method: str = "auto", pinned: bool = True
) -> str:
    """The most blocks of a store, a load and an expedited load that start no other thread."""
    whole = torch.zeros(11, 100, 512, dtype=torch.uint8)
    layout = on_device(driver, whole, [whole[layer] for layer in layers])
    most = []
    for kind in CHANNELS:
        pool = (HostPool if pinned else unpinned)(layout, 100)
        with OffloadHandler(layout, pool, copy_method=copy_method) as handler:
            before, count = threads(), 0
            while new_threads(before) == 0 and count < 100:
                count += 1
                ids = list(range(count))
                if kind == "store":
                    job = handler.store(gpu_block_ids=ids, page_ids=ids)
                else:
                    expedited = kind == "expedited"
                    job = handler.load(page_ids=ids, gpu_block_ids=ids, expedited=expedited)
                handler.synchronize(job)
            most.append(f"{kind} {count - new_threads(before)}")
    return ", ".join(most)


@pytest.mark.parametrize(
    ("copy_method", "layers", "expected"),
    [
        ("batch", [0, 1, 2], 26),  # 2 us, and 0.6 for each fragment
        ("strided", [0, 1, 2, 3], 24),  # 1 us, and 2 for each block
        ("strided", [0, 1, 3, 6, 10], 8),  # 2 for each of three runs
        pytest.param("staged", [0, 1, 2, 3], 36, marks=needs_kernels),  # 8 us, and 1.15 for each
    ],
)
@simulated
def test_the_caller_submits_50_us_of_copies(
    driver: Driver, copy_method: str, layers: list[int], expected: int
) -> None:
    taken = calls_that_submit(driver, layers, copy_method)
    of_expedited = 100 if copy_method == "staged" else expected  # by a kernel
    assert taken == f"store {expected}, load {expected}, expedited {of_expedited}"


@simulated
def test_the_caller_never_submits_pageable_memory(driver: Driver) -> None:
    taken = calls_that_submit(driver, [0, 1, 2, 3], "batch", pinned=False)
    assert taken == "store 0, load 0, expedited 0"


@pytest.mark.parametrize("expedited", [True, False])
@needs_kernels
@simulated
def test_an_expedited_load_passes_a_staged_one(driver: Driver, expedited: bool) -> None:
    """A load that is not expedited is the control: it waits too."""
    whole = torch.randint(256, (4, 40, 64 << 10), dtype=torch.uint8)
    layout = on_device(driver, whole)
    copies = driver.cuda.create_stream() + 3
    first, second = list(range(17)), list(range(20, 37))  # more bytes than a kernel loads otherwise
    pool, ids, expected = HostPool(layout, 40), first + second, whole.clone()
    pool.pages.view(40, 4, -1).copy_(whole.transpose(0, 1))
    whole.zero_()
    with OffloadHandler(layout, pool, copy_method="auto") as handler:
        driver.set_mode("manual")
        hold = driver.hold(copies)
        jobs = [
            handler.load(page_ids=first, gpu_block_ids=first, after=()),
            handler.load(page_ids=second, gpu_block_ids=second, after=(), expedited=expedited),
        ]
        if expedited:
            run_until(driver, jobs[1].query)
            assert torch.equal(whole[:, second], expected[:, second])
        else:
            let_threads_look(driver)
        assert [job.query() for job in jobs] == [False, expedited]
        driver.release(hold)
        run_until(driver, lambda: all(job.query() for job in jobs))
        driver.set_mode("immediate")
        assert torch.equal(whole[:, ids], expected[:, ids])
        results = [job.result for job in jobs]
    taken = [result.copy_method for result in results if result]
    assert taken == ["staged", "kernel" if expedited else "staged"]


@needs_kernels
@simulated
def test_what_no_transfer_would_take_gets_no_memory(driver: Driver) -> None:
    large = on_device(driver, whole_cache(1, 4, 1 << 20))
    with OffloadHandler(large, HostPool(large, 4), copy_method="auto") as handler:
        assert method_of(handler, 4) == "batch"
    assert driver.calls("cuMemAlloc") == 0
    small = on_device(driver, whole_cache(2, 4, 512))
    OffloadHandler(small, HostPool(small, 4), copy_method="auto").close()
    assert driver.calls("cuMemAlloc") == 2  # the table of slabs and the buffer


# A crowded GPU: kernels are held up. The driver's clock says how long a transfer took.


def slow_load(driver: Driver, handler: OffloadHandler, stream: int, ms: float) -> str:
    """The copy method of a load of 4 MiB whose copies on `stream` start so late."""
    driver.set_mode("manual")
    job = handler.load(page_ids=[0, 1], gpu_block_ids=[0, 1], after=())
    assert driver.step(stream)  # its start is recorded
    driver.advance_clock(ms)
    driver.set_mode("immediate")
    handler.synchronize(job)
    assert job.result is not None
    assert job.result.copy_seconds > ms / 1000
    return job.result.copy_method


@contextmanager
def crowded(driver: Driver, copy_method: str = "auto") -> Iterator[tuple[OffloadHandler, int]]:
    """A handler with blocks of 2 MiB, and the stream of its loads."""
    layout = on_device(driver, whole_cache(4, 16, 512 << 10))
    copies = driver.cuda.create_stream() + 3
    with OffloadHandler(
        layout, HostPool(layout, 16), copy_method=copy_method, staging_bytes=1 << 20
    ) as handler:
        yield handler, copies


@pytest.mark.parametrize("ms", [5, pytest.param(200, marks=pytest.mark.slow)])
@needs_kernels
@simulated
def test_copy_engines_replace_kernels_held_up(driver: Driver, ms: float) -> None:
    """For a while, then kernels are tried again."""
    with crowded(driver) as (handler, copies):
        taken: list[str] = []
        while "strided" not in taken:  # a busy machine may stop this thread for as long as that
            began = time.monotonic()
            assert slow_load(driver, handler, copies, ms) == "kernel"
            taken = []
            while "kernel" not in taken:
                assert time.monotonic() < began + PATIENCE
                taken.append(slow_load(driver, handler, copies, ms))
            chosen_until = time.monotonic()  # a busy machine may stop this thread in the call
    # A hundred times as long as the copy took, two seconds at most, from its end on.
    assert chosen_until >= began + min(100 * ms / 1000, 2)


@pytest.mark.parametrize(
    ("copy_method", "ms", "then"),
    [
        ("auto", 0, "kernel"),  # 4 MiB in 1 ms, which is no slower than half of a slow link
        ("auto", 30, "strided"),
        ("kernel", 30, "kernel"),  # it was asked for
    ],
)
@needs_kernels
@simulated
def test_kernels_twice_as_slow_are_avoided(
    driver: Driver, copy_method: str, ms: float, then: str
) -> None:
    taken = ""
    while taken == "":
        with crowded(driver, copy_method) as (handler, copies):
            began = time.monotonic()
            assert slow_load(driver, handler, copies, ms) == "kernel"
            second = slow_load(driver, handler, copies, ms)
            # A busy machine may stop this thread for as long as copy engines are preferred.
            taken = second if time.monotonic() - began < 2 else ""
    assert taken == then


@needs_kernels
@simulated
def test_the_link_is_as_fast_as_seen(driver: Driver) -> None:
    """4 MiB in 1 ms is quick for a slow link, and slow once 32 MiB took as long."""
    while True:
        with crowded(driver) as (handler, _):
            taken = [method_of(handler, count, "expedited") for count in (2, 2, 16, 2)]
            began = time.monotonic()
            taken.append(method_of(handler, 2, "expedited"))
            # Copy engines are preferred for 0.1 s, which a busy machine may stop this thread for.
            if time.monotonic() - began < 0.1:
                break
    assert taken == ["kernel"] * 4 + ["strided"]


@simulated
def test_missing_kernels_warn_and_copy_engines_do(driver: Driver) -> None:
    driver.limit_allocations(1 << 19)
    layout = on_device(driver, whole_cache(4, 4, 512))
    with (
        logged() as messages,
        OffloadHandler(layout, HostPool(layout, 4), copy_method="auto") as handler,
    ):
        assert [method_of(handler, 2, kind) for kind in CHANNELS] == ["strided"] * 3
    (message,) = messages
    if native.kernel_version():
        assert_expected_inline(
            message,
            """kernels would speed up some transfers, but are not available: cuMemAlloc of 1048576 bytes for staging (staging_bytes): CUDA_ERROR_SIMULATED (2): made up by the simulated driver; the copy engines do all transfers (docs/copy_methods.md)""",
        )
    else:
        assert "built without nvcc" in message


@simulated
def test_a_missing_batch_call_is_logged_once(driver: Driver) -> None:
    layout = place(driver, PagedLayout([torch.zeros(4, 64, dtype=torch.uint8)]))
    warn_once.cache_clear()
    with pytest.MonkeyPatch.context() as patch, logged() as messages, HostPool(layout, 2) as host:
        patch.setattr(native, "driver_has_batch", lambda: False)
        for _ in range(2):
            OffloadHandler(layout, host).close()
    (message,) = messages
    assert message.startswith("the CUDA driver is older than 12.8 and has no cuMemcpyBatchAsync:")


def make_what_kernels_need(driver: Driver) -> None:
    """Nothing of it has been made in this process. Each call that it takes fails once."""
    from simulated_driver import cache

    from torch_kvswap import OffloadHandler

    gpu, host = cache(driver)
    compute_capability_major = 75
    driver.set_attribute(compute_capability_major, 9)
    for name, nth in (
        ("cuDeviceGetAttribute", 1),
        ("cuModuleLoadData", 1),
        ("cuModuleGetFunction", 1),
        ("cuFuncSetAttribute", 1),
        ("cuLaunchKernel", 1),
        ("cuStreamSynchronize", 1),
        ("cuMemcpyAsync", 1),
        ("cuStreamSynchronize", 1),
    ):
        driver.fail(name, nth, 2)
        try:
            OffloadHandler(gpu, host, copy_method="staged")
        except ValueError as error:
            print(f"{name}: {error}")
        assert driver.live("allocations") == 0
    OffloadHandler(gpu, host, copy_method="staged").close()


@needs_kernels
@without_cuda
def test_what_fails_where_kernels_are_loaded_is_told() -> None:
    assert_expected_inline(
        run(make_what_kernels_need),
        """\
cuDeviceGetAttribute: copy_method='staged' cannot be had: cuDeviceGetAttribute: CUDA_ERROR_SIMULATED (2): made up by the simulated driver
cuModuleLoadData: copy_method='staged' cannot be had: cuModuleLoadData: CUDA_ERROR_SIMULATED (2): made up by the simulated driver
cuModuleGetFunction: copy_method='staged' cannot be had: cuModuleGetFunction of kvswap_pack_words: CUDA_ERROR_SIMULATED (2): made up by the simulated driver
cuFuncSetAttribute: copy_method='staged' cannot be had: cuFuncSetAttribute: CUDA_ERROR_SIMULATED (2): made up by the simulated driver
cuLaunchKernel: copy_method='staged' cannot be had: cuLaunchKernel: CUDA_ERROR_SIMULATED (2): made up by the simulated driver
cuStreamSynchronize: copy_method='staged' cannot be had: loading the kernels: CUDA_ERROR_SIMULATED (2): made up by the simulated driver
cuMemcpyAsync: copy_method='staged' cannot be had: cuMemcpyAsync of the table of slabs: CUDA_ERROR_SIMULATED (2): made up by the simulated driver
cuStreamSynchronize: copy_method='staged' cannot be had: cuMemcpyAsync of the table of slabs: CUDA_ERROR_SIMULATED (2): made up by the simulated driver
""",
    )


@needs_kernels
@simulated
def test_a_staged_end_includes_the_batch_before(driver: Driver) -> None:
    """The first group has large fragments, which copy engines copy."""
    layouts = [
        on_device(driver, whole_cache(layers, 8, size))
        for layers, size in ((1, 1 << 20), (8, 128 << 10))
    ]
    pools = [HostPool(layout, 8) for layout in layouts]
    with OffloadHandler(layouts, pools, copy_method="auto") as handler:
        driver.log()
        handler.synchronize(
            handler.load(page_ids=[[1], range(5)], gpu_block_ids=[[2], range(5)], after=())
        )
        copied = [line for line in driver.log().splitlines() if "copy" in line or "unpack" in line]
        assert "copy 1048576 bytes" in copied[0]
        assert "unpack" in copied[-1]  # the end is that of the second group
