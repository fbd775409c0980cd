"""Which copy method a transfer takes: the requested one, or the one with the lowest predicted
cost.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from error_text import error_text
from expecttest import assert_expected_inline
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
from simulated_driver import Driver, cache, on_device, place, run, simulated, without_cuda

from torch_kvswap import HostPool, OffloadHandler, PagedLayout
from torch_kvswap._native.loader import native
from torch_kvswap._native.log import warn_once
from torch_kvswap.copy_method import (
    AUTO,
    CHOICES,
    COPY_ENGINES,
    COPY_METHODS,
    CopyMethodCosts,
    copy_method_options,
)
from torch_kvswap.results import Result

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FORCED = [copy_method for copy_method in CHOICES if copy_method not in (AUTO, COPY_ENGINES)]


def test_a_method_is_forced_by_its_name_or_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for copy_method in FORCED:
        assert copy_method_options(copy_method, 0, GPU).copy_method == COPY_METHODS.index(
            copy_method
        )
    monkeypatch.setenv("KVSWAP_COPY_METHOD", "strided")
    assert copy_method_options(None, 0, GPU).copy_method == COPY_METHODS.index("strided")
    assert copy_method_options("auto", 0, GPU).copy_method == -1


def test_what_cannot_be_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_expected_inline(
        error_text(copy_method_options, "fast", 0, CPU),
        """\
ValueError: copy_method='fast'; expected one of auto, copy_engines, batch, strided,
staged, kernel, generic""",
    )
    assert_expected_inline(
        error_text(copy_method_options, "auto", -1, CPU),
        """ValueError: staging_bytes is -1; it must be 0 or more""",
    )
    monkeypatch.setenv("KVSWAP_COPY_METHOD", "host")
    assert_expected_inline(
        error_text(copy_method_options, None, 0, CPU),
        """\
