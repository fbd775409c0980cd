"""The process that :func:`simulated_driver.run` forks, which has loaded the simulated driver too."""

from __future__ import annotations

import torch
from fork_server import serve

from simulated_driver.driver import DEVICE, HOST, Driver
from simulated_driver.program import error_of

if __name__ == "__main__":
    known = {"DEVICE": DEVICE, "HOST": HOST, "driver": Driver(), "error_of": error_of}
    serve({"torch": torch, **known})
