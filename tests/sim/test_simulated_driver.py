"""A test on the simulated driver fails when its body fails, or uses the driver wrongly."""

import importlib.util
import os
import re
import sys
import textwrap

import pytest
import simulated_driver
from simulated_driver import Driver, simulated, without_cuda


@without_cuda
def test_the_example_of_the_package_passes(tmp_path, monkeypatch):
    (code,) = re.findall(r"::\n\n(.*?)\n\n(?=\S)", simulated_driver.__doc__, re.DOTALL)
    imports = (
        "from simulated_driver import cache, simulated\nfrom torch_kvswap import OffloadHandler\n"
    )
    file = tmp_path / "example.py"
    file.write_text(imports + textwrap.dedent(code))
    spec = importlib.util.spec_from_file_location("example", file)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "example", example)
    spec.loader.exec_module(example)
    example.test_a_store_waits_for_the_current_stream()


# Bodies that the test below runs in a worker.


@simulated
def pass_if(driver: Driver, good: bool) -> None:
    assert good, "it is bad"


@simulated
def use_wrongly(driver: Driver) -> None:
    driver.cuda.wait(42, driver.cuda.create_event())
    driver.log()


@simulated
def die(driver: Driver) -> None:
    os.abort()


@pytest.mark.slow
@without_cuda
def test_what_goes_wrong_in_a_worker_fails():
    for body, text in (
        (die, "ended with status -6"),
        (use_wrongly, "used wrongly:\nwait for event 1, which was never recorded"),
        (lambda: pass_if(good=False), "it is bad"),
    ):
        with pytest.raises(pytest.fail.Exception, match=text):
            body()
        pass_if(good=True)
