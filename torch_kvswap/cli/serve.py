"""Keep host pages for the engines of this machine: one memory and one index for all of them.

Engines connect with PrefixCache.connect(PATH, ...). The memory is allocated for the first one, and
freed when this program and all engines have ended. SIGTERM and Ctrl-C end it; engines go on
without host pages.
"""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys

from torch_kvswap._native.arguments import bytes_text
from torch_kvswap.prefix.manager import BELOW_POLICIES
from torch_kvswap.prefix.server import DEADLINE, PageServer

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code; 1 if the socket or the store cannot
    be had."""
    parser = argparse.ArgumentParser("python -m torch_kvswap serve", description=__doc__)
    add = parser.add_argument
    add("--socket", required=True, metavar="PATH", help="socket at which engines connect")
    text = "memory for all pages, such as 64GiB"
    add("--memory", required=True, metavar="SIZE", type=_bytes, help=text)
    add("--below", metavar="STORE", help="second tier, such as file:PATH")
    text = "which pages the second tier gets"
    add("--below-policy", choices=BELOW_POLICIES, default="reused", help=text)
    add(
        "--deadline",
        type=float,
        default=DEADLINE,
        metavar="SECONDS",
        help="how long an engine waits for an answer before it gives up this server",
    )
    options = parser.parse_args(arguments)
    below = options.below, options.below_policy
    try:
        server = PageServer(options.socket, options.memory, *below, options.deadline)
    except (RuntimeError, OSError, ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    print(f"serving {bytes_text(options.memory)} at {options.socket}", flush=True)
    server.run()
    return 0


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)(B|[KMGT]iB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of B, KiB, MiB, GiB or TiB, such as 64GiB"
        )
    return int(match[1]) * _UNITS[match[2]]
