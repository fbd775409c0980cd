"""Runs a function in a process of its own, for settings that the library reads when it is
loaded.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from fork_server import ForkServer

from simulated_driver.driver import Driver
from simulated_driver.libraries import build


def environment(**more: str) -> dict[str, str]:
    """The environment of a process with the simulated driver, which can import the test support and
    the package."""
    support, root = Path(__file__).parents[1], Path(__file__).parents[3]
    path = os.pathsep.join([str(support), str(root), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "SIMULATED_DRIVER": str(build()), **more}


def use_copy_engines() -> None:
    """Lets handlers of this process use kernels only if a test passes copy_method."""
    from torch_kvswap import OffloadHandler, PrefixCache

    for call in (OffloadHandler.__init__, PrefixCache.__init__, PrefixCache.connect):
        call.__kwdefaults__["copy_method"] = "copy_engines"


@functools.cache
def fork_server(preload: str) -> ForkServer:
    """A process with the simulated driver.

    Args:
        preload (str): shared libraries that are in it from its beginning on.
    """
    return ForkServer("simulated_driver.fork_server", environment(LD_PRELOAD=preload))


def run(body: Callable[[Driver], None], ends_as_usual: bool = False, **more: str) -> str:
    """Runs `body(driver)` on the simulated driver in a new process; returns what it printed.

    Args:
        body (Callable): it sees the names of this package and `ops`, and nothing else of its module.
            It can import the modules of its folder.
        ends_as_usual (bool): see :meth:`ForkServer.run`.
        more (str): variables of its environment.
    """
    source = textwrap.dedent(inspect.getsource(body))
    folder = str(Path(inspect.getfile(body)).parent)
    program = f"import sys\nsys.path.insert(0, {folder!r})\nfrom torch_kvswap import ops\n"
    program += "from simulated_driver.program import use_copy_engines\nuse_copy_engines()\n"
    program += f"{source}\n{body.__name__}(driver)"
    variables = environment(**more)
    server = fork_server(variables.get("LD_PRELOAD", ""))
    return server.run(program, variables, ends_as_usual=ends_as_usual)


def error_of(call: Callable[[], None]) -> str:
    """The message of the RuntimeError that `call` raises, without the numbers that vary."""
    try:
        call()
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        return re.sub(r"process \d+", "process N", re.sub("0x[0-9a-f]+", "0x~", message))
    return "no error"
