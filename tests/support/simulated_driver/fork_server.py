"""The process that :func:`simulated_driver.run` forks. It has imported PyTorch, which takes long, but
not torch_kvswap, which reads the environment of each program when it is loaded."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from multiprocessing.connection import Connection

import torch

from simulated_driver.driver import DEVICE, HOST, Driver
from simulated_driver.program import error_of


def main() -> None:
    requests = Connection(int(sys.argv[1]))
    known = {"DEVICE": DEVICE, "HOST": HOST, "driver": Driver(), "error_of": error_of}
    gc.collect()
    gc.freeze()  # a child that looks for garbage would copy the memory of all of PyTorch's objects
    while True:
        try:
            program, environment = requests.recv()
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
                exec(program, {"__name__": "__main__", "torch": torch, **known})
                return  # to end as every Python does
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            printed = []
            for file in (output, errors):
                file.seek(0)
                printed.append(file.read().decode(errors="replace"))
        requests.send((status, *printed))


if __name__ == "__main__":
    main()
