"""The simulated driver behaves like CUDA's, and a test on it fails when its body fails."""

import ctypes
import importlib.util
import logging
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from simulated_driver import DEVICE, HOST, Driver, simulated, without_cuda
from simulated_driver.cuda import CudaError
from simulated_driver.simulated import workers


def sides(driver: Driver, num_bytes: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """A source of ones on the host and a destination of zeros on the device."""
    return driver.memory(num_bytes, HOST).fill_(1), driver.memory(num_bytes, DEVICE)


def word(driver: Driver) -> torch.Tensor:
    return driver.memory(8, HOST).view(torch.int64)


def code_of(call, *arguments, **named) -> int:
    with pytest.raises(CudaError) as caught:
        call(*arguments, **named)
    return caught.value.code


@simulated
def test_waiting_for_an_event_that_was_never_recorded_succeeds_and_is_told(driver):
    event = driver.cuda.create_event()
    driver.cuda.wait(42, event)
    assert driver.cuda.is_done(event=event)
    driver.cuda.synchronize(event=event)
    assert driver.violations() == 3
    assert_expected_inline(
        driver.log(),
        """\
VIOLATION: wait for event 1, which was never recorded
VIOLATION: query of event 1, which was never recorded
VIOLATION: synchronize with event 1, which was never recorded
""",
    )


@simulated
def test_using_what_was_destroyed_fails_and_is_told(driver):
    event, stream = driver.cuda.create_event(), driver.cuda.create_stream()
    driver.cuda.destroy_event(event)
    driver.cuda.destroy_stream(stream)
    assert code_of(driver.cuda.record, event, 42) == 400
    assert code_of(driver.cuda.destroy_event, event) == 400
    assert code_of(driver.cuda.is_done, stream=stream) == 400
    assert driver.violations() == 3
    assert_expected_inline(
        driver.log(),
        """\
create stream 101
destroy stream 101
VIOLATION: use of event 1, which does not exist
VIOLATION: use of event 1, which does not exist
VIOLATION: use of stream 101, which was destroyed
""",
    )


@pytest.mark.parametrize("handle", [0, 1, 2])
@simulated
def test_a_default_stream_is_that_of_the_current_context(driver, handle):
    driver.set_mode("manual")
    driver.hold(handle)
    with driver.on(1):
        assert driver.cuda.is_done(stream=handle)
        driver.hold(handle)
    with driver.on(2):
        assert driver.cuda.is_done(stream=handle)
    assert driver.pending().splitlines() == [
        f"stream {handle & 2}: hold",
        f"stream {handle & 2} of GPU 1: hold",
    ]
    with driver.on(1):
        assert not driver.cuda.is_done(stream=handle)


@simulated
def test_an_event_is_recorded_in_streams_of_its_own_gpu_only_and_waited_for_anywhere(driver):
    driver.set_mode("manual")
    event, hold = driver.cuda.create_event(), driver.hold(0)
    driver.cuda.record(event, 0)
    with driver.on(1):
        assert code_of(driver.cuda.record, event, 0) == 400
        driver.cuda.wait(0, event)
        assert not driver.cuda.is_done(event=event)
        driver.run()
        assert not driver.cuda.is_done(stream=0)
    driver.release(hold)
    driver.run()
    with driver.on(1):
        assert driver.cuda.is_done(stream=0)
    assert driver.violations() == 1
    assert "VIOLATION: record of event 1 of GPU 0 in a stream of GPU 1" in driver.log()


@simulated
def test_a_stream_that_is_used_in_another_context_works_and_is_told(driver):
    driver.set_mode("manual")
    src, dst = sides(driver)
    with driver.on(1):
        stream = driver.cuda.create_stream()
    driver.cuda.copy(dst, src, stream)
    assert driver.violations() == 1
    assert driver.log().splitlines() == [
        "create stream 101",
        "VIOLATION: stream 101 of GPU 1 is used in the context of GPU 0",
        "copy 16 bytes on stream 101",
    ]
    driver.run()
    assert torch.equal(dst, src)
    with driver.on(1):
        driver.cuda.is_done(stream=stream)
    assert driver.violations() == 1


@pytest.mark.parametrize("use", ["reads", "writes", "waits for", "writes a value", "uses another"])
@simulated
def test_letting_memory_go_that_pending_work_uses_is_told(driver, use):
    driver.set_mode("manual")
    tensor, other = torch.zeros(64, dtype=torch.uint8), driver.memory(64, DEVICE)
    driver.cuda.check("cuMemHostRegister", tensor.data_ptr(), 64, 0)
    value = tensor[56:].view(torch.int64)
    driver.hold(42)
    if use == "reads":
        driver.cuda.copy(other, tensor, 42)
    elif use == "writes":
        driver.cuda.copy(tensor, other, 42)
    elif use == "waits for":
        driver.cuda.wait_value(42, value, 1)
    elif use == "writes a value":
        driver.cuda.write_value(42, value, 1)
    else:
        driver.cuda.copy(other[:32], other[32:], 42)
    driver.cuda.check("cuMemHostUnregister", tensor.data_ptr())
    assert driver.violations() == (use != "uses another")


@simulated
def test_the_calls_that_spoil_a_capture_in_global_mode_unless_their_thread_is_relaxed(driver):
    event, whole, address = driver.cuda.create_event(), torch.zeros(32), ctypes.c_void_p()
    driver.cuda.record(event, 42)
    driver.cuda.check("cuMemHostAlloc", ctypes.byref(address), 64, 0)
    calls = {
        "cuEventQuery": (event,),
        "cuEventSynchronize": (event,),
        "cuStreamQuery": (42,),
        "cuStreamSynchronize": (42,),
        "cuMemHostAlloc": (ctypes.byref(ctypes.c_void_p()), 64, 0),
        "cuMemFreeHost": (address,),
        "cuMemHostRegister": (whole.data_ptr(), whole.nbytes, 0),
        "cuMemHostUnregister": (whole.data_ptr(),),
    }
    driver.set_global_capture(True)
    refused = [driver.cuda.call(name, *arguments) for name, arguments in calls.items()]
    assert refused == [900] * len(calls)
    assert driver.capture_spoilt == len(calls)
    assert driver.cuda.exchange_capture_mode(2) == 0
    done = [driver.cuda.call(name, *arguments) for name, arguments in calls.items()]
    with ThreadPoolExecutor(1) as pool:  # whose thread has a mode of its own
        assert pool.submit(driver.cuda.call, "cuStreamQuery", 42).result() == 900
    assert driver.cuda.exchange_capture_mode(0) == 2
    assert done == [0] * len(calls)
    assert driver.capture_spoilt == len(calls) + 1


@simulated
def test_what_a_stream_captures_runs_when_it_is_replayed(driver):
    src, dst = sides(driver)
    outside = driver.cuda.create_event()
    driver.cuda.record(outside, 43)
    driver.set_capturing(True, stream=42)
    driver.cuda.copy(dst, src, 42)
    assert code_of(driver.cuda.wait, 42, outside) == 905
    assert driver.capture_spoilt == 0
    assert code_of(driver.cuda.is_done, stream=42) == 900
    assert code_of(driver.cuda.synchronize, stream=42) == 900
    assert driver.capture_spoilt == 2
    driver.set_capturing(False, stream=42)
    assert driver.cuda.is_done(stream=42)
    assert not dst.any()
    for _ in range(2):
        driver.replay(42, 43)
        assert torch.equal(dst, src)
        dst.zero_()


@without_cuda
def test_the_example_of_the_docs_passes(tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "simulated_driver.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    imports = (
        "from simulated_driver import cache, simulated\nfrom torch_kvswap import OffloadHandler\n"
    )
    file = tmp_path / "example.py"
    file.write_text(imports + code)
    spec = importlib.util.spec_from_file_location("example", file)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "example", example)
    spec.loader.exec_module(example)
    example.test_a_store_waits_for_the_stream_that_is_current()


