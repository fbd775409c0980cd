"""Runs programs in processes that are forked from one that has imported PyTorch, which takes long."""

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
from typing import Any, NoReturn

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
            environment (Mapping[str, str]): the program's.
            arguments (tuple[str, ...]): `sys.argv[1:]` of the program.
            folder (Path | None): where it runs; it can import the modules there.
            ends_as_usual (bool): Python drops all its objects, which takes a quarter of a second.
        """
        with self._lock:
            self._requests.send(
                ("run", program, dict(environment), arguments, folder, ends_as_usual)
            )
            status, output, errors = self._requests.recv()
        assert status == 0, f"the program ended with status {status}\n{errors}"
        return str(output)

    def start(
        self,
        program: str,
        environment: Mapping[str, str],
        arguments: tuple[str, ...],
        pipes: tuple[int, int],
    ) -> int:
        """Starts a program that goes on, and returns the number of its process. It can import what this
        process can.

        Args:
            pipes (tuple[int, int]): descriptors of this process: its stdin and its stdout.
        """
        with self._lock:
            ends = tuple(f"/proc/{os.getpid()}/fd/{pipe}" for pipe in pipes)
            self._requests.send(("start", program, dict(environment), arguments, ends, sys.path))
            process: int = self._requests.recv()
        return process

    def status(self, process: int) -> int | None:
        """The exit code of a program that was started; None if it runs."""
        with self._lock:
            self._requests.send(("status", process))
            status: int | None = self._requests.recv()
        return status

    def _close(self) -> None:
        self._requests.close()
        self._process.wait()


class Programs:
    """What the process does that is forked. Programs see these names."""

    def __init__(self, requests: Connection, names: dict[str, Any]) -> None:
        self._requests, self._names = requests, names

    def run(
        self,
        program: str,
        environment: dict[str, str],
        arguments: tuple[str, ...],
        folder: Path | None,
        ends_as_usual: bool,
    ) -> tuple[int, str, str]:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = os.fork()
            if process == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                if folder is not None:
                    os.chdir(folder)
                    sys.path.insert(0, str(folder))
                signal.alarm(int(3 * PATIENCE))
                self._execute(program, environment, arguments, ends_as_usual)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            for file in (output, errors):
                file.seek(0)
            printed = [file.read().decode(errors="replace") for file in (output, errors)]
        return status, printed[0], printed[1]

    def start(
        self,
        program: str,
        environment: dict[str, str],
        arguments: tuple[str, ...],
        ends: tuple[str, str],
        path: list[str],
    ) -> int:
        pipes = os.open(ends[0], os.O_RDONLY), os.open(ends[1], os.O_WRONLY)
        process = os.fork()
        if process == 0:
            for number, pipe in enumerate(pipes):
                os.dup2(pipe, number)
        for pipe in pipes:
            os.close(pipe)
        if process == 0:
            sys.path = path
            self._execute(program, environment, arguments, ends_as_usual=True)
        return process

    def status(self, process: int) -> int | None:
        ended, status = os.waitpid(process, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    def _execute(
        self,
        program: str,
        environment: dict[str, str],
        arguments: tuple[str, ...],
        ends_as_usual: bool,
    ) -> NoReturn:
        self._requests.close()
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["program", *arguments]
        exec(program, {"__name__": "__main__", **self._names})
        if ends_as_usual:
            sys.exit()
        threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def serve(names: dict[str, Any]) -> None:
    """Forks and runs what :class:`ForkServer` sends; its programs see these names."""
    requests = Connection(int(sys.argv[1]))
    programs = Programs(requests, names)
    gc.collect()
    gc.freeze()  # a child that looks for garbage would copy the memory of all of PyTorch's objects
    while True:
        try:
            what, *of = requests.recv()
        except EOFError:
            return
        requests.send(getattr(programs, what)(*of))


if __name__ == "__main__":
    import torch_kvswap  # which the simulated driver's has to load in each program

    serve({"sys": sys, "torch": torch, "torch_kvswap": torch_kvswap})
