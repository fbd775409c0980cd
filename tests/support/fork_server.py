"""Runs programs in processes that are forked from one that has imported PyTorch, which takes long,
but not torch_kvswap, which reads its environment when it is loaded."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from patience import PATIENCE


class ForkServer:
    """The process that is forked.

    Args:
        module (str): what it runs; it calls :func:`serve`.
        environment (Mapping[str, str]): with which it imports PyTorch.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._requests, theirs = Pipe()
        self._lock = threading.Lock()  # threads take turns: each gets the output of its own program
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            env=dict(environment),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self._close)

    def run(
        self,
        program: str,
        environment: Mapping[str, str],
        arguments: tuple[str, ...] = (),
        folder: Path | None = None,
        ends_as_usual: bool = False,
    ) -> str:
        """What the program prints. It is ended if it takes longer than any test may wait.

        Programs run one after another, so they must not wait for each other.

        Args:
            program (str): Python code.
            environment (Mapping[str, str]): the program's, which torch_kvswap reads.
            arguments (tuple[str, ...]): `sys.argv[1:]` of the program.
            folder (Path | None): where it runs; it can import the modules there.
            ends_as_usual (bool): Python drops all its objects, which takes a quarter of a second.
        """
        with self._lock:
            self._requests.send((program, dict(environment), arguments, folder, ends_as_usual))
            status, output, errors = self._requests.recv()
        assert status == 0, f"the program ended with status {status}\n{errors}"
        return str(output)

    def _close(self) -> None:
        self._requests.close()
        self._process.wait()


def serve(names: dict[str, Any]) -> None:
    """Forks and runs what :class:`ForkServer` sends; its programs see these names."""
    requests = Connection(int(sys.argv[1]))
    gc.collect()
    gc.freeze()  # a child that looks for garbage would copy the memory of all of PyTorch's objects
    while True:
        try:
            program, environment, arguments, folder, ends_as_usual = requests.recv()
        except EOFError:
            return
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = os.fork()
            if process == 0:
                requests.close()
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                os.environ.clear()
                os.environ.update(environment)
                sys.argv = ["program", *arguments]
                if folder is not None:
                    os.chdir(folder)
                    sys.path.insert(0, str(folder))
                signal.alarm(int(3 * PATIENCE))
                exec(program, {"__name__": "__main__", **names})
                if ends_as_usual:
                    return
                threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            printed = []
            for file in (output, errors):
                file.seek(0)
                printed.append(file.read().decode(errors="replace"))
        requests.send((status, *printed))


if __name__ == "__main__":
    serve({"sys": sys, "torch": torch})
