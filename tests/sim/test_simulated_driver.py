"""A test on the simulated driver fails when its body fails, or uses the driver wrongly."""

import importlib.util
import logging
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from simulated_driver import DEVICE, HOST, Driver, simulated, without_cuda
from simulated_driver.simulated import workers


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
    example.test_a_store_waits_for_the_current_stream()


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
    driver.cuda.copy(driver.memory(16, DEVICE), driver.memory(16, HOST), 42)
    driver.cuda.synchronize(stream=42)


worker = workers.fixture()


@pytest.mark.slow
@without_cuda
def test_a_body_that_goes_wrong_fails(worker):
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
def test_after_a_death_comes_a_new_process():
    with pytest.raises(pytest.fail.Exception, match="ended with status -6"):
        die()
    pass_if(good=True)
    with pytest.raises(pytest.fail.Exception, match="it is bad"):
        pass_if(good=False)
    pass_if(good=True)