ValueError: KVSWAP_COPY_METHOD='host'; expected one of auto, copy_engines, batch,
strided, staged, kernel, generic""",
    )


@pytest.mark.parametrize(("batch", "copies"), [("1", ["batch of 6"]), ("0", ["copy 64 bytes"] * 6)])
@simulated
def test_a_handler_copies_in_batches_as_kvswap_batch_said_when_it_was_made(
    driver: Driver, batch: str, copies: list[str]
) -> None:
    layout, host = cache(driver)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSWAP_BATCH", batch)
        handler = OffloadHandler(layout, host)
    driver.log()
    with handler:
        handler.synchronize(handler.store(gpu_block_ids=[1, 3, 5], page_ids=[5, 1, 3]))
        for block, page in ((1, 5), (3, 1), (5, 3)):
            expected = torch.cat([tensor[block] for tensor in layout.tensors])
            assert torch.equal(host.pages[page, 0], expected)
    assert re.findall(r"batch of \d+|copy \d+ bytes", driver.log()) == copies


def test_a_cache_on_the_cpu_needs_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_COPY_METHOD_COSTS", "/nowhere")
    copy_method_options("auto", 0, CPU)
    layout = PagedLayout([torch.zeros(4, 8)])
    with OffloadHandler(layout, HostPool(layout, 2)) as handler:
        job = handler.store(gpu_block_ids=[1], page_ids=[1], copy_method="copy_engines")
        assert job.result is not None
        assert job.result.copy_method == "host"


@pytest.mark.parametrize("copy_method", FORCED)
@pytest.mark.parametrize("given", ["argument", "environment"])
def test_a_method_that_the_device_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, copy_method: str, given: str
) -> None:
    layout = PagedLayout([torch.zeros(4, 8)])
    argument = copy_method if given == "argument" else None
    monkeypatch.setenv("KVSWAP_COPY_METHOD", "auto" if argument else copy_method)
    with pytest.raises(ValueError, match="is no copy method") as refusal:
        OffloadHandler(layout, HostPool(layout, 2), copy_method=argument)
    assert str(refusal.value) == (
        f"{'copy_method' if argument else 'KVSWAP_COPY_METHOD'}='{copy_method}' is no copy method "
        "of host memory; it can be auto, copy_engines"
    )
    OffloadHandler(layout, HostPool(layout, 2), copy_method="auto").close()


# The choice, by costs that a test makes up: milliseconds of the start, a block and a fragment.
# On the simulated driver's clock each call that copies takes one.


@contextmanager
def costs(
    folder: Path,
    *,
    submit_store: tuple[float, float] = (0, 1),
    submit_load: tuple[float, float] = (0, 1),
    **of_methods: tuple[float, float, float],
) -> Iterator[None]:
    """submit_store, submit_load: microseconds to submit any transfer, and each of its copies."""
    content = {
        direction: {
            copy_method: {
                "start_us": 1000 * start,
                "block_us": 1000 * block,
                "submit_start_us": submit[0],
                "submit_copy_us": submit[1],
                "fragment_us": {"512": 1000 * fragment},
            }
            for copy_method, (start, block, fragment) in of_methods.items()
        }
        for direction, submit in (("store", submit_store), ("load", submit_load))
    }
    file = folder / "costs.json"
    file.write_text(json.dumps(content))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KVSWAP_COPY_METHOD_COSTS", str(file))
        yield


def methods_taken(
    driver: Driver, layers: int, fragment: int = 512, counts: tuple[int, ...] = (1, 4, 16)
) -> str:
    """Of stores, loads, expedited loads and loads in the background, by blocks."""
    whole = torch.zeros(layers, 20, fragment, dtype=torch.uint8)
    layout = on_device(driver, whole)
    lines = []
    with OffloadHandler(layout, HostPool(layout, 20)) as handler:
        for count in counts:
            ids = list(range(count))
            jobs = [
                handler.store(gpu_block_ids=ids, page_ids=ids),
                handler.load(page_ids=ids, gpu_block_ids=ids),
                handler.load(page_ids=ids, gpu_block_ids=ids, expedited=True),
                handler.load(page_ids=ids, gpu_block_ids=ids, copy_method="copy_engines"),
            ]
            handler.synchronize(jobs)
            lines.append(
                f"{count}: " + " ".join(job.result.copy_method for job in jobs if job.result)
            )
    return "\n".join(lines)


@simulated
def test_the_method_that_ends_first_is_taken(driver: Driver, tmp_path: Path) -> None:
    with costs(tmp_path, strided=(1, 0, 1), batch=(10, 0, 0.5)):
        assert_expected_inline(
            methods_taken(driver, layers=4),
            """\
