"""What the benchmark programs share: their options, and how they end."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from report import Verdict, write_json


def new_parser(description: str | None, of_gpu: bool = True) -> ArgumentParser:
    """With the options of every program. of_gpu: it measures a GPU, if there is one."""
    parser = ArgumentParser(
        description=description,
        epilog="The exit code is 1 if bytes are wrong, else 0, whether targets are met or not.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
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


def is_judged(options: Namespace) -> bool:
    """Targets are those of a GPU."""
    return bool(options.device == "cuda")


def finish(
    options: Namespace,
    content: Mapping[str, Any],
    verdicts: Sequence[Verdict],
    wrong: int,
) -> int:
    """Says how many blocks and pages have wrong bytes and writes the figures. The exit code: 1 when
    bytes are wrong, else 0, targets met or not."""
    print(f"blocks and pages with wrong bytes: {wrong}")
    write_figures(options, content, verdicts)
    return 1 if wrong else 0


def write_figures(
    options: Namespace, content: Mapping[str, Any], verdicts: Sequence[Verdict]
) -> None:
    """To the file of --json, if there is one."""
    if options.json:
        write_json(options.json, device_of(options), content, verdicts)