# Bodies that the tests below run in a worker of their own.


@simulated
def pass_if(driver: Driver, good: bool) -> None:
    print("said by the body")
    assert good, "it is bad"


@simulated
def use_wrongly(driver: Driver) -> None:
    driver.cuda.wait(42, driver.cuda.create_event())
    driver.log()


@simulated
def fail_in_a_thread(driver: Driver) -> None:
    thread = threading.Thread(target=lambda: 1 // 0)
    thread.start()
    thread.join()


@simulated
def warn(driver: Driver) -> None:
    import warnings

    warnings.warn("look out", stacklevel=1)


@simulated
def log_a_warning(driver: Driver) -> None:
    logging.getLogger("torch_kvswap").warning("look out")


@simulated
def die(driver: Driver) -> None:
    os.abort()


@simulated
def wait_for_what_never_comes(driver: Driver) -> None:
    driver.set_mode("manual")
    driver.set_patience(0.2)
    driver.hold(42)
    driver.cuda.copy(*sides(driver), 42)
    driver.cuda.synchronize(stream=42)


worker = workers.fixture()


@pytest.mark.slow
@without_cuda
def test_a_body_that_goes_wrong_in_any_way_fails_its_test(worker):
    for body, *texts in (
        ("use_wrongly", "used wrongly:\nwait for event 1, which was never recorded"),
        ("fail_in_a_thread", "ZeroDivisionError"),
        ("warn", "UserWarning: look out"),
        ("log_a_warning", "logged: look out"),
        # The last one, which ends the process.
        (
            *("wait_for_what_never_comes", "-6"),
            "synchronize stream 42 waits for ever; pending:\nstream 42: hold\n",
        ),
    ):
        failure = worker.call(__name__, body, {})
        assert failure is not None
        assert [text for text in texts if text not in failure] == []


@pytest.mark.slow
@without_cuda
def test_after_a_death_the_next_test_gets_a_new_process():
    with pytest.raises(pytest.fail.Exception, match="ended with status -6"):
        die()
    pass_if(good=True)
    with pytest.raises(pytest.fail.Exception, match="it is bad"):
        pass_if(good=False)
    pass_if(good=True)