1: strided strided strided strided
4: strided strided strided strided
16: batch batch batch batch""",
        )


@needs_kernels
@pytest.mark.parametrize(
    ("of_handler", "of_job", "taken"),
    [
        ("auto", None, "staged"),
        ("auto", "copy_engines", "batch"),
        ("copy_engines", None, "batch"),
        ("copy_engines", "copy_engines", "batch"),
        ("staged", "copy_engines", "batch"),
        ("strided", "copy_engines", "strided"),
    ],
)
@simulated
def test_copy_engines_is_the_fastest_method_without_kernels(
    driver: Driver, tmp_path: Path, of_handler: str, of_job: str | None, taken: str
) -> None:
    layout = on_device(driver, torch.zeros(4, 4, 512, dtype=torch.uint8))
    before = driver.live("allocations")
    with (
        costs(tmp_path, staged=(1, 0, 0), kernel=(2, 0, 0), batch=(10, 0, 0), strided=(20, 0, 0)),
        OffloadHandler(layout, HostPool(layout, 4), copy_method=of_handler) as handler,
    ):
        job = handler.load(page_ids=[1], gpu_block_ids=[1], copy_method=of_job)
        handler.synchronize(job)
        assert job.result is not None
        assert job.result.copy_method == taken
        takes_memory = of_handler in ("auto", "staged")  # for staging
        assert (driver.live("allocations") > before) == takes_memory


@simulated
def test_pageable_memory_is_copied_by_batches_whatever_would_be_faster(
    driver: Driver, tmp_path: Path
) -> None:
    """Pinned memory is the control."""
    layout = on_device(driver, torch.zeros(4, 4, 512, dtype=torch.uint8))
    taken = []
    with costs(tmp_path, strided=(1, 0, 0), batch=(10, 0, 0)):
        for pinned in (True, False):
            for copy_method in ("auto", "strided"):
                pool = HostPool(layout, 4, pinned=pinned)
                with OffloadHandler(layout, pool, copy_method=copy_method) as handler:
                    job = handler.store(gpu_block_ids=[1, 3], page_ids=[1, 3])
                    handler.synchronize(job)
                    assert job.result is not None
                    taken.append(job.result.copy_method)
    assert taken == ["strided", "strided", "batch", "batch"]
    assert driver.calls("cuMemcpyBatchAsync") == 0  # takes pinned memory only


# Which thread submits: the calling one what is predicted to take 50 us at most.


def calls_that_submit(
    driver: Driver, layers: list[int], copy_method: str = "auto", pinned: bool = True
) -> str:
    """The most blocks of a store, a load and an expedited load that start no other thread."""
    whole = torch.zeros(11, 100, 512, dtype=torch.uint8)
    layout = on_device(driver, whole, [whole[layer] for layer in layers])
    most = []
    for kind in CHANNELS:
        pool = HostPool(layout, 100, pinned=pinned)
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
        ("batch", [0, 1, 2, 3], "store 9, load 4, expedited 4"),  # a copy for each fragment
        ("strided", [0, 1, 2, 3], "store 39, load 19, expedited 19"),  # for each block
        ("strided", [0, 1, 3, 6, 10], "store 13, load 6, expedited 6"),  # for each of three runs
        pytest.param(
            *("staged", [0, 1, 2, 3], "store 39, load 19, expedited 19"), marks=needs_kernels
        ),
        pytest.param(
            *("kernel", [0, 1, 2, 3], "store 39, load 19, expedited 19"), marks=needs_kernels
        ),
    ],
)
@simulated
def test_the_caller_submits_as_many_copies_as_take_50_us(
    driver: Driver, tmp_path: Path, copy_method: str, layers: list[int], expected: str
) -> None:
    of_methods = {copy_method: (1.0, 0.0, 0.0), "strided": (2.0, 0.0, 0.0)}
    with costs(tmp_path, submit_store=(10.5, 1), submit_load=(10.5, 2), **of_methods):
        assert calls_that_submit(driver, layers, copy_method) == expected


@simulated
def test_the_caller_submits_by_a_method_without_costs_and_never_pageable_memory(
    driver: Driver, tmp_path: Path
) -> None:
    with costs(tmp_path, strided=(1, 0, 0)):
        taken = calls_that_submit(driver, [0, 1, 2, 3], "batch")
        assert taken == "store 100, load 100, expedited 100"
        taken = calls_that_submit(driver, [0, 1, 2, 3], "batch", pinned=False)
        assert taken == "store 0, load 0, expedited 0"


@needs_kernels
@simulated
def test_kernels_are_chosen_where_they_are_faster(driver: Driver, tmp_path: Path) -> None:
    fast = {"kernel": (1.0, 0.0, 2.0), "staged": (12.0, 0.0, 0.1)}
    with costs(tmp_path, strided=(0, 0, 9), batch=(0, 0, 9), **fast):
        assert_expected_inline(
            methods_taken(driver, layers=4),
            """\
1: kernel kernel kernel strided
4: staged staged kernel strided
16: staged staged kernel strided""",
        )


@needs_kernels
@simulated
def test_a_large_load_is_left_to_a_kernel_only_if_it_is_expedited(
    driver: Driver, tmp_path: Path
) -> None:
    with costs(tmp_path, strided=(0, 0, 9), batch=(0, 0, 9), kernel=(0, 0, 1)):
        taken = methods_taken(driver, layers=4, fragment=64 << 10, counts=(16, 17))
    assert_expected_inline(
        taken,
        """\
