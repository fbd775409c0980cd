"""What the benchmark programs share: their options, and how they end."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from report import write_json


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _file(text: str) -> Path:
    """Refuses a folder before anything is measured."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a folder; name a file")
    return path


def new_parser(description: str | None, of_gpu: bool = True) -> ArgumentParser:
    """With the options of every program. of_gpu: it measures a GPU, if there is one."""
    parser = ArgumentParser(
        description=description,
        epilog="The exit code is 1 if bytes are wrong.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=_file, help="file for the figures")
    if of_gpu:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    else:
        parser.set_defaults(device="cpu")
    return parser


def device_of(options: Namespace) -> torch.device:
    if options.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def finish(options: Namespace, content: Mapping[str, Any], wrong: int = 0) -> int:
    """Writes the figures to the file of --json, if there is one. wrong: blocks and pages with wrong
    bytes. Returns the exit code."""
    if options.json:
        write_json(options.json, device_of(options), content)
    if wrong:
        print(f"blocks and pages with wrong bytes: {wrong}", file=sys.stderr)
    return 1 if wrong else 0
