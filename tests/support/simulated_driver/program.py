"""A test's body in a process of its own, for what has to be set before the library is loaded."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from simulated_driver.driver import Driver
from simulated_driver.libraries import build


def environment(**more: str) -> dict[str, str]:
    """Of a process that loads the stub and imports from the tests and the package. Kernels are only
    used there where a test asks for them."""
    support, root = Path(__file__).parents[1], Path(__file__).parents[3]
    more = {"KVSWAP_PATH_COSTS": str(Path(__file__).with_name("path_costs.json")), **more}
    path = os.pathsep.join([str(support), str(root), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "STUB": str(build()), **more}


def run(body: Callable[[Driver], None], **more: str) -> str:
    """Runs `body(driver)` in a new process with the stub in place and returns what it printed. The
    body can import modules of its folder."""
    source = textwrap.dedent(inspect.getsource(body))
    program = "\n".join(
        [
            "from simulated_driver import DEVICE, HOST, Driver, error_of",
            "driver = Driver()",
            "import torch",
            "from torch_kvswap import ops",
            source,
            f"{body.__name__}(driver)",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(inspect.getfile(body)).parent,
        env=environment(**more),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def error_of(call: Callable[[], None]) -> str:
    """The message of the RuntimeError that `call` raises, without the numbers that vary."""
    try:
        call()
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        return re.sub(r"process \d+", "process N", re.sub("0x[0-9a-f]+", "0x~", message))
    return "no error"