16: kernel kernel kernel strided
17: strided strided kernel strided""",
    )


@pytest.mark.parametrize("expedited", [True, False])
@needs_kernels
@simulated
def test_a_large_expedited_load_ends_while_a_staged_load_waits(
    driver: Driver, tmp_path: Path, expedited: bool
) -> None:
    """A load that is not expedited is the control: it waits too."""
    whole = torch.randint(256, (4, 40, 64 << 10), dtype=torch.uint8)
    layout = on_device(driver, whole)
    copies = driver.cuda.create_stream() + 3
    first, second = list(range(17)), list(range(20, 37))  # more bytes than a kernel loads otherwise
    with (
        costs(tmp_path, strided=(0, 0, 9), staged=(1, 0, 0), kernel=(1, 0, 0)),
        OffloadHandler(layout, HostPool(layout, 40)) as handler,
    ):
        handler.synchronize(handler.store(gpu_block_ids=first + second, page_ids=first + second))
        expected = whole.clone()
        whole.zero_()
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
        assert torch.equal(whole[:, first + second], expected[:, first + second])
        results = [job.result for job in jobs]
    taken = [result.copy_method for result in results if result]
    assert taken == ["staged", "kernel" if expedited else "staged"]


@needs_kernels
@simulated
def test_what_no_transfer_would_take_gets_no_memory(driver: Driver, tmp_path: Path) -> None:
    with costs(tmp_path, strided=(1, 1, 1), batch=(5, 5, 5)):
        methods_taken(driver, layers=4)
    assert driver.calls("cuMemAlloc") == 0
    with costs(tmp_path, strided=(1, 1, 1), batch=(5, 5, 5), staged=(99, 0, 0)):
        methods_taken(driver, layers=4)
    assert driver.calls("cuMemAlloc") == 2  # the table of slabs and the buffer


def slow_store(driver: Driver, handler: OffloadHandler, stream: int, ms: float = 200) -> Result:
    """Of one whose copies on `stream` start so late."""
    driver.set_mode("manual")
    job = handler.store(gpu_block_ids=[1], page_ids=[1], after=())
    assert driver.step(stream)  # its start is recorded
    driver.advance_clock(ms)
    driver.set_mode("immediate")
    handler.synchronize(job)
    assert job.result is not None
    assert job.result.copy_seconds > ms / 1000
    return job.result


@pytest.mark.parametrize("ms", [5, pytest.param(200, marks=pytest.mark.slow)])
@needs_kernels
@simulated
def test_where_kernels_are_held_up_the_copy_engines_take_over_for_a_while(
    driver: Driver, tmp_path: Path, ms: float
) -> None:
    layout = on_device(driver, torch.zeros(4, 20, 512, dtype=torch.uint8))
    copies = driver.cuda.create_stream() + 1
    with (
        costs(tmp_path, strided=(1.5, 0, 0), staged=(1, 0, 0)),
        OffloadHandler(layout, HostPool(layout, 4)) as handler,
    ):
        taken: list[str] = []
        while "strided" not in taken:  # a busy machine may stop this thread for as long as that
            began = time.monotonic()
            held_up = slow_store(driver, handler, copies, ms)
            assert held_up.copy_method == "staged"
            taken = []
            while "staged" not in taken:
                assert time.monotonic() < began + PATIENCE
                taken.append(slow_store(driver, handler, copies, ms).copy_method)
            chosen_until = time.monotonic()  # a busy machine may stop this thread in the call
    # A hundred times as long as the copy took, two seconds at most, from its end on.
    assert chosen_until >= began + min(100 * held_up.copy_seconds, 2)


def taken_by_two(
    driver: Driver, folder: Path, ms: float, **of_methods: tuple[float, float, float]
) -> list[str]:
    """The copy methods of two stores that are held up, of a new handler: it knows of no other."""
    layout = on_device(driver, torch.zeros(4, 20, 512, dtype=torch.uint8))
    while True:
        copies = driver.cuda.create_stream() + 1
        with (
            costs(folder, **of_methods),
            OffloadHandler(layout, HostPool(layout, 4)) as handler,
        ):
            began = time.monotonic()
            taken = [slow_store(driver, handler, copies, ms).copy_method for _ in range(2)]
            # A busy machine may stop this thread for as long as the rule holds.
            if time.monotonic() - began < 2:
                return taken


@needs_kernels
@simulated
def test_a_method_that_was_asked_for_is_taken_also_where_kernels_are_held_up(
    driver: Driver, tmp_path: Path
) -> None:
    layout = on_device(driver, torch.zeros(4, 20, 512, dtype=torch.uint8))
    copies = driver.cuda.create_stream() + 1
    with (
        costs(tmp_path, strided=(2, 0, 0), staged=(1, 0, 0)),
        OffloadHandler(layout, HostPool(layout, 4), copy_method="staged") as handler,
    ):
        taken = [slow_store(driver, handler, copies).copy_method for _ in range(2)]
    assert taken == ["staged"] * 2


@simulated
def test_where_kernels_cannot_be_had_a_warning_says_why_and_the_copy_engines_do_it(
    driver: Driver, tmp_path: Path
) -> None:
    driver.limit_allocations(1 << 19)
    with (
        costs(tmp_path, strided=(2, 0, 0), staged=(1, 0, 0)),
        logged() as messages,
    ):
        taken = methods_taken(driver, layers=4, counts=(1,))
    assert taken == "1: strided strided strided strided"
    (message,) = messages
    if native.kernel_version():
        assert_expected_inline(
            message,
            """kernels would speed up some transfers, but are not available: cuMemAlloc of 1048576 bytes for staging (staging_bytes): CUDA_ERROR_SIMULATED (2): made up by the simulated driver; the copy engines do all transfers (docs/copy_methods.md)""",
        )
    else:
        assert "built without nvcc" in message


@simulated
def test_a_driver_without_batched_copies_is_named_in_the_log_once(driver: Driver) -> None:
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


@simulated
def test_without_any_figures_blocks_are_strided(driver: Driver, tmp_path: Path) -> None:
    with costs(tmp_path):
        taken = methods_taken(driver, layers=4, counts=(1,))
    assert_expected_inline(taken, """1: strided strided strided strided""")


@pytest.mark.parametrize(("ms", "then"), [(15, "staged"), (30, "strided")])
@needs_kernels
@simulated
def test_copy_engines_take_over_only_if_they_promise_half_the_time(
    driver: Driver, tmp_path: Path, ms: float, then: str
) -> None:
    of_methods = {"strided": (10.5, 0, 0), "staged": (10, 0, 0)}
    taken = taken_by_two(driver, tmp_path, ms, **of_methods)
    assert taken == ["staged", then]


@needs_kernels
@simulated
def test_a_load_that_ends_with_a_staged_group_has_copied_the_batch_before(driver: Driver) -> None:
    small, large = (torch.zeros(13, 8, 512, dtype=torch.uint8) for _ in range(2))
    layouts = [
        on_device(driver, small, [small[0]]),
        on_device(driver, large, [large[layer] for layer in (0, 1, 3, 7, 12)]),
    ]
    pools = [HostPool(layout, 8) for layout in layouts]
    with pytest.MonkeyPatch.context() as patch:
        batch = CopyMethodCosts(0, 0, 0, 0, {512: 1e-6})  # for each fragment
        staged = CopyMethodCosts(0, 2e-6, 0, 0, {512: 0})
        costs = {kind: {"batch": batch, "staged": staged} for kind in ("store", "load")}
        patch.setattr(OffloadHandler, "_costs", costs)
        handler = OffloadHandler(layouts, pools)
    with handler:
        driver.log()
        handler.synchronize(handler.load(page_ids=[[1], [1]], gpu_block_ids=[[2], [2]], after=()))
        copied = [line.split(" on ")[0] for line in driver.log().splitlines() if " bytes" in line]
        assert copied == ["copy 512 bytes", "copy 2560 bytes"]  # the end is that of the second
